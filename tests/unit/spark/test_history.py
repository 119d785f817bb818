"""The history of a query's plans: what follows what, and what later plans know of earlier ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.machines.lineage import Lineage
from anabranch.spark.plan import Splitting, TopicSnapshot, plan_tasks, plan_to_json, verify, verify_history
from anabranch.spark.source import _append

ONE, TWO = Lineage.flat(1), Lineage.of_ends(1, (1, 2), ({0: 5},))
Reads = dict[int, tuple[int, int]]


def look(lineage: Lineage, ends: dict[int, int], starts: dict[int, int] | None = None, **more: Any) -> TopicSnapshot:
    return TopicSnapshot("t", "id", lineage, starts or dict.fromkeys(ends, 0), ends, **more)


def plan(at: TopicSnapshot, reads: Reads, *, whole: bool = False) -> str:
    start, end = {"t": {p: r[0] for p, r in reads.items()}}, {"t": {p: r[1] for p, r in reads.items()}}
    tasks = plan_tasks({"t": at}, start, end, Splitting(), whole=whole)
    line = plan_to_json({"t": at}, start, end, tasks, by_key=True, whole=whole)
    assert verify(line) == []
    return line


FIRST = plan(look(ONE, {0: 9}), {0: (2, 5)})
SECOND = plan(look(TWO, {0: 9, 1: 4}), {0: (5, 9), 1: (0, 4)})


def test_a_layout_that_took_no_record_may_have_another_count_in_later_plans() -> None:
    """Nobody publishes its ends; it has the count of the one before it then."""
    four = plan(look(Lineage.of_ends(2, (2, 4), ({0: 5, 1: 5},)), dict.fromkeys(range(4), 5)), {0: (0, 5), 1: (0, 5)})
    three = look(Lineage.of_ends(2, (2, 2, 3), ({0: 5, 1: 5}, {0: 5, 1: 5})), {0: 9, 1: 5, 2: 3, 3: 0})
    assert problems(four, plan(three, {0: (5, 9), 1: (5, 5), 2: (0, 3), 3: (0, 0)})) == []


def test_a_layout_whose_records_are_there_may_not_vanish_from_later_plans() -> None:
    first = look(Lineage.of_ends(1, (1, 2, 3), ({0: 10}, {0: 20, 1: 15})), {0: 20, 1: 15, 2: 0})
    ends = {0: 10}, {0: 10}, {0: 25, 1: 15, 2: 1}
    second = look(Lineage.of_ends(1, (1, 1, 3, 4), ends), {0: 30, 1: 15, 2: 1, 3: 0})
    found = problems(
        plan(first, {0: (10, 20), 1: (0, 15), 2: (0, 0)}),
        plan(second, {0: (20, 30), 1: (15, 15), 2: (0, 1), 3: (0, 0)}),
    )
    assert any("layout 1 has 2 partitions, and 1 in a later plan" in each for each in found), found


def problems(*lines: str) -> list[str]:
    return [each.problem for each in verify_history(lines).problems]


def test_a_query_begins_anywhere_and_goes_on_where_it_was_through_a_resize_and_a_restart() -> None:
    third = plan(look(TWO, {0: 9, 1: 6}), {0: (9, 9), 1: (4, 6)})
    found = verify_history([FIRST, FIRST, SECOND, "INFO plan: " + SECOND, "other words", third])
    assert (found.plans, found.problems, found.torn) == (5, (), ())


@pytest.mark.parametrize(
    ("cleanup", "log_start", "fault"),
    [
        ({"compact", "delete"}, 40, []),
        ({"compact", "delete"}, 41, ["t-1: offsets 3 to 41 were deleted before they were read"]),
        ({"compact"}, 40, []),
        ({"compact"}, 41, ["t-1: offsets 3 to 41 were deleted before they were read"]),
        ({"delete"}, 40, ["t-1: offsets 3 to 40 were deleted before they were read"]),
    ],
)
def test_what_was_folded_back_is_no_fault_either_when_the_topic_has_grown_again(
    cleanup: set[str], log_start: int, fault: list[str]
) -> None:
    policy = frozenset(cleanup)
    grown = Lineage.of_cuts(1, (2,), {})
    before = plan(look(grown, {0: 9, 1: 40}, cleanup=policy), {0: (0, 9), 1: (0, 3)})
    regrown = Lineage.of_cuts(1, (2, 1, 2), {0: [(0, 9), (1, 12)], 1: [(0, 40)]})
    there = look(regrown, {0: 12, 1: 44}, {0: 0, 1: log_start}, cleanup=policy)
    after = plan(there, {0: (9, 12), 1: (log_start, log_start)})
    assert problems(before, after) == fault
    last = replace(there, ends={0: 12, 1: 50}, starts={0: 0, 1: 47})
    lost = [f"t-1: offsets {log_start} to 47 were deleted before they were read"]
    assert problems(before, after, plan(last, {0: (12, 12), 1: (47, 50)})) == [*fault, *lost]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([FIRST, plan(look(ONE, {0: 9}), {0: (6, 9)})], "t-0: offsets 5 to 6 are read by no micro-batch"),
        ([FIRST, plan(look(ONE, {0: 9}), {0: (4, 9)})], "t-0: offsets 4 to 5 are read again"),
        (
            [FIRST, plan(look(ONE, {0: 9}, {0: 7}), {0: (7, 9)})],
            "t-0: offsets 5 to 7 were deleted before they were read",
        ),
        (
            [FIRST, plan(look(TWO, {0: 9, 1: 4}), {0: (5, 9), 1: (1, 4)})],
            "t-1 is new, and begins at offset 1, not at its log start 0",
        ),
        (
            [SECOND, plan(look(ONE, {0: 9}), {0: (9, 9)}), plan(look(TWO, {0: 9, 1: 7}), {0: (9, 9), 1: (0, 7)})],
            "t-1 was created again, and offsets 0 to 4 are read again",
        ),
        (
            [plan(look(TWO, {0: 9, 1: 4}), {0: (5, 9), 1: (0, 3)}), plan(look(ONE, {0: 9}), {0: (9, 9)})],
            "t-1 was removed, and offsets 3 to 4 were never read",
        ),
        (
            [FIRST, plan(replace(look(ONE, {0: 9}), topic_id="other"), {0: (0, 9)})],
            "t-0 was removed, and offsets 5 to 9 were never read",
        ),
        (
            [plan(look(ONE, {0: 9}), {0: (2, 9)}), plan(replace(look(ONE, {0: 9}), topic_id="other"), {0: (3, 9)})],
            "t-0 is new, and begins at offset 3, not at its log start 0",
        ),
        (
            [SECOND, plan(look(Lineage.of_ends(1, (1, 3, 2), ({0: 5}, {0: 9})), {0: 9, 1: 4}), {0: (9, 9), 1: (4, 4)})],
            "t: layout 1 has 2 partitions, and 3 in a later plan",
        ),
        (
            [SECOND, plan(look(Lineage.of_ends(1, (1, 2, 1), ({0: 6}, {0: 9})), {0: 9, 1: 4}), {0: (9, 9), 1: (4, 4)})],
            "t-0: layout 0 ends at 5, and at 6 in a later plan",
        ),
        (['{"version":99,"tasks":[]}'], "this is not a plan of version 3"),
    ],
)
def test_what_does_not_follow_is_named(lines: list[str], problem: str) -> None:
    assert problems(*lines) == [problem]


def test_a_plan_is_proved_with_the_cuts_that_it_did_not_know() -> None:
    """The resize at offset 5 moved keys of partition 0 to 1 and back: offsets 7 and on must wait for partition 1."""
    returned = Lineage.of_ends(1, (1, 2, 1), ({0: 5}, {0: 7, 1: 4}))
    late = plan(look(ONE, {0: 9}), {0: (2, 9)})
    knows = plan(look(returned, {0: 9, 1: 4}), {0: (9, 9), 1: (0, 4)})
    (wrong,) = verify_history([late, knows]).problems
    assert wrong == (
        1,
        "t-0: offset 7, of layout 2, is read before t-1 was read up to offset 4, the end of layout 1",
    )
    assert problems(late) == []
    in_time = plan(look(ONE, {0: 9}), {0: (2, 7)})
    assert problems(in_time, plan(look(returned, {0: 9, 1: 4}), {0: (7, 7), 1: (0, 4)})) == []


def test_a_position_beyond_the_last_stable_offset_is_within_the_log() -> None:
    waiting = look(Lineage.flat(2), {0: 5, 1: 9}, high_watermarks={0: 9, 1: 9})
    assert problems(plan(waiting, {0: (7, 7), 1: (0, 9)})) == []


def test_batch_queries_are_proved_one_by_one() -> None:
    batch = plan(look(TWO, {0: 9, 1: 4}), {0: (0, 9), 1: (0, 4)}, whole=True)
    assert verify_history([FIRST, batch, SECOND, batch]) == verify_history([batch, batch, FIRST, SECOND])
    assert verify_history([FIRST, batch, SECOND, batch]).problems == ()


def test_a_line_that_a_crash_has_torn_is_no_plan_and_the_next_one_begins_a_new_line(tmp_path: Path) -> None:
    log = tmp_path / "plans"
    _append(str(log), FIRST)
    with log.open("a") as file:
        file.write(SECOND[:40])
    _append(str(log), SECOND)
    lines = log.read_text().splitlines()
    assert lines == [FIRST, SECOND[:40], SECOND]
    found = verify_history(lines)
    assert (found.plans, found.problems, found.torn) == (2, (), (2,))


def test_an_empty_micro_batch_of_no_topic_is_no_fault() -> None:
    empty = json.dumps({"version": 3, "kind": "micro-batch", "split": "key", "topics": {}, "tasks": []})
    assert problems(FIRST, empty, SECOND) == []
