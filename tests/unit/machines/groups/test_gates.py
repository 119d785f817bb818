"""Gates as a coordinator evaluates them: progress, gates that were open once, and partitions that re-opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anabranch.machines.groups.gates import Evaluation, evaluate, segment_start, was_reopened
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.positions import Position
from anabranch.machines.lineage import GateWait, Lineage
from tests.support.groups import topic_id

FOO = topic_id("foo")
GREW = TopicImage(FOO, "foo", (0, 1), lineage=Lineage.of_ends(1, (1, 2), ({0: 5},)))
CAME_BACK = TopicImage(
    FOO, "foo", (0, 1), lineage=Lineage.of_ends(1, (1, 2, 1, 2), ({0: 5}, {0: 8, 1: 3}, {0: 9, 1: 3}))
)
"""Partition 1 was added, retired and re-opened; offsets 8 and 9 of partition 0 came in between."""


def closed(topic: TopicImage, positions: Mapping[int, int], committed: Mapping[int, Position] = {}) -> Evaluation:
    return evaluate(topic, positions, positions, committed)


def test_a_child_waits_until_its_parent_has_reached_the_cut() -> None:
    found = closed(GREW, {0: 4, 1: 0})
    assert found.closed == {1: (GateWait(0, 5),)}
    assert found.needs == {0: 5} and found.waiting == {0: (1,)}
    assert not closed(GREW, {0: 5, 1: 0}).closed


def test_a_committed_offset_above_the_start_of_the_segment_says_that_the_gate_was_open() -> None:
    assert 1 in closed(GREW, {0: 0, 1: 0}, {1: Position(0)}).closed
    assert not closed(GREW, {0: 0, 1: 1}, {1: Position(1)}).closed


def test_records_deleted_after_the_commit_do_not_make_it_a_proof() -> None:
    deleted = replace(GREW, log_start=lambda partition: 7 * partition)
    assert segment_start(deleted, 1, 1) == 7
    assert 1 in closed(deleted, {0: 0, 1: 7}, {1: Position(7)}).closed


def test_a_partition_handed_out_at_its_gate_is_not_closed_again() -> None:
    assert 1 in closed(GREW, {0: 0, 1: 0}, {1: Position(0, opened=0)}).closed
    assert not closed(GREW, {0: 0, 1: 0}, {1: Position(0, opened=1)}).closed


def test_a_gate_that_opens_by_time_counts_for_others_and_not_for_the_partition_itself() -> None:
    found = evaluate(GREW, {0: 2, 1: 0}, {0: 5, 1: 0}, {})
    assert not found.closed


def test_a_partition_that_came_back_is_taken_away_at_its_cut_and_not_before() -> None:
    lineage = CAME_BACK.lineage
    assert lineage is not None and was_reopened(lineage, 1, 3, 3)
    at_cut = closed(CAME_BACK, {0: 8, 1: 3}, {1: Position(3)})
    assert at_cut.closed == {1: (GateWait(0, 9),)} and at_cut.reopened == {1}
    before = closed(CAME_BACK, {0: 8, 1: 2}, {1: Position(2)})
    assert 1 not in before.closed and before.ahead == {1: 3}
    assert not closed(CAME_BACK, {0: 9, 1: 3}, {1: Position(3)}).closed


def test_a_partition_that_was_never_resized_has_no_gates() -> None:
    flat = TopicImage(FOO, "foo", (0, 1), lineage=Lineage.flat(2))
    assert closed(flat, {0: 0, 1: 0}) == Evaluation()
    assert closed(replace(flat, lineage=None), {0: 0, 1: 0}) == Evaluation()
