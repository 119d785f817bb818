"""The tracker of unfinished records against a plain model: a list of every taken record, and sets of offsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.processing import Entry, Tracker, TrackerSettings
from anabranch.machines.clients.processing.values import Stage

SETTINGS = TrackerSettings(max_unfinished_records=12, max_unfinished_bytes=60, max_offsets_ahead=9, max_bytes_ahead=45)
PARTITIONS = [TopicPartition("t", number) for number in range(3)]
STEPS = 250


class Given(NamedTuple):
    """A record of a model."""

    offset: int
    key: bytes | None
    value: bytes | None
    lease: int


@dataclass
class Model:
    """What is known of one partition, offset by offset."""

    position: int
    start: int
    records: list[Given] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    """The offsets above the start that commits have covered."""

    @property
    def unfinished(self) -> list[Given]:
        return [record for record in self.records if record.offset not in self.done]

    @property
    def stable(self) -> int:
        return self.unfinished[0].offset if self.unfinished else self.position

    @property
    def ahead(self) -> list[Given]:
        """The records that were taken from the first unfinished one on."""
        return [record for record in self.records if record.offset >= self.stable]


class World:
    """A tracker and its model, driven at random."""

    def __init__(self, seed: int, *, orphaning: bool) -> None:
        self.chance = Random(seed)
        self.tracker = Tracker(SETTINGS)
        self.tracker.orphaning = orphaning
        self.models: dict[TopicPartition, Model] = {}
        self.running: list[tuple[TopicPartition, Entry, Given]] = []
        self.orphans: list[tuple[TopicPartition, Entry, Given]] = []
        self.rejected: dict[int, int] = {}
        self.delivered: dict[int, int] = {}
        self.held: set[TopicPartition] = set()
        self.leases = 0
        self.now_ms = 0

    def run(self) -> None:
        steps = [self.take, self.take, self.hand_out, self.hand_out, self.finish, self.finish, self.reject]
        steps += [self.commit, self.forget, self.hold, self.pass_time]
        for _ in range(STEPS):
            self.chance.choice(steps)()
            self.check()
        self.drain()

    def size(self, records: list[Given]) -> int:
        return sum(len(record.key or b"") + len(record.value or b"") for record in records)

    def take(self) -> None:
        tp = self.chance.choice(PARTITIONS)
        model = self.models.get(tp)
        if model is None:
            start = self.chance.randrange(100)
            model = self.models[tp] = Model(start, start)
        room = self.tracker.room(tp, model.position, len(PARTITIONS))
        if room is None:
            return
        records: list[Given] = []
        offset = model.position
        while len(records) < room.records and self.size(records) < room.size and self.chance.random() < 0.8:
            offset += self.chance.choice([0, 0, 0, 1, 3])
            if offset >= room.end:
                break
            self.leases += 1
            key = self.chance.choice([None, b"a", b"b", b"c"])
            records.append(Given(offset, key, b"v" * self.chance.randrange(20), self.leases))
            offset += 1
        end = (records[-1].offset + 1 if records else model.position) + self.chance.choice([0, 0, 2])
        self.tracker.take(tp, records, end)
        assert len(records) <= room.records
        model.records += records
        model.position = end

    def hand_out(self) -> None:
        entry = self.tracker.next(self.now_ms)
        if entry is None:
            assert not list(self.startable()), "a record that could run was kept back"
            return
        given = entry.record
        assert given in list(self.startable())
        self.rejected.pop(given.lease, None)
        self.delivered[given.lease] = self.delivered.get(given.lease, 0) + 1
        assert entry.deliveries == self.delivered[given.lease]
        self.running.append((entry.partition, entry, given))

    def startable(self) -> Iterator[Given]:
        """The records that may run: of their keys none before is unfinished, none of its orphans runs."""
        busy = {given.lease for _, _, given in self.running}
        for tp, model in self.models.items():
            if tp in self.held:
                continue
            taken = {given.key for orphan, _, given in self.orphans if orphan == tp and given.key is not None}
            for record in model.unfinished:
                if record.key is not None and record.key in taken:
                    continue
                if record.key is not None:
                    taken.add(record.key)
                if record.lease not in busy and self.rejected.get(record.lease, 0) <= self.now_ms:
                    yield record

    def finish(self) -> None:
        if not self.running and not self.orphans:
            return
        if self.orphans and (not self.running or self.chance.random() < 0.3):
            _, entry, given = self.orphans.pop(self.chance.randrange(len(self.orphans)))
            assert not self.tracker.done(given.lease, entry.deliveries)
            return
        tp, entry, given = self.running.pop(self.chance.randrange(len(self.running)))
        assert not self.tracker.done(given.lease, entry.deliveries + 1)
        assert self.tracker.done(given.lease, entry.deliveries)
        assert not self.tracker.done(given.lease, entry.deliveries)
        self.models[tp].done.add(given.offset)

    def reject(self) -> None:
        if not self.running:
            return
        _, entry, given = self.running.pop(self.chance.randrange(len(self.running)))
        self.rejected[given.lease] = self.now_ms + self.chance.randrange(5)
        assert self.tracker.reject(given.lease, entry.deliveries, self.rejected[given.lease])

    def commit(self) -> None:
        stable = {tp: self.tracker.stable(tp, model.position) for tp, model in self.models.items()}
        fresh = self.tracker.take_fresh()
        between = self.chance.randrange(3)
        for _ in range(between):
            self.chance.choice([self.finish, self.hand_out, self.take, self.forget])()
        if self.chance.random() < 0.4:
            self.tracker.give_back(fresh)
            return
        for tp, model in self.models.items():
            if tp in stable and stable[tp] >= model.start:
                model.committed |= set(range(model.start, stable[tp]))
            for first, last in fresh.get(tp, ()):
                covered = {record.offset for record in model.records if first <= record.offset <= last}
                assert covered <= model.done, "a commit went past a record that is not done"
                assert first > stable[tp] or first < model.start
                model.committed |= set(range(first, last + 1))

    def forget(self) -> None:
        if self.chance.random() < 0.7 or not self.models:
            return
        tp = self.chance.choice(sorted(self.models))
        mine = [each for each in self.running if each[0] == tp]
        assert [entry for _, entry, _ in mine] == sorted(self.tracker.forget(tp), key=[e for _, e, _ in mine].index)
        self.running = [each for each in self.running if each[0] != tp]
        if self.tracker.orphaning:
            self.orphans += mine
        else:
            assert not any(self.tracker.done(given.lease, entry.deliveries) for _, entry, given in mine)
        del self.models[tp]

    def hold(self) -> None:
        tp = self.chance.choice(PARTITIONS)
        if tp in self.held:
            self.held.discard(tp)
            self.tracker.release(tp)
        else:
            self.held.add(tp)
            self.tracker.hold(tp)

    def pass_time(self) -> None:
        self.now_ms += 3

    def check(self) -> None:
        unfinished = [record for model in self.models.values() for record in model.unfinished]
        assert self.tracker.unfinished == len(unfinished) <= SETTINGS.max_unfinished_records
        assert self.tracker.size == self.size(unfinished) < SETTINGS.max_unfinished_bytes + 21
        for tp, model in self.models.items():
            assert self.tracker.stable(tp, model.position) == model.stable
            assert len(model.unfinished) <= SETTINGS.max_unfinished_records // len(PARTITIONS)
            if model.unfinished:
                assert model.records[-1].offset < model.stable + SETTINGS.max_offsets_ahead
                assert self.size(model.ahead[:-1]) < SETTINGS.max_bytes_ahead

    def drain(self) -> None:
        """Finish everything: all is handed out, all is done, and commits cover exactly what is done."""
        for tp in list(self.held):
            self.held.discard(tp)
            self.tracker.release(tp)
        self.now_ms += 1000
        while self.orphans or any(model.unfinished for model in self.models.values()):
            if self.running or self.orphans:
                self.finish()
            self.hand_out()
            self.check()
        for tp, model in self.models.items():
            assert self.tracker.stable(tp, model.position) == model.position
        assert self.tracker.fresh == 0
        assert self.tracker.take_fresh() == {}


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_the_tracker_agrees_with_a_plain_model(seed: int, orphaning: bool) -> None:
    World(seed, orphaning=orphaning).run()


def taken(records: list[tuple[int, bytes | None]], settings: TrackerSettings = SETTINGS) -> Tracker:
    tracker = Tracker(settings)
    given_ = [Given(offset, key, b"", number) for number, (offset, key) in enumerate(records)]
    tracker.room(PARTITIONS[0], 40)
    tracker.take(PARTITIONS[0], given_, records[-1][0] + 1)
    return tracker


def run_all(tracker: Tracker) -> dict[int, Entry]:
    found: dict[int, Entry] = {}
    while (entry := tracker.next(0)) is not None:
        found[entry.offset] = entry
    return found


def test_every_fresh_range_is_committed_once_and_covers_exactly_what_was_done() -> None:
    tracker = taken([(offset, None) for offset in range(40, 50)])
    running = run_all(tracker)
    for offset in (43, 45, 44, 48):
        tracker.done(running[offset].lease, 1)
    assert tracker.fresh == 2
    assert tracker.take_fresh() == {PARTITIONS[0]: [(43, 45), (48, 48)]}
    assert tracker.take_fresh() == {}
    tracker.done(running[47].lease, 1)
    assert tracker.take_fresh() == {PARTITIONS[0]: [(47, 47)]}
    for offset in (40, 41, 42):
        tracker.done(running[offset].lease, 1)
    assert tracker.stable(PARTITIONS[0], 50) == 46
    assert tracker.take_fresh() == {}, "the plain offset covers what lies below it"


def test_the_proposals_example_of_gap_amending() -> None:
    tracker = Tracker(SETTINGS)
    tp = PARTITIONS[0]
    tracker.room(tp, 40)
    offsets = (40, 41, 42, 46, 47, 50)
    records = [Given(offset, None, b"", offset) for offset in offsets]
    tracker.take(tp, records, 51, skipped=[(43, 45), (48, 49)])
    running = run_all(tracker)
    for offset in offsets[1:]:
        tracker.done(running[offset].lease, 1)
    assert tracker.take_fresh() == {tp: [(41, 42), (46, 47), (50, 50)]}


@pytest.mark.parametrize("orphaning", [False, True])
def test_a_partition_that_comes_back_waits_for_a_record_that_still_runs(orphaning: bool) -> None:
    tracker = taken([(40, b"k"), (41, b"k")])
    tracker.orphaning = orphaning
    (entry,) = run_all(tracker).values()
    tracker.forget(PARTITIONS[0])
    tracker.room(PARTITIONS[0], 40)
    tracker.take(PARTITIONS[0], [Given(40, b"k", b"", 100)], 41)
    again = tracker.next(0)
    assert (again is None) is orphaning
    assert not tracker.done(entry.lease, 1)
    if orphaning:
        again = tracker.next(0)
    assert again is not None and again.lease == 100
    assert tracker.done(100, 1)


def test_what_is_done_of_keys_that_go_to_others_goes_along_and_is_not_committed_later() -> None:
    keys = (b"a", b"b", b"c", b"b", b"a", b"c", b"b")
    tracker = taken([(40 + number, key) for number, key in enumerate(keys)])
    tp = PARTITIONS[0]
    while (entry := tracker.next(0)) is not None:
        if entry.offset not in (40, 45):
            tracker.done(entry.lease, 1)
    assert tracker.take_fresh() == {tp: [(41, 43), (46, 46)]}
    tracker.part(tp, [entry for entry in tracker.entries(tp) if entry.key == b"b"])
    tracker.give_back({tp: [(41, 43), (46, 46)]})
    assert tracker.fresh == 2
    tracker.part_with(tp)
    assert tracker.fresh == 1
    assert tracker.take_fresh() == {tp: [(42, 42)]}
    tracker.give_back({tp: [(41, 43), (46, 46)]})
    assert tracker.take_fresh() == {tp: [(42, 42)]}, "they went meanwhile"
    assert tracker.stable(tp, 47) == 40 and tracker.unfinished == 3


def test_ranges_that_are_given_back_twice_are_committed_once() -> None:
    tracker = taken([(offset, None) for offset in range(40, 50)])
    running = run_all(tracker)
    for offset in (43, 44, 45, 48):
        tracker.done(running[offset].lease, 1)
    fresh = tracker.take_fresh()
    tracker.done(running[46].lease, 1)
    tracker.give_back({PARTITIONS[0]: [(44, 44), *fresh[PARTITIONS[0]]]})
    tracker.give_back(fresh)
    assert tracker.fresh == 2
    assert tracker.take_fresh() == {PARTITIONS[0]: [(43, 46), (48, 48)]}


def test_what_is_given_back_of_records_that_were_taken_again_is_not_committed_before_they_are_done() -> None:
    tracker, tp = taken([(offset, None) for offset in range(40, 44)]), PARTITIONS[0]
    for entry in list(run_all(tracker).values())[1:]:
        tracker.done(entry.lease, 1)
    fresh = tracker.take_fresh()
    tracker.forget(tp)
    tracker.room(tp, 40)
    tracker.take(tp, [Given(offset, None, b"", 100 + offset) for offset in range(40, 44)], 44)
    tracker.done(run_all(tracker)[42].lease, 1)
    tracker.give_back(fresh)
    assert tracker.take_fresh() == {tp: [(42, 42)]}


def test_what_was_taken_first_runs_first_so_that_few_ranges_are_left() -> None:
    settings = TrackerSettings()
    chance = Random(1)
    keys = [b"%d" % chance.randrange(300) for _ in range(3_000)]
    tracker = taken([(40 + number, key) for number, key in enumerate(keys)], settings)
    running: list[Entry] = []
    most = 0
    while tracker.unfinished:
        while len(running) < 32 and (entry := tracker.next(0)) is not None:
            running.append(entry)
        done = running.pop(len(running) // 2)
        assert tracker.done(done.lease, 1)
        most = max(most, tracker.fresh)
    assert most <= 200


@pytest.mark.parametrize("finished_first", [True, False])
def test_a_record_that_is_here_already_does_not_come_again_when_the_position_has_gone_back(
    finished_first: bool,
) -> None:
    """A late commit of another member puts a group back: of what was taken again there were two, and `done` failed.

    Nor do ranges of the records before those that are here reach into theirs.
    """
    tracker, tp = Tracker(SETTINGS), PARTITIONS[0]
    tracker.begin(tp, 11)
    taken_first = [Given(11, b"z", None, 0), Given(12, b"a", None, 1), Given(14, b"a", None, 2)]
    tracker.take(tp, taken_first, 15, exact=True)
    long = tracker.next(0)
    offsets: list[int] = []

    def finish() -> None:
        entry = tracker.next(0)
        assert entry is not None and tracker.done(entry.lease, entry.deliveries)
        offsets.append(entry.offset)

    if finished_first:
        finish()
    tracker.stands(tp, 5)
    again = [Given(5, b"a", None, 3), Given(10, b"b", None, 4), Given(12, b"a", None, 5), Given(13, b"c", None, 6)]
    tracker.take(tp, again, 14)
    while tracker.ready:
        finish()
        fresh = tracker.take_fresh()
        assert all(first <= last for ranges in fresh.values() for first, last in ranges)
        tracker.give_back(fresh)
    assert sorted(offsets) == [5, 10, 12, 13, 14]
    of_a = [offset for offset in offsets if offset in (5, 12, 14)]
    assert of_a == ([12, 5, 14] if finished_first else [5, 12, 14])
    assert long is not None and long.offset == 11 and tracker.done(long.lease, 1) and tracker.unfinished == 0
    tracker.stands(tp, 15)
    assert tracker.stable(tp, 15) == 15 and not tracker.take_fresh() and tracker.fresh == 0


@pytest.mark.parametrize("seed", range(300))
def test_whatever_was_taken_before_records_of_a_key_run_by_offset_and_each_that_is_here_once(seed: int) -> None:
    chance, tracker, tp = Random(seed), Tracker(TrackerSettings()), PARTITIONS[0]
    running: list[Entry] = []
    position, leases = 20, 0
    tracker.begin(tp, position)
    for _ in range(60):
        dice = chance.random()
        if dice < 0.3:
            if chance.random() < 0.3:
                position = chance.randrange(position + 1)
                tracker.stands(tp, position)
            offsets = sorted(chance.sample(range(position, position + 12), chance.randrange(1, 5)))
            records = [Given(it, [None, b"a", b"b"][it % 3], None, leases + n) for n, it in enumerate(offsets)]
            leases, position = leases + len(records), offsets[-1] + 1
            tracker.take(tp, records, position, exact=True)
            here = [entry.offset for entry in tracker.entries(tp)]
            assert here == sorted(set(here))
        elif dice < 0.6 and (entry := tracker.next(0)) is not None:
            others = [it for it in tracker.entries(tp) if it.key == entry.key is not None and it is not entry]
            assert not any(it.stage is Stage.RUNNING for it in others)
            assert entry.deliveries > 1 or all(
                it.offset > entry.offset for it in others if it.stage in (Stage.READY, Stage.WAITING)
            )
            running.append(entry)
        elif dice >= 0.6 and running:
            entry = running.pop(chance.randrange(len(running)))
            if chance.random() < 0.2:
                assert tracker.reject(entry.lease, entry.deliveries, 0)
            else:
                assert tracker.done(entry.lease, entry.deliveries)
    while (found := tracker.next(0)) is not None or running:
        entry = running.pop() if found is None else found
        assert tracker.done(entry.lease, entry.deliveries)
    assert tracker.unfinished == 0
    tracker.stands(tp, position + 100)
    assert tracker.stable(tp, position + 100) == position + 100
