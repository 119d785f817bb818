"""What may be removed from partitions that share keys: the rules one by one."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.machines.compaction import (
    Fold,
    Place,
    Trace,
    decide_fold,
    family_of,
    may_fold,
    may_hide_older,
    relatives,
    share_keys,
    superseded_by,
)
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.lineage import Lineage
from anabranch.machines.placement import place


def trace(partition: int, *records: tuple[int, int], undecided: bool = False) -> Trace:
    """The trace of committed records, (offset, layout) each; `undecided`: the last one is of an open transaction."""
    found = Trace(partition)
    for number, (offset, layout) in enumerate(records):
        found = found.with_record(offset, layout, decided=not undecided or number < len(records) - 1)
    return found


def test_a_record_goes_for_a_later_one_in_its_log_and_for_one_of_a_later_layout_elsewhere() -> None:
    here = trace(0, (5, 0), (9, 1))
    assert superseded_by(Place(0, 0, 5), [here]) == here
    assert superseded_by(Place(0, 1, 9), [here]) is None
    later = trace(1, (0, 2))
    assert superseded_by(Place(0, 1, 9), [here, later]) == later
    assert superseded_by(Place(0, 0, 5), [later, here]) == here, "the record's own log comes first"
    assert superseded_by(Place(1, 2, 0), [here, later]) is None


def test_records_of_one_layout_in_different_logs_have_no_order() -> None:
    traces = [trace(0, (5, 1)), trace(1, (0, 1))]
    assert superseded_by(Place(0, 1, 5), traces) is None
    assert superseded_by(Place(1, 1, 0), traces) is None
    assert may_hide_older(Place(0, 1, 5), traces)
    assert may_hide_older(Place(1, 1, 0), traces)


def test_what_an_open_transaction_wrote_supersedes_nothing() -> None:
    assert superseded_by(Place(0, 0, 5), [trace(0, (5, 0)), trace(1, (0, 1), undecided=True)]) is None
    assert superseded_by(Place(0, 0, 5), [trace(0, (5, 0), (6, 0), undecided=True)]) is None


def test_a_tombstone_stays_while_an_older_record_of_its_key_is_left_anywhere() -> None:
    tombstone = Place(1, 1, 7)
    own = trace(1, (7, 1))
    assert not may_hide_older(tombstone, [own])
    assert may_hide_older(tombstone, [own, trace(0, (5, 0))])
    assert may_hide_older(tombstone, [own, trace(0, (5, 0), undecided=True)]), "an open transaction may commit"
    assert may_hide_older(tombstone, [trace(1, (3, 0), (7, 1))])
    assert not may_hide_older(tombstone, [own, trace(0, (5, 2))]), "that one is newer"


@pytest.mark.parametrize(
    ("elsewhere", "fate"),
    [
        ([], Fold.FOLD),
        ([trace(0, (3, 0))], Fold.FOLD),
        ([trace(0, (3, 1))], Fold.FOLD),
        ([trace(0, (3, 0), (8, 2))], Fold.SUPERSEDED),
        ([trace(0, (3, 0), (8, 2), undecided=True)], Fold.UNDECIDED),
        ([trace(0, (3, 0)), trace(1, (8, 2))], Fold.SUPERSEDED),
    ],
)
def test_a_record_is_folded_only_while_it_is_the_newest_of_its_key(elsewhere: list[Trace], fate: Fold) -> None:
    assert decide_fold(Place(3, 1, 4), [trace(3, (2, 1), (4, 1)), *elsewhere]) is fate
    assert decide_fold(Place(3, 1, 2), [trace(3, (2, 1), (4, 1)), *elsewhere]) is Fold.SUPERSEDED


def role(partition: int, count: int, layout: int, *, retiring: bool = False) -> Leadership:
    return Leadership(UUID(int=1), partition, layout, 1, 1, count, retiring)


def test_a_partition_is_folded_into_its_survivor_when_both_serve_one_layout() -> None:
    assert may_fold(role(3, 2, 5, retiring=True), role(1, 2, 5))
    assert not may_fold(role(3, 2, 5, retiring=True), role(0, 2, 5)), "not the survivor"
    assert not may_fold(role(3, 2, 5, retiring=True), role(1, 2, 4)), "a shrink is under way"
    assert not may_fold(role(3, 2, 5, retiring=True), role(1, 4, 6)), "a growth is under way"
    assert not may_fold(role(3, 4, 5), role(1, 4, 5)), "it opened again"
    assert not may_fold(role(3, 1, 5, retiring=True), role(1, 1, 5, retiring=True))
    assert not may_fold(None, role(1, 2, 5))
    assert not may_fold(role(3, 2, 5, retiring=True), None)


@given(st.integers(1, 3), st.integers(0, 12), st.integers(0, 12), st.integers(1, 13), st.integers(1, 13))
def test_partitions_share_keys_where_some_key_is_placed_in_both(
    initial: int, one: int, other: int, one_count: int, other_count: int
) -> None:
    one_count, other_count = max(one_count, initial, one + 1), max(other_count, initial, other + 1)
    hashes = range(initial * 64)
    expected = any(place(h, initial, one_count) == one and place(h, initial, other_count) == other for h in hashes)
    assert share_keys(one, one_count, other, other_count, initial) is expected


@given(st.integers(1, 5), st.integers(1, 60), st.data())
def test_only_relatives_ever_share_keys(initial: int, existing: int, data: st.DataObject) -> None:
    existing = max(existing, initial)
    partition = data.draw(st.integers(0, existing - 1))
    found = list(relatives(partition, existing, initial))
    assert len(set(found)) == len(found) and partition not in found
    counts = range(initial, existing + 1)
    expected = {
        other
        for other in range(existing)
        if other != partition
        and any(
            share_keys(partition, one_count, other, other_count, initial)
            for one_count in counts
            for other_count in counts
            if partition < one_count and other < other_count
        )
    }
    assert set(found) == expected


def test_all_partitions_together_have_few_relatives() -> None:
    for existing in (1_000, 2_000):
        found = sum(1 for partition in range(existing) for _ in relatives(partition, existing, 1))
        assert found <= 2 * existing * 11 / 2, "one for each level that is not empty, and that both ways"


def test_a_family_is_the_partitions_that_may_hold_older_records_or_newer_ones_of_dirty_keys() -> None:
    lineage = Lineage.of_ends(1, (1, 2, 4), ({0: 5}, {0: 9, 1: 3}))
    layouts_of = {0: [0, 1, 2], 1: [1, 2], 2: [2], 3: [2]}
    assert family_of(3, [2], layouts_of, lineage) == (0, 1), "its keys were in 0, then in 1"
    assert family_of(2, [2], layouts_of, lineage) == (0,), "its keys were never in 1"
    assert family_of(0, [2], layouts_of, lineage) == (1, 2), "producers may have placed by the count before"
    assert family_of(0, [2], {**layouts_of, 0: [2]}, lineage) == (2,)
    assert family_of(0, [0], layouts_of, lineage) == (1, 2, 3), "newer records of its first keys may be anywhere"
    assert family_of(3, [2], {**layouts_of, 0: [2], 1: [2]}, lineage) == (1,), "the older records are gone"


def test_partitions_of_different_roots_share_no_key() -> None:
    lineage = Lineage.of_ends(2, (2, 4), ({0: 5, 1: 5},))
    assert family_of(2, [1], {0: [0, 1], 1: [0, 1], 2: [1], 3: [1]}, lineage) == (0,)
