"""A member that shares partitions, as transcripts: ranges of keys move as partitions do."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.clients.membership.assignors import TopicIdPartition
from anabranch.machines.clients.membership.consumer import ConsumerMember, Phase
from anabranch.machines.clients.membership.sharing import with_pending
from anabranch.machines.clients.membership.steps import (
    Assign,
    Event,
    Failed,
    Lost,
    MemberSettings,
    Owned,
    Revoke,
    Send,
    Subscription,
    TopicFacts,
)
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval
from anabranch.protocol.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    KeyRange,
    PartitionKeyRanges,
    TopicPartitions,
)

FLIGHTS = UUID(int=1)
MIDDLE = SPACE_END // 2
LOW, HIGH = Interval(0, MIDDLE), Interval(MIDDLE + 1, SPACE_END)
QUARTER = Interval(0, MIDDLE // 2)
REST = Interval(MIDDLE // 2 + 1, MIDDLE)
Shares = dict[int, tuple[Interval, ...]]


def unit(number: int, *keys: Interval) -> Owned:
    return Owned("flights", number, FLIGHTS, keys)


class World:
    """A member, and somebody who plays coordinator and application."""

    def __init__(self, *, allow_key_share: bool = True) -> None:
        self.now = 1_000
        self.member = ConsumerMember(MemberSettings("g", allow_key_share=allow_key_share), "m1")
        self.member.on_topics([TopicFacts("flights", FLIGHTS, 6)])
        self.member.subscribe(Subscription(frozenset({"flights"})))

    def beat(self, after_ms: int = 0) -> ConsumerGroupHeartbeatRequest:
        self.now += after_ms
        step = self.member.next(self.now)
        assert isinstance(step, Send), step
        self.ticket = step.ticket
        assert isinstance(step.request, ConsumerGroupHeartbeatRequest)
        return step.request

    def answer(self, epoch: int, shares: Shares, **topic: Any) -> None:
        ranges = [
            PartitionKeyRanges(partition=number, ranges=[KeyRange(start=it.start, end=it.end) for it in keys])
            for number, keys in shares.items()
        ]
        assigned = TopicPartitions(topic_id=FLIGHTS, partitions=list(shares), **{"key_ranges": ranges, **topic})
        response = ConsumerGroupHeartbeatResponse(
            member_epoch=epoch,
            heartbeat_interval_ms=5_000,
            assignment=Assignment(topic_partitions=[assigned]),
        )
        self.member.on_response(self.ticket, response, self.now)

    def carry_out(self, expected: Event) -> None:
        event = self.member.take()
        assert event == expected
        assert event is not None
        self.member.done(event, self.now)

    def reported(self, request: ConsumerGroupHeartbeatRequest) -> Shares:
        """What a heartbeat says of owned partitions; ranges are in the order of the partitions."""
        assert request.topic_partitions is not None
        found: Shares = {}
        for topic in request.topic_partitions:
            listed = [each.partition for each in topic.key_ranges]
            assert listed in ([], list(topic.partitions))
            found |= dict.fromkeys(topic.partitions, ())
            found |= {it.partition: tuple(Interval(r.start, r.end) for r in it.ranges) for it in topic.key_ranges}
        return found

    def given(self, shares: Shares) -> None:
        """Join, and be given these."""
        assert self.beat().allow_key_share
        self.answer(1, shares)
        self.carry_out(Assign(frozenset(unit(number, *keys) for number, keys in shares.items())))
        assert self.reported(self.beat()) == shares
        self.answer(1, shares)


def test_a_share_is_assigned_and_reported_as_it_is_beside_whole_partitions() -> None:
    world = World()
    world.given({0: (LOW,), 1: (), 2: (QUARTER, HIGH)})
    assert world.member.event() is None


def test_only_the_ranges_beyond_the_target_are_revoked_and_then_reported_as_gone() -> None:
    world = World()
    world.given({0: (LOW,)})
    world.beat(5_000)
    world.answer(2, {0: (QUARTER,)})
    world.carry_out(Revoke(frozenset({unit(0, REST)})))
    assert world.member.event() is None
    assert world.reported(world.beat()) == {0: (QUARTER,)}


def test_a_whole_partition_is_narrowed_and_becomes_whole_again() -> None:
    world = World()
    world.given({0: ()})
    world.beat(5_000)
    world.answer(2, {0: (LOW,)})
    world.carry_out(Revoke(frozenset({unit(0, HIGH)})))
    assert world.reported(world.beat()) == {0: (LOW,)}
    world.answer(2, {0: (LOW,)})
    world.beat(5_000)
    world.answer(3, {0: ()})
    world.carry_out(Assign(frozenset({unit(0, HIGH)})))
    assert world.reported(world.beat()) == {0: ()}
    assert world.member.owned == {unit(0)}


def test_ranges_are_revoked_before_others_of_the_same_partition_are_assigned() -> None:
    world = World()
    world.given({0: (LOW,)})
    world.beat(5_000)
    world.answer(2, {0: (REST, HIGH)})
    world.carry_out(Revoke(frozenset({unit(0, QUARTER)})))
    world.carry_out(Assign(frozenset({unit(0, HIGH)})))
    assert world.member.owned == {unit(0, Interval(REST.start, SPACE_END))}


def test_a_share_that_is_left_out_is_revoked_whole() -> None:
    world = World()
    world.given({0: (LOW,), 1: (HIGH,)})
    world.beat(5_000)
    world.answer(2, {1: (HIGH,)})
    world.carry_out(Revoke(frozenset({unit(0, LOW)})))
    assert world.reported(world.beat()) == {1: (HIGH,)}


def test_a_fenced_member_loses_its_shares_as_they_are() -> None:
    world = World()
    world.given({0: (LOW,), 1: ()})
    world.beat(5_000)
    response = ConsumerGroupHeartbeatResponse(error_code=int(ErrorCode.FENCED_MEMBER_EPOCH))
    world.member.on_response(world.ticket, response, world.now)
    world.carry_out(Lost(frozenset({unit(0, LOW), unit(1)})))
    assert world.member.owned == frozenset()


def test_ranges_that_are_the_whole_space_are_a_whole_partition() -> None:
    world = World()
    world.beat()
    world.answer(1, {0: (SPACE,), 1: (HIGH, LOW)})
    world.carry_out(Assign(frozenset({unit(0), unit(1)})))


def test_a_member_that_shares_nothing_refuses_ranges_and_leaves() -> None:
    world = World(allow_key_share=False)
    assert not world.beat().allow_key_share
    world.answer(1, {0: ()})
    world.carry_out(Assign(frozenset({unit(0)})))
    world.beat()
    world.answer(2, {0: (LOW,)})
    world.carry_out(Lost(frozenset({unit(0)})))
    assert world.beat().member_epoch == -1
    event = world.member.take()
    assert isinstance(event, Failed)
    assert event.error.code is ErrorCode.CONSUMER_RANGE_FETCH_NOT_ACCEPTED
    assert "allow.key.share" in str(event.error)
    assert world.member.phase is Phase.FAILED


def test_ranges_that_cannot_be_are_refused() -> None:
    world = World()
    world.beat()
    world.answer(1, {0: (Interval(5, 4),)})
    event = world.member.take()
    assert isinstance(event, Failed)
    assert event.error.code is ErrorCode.INVALID_ASSIGNMENT


def test_a_share_that_is_assigned_while_a_heartbeat_is_lost_is_reported_in_full_again() -> None:
    world = World()
    world.given({0: (LOW,)})
    world.beat(5_000)
    world.member.on_error(world.ticket, OSError(), world.now)
    assert world.reported(world.beat(1_000)) == {0: (LOW,)}


def test_an_assignor_is_told_the_keys_that_others_have_yet_to_release_with_those_that_it_has() -> None:
    first, second, third, fourth = (TopicIdPartition(FLIGHTS, number) for number in range(4))
    target = frozenset({first, second, third})
    shares = {first: (QUARTER,), second: (LOW,)}
    coming = {0: (REST,), 1: (HIGH,), 2: (HIGH,), 3: (LOW,)}
    pending = TopicPartitions(
        topic_id=FLIGHTS,
        partitions=list(coming),
        key_ranges=[
            PartitionKeyRanges(partition=number, ranges=[KeyRange(start=it.start, end=it.end) for it in keys])
            for number, keys in coming.items()
        ],
    )
    assert with_pending(target, shares, [pending]) == {first: (LOW,), fourth: (LOW,)}, "the others are whole"
    assert with_pending(target, shares, []) == shares
    assert with_pending(target, {}, []) == {}
