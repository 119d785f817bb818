"""The story of a run, from plans that one can check by eye: a topic of one partition that is split into two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from anabranch.demo.picture import cells
from anabranch.demo.story import Events, Followed, Piece, Resize, Segment, Span, Story, Wait, tell
from anabranch.machines.lineage import Lineage
from anabranch.spark.plan import Splitting, TopicSnapshot, plan_tasks, plan_to_json

ALL, LOWER, UPPER = Span(0.0, 1.0), Span(0.0, 0.5), Span(0.5, 1.0)
LAYOUTS = Lineage.of_ends(1, (1, 2), [{0: 10}])
"""Partition 0 has ten records of layout 0 and four of layout 1, partition 1 has six of layout 1."""
IN_ORDER = [{0: (0, 6), 1: (0, 0)}, {0: (6, 12), 1: (0, 0)}, {0: (12, 14), 1: (0, 6)}]
OUT_OF_ORDER = [{0: (0, 6), 1: (0, 3)}, {0: (6, 14), 1: (3, 6)}]


def plan(ranges: Mapping[int, tuple[int, int]], *, ordered: bool = True, lineage: Lineage = LAYOUTS) -> str:
    snapshot = TopicSnapshot("flights", "id", lineage, {0: 0, 1: 0}, {0: 14, 1: 6}, ordered)
    start = {"flights": {partition: low for partition, (low, _) in ranges.items()}}
    end = {"flights": {partition: high for partition, (_, high) in ranges.items()}}
    tasks = plan_tasks({"flights": snapshot}, start, end, Splitting())
    return plan_to_json({"flights": snapshot}, start, end, tasks, by_key=True)


def story(reads: Sequence[Mapping[int, tuple[int, int]]], **changes: Any) -> Story:
    """Tell of micro-batches that begin at second 1, 2, ... after the run and take half a second each."""
    ordered = reads is IN_ORDER
    events = Events("key" if ordered else "none", 100.0)
    events.sent = [(100.5, 8), (101.0, 12), (102.0, 20)]
    events.resizes = [Resize(100.75, 250.0, 1, 2)]
    events.plans = [plan(ranges, ordered=ordered) for ranges in reads]
    events.batches = [(101.0 + number, 0.5) for number in range(len(reads))]
    for name, value in changes.items():
        setattr(events, name, value)
    return tell(events)


def test_segments_lie_where_their_keys_are_and_layouts_begin_at_the_end_of_their_resize() -> None:
    told = story(IN_ORDER)
    assert told.segments == (Segment(0, 0, 10, ALL), Segment(0, 1, 4, LOWER), Segment(1, 1, 6, UPPER))
    assert [(each.partitions, each.begin_s, each.end_s) for each in told.layouts] == [(1, 0.0, 1.0), (2, 1.0, 3.5)]


def test_families_of_partitions_share_the_keys_evenly() -> None:
    lineage = Lineage.flat(2)
    told = story([{0: (0, 14), 1: (0, 6)}], plans=[plan({0: (0, 14), 1: (0, 6)}, lineage=lineage)], resizes=[])
    assert [segment.keys for segment in told.segments] == [LOWER, UPPER]


def test_a_micro_batch_reads_pieces_of_one_layout_each() -> None:
    told = story(IN_ORDER)
    assert [(p.batch, p.partition, p.layout, p.start, p.end) for p in told.pieces] == [
        (0, 0, 0, 0, 6),
        (1, 0, 0, 6, 10),
        (1, 0, 1, 10, 12),
        (2, 0, 1, 12, 14),
        (2, 1, 1, 0, 6),
    ]
    assert [batch.records for batch in told.batches] == [6, 6, 8] and told.records == 20


def test_records_wait_at_a_gate_until_the_micro_batch_that_passes_it() -> None:
    assert story(IN_ORDER).waits == (Wait(1, 1, 1.0, 3.0, (0,), 6),)


def test_a_gate_that_is_never_passed_is_closed_to_the_end() -> None:
    told = story(IN_ORDER, plans=[plan(ranges) for ranges in IN_ORDER[:2]], batches=[(101.0, 0.5), (102.0, 0.5)])
    assert [(wait.begin_s, wait.end_s) for wait in told.waits] == [(1.0, 2.5)]


def test_nothing_is_late_in_order() -> None:
    assert not story(IN_ORDER).is_late


def test_older_records_are_late_for_exactly_the_keys_whose_newer_ones_were_read_before() -> None:
    told = story(OUT_OF_ORDER)
    assert told.waits == ()
    assert {(p.batch, p.partition, p.layout): p.late for p in told.pieces if p.late} == {(1, 0, 0): (UPPER,)}


def test_the_followed_records_are_found_in_their_micro_batches_and_those_overtaken_counted() -> None:
    mine = Followed("N1", [(0, 2), (0, 7), (0, 9), (1, 1), (1, 4)])
    assert story(IN_ORDER, followed=mine).followed == (0, 1, 1, 2, 2) and story(IN_ORDER, followed=mine).overtaken == 0
    wrong = story(OUT_OF_ORDER, followed=mine)
    assert wrong.followed == (0, 1, 1, 0, 1) and wrong.overtaken == 2


def test_the_lag_grows_with_what_is_sent_and_falls_at_the_end_of_a_micro_batch() -> None:
    told = story(IN_ORDER)
    assert told.lag == (
        (0.0, 0),
        (0.5, 8),
        (1.0, 12),
        (1.5, 12),
        (1.5, 6),
        (2.0, 14),
        (2.5, 14),
        (2.5, 8),
        (3.5, 8),
        (3.5, 0),
    )


def test_cuts_of_partitions_that_were_removed_on_the_way_are_kept() -> None:
    """Layouts of 1, 2 and 1 partitions: the last plan knows nothing of partition 1 any more."""
    seen = Lineage.of_ends(1, (1, 2, 1), [{0: 4}, {0: 8, 1: 6}])
    gone = Lineage.of_ends(1, (1, 2, 1), [{0: 4}, {0: 8}])
    plans = [plan({0: (0, 8), 1: (0, 6)}, ordered=False, lineage=seen), plan({0: (8, 14)}, lineage=gone)]
    resizes = [Resize(100.5, 10.0, 1, 2), Resize(100.8, 10.0, 2, 1)]
    told = story([], plans=plans, batches=[(101.0, 0.5), (102.0, 0.5)], resizes=resizes)
    assert Segment(1, 1, 6, UPPER) in told.segments and Segment(0, 2, 6, ALL) in told.segments


@pytest.mark.parametrize("batches", [[], [(101.0, 0.5)]])
def test_plans_without_their_micro_batches_are_refused(batches: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="not those of one run"):
        story(IN_ORDER, batches=batches)


def test_cells_tile_what_was_read_and_are_late_only_where_records_came_late() -> None:
    pieces = [
        Piece(1, 0, 0, 6, 10, ALL, (UPPER,)),
        Piece(1, 0, 1, 10, 14, LOWER, ()),
        Piece(1, 1, 1, 3, 6, UPPER, ()),
    ]
    found = cells(pieces)
    assert [(cell.keys, [piece.layout for piece in cell.pieces], cell.late) for cell in found] == [
        (LOWER, [0, 1], (False, False)),
        (UPPER, [0, 1], (True, False)),
    ]
    alone = cells([Piece(0, 0, 0, 0, 6, ALL, ()), Piece(0, 9, 0, 0, 6, Span(0.25, 0.5), ())])
    assert [cell.keys for cell in alone] == [Span(0.0, 0.25), Span(0.25, 0.5), Span(0.5, 1.0)]
    assert all(one.keys.high == other.keys.low for one, other in pairwise(alone))
