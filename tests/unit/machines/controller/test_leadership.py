"""Roles only go forward; appends and reads are for those who know the role."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.effects import Role, SendLeaderAndIsr
from anabranch.machines.controller.leadership import (
    Leadership,
    Taken,
    refuse_read,
    take_role,
)

ROLE = Role(4, leader=1, leader_epoch=3, layout=2, retiring=False, replicas=(1,), isr=(1,))
ORDER = SendLeaderAndIsr(1, 1, 1, "t", UUID(int=1), 2, 6, (ROLE,))
OPEN = Leadership(UUID(int=1), 4, 2, 3, 2, 6, retiring=False)
CLOSED = replace(OPEN, layout=3, undeleted_partition_count=3, retiring=True)


def test_the_first_role_starts_its_epoch() -> None:
    assert take_role(None, ORDER, ROLE) == Taken(OPEN, start_epoch=3)


def test_the_same_role_again_changes_nothing() -> None:
    assert take_role(OPEN, ORDER, ROLE, latest_epoch=3) == Taken(OPEN)


def test_after_a_restart_the_log_knows_the_epoch_already() -> None:
    assert take_role(None, ORDER, ROLE, latest_epoch=3) == Taken(OPEN)


def test_closing_keeps_the_epoch_and_adopts_the_count() -> None:
    closing = replace(ROLE, layout=3, retiring=True)
    assert take_role(OPEN, replace(ORDER, undeleted_partition_count=3), closing, latest_epoch=3) == Taken(CLOSED)


def test_an_end_that_becomes_a_segments_end_is_synced_first() -> None:
    closing = replace(ROLE, layout=3, retiring=True)
    assert take_role(OPEN, ORDER, replace(ROLE, leader_epoch=4), latest_epoch=3).final_end
    assert take_role(OPEN, ORDER, closing, latest_epoch=3).final_end
    assert not take_role(OPEN, ORDER, ROLE, latest_epoch=3).final_end


def test_an_older_layout_never_opens_what_was_closed() -> None:
    assert take_role(CLOSED, ORDER, ROLE, latest_epoch=3) == Taken(CLOSED, ErrorCode.FENCED_LEADER_EPOCH)


def test_after_a_canceled_resize_the_layout_before_comes_back_under_a_later_epoch() -> None:
    canceled = replace(OPEN, layout=3, leader_epoch=4, undeleted_partition_count=8)
    back = replace(ROLE, leader_epoch=5)
    taken = take_role(canceled, ORDER, back, latest_epoch=4)
    assert taken == Taken(replace(OPEN, leader_epoch=5), start_epoch=5)
    late = replace(ROLE, leader_epoch=4, layout=3)
    order = replace(ORDER, undeleted_partition_count=8)
    assert take_role(taken.leadership, order, late, latest_epoch=5).error is ErrorCode.FENCED_LEADER_EPOCH


def test_an_older_epoch_is_fenced_by_the_role_and_by_the_log() -> None:
    older = replace(ROLE, leader_epoch=2)
    assert take_role(OPEN, ORDER, older, latest_epoch=3).error is ErrorCode.FENCED_LEADER_EPOCH
    assert take_role(None, ORDER, older, latest_epoch=3) == Taken(None, ErrorCode.FENCED_LEADER_EPOCH)


def test_another_topic_of_the_same_name_is_refused() -> None:
    other = replace(ORDER, topic_id=UUID(int=2))
    assert take_role(OPEN, other, ROLE, latest_epoch=3) == Taken(OPEN, ErrorCode.INCONSISTENT_TOPIC_ID)


@pytest.mark.parametrize(
    ("count", "epoch", "error"),
    [
        (6, 3, ErrorCode.NONE),
        (-1, -1, ErrorCode.NONE),
        (6, 2, ErrorCode.FENCED_LEADER_EPOCH),
        (6, 4, ErrorCode.UNKNOWN_LEADER_EPOCH),
        (3, 3, ErrorCode.INVALID_PARTITION_METADATA),
        (3, -1, ErrorCode.INVALID_PARTITION_METADATA),
        (3, 2, ErrorCode.FENCED_LEADER_EPOCH),
    ],
)
def test_who_may_read(count: int, epoch: int, error: ErrorCode) -> None:
    assert refuse_read(OPEN, count, epoch) is error


def test_the_survivor_of_a_retiring_partition_has_its_keys() -> None:
    assert CLOSED.survivor == 0
    assert OPEN.survivor == 4


def test_a_removed_partition_has_the_role_of_a_retiring_one() -> None:
    removed = replace(OPEN, partition=0, undeleted_partition_count=3).of_removed(4)
    assert (removed.partition, removed.retiring, removed.survivor) == (4, True, 0)
