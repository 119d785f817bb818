"""Gates of readers that share partitions by interval (keyspace.md, sections 3 to 5), against two models.

One is the definition: every class of keys that all layouts place alike, its way through the layouts, and whether the
reader stands behind every segment on it. The other is a topic with a crowd of readers, who cut partitions into shares
anew at any time, deliver in random order wherever a gate lets them, and crash back to what they committed. Of these it
is asked one question only: did a key's records come in the order sent?
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.machines.keyspace import SPACE, SPACE_END, Interval, cuts, interval, keyless_spread, spread
from anabranch.machines.lineage import BEYOND, UNKNOWN_END, Frontier, Lineage
from anabranch.machines.placement import place
from tests.properties.test_lineage import Topic, first_deliveries, grown_topic
from tests.support.delivery import Delivery
from tests.support.thorough import thorough

HISTORIES = thorough(3_000, 800)
CLASS_BITS = 5
"""Enough for all placements of `grown_topic`: at most eight partitions in a family."""
CLASSES = 1 << CLASS_BITS
CLASS_SIZE = (SPACE_END + 1) // CLASSES


def random_frontier(chance: random.Random, start: int, end: int) -> Frontier:
    """Positions by key between two offsets, with steps at bounds of classes."""
    steps = sorted({0, *(chance.randrange(CLASSES) for _ in range(chance.randint(0, 3)))})
    return Frontier(tuple(step * CLASS_SIZE for step in steps), tuple(chance.randint(start, end) for _ in steps))


def open_by_definition(
    topic: Topic, frontiers: dict[int, Frontier], partition: int, layout: int, keys: Interval
) -> bool:
    """Whether no key of `keys` in segment (partition, layout) has an unread record in an earlier layout elsewhere."""
    for key_class in range(CLASSES):
        key_hash = key_class * topic.initial + partition % topic.initial
        low = spread(key_hash, topic.initial) & -CLASS_SIZE
        if place(key_hash, topic.initial, topic.counts[layout - topic.first]) != partition:
            continue
        if keys.overlap(Interval(low, low + CLASS_SIZE - 1)) is None:
            continue
        for earlier in range(layout - topic.first):
            q = place(key_hash, topic.initial, topic.counts[earlier])
            if q == partition or q not in topic.logs:
                continue
            end = topic.ends[earlier].get(q, 0)
            start = max((ends.get(q, 0) for ends in topic.ends[:earlier]), default=0)
            frontier = frontiers[q]
            if start < end and frontier.offsets[bisect_right(frontier.starts, low) - 1] < end:
                return False
    return True


@pytest.mark.parametrize("block", range(2))
def test_a_gate_is_open_exactly_if_no_key_has_an_unread_past_elsewhere(block: int) -> None:
    closed = opened = 0
    for seed in range(block * 1_000, block * 1_000 + thorough(1_000, 160)):
        chance = random.Random(seed)
        topic = grown_topic(chance)
        lineage = topic.lineage()
        frontiers = {p: random_frontier(chance, log.start, log.end) for p, log in topic.logs.items()}
        whole = {p: min(frontier.offsets) for p, frontier in frontiers.items()}
        constant = {p: Frontier((0,), (offset,)) for p, offset in whole.items()}
        low, high = sorted(chance.sample(range(CLASSES + 1), 2))
        keys = Interval(low * CLASS_SIZE, high * CLASS_SIZE - 1)
        by_offset, by_key = lineage.gates(whole), lineage.gates(frontiers)
        for p in topic.logs:
            for layout in range(lineage.first, lineage.current + 1):
                expected = open_by_definition(topic, constant, p, layout, SPACE)
                assert by_offset.may_deliver(p, layout) == expected, f"seed {seed}: ({p}, {layout})"
                assert by_key.may_deliver(p, layout) == open_by_definition(topic, frontiers, p, layout, SPACE)
                shared = open_by_definition(topic, frontiers, p, layout, keys)
                assert by_key.may_deliver(p, layout, keys) == shared, f"seed {seed}: ({p}, {layout}), {keys}"
                closed += not shared
                opened += shared and not expected
    assert closed > 400
    assert opened > 100


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_while_a_log_cannot_be_opened_the_gates_of_its_relatives_are_closed(seed: int) -> None:
    chance = random.Random(seed)
    topic = grown_topic(chance)
    known = topic.lineage()
    lost = chance.choice(sorted(topic.logs))
    since = chance.randint(known.first, known.current)
    pairs = {p: zip(*found, strict=True) for p, found in known.cuts.items()}
    kept = {p: [(v, end) for v, end in found if p != lost or v < since] for p, found in pairs.items()}
    lineage = Lineage.of_cuts(topic.initial, topic.counts, kept, first=topic.first, unknown={lost: since})
    positions = {p: log.end for p, log in topic.logs.items()}
    for p in topic.logs.keys() - {lost}:
        for layout in range(known.first, known.current + 1):
            shared = {
                j
                for j in range(since, layout)
                if p < known.count_in(layout)
                and lost < known.count_in(j)
                and interval(p, known.count_in(layout), topic.initial).overlap(
                    interval(lost, known.count_in(j), topic.initial)
                )
                and p % topic.initial == lost % topic.initial
            }
            assert lineage.may_deliver(p, layout, positions) == (not shared)
            assert lineage.may_deliver(p, layout, {**positions, lost: BEYOND})
        if lineage.waits(p, positions):
            assert lineage.waits(p, positions) == ((lost, UNKNOWN_END),)
            assert lineage.gates(positions).limit(p) == positions[p]


class Crowd(Delivery[Frontier]):
    """Readers of a whole topic: each partition is cut into shares, each with its own progress."""

    def __init__(self, topic: Topic, chance: random.Random) -> None:
        super().__init__()
        self.topic = topic
        self.chance = chance
        self.shares: dict[int, list[Interval]] = {}
        self.delivered: dict[object, list[int]] = {}

    def share_anew(self, partition: int) -> None:
        count = self.topic.counts[-1]
        held = interval(partition, count, self.topic.initial) if partition < count else SPACE
        self.shares[partition] = cuts(held, self.chance.randint(1, 4))

    def frontiers(self, of: dict[int, Frontier]) -> dict[int, Frontier]:
        """Progress, moved on to the log starts."""
        nothing = Frontier((0,), (0,))
        return {
            p: Frontier(known.starts, tuple(max(offset, log.start) for offset in known.offsets))
            for p, log in self.topic.logs.items()
            for known in [of.get(p, nothing)]
        }

    def _choices(self) -> Iterator[tuple[int, Interval, int]]:
        lineage = self.topic.lineage()
        gates = lineage.gates(self.frontiers(self.committed))
        for p, frontier in self.frontiers(self.progress).items():
            for keys in self.shares.get(p, [SPACE]):
                at = frontier.lowest(keys)
                if at < self.topic.logs[p].end and self.may_deliver(gates, p, lineage.layout_at(p, at), keys):
                    yield p, keys, at

    def may_deliver(self, gates: object, partition: int, layout: int, keys: Interval) -> bool:
        return gates.may_deliver(partition, layout, keys)  # type: ignore[attr-defined, no-any-return]

    def spread_of(self, partition: int, offset: int, key: int) -> int:
        if key >= 0:
            return spread(key, self.topic.initial)
        lineage = self.topic.lineage()
        count = lineage.count_in(lineage.layout_at(partition, offset))
        return keyless_spread(offset, interval(partition, count, self.topic.initial))

    def step(self) -> bool:
        choices = list(self._choices())
        if not choices:
            return False
        p, keys, at = self.chance.choice(choices)
        log, lineage = self.topic.logs[p], self.topic.lineage()
        frontier = self.frontiers(self.progress)[p]
        end = min(at + self.chance.randint(1, 3), log.end)
        while lineage.layout_at(p, end - 1) != lineage.layout_at(p, at):
            end -= 1
        for offset in range(at, end):
            key, number = log.records[offset - log.start]
            place_ = self.spread_of(p, offset, key)
            done = frontier.offsets[bisect_right(frontier.starts, place_) - 1]
            if keys.start <= place_ <= keys.end and offset >= done:
                self.delivered.setdefault(self.topic.lane(key, p), []).append(number)
        self.progress[p] = moved(frontier, keys, end)
        return True

    def is_done(self) -> bool:
        return all(f.lowest(SPACE) >= self.topic.logs[p].end for p, f in self.frontiers(self.progress).items())


def moved(frontier: Frontier, keys: Interval, offset: int) -> Frontier:
    """The frontier after all records of `keys` below `offset`."""
    after = bisect_right(frontier.starts, keys.end) - 1
    steps = dict(zip(frontier.starts, frontier.offsets, strict=True))
    steps.setdefault(keys.start, frontier.offsets[bisect_right(frontier.starts, keys.start) - 1])
    if keys.end < SPACE_END:
        steps.setdefault(keys.end + 1, frontier.offsets[after])
    for start in steps:
        if keys.start <= start <= keys.end:
            steps[start] = max(steps[start], offset)
    return Frontier(tuple(sorted(steps)), tuple(steps[start] for start in sorted(steps)))


class SharedTopic(Topic):
    """A topic whose records may have no key (-1), or have been placed by another partitioner."""

    def __init__(self, initial: int) -> None:
        super().__init__(initial)
        self.foreign: set[int] = set()
        self.loose: list[int] = []

    def send_to(self, partition: int, key: int) -> None:
        """Put a record where its key does not belong; order holds only within the partition."""
        self.foreign.add(key)
        self.logs[partition].records.append((key, self._numbers))
        self.loose.append(self._numbers)
        self._numbers += 1

    def lane(self, key: int, partition: int) -> object:
        """Records of one lane must come in order."""
        return (key, partition) if key in self.foreign and key >= 0 else key


class IgnoresShares(Crowd):
    """Readers that take the progress of the furthest share for that of all."""

    def frontiers(self, of: dict[int, Frontier]) -> dict[int, Frontier]:
        found = super().frontiers(of)
        if of is not self.committed:
            return found
        return {p: Frontier((0,), (max(frontier.offsets),)) for p, frontier in found.items()}


class AsksOneLayoutTooLow(Crowd):
    def may_deliver(self, gates: object, partition: int, layout: int, keys: Interval) -> bool:
        return super().may_deliver(gates, partition, max(layout - 1, self.topic.first), keys)


class AsksForOtherKeys(Crowd):
    """Readers that ask for the gates of the lower half of their share."""

    def may_deliver(self, gates: object, partition: int, layout: int, keys: Interval) -> bool:
        held = keys.overlap(interval(partition, max(self.topic.counts), self.topic.initial)) or keys
        lower = Interval(held.start, held.start + held.size // 2 - 1)
        return super().may_deliver(gates, partition, layout, lower)


def history(seed: int, crowd_class: type[Crowd] = Crowd) -> tuple[bool, bool]:
    """Run one random history; say whether order held, and whether every record was delivered."""
    chance = random.Random(seed)
    topic = SharedTopic(chance.randint(1, 3))
    crowd = crowd_class(topic, chance)
    keys = [chance.randrange(2**31) for _ in range(chance.randint(1, 12))]
    expired: set[int] = set()
    for _ in range(chance.randint(5, 60)):
        act = chance.random()
        if act < 0.40:
            topic.send(chance.choice(keys))
        elif act < 0.43:
            topic.send_to(chance.randrange(topic.counts[-1]), chance.choice([-1, 2**31 - 1 - chance.randrange(50)]))
        elif act < 0.57:
            count = chance.randint(topic.initial, topic.initial * 8)
            if count != topic.counts[-1]:
                topic.resize(count)
        elif act < 0.68:
            crowd.share_anew(chance.choice(sorted(topic.logs)))
        elif act < 0.90:
            crowd.step()
        elif act < 0.95:
            crowd.commit()
        elif act < 0.97:
            crowd.crash()
        else:
            p = chance.choice(sorted(topic.logs))
            expired.update(number for _, number in topic.expire(p, chance.randint(0, topic.logs[p].end)))
            topic.reap()
    complete = crowd.drain()
    in_order = True
    got: set[int] = set()
    for lane, numbers in crowd.delivered.items():
        first = first_deliveries(numbers)
        in_order &= lane == -1 or first == sorted(first)
        got.update(first)
    sent = {number for numbers in topic.sent.values() for number in numbers} | set(topic.loose)
    return in_order, complete and sent - expired <= got


@pytest.mark.parametrize("block", range(4))
def test_shares_keep_the_order_of_every_key_and_never_get_stuck(block: int) -> None:
    for seed in range(block * HISTORIES // 4, (block + 1) * HISTORIES // 4):
        assert history(seed) == (True, True), f"history({seed})"


@pytest.mark.parametrize("crowd_class", [IgnoresShares, AsksOneLayoutTooLow, AsksForOtherKeys])
def test_readers_that_mistake_their_share_break_order(crowd_class: type[Crowd]) -> None:
    broken = (seed for seed in range(2_000) if not history(seed, crowd_class)[0])
    assert len(list(islice(broken, 11))) == 11
