"""ConsumerGroupInstallAssignment (API 10003), ours, from KIP-848: the result of a client-side assignor."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import Blob, array, bytes_, int8, int16, int32, message, string, struct, uuid
from anabranch.protocol.messages.consumer_group_heartbeat import PartitionKeyRanges


@struct()
class TopicPartition:
    """Partitions of one topic, and the key ranges of those that are shared; together they hold every key once."""

    topic_id: UUID = uuid()
    partitions: Sequence[int] = array(int32)
    key_ranges: Sequence[PartitionKeyRanges] = array(PartitionKeyRanges, tag=10000)


@struct()
class Member:
    """The assignment of one member."""

    member_id: str = string()
    partitions: Sequence[TopicPartition] = array(TopicPartition)
    metadata_version: int = int32()
    metadata_bytes: Blob = bytes_()


@message(api_key=10003, versions="0", flexible="0+")
class ConsumerGroupInstallAssignmentRequest:
    """Hand in the assignment computed for a group epoch, or the assignor's error."""

    group_id: str = string()
    member_id: str = string()
    member_epoch: int = int32()
    group_epoch: int = int32()
    error: int = int8()
    members: Sequence[Member] = array(Member)


@message(api_key=10003, versions="0", flexible="0+")
class ConsumerGroupInstallAssignmentResponse:
    """Whether the assignment was taken."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
