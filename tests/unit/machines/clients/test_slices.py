"""Slices in hand: what of them is done, and what becomes of one that is offered again to its member."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.base.errors import ApiError
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.processing import Entry, Tracker, TrackerSettings
from anabranch.machines.clients.slices import SliceLedger
from anabranch.machines.groups.individual import checked

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Member:
    """A ledger, and the application of its records."""

    def __init__(self) -> None:
        self.ledger = SliceLedger(Tracker(TrackerSettings(), ordered=False))
        self._leases = itertools.count(1)

    def got(self, start: int, end: int, *, without: tuple[int, ...] = (), tp: TopicPartition = P0) -> None:
        session = self.ledger.session(tp)
        records: list[Any] = [
            SimpleNamespace(offset=offset, key=b"k", value=b"v", lease=next(self._leases))
            for offset in range(start, end + 1)
            if offset not in without
        ]
        assert self.ledger.got(tp, session.number, session.sequence, start, end, records)

    def polled(self) -> list[Entry]:
        found: list[Entry] = []
        while (entry := self.ledger.tracker.next(0)) is not None:
            found.append(entry)
        return found

    def finish(self, entries: list[Entry]) -> None:
        for entry in entries:
            assert self.ledger.tracker.done(entry.lease, entry.deliveries)

    def done(self) -> list[tuple[int, int]]:
        """What a commit would say of partition 0; a coordinator takes it."""
        return checked((part.start, part.end) for part in self.ledger.done() if part.tp == P0)

    def commit(self) -> None:
        for part in self.ledger.done():
            self.ledger.committed(part)


def offsets(entries: list[Entry]) -> list[int]:
    return [entry.offset for entry in entries]


def test_a_slice_that_is_offered_again_to_its_member_is_in_hand_once() -> None:
    member = Member()
    member.got(0, 4)
    running = member.polled()
    member.got(0, 4)
    assert member.polled() == [], "the application has these records"
    assert member.done() == []
    member.finish(running)
    assert member.done() == [(0, 4)]
    member.commit()
    assert len(member.ledger) == 0


def test_of_a_slice_that_reaches_beyond_what_is_in_hand_the_rest_comes_in() -> None:
    member = Member()
    member.got(2, 3)
    member.got(6, 6, without=(6,))
    first = member.polled()
    member.got(0, 8)
    rest = member.polled()
    assert (offsets(first), offsets(rest)) == ([2, 3], [0, 1, 4, 5, 7, 8])
    member.finish(rest)
    assert member.done() == [(0, 1), (4, 8)]
    member.finish(first)
    assert member.done() == [(0, 8)]


def test_a_rejected_record_goes_on_waiting_where_its_slice_is_offered_again() -> None:
    member = Member()
    member.got(0, 1)
    kept, rejected = member.polled()
    assert member.ledger.tracker.reject(rejected.lease, rejected.deliveries, due_ms=100)
    member.got(0, 1)
    assert member.ledger.tracker.next(99) is None
    again = member.ledger.tracker.next(100)
    assert again is rejected and again.deliveries == 2
    member.finish([kept, again])
    assert member.done() == [(0, 1)]


def test_what_was_committed_and_is_offered_again_after_a_reset_is_handed_out_and_committed_beside_the_rest() -> None:
    member = Member()
    member.got(0, 4)
    entries = member.polled()
    member.finish(entries[:2])
    member.commit()
    member.got(0, 4)  # The group was set back, and the slice was held for too long.
    again = member.polled()
    assert offsets(again) == [0, 1]
    member.finish([*again, *entries[2:]])
    assert member.done() == [(0, 4)]
    member.commit()
    assert len(member.ledger) == 0


def test_ranges_by_hand_count_each_offset_in_hand_once() -> None:
    member = Member()
    member.got(0, 4)
    member.got(5, 9)
    member.got(0, 9, tp=P1)
    member.finish(member.polled()[:2])
    member.commit()
    member.got(0, 4)
    parts = member.ledger.parts_of({P0: [(1, 7)]})
    assert checked((part.start, part.end) for part in parts) == [(1, 7)]
    with pytest.raises(ApiError, match="offsets 8 to 10 of t-0 are not all in hand"):
        member.ledger.parts_of({P0: [(8, 10)]})


def test_offsets_without_a_record_go_with_the_next_record_and_behind_the_last_one_with_that_one() -> None:
    member = Member()
    member.got(0, 12, without=(0, 1, 4, 7, 8, 11, 12))

    def ranges(*offsets: int) -> Any:
        return member.ledger.ranges_of((P0, offset) for offset in offsets)

    assert ranges(2) == {P0: [(0, 2)]}
    assert ranges(3, 5) == {P0: [(3, 5)]}
    assert ranges(3, 6, 9) == {P0: [(3, 3), (6, 9)]}
    assert ranges(10, 9, 9) == {P0: [(7, 12)]}
    assert ranges() == {}
    member.got(13, 13, without=(13,))
    member.got(14, 15, without=(14,), tp=P1)
    assert member.ledger.ranges_of([(P0, 10), (P1, 15)]) == {P0: [(10, 12)], P1: [(14, 15)]}
    (part,) = member.ledger.parts_of({P0: [(8, 8), (9, 9)]})
    assert (part.start, part.end) == (7, 9), "once, though a range begins within"
    (part,) = member.ledger.parts_of({P0: [(7, 8)]})
    assert (part.start, part.end) == (7, 8), "no record, nothing that belongs to it"
    with pytest.raises(ApiError, match="offsets 16 to 16 of t-0 are not all in hand"):
        ranges(16)


def test_what_belongs_to_a_record_and_is_committed_is_not_committed_again() -> None:
    member = Member()
    member.got(0, 5, without=(1, 2, 5))
    member.ledger.committed(*member.ledger.parts_of({P0: [(2, 2)]}))
    assert member.ledger.ranges_of([(P0, 3)]) == {P0: [(1, 1), (3, 3)]}
    assert member.ledger.ranges_of([(P0, 4)]) == {P0: [(4, 5)]}


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.sets(st.integers(1, 29)), st.randoms())
def test_all_is_committed_when_each_record_is_and_no_offset_twice(
    has_record: list[bool], cuts: set[int], random: Random
) -> None:
    member = Member()
    edges = [0, *sorted(cut for cut in cuts if cut < len(has_record)), len(has_record)]
    for start, end in itertools.pairwise(edges):
        member.got(start, end - 1, without=tuple(at for at in range(start, end) if not has_record[at]))
    member.ledger.committed(*member.ledger.passed())
    records = [offset for offset, has in enumerate(has_record) if has]
    random.shuffle(records)
    said: set[int] = set()
    while records:
        some = {records.pop() for _ in range(random.randint(1, len(records)))}
        ranges = member.ledger.ranges_of((P0, offset) for offset in some)
        named = {offset for first, last in ranges[P0] for offset in range(first, last + 1)}
        assert {offset for offset in named if has_record[offset]} == some and not named & said
        said |= named
        if random.random() < 0.5:
            ranges = {P0: [(offset, offset) for offset in sorted(some)]}
        member.ledger.committed(*member.ledger.parts_of(ranges))
    assert len(member.ledger) == 0


def test_slices_without_records_are_known_by_themselves_until_they_are_committed() -> None:
    member = Member()
    member.got(0, 9)
    assert not member.ledger.has_passed
    member.got(10, 4_999, without=tuple(range(10, 5_000)))
    (part,) = member.ledger.passed()
    assert (part.start, part.end) == (10, 4_999)
    assert member.ledger.has_passed
    member.ledger.committed(part)
    assert not member.ledger.has_passed and member.ledger.passed() == []
    assert [(start, end) for _, start, end in member.ledger.slices()] == [(0, 9)]


MANY = 3_000


class Looks:
    """Counts how often a tracker is asked for its state of one slice."""

    def __init__(self, tracker: Tracker) -> None:
        self.count = 0
        self._finished = tracker.finished
        tracker.finished = self.finished  # type: ignore[method-assign]

    def finished(self, tp: TopicPartition, position: int) -> Any:
        self.count += 1
        return self._finished(tp, position)


def test_what_is_done_is_found_without_a_look_at_all_slices_in_hand() -> None:
    member = Member()
    for offset in range(0, 20 * MANY, 20):
        member.got(offset, offset + 9)
    entries = member.polled()
    member.finish(entries[:5] + entries[25:30])
    looks = Looks(member.ledger.tracker)
    assert member.done() == [(0, 4), (45, 49)]
    looks.count = 0
    assert member.done() == [(0, 4), (45, 49)], "until it is committed"
    assert looks.count == 2
    member.commit()
    member.finish(entries[5:6])
    looks.count = 0
    assert member.done() == [(5, 5)]
    assert looks.count <= 3, "those of which more is done, and those that were committed"
    looks.count = 0
    member.commit()
    assert member.done() == [] and looks.count <= 3


def test_ranges_are_found_among_slices_of_any_length_that_overlap() -> None:
    member = Member()
    member.got(0, 999)
    member.ledger.committed(next(iter(member.ledger.parts_of({P0: [(0, 499)]}))))
    member.got(0, 9)  # After a reset.
    for offset in range(1_000, 1_010):
        member.got(offset, offset)
    parts = member.ledger.parts_of({P0: [(5, 12), (995, 1_001)]})
    assert [(part.start, part.end) for part in parts] == [(5, 9), (10, 12), (995, 999), (1_001, 1_001), (1_000, 1_000)]
    assert len({part.slice for part in parts}) == 4, "the later one of two, as far as it goes"
    member.ledger.drop_below(P0, 1_001)
    assert [start for _, start, _ in member.ledger.slices()] == list(range(1_001, 1_010))
    with pytest.raises(ApiError, match="not all in hand"):
        member.ledger.parts_of({P0: [(1_000, 1_001)]})


def below(ledger: SliceLedger) -> None:
    ledger.drop_below(P0, MANY)


def refused(ledger: SliceLedger) -> None:
    ledger.refused(*ledger.parts_of({P0: [(0, MANY - 1)]}))


def committed(ledger: SliceLedger) -> None:
    ledger.committed(*ledger.parts_of({P0: [(0, MANY - 1)]}))


@pytest.mark.parametrize("drop", [lambda ledger: ledger.drop([P0]), below, refused, committed])
def test_many_slices_that_are_ready_are_dropped_in_one_look_at_what_is_ready(
    drop: Callable[[SliceLedger], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Member()
    for offset in range(MANY):
        member.got(offset, offset)
        member.got(offset, offset, tp=P1)
    kept: list[int] = []
    keep = member.ledger.tracker._keep_ready
    monkeypatch.setattr(member.ledger.tracker, "_keep_ready", lambda stays: (kept.append(1), keep(stays)))
    drop(member.ledger)
    assert len(kept) == 1 and len(member.ledger) == MANY
    assert member.ledger.tracker.ready == MANY == len(member.polled())
