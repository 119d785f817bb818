"""The rule of ordering.md, section 3, case by case; `tests/properties/test_lineage.py` has it against a model."""

from __future__ import annotations

import pytest

from anabranch.base.limits import LATE_LAYOUT, LATE_OFFSET_BITS, LAYOUT_NUMBER_MAX, SEQUENCE_OFFSET_BITS
from anabranch.machines.lineage import BEYOND, GateWait, Lineage, Segment, sequence_base, sequence_cuts

GROWN_TWICE = Lineage.of_ends(initial=1, counts=(1, 2, 4), ends=({0: 3}, {0: 3, 1: 0}))
"""Three records in partition 0, then 1 → 2, nothing written, then 2 → 4."""
SHRUNK = Lineage.of_ends(initial=1, counts=(2, 1), ends=({0: 5, 1: 7},))


def test_a_flat_lineage_closes_no_gate() -> None:
    lineage = Lineage.flat(3)
    assert lineage.deliverable({0: 0, 1: 0, 2: 0}) == {0: None, 1: None, 2: None}
    assert (lineage.current, lineage.count) == (0, 3)


def test_an_empty_parent_does_not_hide_the_unread_grandparent() -> None:
    """The example of the design: partition 1 stayed empty, so its position proves nothing about partition 0."""
    positions = {0: 0, 1: 0, 2: 0, 3: 0}
    assert not GROWN_TWICE.may_deliver(3, 2, positions)
    assert GROWN_TWICE.waits(3, positions) == (GateWait(0, 3),)
    assert GROWN_TWICE.may_deliver(3, 2, {**positions, 0: 3})


@pytest.mark.parametrize(("position", "opened"), [(0, False), (2, False), (3, True), (BEYOND, True)])
def test_a_child_waits_until_its_parent_is_read_to_the_end_of_the_layout(position: int, opened: bool) -> None:
    assert GROWN_TWICE.may_deliver(1, 1, {0: position, 1: 0}) is opened


def test_a_parent_whose_position_is_unknown_keeps_the_gate_closed() -> None:
    assert not GROWN_TWICE.may_deliver(1, 1, {1: 0})


def test_a_survivor_delivers_its_own_records_and_stops_where_the_retired_partition_joined() -> None:
    positions = {0: 0, 1: 6}
    assert SHRUNK.deliverable(positions) == {0: 5, 1: None}
    assert SHRUNK.waits(0, positions) == (GateWait(1, 7),)
    assert SHRUNK.deliverable({0: 5, 1: 7}) == {0: None, 1: None}


def test_a_removed_partition_has_nothing_left_to_read() -> None:
    removed = Lineage.of_ends(initial=1, counts=(2, 1), ends=({0: 5},))
    assert removed.deliverable({0: 0}) == {0: None}


def test_a_log_is_cut_into_segments_without_the_empty_ones() -> None:
    assert list(GROWN_TWICE.segments(0, 1)) == [Segment(0, 0, 1, 3), Segment(0, 2, 3, None)]
    assert list(GROWN_TWICE.segments(1, 0)) == [Segment(1, 2, 0, None)]


def test_the_layout_of_an_offset_and_the_sequence_grow_together() -> None:
    layouts = [SHRUNK.layout_at(0, offset) for offset in (0, 4, 5, 6)]
    assert layouts == [0, 0, 1, 1]
    assert SHRUNK.sequence(0, 5) == 1 << SEQUENCE_OFFSET_BITS | 5


def test_the_sequence_grows_with_layout_and_offset_up_to_the_last_layout_there_can_be() -> None:
    numbers = (0, 1, LATE_LAYOUT - 1, LATE_LAYOUT, LATE_LAYOUT + 1, 32_766, 32_767, 40_000, LAYOUT_NUMBER_MAX)
    offsets = (0, 1, (1 << LATE_OFFSET_BITS) - 1)
    sequences = [sequence_base(layout) + offset for layout in numbers for offset in offsets]
    assert sequences == sorted(set(sequences))
    assert sequences[-1] == (1 << 63) - 1
    assert sequence_base(3) + 7 == 3 << SEQUENCE_OFFSET_BITS | 7
    lineage = Lineage.of_cuts(1, (1, 2), {0: [(40_000, 5)]}, first=40_000)
    assert lineage.sequence(0, 4) == sequence_base(40_000) + 4
    assert lineage.sequence(0, 5) == sequence_base(40_001) + 5
    assert SHRUNK.sequence(1, 6) < SHRUNK.sequence(0, 5)
    ends, layouts = sequence_cuts(SHRUNK, 0)
    assert (list(ends), list(layouts)) == ([5], [0, 1])
