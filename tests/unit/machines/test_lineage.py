"""The rule of ordering.md, section 3, case by case; `tests/properties/test_lineage.py` has it against a model."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest

from anabranch.base.limits import LATE_LAYOUT, LATE_OFFSET_BITS, LAYOUT_NUMBER_MAX, SEQUENCE_OFFSET_BITS
from anabranch.machines.keyspace import SPACE_END, Interval
from anabranch.machines.lineage import (
    BEYOND,
    UNKNOWN_END,
    Frontier,
    GateWait,
    Lineage,
    Segment,
    sequence_base,
    sequence_cuts,
)

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


def test_while_the_end_of_a_parent_is_unknown_the_gates_of_its_children_are_closed() -> None:
    lineage = Lineage.of_cuts(1, (1, 2, 4), {1: [(1, 7)]}, unknown={0: 0})
    read = {0: 1 << 40, 1: 7, 2: 0, 3: 0}
    assert lineage.deliverable(read) == {0: None, 1: 7, 2: 0, 3: 0}
    assert lineage.waits(3, read) == (GateWait(0, UNKNOWN_END),)
    assert lineage.deliverable({**read, 0: BEYOND}) == dict.fromkeys(range(4)), "a reader that does not read it"


def test_ends_that_are_known_open_their_gates_while_a_later_one_is_not() -> None:
    lineage = Lineage.of_cuts(1, (1, 2, 1, 2), {0: [(0, 3)], 1: [(1, 2)]}, unknown={0: 1})
    assert lineage.may_deliver(1, 1, {0: 3, 1: 0})
    assert not lineage.may_deliver(1, 1, {0: 2, 1: 0})
    assert not lineage.may_deliver(1, 3, {0: 1 << 40, 1: 2}), "layout 2 put the keys of both into partition 0"


def test_layouts_keep_their_numbers_when_older_ones_are_folded_away() -> None:
    whole = Lineage.of_ends(1, (1, 2, 1, 3), ({0: 5}, {0: 5, 1: 2}, {0: 9, 1: 2}))
    folded = Lineage.of_ends(1, (1, 3), ({0: 9, 1: 2},), first=2)
    assert (whole.current, folded.current, folded.count_in(2)) == (3, 3, 1)
    assert [folded.sequence(0, offset) for offset in (6, 9)] == [whole.sequence(0, offset) for offset in (6, 9)]
    assert folded.start(0, 3) == whole.start(0, 3) == 9
    assert folded.waits(2, {0: 8, 1: 2}) == whole.waits(2, {0: 8, 1: 2}) == (GateWait(0, 9),)


def test_a_gate_waits_on_all_partitions_with_a_past_of_its_keys_at_once() -> None:
    """4 → 1 → 2: what partition 1 holds now was in 0, 1 and 3; partition 2 only ever had keys of 0."""
    lineage = Lineage.of_ends(1, (4, 1, 2), ({0: 5, 1: 6, 2: 7, 3: 8}, {0: 9, 1: 6, 2: 7, 3: 8}))
    unread = dict.fromkeys(range(4), 0)
    assert lineage.waits(1, unread) == (GateWait(0, 9), GateWait(3, 8))
    assert lineage.relatives(1) == (0, 3)
    assert lineage.waits(0, {**unread, 0: 5}) == (GateWait(1, 6), GateWait(2, 7), GateWait(3, 8))


QUARTER = (SPACE_END + 1) // 4


def test_a_reader_of_a_share_waits_for_the_past_of_its_own_keys_only() -> None:
    """2 → 1: partition 0 took over the upper half of the keys."""
    lower, upper = Interval(0, 2 * QUARTER - 1), Interval(2 * QUARTER, SPACE_END)
    gates = SHRUNK.gates({0: 5, 1: 0})
    assert gates.limit(0, lower) is None
    assert gates.limit(0, upper) == gates.limit(0) == 5
    half_read = Frontier((0, 3 * QUARTER), (0, 7))
    gates = SHRUNK.gates({0: 5, 1: half_read})
    assert gates.waits(0, upper) == (GateWait(1, 7),)
    assert gates.waits(0, Interval(3 * QUARTER, SPACE_END)) == ()


@pytest.mark.parametrize("initial", [1, 2, 3])
def test_the_keys_of_a_partition_in_many_layouts_are_those_of_each(initial: int) -> None:
    counts = (*range(initial, 9 * initial), 5 * initial, initial)
    lineage = Lineage(initial, counts, first=4)
    layouts = range(4, 4 + len(counts))
    for partition in range(9 * initial):
        assert lineage.held_in(partition, layouts) == tuple(lineage.held(partition, layout) for layout in layouts)


def test_a_frontier_names_the_lowest_position_of_some_keys() -> None:
    frontier = Frontier((0, 10, 20), (7, 3, 9))
    assert [frontier.lowest(Interval(*keys)) for keys in ((0, 9), (5, 10), (10, 19), (20, 99), (19, 20))] == [
        7,
        3,
        3,
        9,
        3,
    ]


def resized_often(low: int, high: int, times: int, *, busy: int) -> Lineage:
    """A topic between two counts: each layout got records in `busy` partitions."""
    chance = random.Random(times)
    counts = [low if layout % 2 == 0 else high for layout in range(times + 1)]
    cuts: dict[int, list[tuple[int, int]]] = {partition: [] for partition in range(high)}
    for layout, count in enumerate(counts[:-1]):
        for partition in chance.sample(range(count), busy):
            known = cuts[partition]
            known.append((layout, (known[-1][1] if known else 0) + 1))
    return Lineage.of_cuts(low, counts, cuts)


@pytest.mark.parametrize(("low", "high", "times"), [(80, 160, 110), (1000, 2000, 1000), (1000, 5000, 6)])
def test_a_lineage_costs_what_its_segments_with_records_cost(low: int, high: int, times: int) -> None:
    """Its build, its gates and its memory; partitions times layouts times partitions took gigabytes and minutes."""
    tracemalloc.start()
    lineage = resized_often(low, high, times, busy=50)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    segments = sum(len(cuts.ends) for cuts in lineage.cuts.values())
    assert segments == 50 * times
    assert size < 1_000 * high + 100 * segments
    ends = [lineage.start(partition, lineage.current) for partition in range(high)]
    for positions in (ends, [0] * high, [end // 2 for end in ends]):
        began = time.process_time()
        limits = lineage.deliverable(dict(enumerate(positions)))
        assert time.process_time() - began < 1
        assert (positions is ends) == (set(limits.values()) == {None})
