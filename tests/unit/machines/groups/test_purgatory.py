"""Commits in transactions that wait for gaps below them: whatever ends the wait, they are answered then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.purgatory import Purgatory, size_of
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.outcome import Parked
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetRange,
)
from anabranch.protocol.messages.sync_group import SyncGroupRequestAssignment
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from tests.support.groups import GROUP, GroupWorld, subscription, topics

CALLER = Caller("client", "/host", 4, "fresh", 0)
TICKET = "parked"
WAITS = GroupSettings(gaps_are_waited_for=True)
FOO = {"range": subscription("foo")}


def commit(world: GroupWorld, member: str, epoch: int, offset: int = 5) -> None:
    part = OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    request = OffsetCommitRequest(
        group_id=GROUP,
        member_id=member,
        generation_id_or_member_epoch=epoch,
        topics=[OffsetCommitRequestTopic(name="foo", partitions=[part])],
    )
    reply = world.submit(lambda machine: machine.offset_commit(request, CALLER._replace(version=9), world.now_ms))
    assert not reply.topics[0].partitions[0].error_code


def gap(producer_id: int, member: str = "", epoch: int = -1) -> TxnOffsetCommitRequest:
    """A commit of offsets 8 and 9 in a transaction, with a gap below."""
    part = TxnOffsetCommitRequestPartition(
        partition_index=0, committed_offset=-1, offset_ranges=[OffsetRange(start=8, end=9)]
    )
    return TxnOffsetCommitRequest(
        group_id=GROUP,
        producer_id=producer_id,
        member_id=member,
        generation_id=epoch,
        topics=[TxnOffsetCommitRequestTopic(name="foo", partitions=[part])],
    )


def park(world: GroupWorld, member: str = "", epoch: int = -1) -> None:
    """Send `gap`."""
    request = gap(1, member, epoch)
    reply = world.submit(lambda machine: machine.txn_offset_commit(request, CALLER, TICKET, world.now_ms))
    assert isinstance(reply, Parked)
    world.advance(0)
    assert TICKET not in world.answers, "nothing has ended the wait"


def answered(world: GroupWorld) -> ErrorCode | None:
    world.advance(0)
    reply = world.answers.get(TICKET)
    assert (reply is None) is (GROUP in world.coordinator.offsets.in_transactions.purgatory)
    return None if reply is None else ErrorCode(reply.topics[0].partitions[0].error_code)


def test_the_deletion_of_the_topic_ends_the_wait() -> None:
    world = GroupWorld(settings=WAITS)
    commit(world, "", -1)
    park(world)
    world.set_topics(topics(bar=1))
    assert answered(world) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_the_expiry_of_the_position_ends_the_wait() -> None:
    world = GroupWorld(
        settings=GroupSettings(
            gaps_are_waited_for=True, offsets_retention_ms=2_000, offsets_retention_check_interval_ms=1_000
        )
    )
    world.reload()
    commit(world, "", -1)
    park(world)
    world.advance(1_000)
    assert answered(world) is None
    world.advance(3_000)
    assert answered(world) is not None


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda world: world.leave("one"), ErrorCode.UNKNOWN_MEMBER_ID),
        (lambda world: world.advance(60_000), ErrorCode.UNKNOWN_MEMBER_ID),
        (lambda world: world.beat("one", -2, instance_id="i"), ErrorCode.STALE_MEMBER_EPOCH),
    ],
    ids=["leaves", "times out", "leaves for a while"],
)
def test_a_member_that_goes_waits_no_longer(end: Callable[[GroupWorld], object], code: ErrorCode) -> None:
    world = GroupWorld(settings=WAITS)
    epoch = world.join("one", instance_id="i").member_epoch
    commit(world, "one", epoch)
    park(world, "one", epoch)
    end(world)
    assert answered(world) is code


def test_a_member_that_goes_on_to_another_epoch_waits_no_longer() -> None:
    world = GroupWorld(settings=WAITS)
    epoch = world.join("one").member_epoch
    commit(world, "one", epoch)
    park(world, "one", epoch)
    world.join("two")
    assert answered(world) is None, "it has its epoch still"
    while world.beat("one", epoch, "foo-0 foo-1 foo-2").member_epoch == epoch:
        world.beat("one", epoch, "foo-0")
    assert answered(world) is ErrorCode.STALE_MEMBER_EPOCH


def park_classic(world: GroupWorld, member: str) -> None:
    """Have the only member of a classic group send `gap`."""
    world.join_classic("", FOO, version=3, fresh="m")
    world.advance(3_001)
    world.sync_classic(member, 1, [SyncGroupRequestAssignment(member_id=member, assignment=b"")])
    commit(world, member, 1)
    park(world, member, 1)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_classic_member_that_goes_or_has_another_generation_waits_no_longer(leaves: bool) -> None:
    world, member = GroupWorld(settings=WAITS), "classic-m"
    park_classic(world, member)
    if leaves:
        world.leave_classic(member)
        assert answered(world) is ErrorCode.UNKNOWN_MEMBER_ID
    else:
        world.join_classic(member, {"range": subscription("foo", "bar")}, version=3)
        assert answered(world) is ErrorCode.ILLEGAL_GENERATION


def test_a_classic_member_goes_on_waiting_in_a_group_that_is_converted() -> None:
    world, member = GroupWorld(settings=WAITS), "classic-m"
    park_classic(world, member)
    world.join("new")
    assert answered(world) is None, "it is a member still, at the same epoch"
    world.leave_classic(member)
    assert answered(world) is ErrorCode.UNKNOWN_MEMBER_ID


def test_what_waits_counts_among_the_committed_offsets_and_no_more_waits_than_has_room() -> None:
    world = GroupWorld(settings=replace(WAITS, offsets_size_max=10_000, offsets_size=lambda: purgatory().size))

    def purgatory() -> Purgatory:
        return world.coordinator.offsets.in_transactions.purgatory

    commit(world, "", -1)
    replies = [
        world.submit(lambda machine, n=n: machine.txn_offset_commit(gap(1), CALLER, n, world.now_ms)) for n in range(9)
    ]
    waits = [isinstance(reply, Parked) for reply in replies]
    assert waits == sorted(waits, reverse=True) and 0 < sum(waits) < 9
    assert replies[-1].topics[0].partitions[0].error_code == ErrorCode.INVALID_COMMIT_OFFSET_SIZE
    assert sum(waits) * size_of(gap(1)) == purgatory().size <= 10_000
    commit(world, "", -1, 8)
    world.advance(0)
    assert len(world.answers) == sum(waits) and not purgatory().size
