"""Delivering: a partition stops at exactly the first record that must wait for another one."""

from __future__ import annotations

from uuid import UUID

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import assigning, delivering
from anabranch.machines.clients.fetching.state import FetchingState
from anabranch.machines.clients.fetching.values import Deliverable, Fetched, FetcherSettings, TopicView
from anabranch.machines.lineage import Lineage

P0, P1, P2 = (TopicPartition("t", number) for number in range(3))
GREW = Lineage.of_ends(1, (1, 2), ({0: 10},))
"""One partition became two when partition 0 had ten records: partition 1 waits for those."""


def world(lineage: Lineage = GREW, *, ordered: bool = True, **positions: int) -> FetchingState:
    """Partitions at these positions, with batches of five records up to offset 20."""
    state = FetchingState(FetcherSettings())
    numbers = range(lineage.count)
    assigning.assign(state, [TopicPartition("t", number) for number in numbers], [], awaiting=False)
    view = TopicView("t", UUID(int=1), lineage, dict.fromkeys(numbers, 1), {}, True, ordered)
    assigning.learn(state, state.topics["t"], view, 0)
    for partition in state.partitions():
        partition.position = positions.get(f"p{partition.number}", 0)
        ends = [end for end in range(5, 25, 5) if end > partition.position]
        partition.held.extend(Fetched(memoryview(b"x"), end) for end in ends)
        partition.held_size = len(ends)
    return state


def spans(parts: list[Deliverable]) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for part in parts:
        low, high = found.get(part.partition, (part.start, part.start))
        assert high == part.start, "the parts of a partition follow each other"
        found[part.partition] = (low, part.end)
    return found


def test_a_closed_gate_holds_its_partition_back_until_what_it_waits_for_was_handed_out() -> None:
    state = world()
    assert spans(delivering.deliverable(state)) == {0: (0, 20)}
    state = world(p0=9)
    assert spans(delivering.deliverable(state)) == {0: (9, 20)}
    state = world(p0=10)
    assert spans(delivering.deliverable(state)) == {0: (10, 20), 1: (0, 20)}


def test_without_order_nothing_waits() -> None:
    assert spans(delivering.deliverable(world(ordered=False))) == {0: (0, 20), 1: (0, 20)}


def test_handing_out_moves_the_position_drops_batches_and_opens_gates() -> None:
    state = world()
    delivering.deliverable(state)
    parts = [part for part in delivering.deliverable(state) if part.partition == 0][:2]
    assert delivering.all_handed_out(state, parts)
    partition = state.partition(P0)
    assert (partition.position, len(partition.held), partition.held_size) == (10, 2, 2)
    assert state.milestone, "the end of the first layout was passed"
    assert spans(delivering.deliverable(state))[1] == (0, 20)


def test_parts_that_are_not_next_are_not_handed_out() -> None:
    state = world()
    parts = delivering.deliverable(state)
    state.partition(P0).position = 3
    assert not delivering.is_next(state, parts[0])
    assert not delivering.all_handed_out(state, parts)
    assert not delivering.all_handed_out(state, [parts[1]]) and state.partition(P0).position == 3


def test_a_part_may_be_handed_out_by_and_by_and_never_beyond_its_end() -> None:
    state = world()
    part = delivering.deliverable(state)[0]
    delivering.handed_out(state, part, 2)
    assert state.partition(P0).position == 2 and len(state.partition(P0).held) == 4
    with pytest.raises(AssertionError):
        delivering.handed_out(state, part, 3)


def test_paused_partitions_hand_nothing_out_and_their_positions_still_count() -> None:
    state = world(p0=4)
    state.partition(P0).paused = True
    assert delivering.deliverable(state) == []


def test_the_first_partition_changes_from_call_to_call() -> None:
    state = world(Lineage.flat(3))
    assert {delivering.deliverable(state)[0].partition for _ in range(3)} == {0, 1, 2}


def test_an_assigned_consumer_waits_for_no_partition_that_it_does_not_read() -> None:
    state = world()
    del state.topics["t"].partitions[0]
    assert spans(delivering.deliverable(state)) == {1: (0, 20)} and state.topics["t"].needs == {}
