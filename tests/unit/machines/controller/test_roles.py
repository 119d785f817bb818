"""Phases of a resize and the roles that follow from them (ordering.md, section 4)."""

from __future__ import annotations

from itertools import pairwise
from uuid import UUID

import pytest

from anabranch.machines.controller.layouts import EpochRun, Layout
from anabranch.machines.controller.nodes import (
    PartitionNode,
    Phase,
    Removed,
    Resize,
    Topic,
    put_partition,
    read_partition,
)
from anabranch.machines.controller.roles import due_node, layout_of, phase_of, phases, role_of


def resizing(old: int, new: int, phase: Phase | None, existing: int | None = None, **more: object) -> Topic:
    """A topic in a phase of its first resize; every partition ended epoch 4."""
    count = existing if existing is not None else max(old, new)
    return Topic(
        name="t",
        topic_id=UUID(int=1),
        partitions=dict.fromkeys(range(count), (1,)),
        initial_partition_count=1,
        layouts=(Layout(0, old), Layout(1, new)),
        ended=dict.fromkeys(range(old), (EpochRun(0, 4, 1),)),
        resize=None if phase is None else Resize(new, phase),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("old", "new", "order"), [(2, 4, (Phase.CUT, Phase.OPEN)), (4, 2, (Phase.CLOSE, Phase.CUT))])
def test_survivors_adopt_a_shrink_only_after_every_retiring_partition_has_closed(
    old: int, new: int, order: tuple[Phase, ...]
) -> None:
    assert phases(old, new) == order
    assert phase_of(0, old, new) is Phase.CUT
    assert phase_of(3, old, new) is (Phase.OPEN if new > old else Phase.CLOSE)
    assert phase_of(9, old, new) is order[-1]


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2)])
def test_every_partition_changes_its_layout_in_exactly_one_phase(old: int, new: int) -> None:
    steps = [resizing(old, new, phase) for phase in phases(old, new)]
    for partition in range(6):
        layouts = [0, *(layout_of(topic, partition) for topic in steps)]
        assert [b - a for a, b in pairwise(layouts)].count(1) == 1 and layouts[-1] == 1


def test_retiring_partitions_close_while_survivors_still_serve_the_old_layout() -> None:
    closing = resizing(4, 2, Phase.CLOSE)
    node = PartitionNode(leader=1, leader_epoch=5, isr=(1,), controller_epoch=1)
    assert role_of(closing, 3, node).retiring and role_of(closing, 3, node).layout == 1
    assert not role_of(closing, 0, node).retiring and role_of(closing, 0, node).layout == 0


def test_a_partition_that_changes_starts_one_epoch_and_asking_again_starts_no_other() -> None:
    cutting = resizing(2, 4, Phase.CUT)
    before = PartitionNode(leader=1, leader_epoch=4, isr=(1,), controller_epoch=1)
    after = due_node(cutting, 0, before, controller_epoch=7)
    assert (after.leader_epoch, after.controller_epoch) == (5, 7)
    assert due_node(cutting, 0, after, controller_epoch=8) is after


def test_a_partition_that_is_made_again_goes_on_where_its_earlier_life_ended() -> None:
    topic = resizing(2, 4, Phase.OPEN, removed={3: Removed(next_offset=90, leader_epoch=6)})
    fresh, again = due_node(topic, 2, None, 1), due_node(topic, 3, None, 1)
    assert (fresh.start_offset, fresh.leader_epoch, fresh.born) == (0, 0, 0)
    assert (again.start_offset, again.leader_epoch, again.born) == (90, 7, 7)
    assert read_partition("", put_partition("t", 3, again).data) == again
