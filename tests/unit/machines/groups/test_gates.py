"""Gates as a coordinator decides them: progress, gates that were open once, and partitions that re-opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anabranch.machines.groups.gates import COST, OPEN, Evaluated, Stand, Verdict, segment_start, was_reopened
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.positions import Position
from anabranch.machines.lineage import GateWait, Lineage
from tests.support.groups import topic_id

FOO = topic_id("foo")
GREW = TopicImage(FOO, "foo", (0, 1), lineage=Lineage.of_ends(1, (1, 2), ({0: 5},)))
CAME_BACK = TopicImage(
    FOO, "foo", (0, 1), lineage=Lineage.of_ends(1, (1, 2, 1, 2), ({0: 5}, {0: 8, 1: 3}, {0: 9, 1: 3}))
)
"""Partition 1 was added, retired and re-opened; offset 8 of partition 0 came in between."""


def evaluated(
    topic: TopicImage,
    positions: Mapping[int, int],
    committed: Mapping[int, Position] | None = None,
    counted: Mapping[int, int] | None = None,
) -> Evaluated:
    made = Evaluated(topic)

    def stand(number: int) -> Stand:
        position = positions[number]
        return Stand(position, position, position, (counted or positions)[number], (committed or {}).get(number))

    made.decide(list(made.left), stand)
    assert not made.left
    return made


def closed(
    topic: TopicImage, positions: Mapping[int, int], committed: Mapping[int, Position] | None = None
) -> dict[int, Verdict]:
    made = evaluated(topic, positions, committed)
    return {number: made.verdicts[number] for number in made.closed}


def test_a_gate_that_was_open_once_opens_no_later_one() -> None:
    """Where the next record is has to be known: behind the gate of layout 1, which was open, or that of layout 3."""
    found = evaluated(CAME_BACK, {0: 0, 1: 0}, {1: Position(0, opened=1)}).verdicts[1]
    assert not found.is_closed and found.ahead == 3
    assert 1 not in evaluated(CAME_BACK, {0: 0, 1: 0}, {1: Position(0, opened=3)}).verdicts


def test_a_child_waits_until_its_parent_has_reached_the_cut() -> None:
    found = evaluated(GREW, {0: 4, 1: 0})
    assert found.verdicts == {1: Verdict(True, -1, (GateWait(0, 5),))}
    assert found.waiting == {0: {1: None}}
    assert not closed(GREW, {0: 5, 1: 0})


def test_a_committed_offset_above_the_start_of_the_segment_says_that_the_gate_was_open() -> None:
    assert 1 in closed(GREW, {0: 0, 1: 0}, {1: Position(0)})
    assert not closed(GREW, {0: 0, 1: 1}, {1: Position(1)})


def test_records_deleted_after_the_commit_do_not_make_it_a_proof() -> None:
    deleted = replace(GREW, log_start=lambda partition: 7 * partition)
    assert segment_start(deleted, 1, 1) == 7
    assert 1 in closed(deleted, {0: 0, 1: 7}, {1: Position(7)})


def test_a_partition_handed_out_at_its_gate_is_not_closed_again() -> None:
    assert 1 in closed(GREW, {0: 0, 1: 0}, {1: Position(0, opened=0)})
    assert not closed(GREW, {0: 0, 1: 0}, {1: Position(0, opened=1)})


def test_a_gate_that_opens_by_time_counts_for_others() -> None:
    assert not evaluated(GREW, {0: 2, 1: 0}, counted={0: 5, 1: 0}).verdicts


def test_a_partition_that_came_back_is_taken_away_at_its_cut_and_not_before() -> None:
    lineage = CAME_BACK.lineage
    assert lineage is not None and was_reopened(lineage, 1, 3, 3)
    at_cut = closed(CAME_BACK, {0: 8, 1: 3}, {1: Position(3)})
    assert at_cut == {1: Verdict(True, -1, (GateWait(0, 9),), True)}
    before = evaluated(CAME_BACK, {0: 8, 1: 2}, {1: Position(2)})
    assert before.verdicts[1] == Verdict(ahead=3, waits=(GateWait(0, 9),))
    assert not closed(CAME_BACK, {0: 9, 1: 3}, {1: Position(3)})


def test_a_moved_position_has_only_those_decided_anew_that_waited_on_it() -> None:
    topic = TopicImage(FOO, "foo", (0, 1, 2, 3), lineage=Lineage.of_ends(2, (2, 4), ({0: 5, 1: 5},)))
    made = evaluated(topic, {0: 4, 1: 4, 2: 0, 3: 0})
    assert set(made.closed) == {2, 3}
    assert made.crosses(0, 5) and not made.crosses(0, 3)
    made.moved(0, Stand(5, 5, 5, 5, None))
    assert set(made.left) == {0, 2}
    assert made.decide(list(made.left), lambda _: Stand(-1, 0, 0, 0, None))
    assert set(made.closed) == {3} and made.verdicts.get(2, OPEN) is OPEN


def test_what_holds_up_a_partition_that_is_waited_for_is_waited_for_too() -> None:
    """Partition 0 has a gate ahead at 8 and partition 1 at 3; nobody is waited for unless somebody waits."""
    back_and_forth = replace(CAME_BACK, lineage=Lineage.of_ends(1, (1, 2, 1, 2), ({0: 5}, {0: 8, 1: 3}, {0: 12, 1: 3})))
    made = evaluated(back_and_forth, {0: 5, 1: 1})
    assert {number: verdict.waits for number, verdict in made.verdicts.items()} == {
        0: (GateWait(1, 3),),
        1: (GateWait(0, 12),),
    }
    assert not made.closed and (made.own_gate(0), made.own_gate(1)) == (8, 3)
    assert made.needed(frozenset()) == {}
    assert made.needed({0}) == made.needed({1}) == {0: 12, 1: 3}
    closed_at_5 = evaluated(back_and_forth, {0: 0, 1: 0})
    assert list(closed_at_5.closed) == [1] and closed_at_5.own_gate(1) is None
    assert closed_at_5.needed(frozenset()) == {0: 5, 1: 3}


def test_a_partition_that_was_never_resized_has_no_gates() -> None:
    flat = TopicImage(FOO, "foo", (0, 1), lineage=Lineage.flat(2))
    assert not closed(flat, {0: 0, 1: 0}) and not flat.is_gated
    assert not replace(flat, lineage=None).is_gated


def test_decisions_cost_by_the_relatives_that_they_look_at() -> None:
    counts = (1, 2, 4, 8, 16)
    ends = [dict.fromkeys(range(count), 5) for count in counts[:-1]]
    made = Evaluated(TopicImage(FOO, "foo", range(16), lineage=Lineage.of_ends(1, counts, ends)))
    assert made.topic.lineage is not None
    cost = {number: COST + len(made.topic.lineage.relatives(number)) for number in range(16)}
    assert cost[0] > cost[15] > COST
    assert made.next(0) == ([], 0)
    first, room = made.next(1)
    assert (first, room) == ([0], 1 - cost[0]), "one is decided, whatever it costs"
    decided: list[int] = []
    while made.left:
        some, room = made.next(10)
        assert sum(cost[number] for number in some[:-1]) < 10 and room == 10 - sum(cost[number] for number in some)
        made.decide(some, lambda number: Stand(0, 0, 0, 0, None))
        decided += some
    assert decided == [*range(16)]
