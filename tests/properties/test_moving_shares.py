"""Members that share a partition, while ranges of keys move between them: each record once, each key in order.

The fetchers are those that ship; broker, coordinator and applications are models. Applications work with implicit
acknowledgements, or record by record and out of order, with the tracker that ships.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import Fetcher, FetcherSettings, FetchResult, TopicView
from anabranch.machines.clients.key_ranges import (
    NOWHERE,
    KeyRanges,
    has,
    lowest,
    pieces,
    set_to,
    share,
)
from anabranch.machines.clients.processing import Tracker, TrackerSettings
from anabranch.machines.key_ranges import joined, union, without
from anabranch.machines.keyspace import SPACE, Interval, spread
from anabranch.machines.lineage import Frontier, Lineage
from anabranch.records.hashing import murmur2
from tests.properties import record_model as model
from tests.support.thorough import thorough

TP = TopicPartition("t", 0)
KEYS = [b"k%d" % number for number in range(30)]
PLACES = {key: spread(murmur2(key), 1) for key in KEYS}
VIEW = TopicView("t", UUID(int=1), Lineage.flat(1), {0: 1}, {0: 0}, elastic=True)


class Item(NamedTuple):
    """A record of the log."""

    offset: int
    key: bytes
    value: bytes = b""
    lease: int = 0


@dataclass
class World:
    """The log, what the group has committed, and what applications were handed."""

    log: list[bytes] = field(default_factory=list)
    batches: list[bytes] = field(default_factory=list)
    committed: Frontier = NOWHERE
    ranges: set[int] = field(default_factory=set)
    """Offsets that were committed one by one."""
    processed: dict[int, int] = field(default_factory=dict)
    """How often each offset was processed."""
    excused: set[int] = field(default_factory=set)
    """Offsets that a member had when it died."""

    def append(self, key: bytes) -> None:
        offset = len(self.log)
        self.log.append(key)
        self.batches.append(model.encode(model.Batch(offset, (model.Row(offset, 1, key, b"v"),), leader_epoch=0)))

    def fetched(self, start: int, end: int, ranges: KeyRanges | None) -> bytes:
        wanted = (at for at in range(start, end) if ranges is None or has(ranges, PLACES[self.log[at]]))
        return b"".join(self.batches[at] for at in wanted)

    def check_ranges(self) -> None:
        """Of no key is a later record committed, and an earlier one not."""
        gaps: dict[bytes, int] = {}
        for at, key in enumerate(self.log):
            place = PLACES[key]
            if at in self.ranges or at < self.committed.lowest(Interval(place, place)):
                assert key not in gaps, f"{key!r}: {at} is committed, {gaps[key]} is not"
            else:
                gaps.setdefault(key, at)

    def process(self, offset: int) -> None:
        key = self.log[offset]
        before = [at for at in range(offset) if self.log[at] == key and at not in self.processed]
        assert not before, f"{key!r}: {offset} before {before}"
        self.processed[offset] = self.processed.get(offset, 0) + 1


class Member:
    """A fetcher, and its application."""

    def __init__(self, world: World, chance: random.Random, *, tracked: bool, refused: float = 0.0) -> None:
        """`refused`: the probability that a commit of ranges is refused."""
        self.world, self.chance, self.refused = world, chance, refused
        self.fetcher = Fetcher(FetcherSettings(auto_offset_reset="earliest"))
        self.keys: KeyRanges = ()
        """What it has; nothing where empty."""
        self.tracker = Tracker(TrackerSettings(max_offsets_ahead=1_000)) if tracked else None
        self.running: list[tuple[int, int, int]] = []
        self.skips: set[int] = set()
        self.leases = iter(range(1, 1_000_000))
        self.pending: list[tuple[int, dict]] = []

    # -- the group -----------------------------------------------------------------------------------------------------

    def gain(self, keys: KeyRanges) -> None:
        self.fetcher.grant([(TP, None)], {} if keys == (SPACE,) else {TP: keys})
        self.fetcher.topic_known(VIEW, 0)
        self.keys = union(self.keys, keys)
        self.skips = set(self.world.ranges)
        if self.fetcher.arriving(TP):
            self.fetcher.arrive(TP, self.world_stable, self.steps, self.consumed)
            self.follow()
        else:
            self.fetcher.begin(TP, offset=self.world_stable, steps=self.steps)

    @property
    def world_stable(self) -> int:
        return lowest(self.world.committed, (SPACE,))

    @property
    def steps(self) -> list[tuple[int, int, int]]:
        return pieces(self.world.committed, (SPACE,)) if len(self.world.committed.starts) > 1 else []

    @property
    def consumed(self) -> int:
        self.follow()
        position = self.fetcher.position(TP)
        assert position is not None
        return position if self.tracker is None else self.tracker.stable(TP, position)

    def follow(self) -> None:
        if self.tracker is not None and TP in self.fetcher.assignment:
            position = self.fetcher.position(TP)
            assert position is not None
            self.tracker.stands(TP, position)
            self.fetcher.finished(TP, self.tracker.stable(TP, position))

    def lose(self, keys: KeyRanges) -> None:
        """Revoke ranges as the group does: what runs of them ends, what is done is committed, and they go."""
        if self.tracker is not None:
            self.tracker.part(TP, [entry for entry in self.tracker.entries(TP) if has(keys, PLACES[entry.key or b""])])
            for entry in self.tracker.running([TP], leaving=True):
                self.finish(entry.lease)
        self.commit()
        self.leave(keys)

    def leave(self, keys: KeyRanges) -> None:
        self.keys = without(self.keys, keys)
        self.fetcher.withdraw([TP], {TP: keys} if self.keys else {})
        if self.tracker is not None:
            if self.keys:
                self.tracker.part_with(TP)
                self.follow()
            else:
                self.tracker.forget(TP)
                self.running.clear()

    def commit(self) -> None:
        if not self.keys:
            return
        steps = self.fetcher.to_commit(TP, self.consumed)
        if not steps:  # The whole partition: a plain commit.
            assert share(self.keys) == ()
            steps = [(start, end, max(at, self.consumed)) for start, end, at in pieces(self.world.committed, (SPACE,))]
        for start, end, at in steps:
            assert not without((Interval(start, end),), self.keys), "keys of another member are committed"
            before = pieces(self.world.committed, (Interval(start, end),))
            raised = [(one, two, max(at, old)) for one, two, old in before]
            self.world.committed = set_to(self.world.committed, (Interval(start, end),), raised)
        if self.tracker is not None:
            fresh = self.tracker.take_fresh()
            if self.chance.random() < self.refused:
                self.tracker.give_back(fresh)
                return
            for first, last in fresh.get(TP, ()):
                self.world.ranges.update(range(first, last + 1))
            self.world.check_ranges()

    def die(self) -> None:
        """Nothing is committed: what was processed meanwhile is processed again."""
        for at, key in enumerate(self.world.log):
            place = PLACES[key]
            if has(self.keys, place) and at >= self.world.committed.lowest(Interval(place, place)):
                self.world.excused.add(at)
        keys, self.keys = self.keys, ()
        self.__init__(self.world, self.chance, tracked=self.tracker is not None, refused=self.refused)  # type: ignore[misc]
        assert keys

    # -- reading -------------------------------------------------------------------------------------------------------

    def send(self) -> None:
        for fetch in self.fetcher.drain(0).fetches:
            self.pending.append((fetch.request_id, dict(fetch.partitions)))

    def receive(self) -> None:
        if not self.pending:
            return
        request_id, asked = self.pending.pop(0)
        results = {}
        for tp, origin in asked.items():
            end = min(len(self.world.log), origin.offset + self.chance.randrange(1, 12))
            ranges = None if origin.asked is None else origin.asked.ranges
            data = memoryview(self.world.fetched(origin.offset, end, ranges))
            looked = -1 if ranges is None else max(end, origin.offset)
            results[tp] = FetchResult(ErrorCode.NONE, data, end, end, 0, filtered_to=looked)
        self.fetcher.answered(request_id, ErrorCode.NONE, 0, results, 0)

    def read(self) -> None:
        for part in self.fetcher.deliverable()[:2]:
            end = self.chance.randrange(part.start + 1, part.end + 1)
            found, data, at = [], bytes(part.fetched.data), 0
            while at < len(data):
                offset = int.from_bytes(data[at : at + 8], "big")
                at += 12 + int.from_bytes(data[at + 8 : at + 12], "big")
                if part.start <= offset < end and offset not in self.skips:
                    found.append(offset)
            if not self.fetcher.is_next(part):
                continue
            if self.tracker is None:
                self.fetcher.handed_out(part, end)
                for offset in found:
                    self.world.process(offset)
                continue
            self.tracker.stands(TP, part.start)  # Fetches without a record may lie between.
            room = self.tracker.room(TP, part.start)
            if room is None:
                return
            self.fetcher.handed_out(part, end)
            items = [Item(offset, self.world.log[offset], b"", next(self.leases)) for offset in found]
            self.tracker.take(TP, items, end, exact=self.fetcher.is_read_by_key(TP))
            self.fetcher.finished(TP, self.tracker.stable(TP, end))

    def work(self) -> None:
        if self.tracker is None:
            return
        while self.chance.random() < 0.7 and (entry := self.tracker.next(0)) is not None:
            self.running.append((entry.lease, entry.deliveries, entry.offset))
        self.chance.shuffle(self.running)
        while self.running and self.chance.random() < 0.6:
            self.finish(self.running[-1][0])

    def finish(self, lease: int) -> None:
        assert self.tracker is not None
        ((_, deliveries, offset),) = [each for each in self.running if each[0] == lease]
        self.running = [each for each in self.running if each[0] != lease]
        if self.tracker.done(lease, deliveries):
            self.world.process(offset)


def moved(members: list[Member], chance: random.Random) -> None:
    """Move a range from one member to another."""
    one, two = chance.sample(members, 2)
    if not one.keys:
        return
    held = chance.choice(one.keys)
    bounds = sorted(
        chance.choice([held.start, held.end, *[chance.randrange(held.start, held.end + 1)] * 2]) for _ in "12"
    )
    gone = (Interval(*bounds),)
    one.lose(gone)
    two.gain(gone)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("seed", range(thorough(1_000, 30)))
def test_each_record_is_processed_once_and_each_key_in_order(seed: int, tracked: bool) -> None:
    chance = random.Random(seed)
    world = World()
    members = [Member(world, chance, tracked=tracked) for _ in range(3)]
    members[0].gain((SPACE,))
    deaths = seed % 3 == 0
    for _ in range(400):
        step = chance.random()
        member = chance.choice(members)
        if step < 0.3:
            world.append(chance.choice(KEYS))
        elif step < 0.5:
            member.send()
        elif step < 0.65:
            member.receive()
        elif step < 0.8:
            member.read()
            member.work()
        elif step < 0.87:
            member.commit()
        elif step < 0.99 or not deaths:
            moved(members, chance)
        elif member.keys:
            keys = member.keys
            member.die()
            other = chance.choice(members)
            other.gain(keys)
    assert joined(each for member in members for each in member.keys) == (SPACE,)
    for _ in range(3_000):
        for member in members:
            member.send()
            member.receive()
            member.read()
            member.work()
        if len(world.processed) == len(world.log):
            break
    assert len(world.processed) == len(world.log)
    again = {at for at, count in world.processed.items() if count > 1}
    assert again <= world.excused
    for member in members:
        member.commit()


@pytest.mark.parametrize("seed", range(thorough(1_000, 10)))
def test_no_later_record_of_a_key_is_committed_alone_where_commits_of_ranges_are_refused(seed: int) -> None:
    chance = random.Random(seed)
    world = World()
    members = [Member(world, chance, tracked=True, refused=0.5) for _ in range(2)]
    members[0].gain((SPACE,))
    for _ in range(100):
        for _ in range(chance.randrange(12)):
            world.append(chance.choice(KEYS[:8]))
        for member in members:
            for step in (member.send, member.receive, member.read, member.work):
                step()
            if chance.random() < 0.4:
                member.commit()
        if chance.random() < 0.3:
            moved(members, chance)
        world.check_ranges()
    assert world.ranges
