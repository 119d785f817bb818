"""ConsumerGroupDescribe (API 69). v1 adds `member_type`. Ours: the partitions that wait at gates."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, float64, int8, int16, int32, int64, message, nested, string, struct, uuid
from anabranch.protocol.messages.consumer_group_heartbeat import PartitionKeyRanges


@message(api_key=69, versions="0-1", flexible="0+")
class ConsumerGroupDescribeRequest:
    """Ask about groups of the consumer protocol."""

    group_ids: Sequence[str] = array(string)
    include_authorized_operations: bool = boolean()


@struct()
class TopicPartitions:
    """Partitions of one topic; ours: the key ranges of those that are shared."""

    topic_id: UUID = uuid()
    topic_name: str = string()
    partitions: Sequence[int] = array(int32)
    key_ranges: Sequence[PartitionKeyRanges] = array(PartitionKeyRanges, tag=10000)


@struct()
class Assignment:
    """Partitions that a member owns, or is to own."""

    topic_partitions: Sequence[TopicPartitions] = array(TopicPartitions)


@struct()
class Member:
    """A member, its subscription, its current and its target assignment."""

    member_id: str = string()
    instance_id: str | None = string(nullable=True, default=None)
    rack_id: str | None = string(nullable=True, default=None)
    member_epoch: int = int32()
    client_id: str = string()
    client_host: str = string()
    subscribed_topic_names: Sequence[str] = array(string)
    subscribed_topic_regex: str | None = string(nullable=True, default=None)
    assignment: Assignment = nested(Assignment)
    target_assignment: Assignment = nested(Assignment)
    member_type: int = int8(since=1, default=-1)


@struct()
class WaitedOnPartition:
    """A partition whose position a gate waits for."""

    partition: int = int32()
    member_id: str = string()
    """The member that holds up the others: its owner, or a sharer that is furthest back; empty without one."""
    position: int = int64()
    """What counts as read."""
    offset: int = int64()
    """The position at which the gate opens."""
    records_per_second: float = float64()
    """How fast the position moves, in offsets, since the coordinator watches it."""


@struct()
class WaitingPartition:
    """Ours: a partition whose next record waits until the group has read others."""

    topic_id: UUID = uuid()
    topic_name: str = string()
    partition: int = int32()
    waits_ms: int = int64()
    """For how long it has waited, as far as the coordinator knows."""
    waits_on: Sequence[WaitedOnPartition] = array(WaitedOnPartition)
    opened_by_time: bool = boolean(tag=10000)
    """It waits no longer: its gate has opened by time, although records are left in `waits_on`."""


@struct()
class DescribedGroup:
    """A group of the consumer protocol and its members."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    group_id: str = string()
    group_state: str = string()
    group_epoch: int = int32()
    assignment_epoch: int = int32()
    assignor_name: str = string()
    members: Sequence[Member] = array(Member)
    authorized_operations: int = int32(default=-2147483648)
    waiting_partitions: Sequence[WaitingPartition] = array(WaitingPartition, tag=10000)
    waiting_partitions_omitted: int = int32(tag=10001)
    """How many more partitions wait than are listed."""


@message(api_key=69, versions="0-1", flexible="0+")
class ConsumerGroupDescribeResponse:
    """The groups asked about."""

    throttle_time_ms: int = int32()
    groups: Sequence[DescribedGroup] = array(DescribedGroup)
