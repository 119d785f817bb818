"""Expiry: empty groups without offsets are removed, others stay; offsets are counted."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.settings import GroupSettings
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
from tests.support.groups import GroupWorld, subscription, topics

DAY_MS = 24 * 60 * 60 * 1_000
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
    world.submit(lambda machine: machine.txn_offset_commit(request, Caller(version=3), world.now_ms))


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
    world.advance(8 * DAY_MS)
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
