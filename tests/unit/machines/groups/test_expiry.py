"""Expiry: empty groups without offsets are removed, others stay; offsets are counted."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.expiry import POSITIONS_PER_STEP, RECORDS_PER_STEP
from anabranch.machines.groups.positions import Position, position_record
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.outcome import Outcome
from anabranch.protocol.messages.join_group import JoinGroupResponse
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from tests.support.groups import GroupWorld, subscription, topic_id, topics

DAY_MS = 24 * 60 * 60 * 1_000
HOUR_MS = DAY_MS // 24
PRODUCER = 7


def commit(world: GroupWorld, topic: str, offset: int) -> None:
    part = OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    request = OffsetCommitRequest(
        group_id="g",
        generation_id_or_member_epoch=-1,
        topics=[OffsetCommitRequestTopic(name=topic, partitions=[part])],
    )
    world.submit(lambda machine: machine.offset_commit(request, Caller(version=9), world.now_ms))


def commit_in_transaction(world: GroupWorld, topic: str, offset: int) -> None:
    part = TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    request = TxnOffsetCommitRequest(
        transactional_id="tx",
        group_id="g",
        producer_id=PRODUCER,
        producer_epoch=0,
        generation_id=-1,
        topics=[TxnOffsetCommitRequestTopic(name=topic, partitions=[part])],
    )
    world.submit(lambda machine: machine.txn_offset_commit(request, Caller(version=3), 1, world.now_ms))


def expiring() -> GroupWorld:
    return GroupWorld(topics(foo=1), GroupSettings(offsets_retention_check_interval_ms=1_000))


def check_expiry(world: GroupWorld) -> None:
    world.submit(lambda machine: machine.on_timer(("expire",), world.now_ms))


def test_an_empty_group_without_offsets_is_removed() -> None:
    world = expiring()
    world.join("A")
    check_expiry(world)
    assert "g" in world.coordinator.groups, "it has a member"
    world.leave("A")
    check_expiry(world)
    assert not world.coordinator.groups
    assert not world.replayed(compact=True).groups
    world.check()


def test_an_empty_classic_group_without_offsets_is_removed() -> None:
    world = expiring()
    world.join_classic("", {"range": subscription("foo")}, version=3)
    world.advance(10_000)
    (joined,) = world.answers.values()
    check_expiry(world)
    assert "g" in world.coordinator.groups
    world.leave_classic(joined.member_id)
    check_expiry(world)
    assert not world.coordinator.groups
    assert not world.replayed(compact=True).groups


def test_a_group_with_a_static_member_that_left_for_a_while_stays() -> None:
    world = expiring()
    world.join("A", instance_id="i")
    world.beat("A", -2, instance_id="i")
    check_expiry(world)
    assert "g" in world.coordinator.groups


def test_a_group_in_which_a_member_id_was_given_out_stays() -> None:
    world = expiring()
    answer = world.join_classic("", {"range": subscription("foo")})
    assert isinstance(answer, JoinGroupResponse) and answer.error_code == ErrorCode.MEMBER_ID_REQUIRED
    check_expiry(world)
    assert "g" in world.coordinator.groups
    world.join_classic(answer.member_id, {"range": subscription("foo")})
    world.advance(10_000)
    (joined,) = world.answers.values()
    assert joined.error_code == ErrorCode.NONE


def test_a_group_with_offsets_stays_and_one_with_offsets_of_an_open_transaction() -> None:
    world = expiring()
    world.join("A")
    world.leave("A")
    commit(world, "foo", 5)
    check_expiry(world)
    assert "g" in world.coordinator.groups
    world.now_ms += 8 * DAY_MS - HOUR_MS
    world.advance(HOUR_MS)
    assert not world.coordinator.groups and "g" not in world.coordinator.positions

    world.join("A")
    world.leave("A")
    commit_in_transaction(world, "foo", 6)
    check_expiry(world)
    assert "g" in world.coordinator.groups


def test_commits_expirations_and_deletions_are_counted() -> None:
    world = expiring()
    counts = world.coordinator.offsets.counts
    commit(world, "foo", 5)
    commit_in_transaction(world, "foo", 6)
    commit(world, "missing", 5)
    assert counts == {"commit": 2}
    world.marker(PRODUCER, committed=False)
    world.advance(8 * DAY_MS)
    check_expiry(world)
    assert counts == {"commit": 2, "expiration": 1}
    commit(world, "foo", 5)
    request = OffsetDeleteRequest(
        group_id="g",
        topics=[
            OffsetDeleteRequestTopic(name=name, partitions=[OffsetDeleteRequestPartition(partition_index=0)])
            for name in ("foo", "missing")
        ],
    )
    world.submit(lambda machine: machine.offset_delete(request, world.now_ms))
    assert counts == {"commit": 3, "expiration": 1, "deletion": 1}


# -- steps -------------------------------------------------------------------------------------------------------------


def many(groups: int, partitions: int) -> GroupWorld:
    """Groups with a position in each partition of a topic."""
    world = GroupWorld(topics(foo=partitions), GroupSettings(offsets_retention_check_interval_ms=1_000))
    for group in range(groups):
        for partition in range(partitions):
            position = Position(1, -1, "", world.now_ms, topic_id("foo"))
            record = position_record(f"g{group:03}", "foo", partition, position)
            world.submit(lambda _, record=record: Outcome(None, (record,)))
    return world


def round_of(world: GroupWorld) -> list[tuple[int, int]]:
    """Let a round pass; the number of positions before, and of records, of each step."""
    steps = []
    while True:
        before = len(world.log)
        world.timers.pop(("expire",), None)
        check_expiry(world)
        steps.append((len(world.coordinator.positions.groups()), len(world.log) - before))
        at_ms = world.timers[("expire",)]
        if at_ms - world.now_ms >= 1_000:
            return steps
        assert at_ms > world.now_ms, "other work of the loop comes between two steps"
        world.now_ms = at_ms


def test_no_step_looks_at_many_more_positions_than_its_limit() -> None:
    world = many(POSITIONS_PER_STEP // 20 * 3, 20)
    steps = round_of(world)
    assert 3 <= len(steps) <= 5
    assert all(records == 0 for _, records in steps)


@pytest.mark.parametrize(("groups", "partitions"), [(30, 10), (1, 350), (3, 100)])
def test_no_step_deletes_more_than_its_limit_and_a_round_deletes_everything(groups: int, partitions: int) -> None:
    world = many(groups, partitions)
    world.now_ms += 8 * DAY_MS
    steps = round_of(world)
    assert all(records <= RECORDS_PER_STEP for _, records in steps)
    assert sum(records for _, records in steps) == groups * partitions
    assert not world.coordinator.positions.groups()
    assert world.coordinator.offsets.counts["expiration"] == groups * partitions
    world.check()


def test_a_round_goes_on_with_what_holds_at_each_step() -> None:
    world = many(30, 10)
    world.now_ms += 8 * DAY_MS
    check_expiry(world)
    left = sorted(world.coordinator.positions.groups())
    world.join("A", group=left[-1])
    round_of(world)
    assert world.coordinator.positions.groups() == {left[-1]}, "its topic is subscribed to by now"
