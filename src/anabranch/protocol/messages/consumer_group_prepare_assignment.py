"""ConsumerGroupPrepareAssignment (API 10002), ours, from KIP-848: the input of a client-side assignor."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import Blob, array, boolean, bytes_, int8, int16, int32, message, nested, string, struct, uuid
from anabranch.protocol.messages.consumer_group_heartbeat import PartitionKeyRanges


@message(api_key=10002, versions="0", flexible="0+")
class ConsumerGroupPrepareAssignmentRequest:
    """Sent by the member that was asked to compute the assignment."""

    group_id: str = string()
    member_id: str = string()
    member_epoch: int = int32()


@struct()
class Assignor:
    """The member's metadata for the selected assignor."""

    reason: int = int8()
    metadata_version: int = int16()
    metadata_bytes: Blob = bytes_()


@struct()
class TopicPartition:
    """Partitions of one topic, and the key ranges of those that are shared."""

    topic_id: UUID = uuid()
    partitions: Sequence[int] = array(int32)
    key_ranges: Sequence[PartitionKeyRanges] = array(PartitionKeyRanges, tag=10000)


@struct()
class Member:
    """A member, its subscription and its present target assignment."""

    member_id: str = string()
    member_epoch: int = int32()
    instance_id: str | None = string(nullable=True, default=None)
    rack_id: str | None = string(nullable=True, default=None)
    subscribed_topic_ids: Sequence[UUID] = array(uuid)
    assignor: Assignor = nested(Assignor)
    topic_partitions: Sequence[TopicPartition] = array(TopicPartition)
    allow_key_share: bool = boolean(tag=10000)
    """Whether it takes partitions in part."""


@struct()
class TopicMetadata:
    """A topic that some member subscribes to; its retiring partitions count among `num_partitions`."""

    topic_id: UUID = uuid()
    topic_name: str = string()
    num_partitions: int = int32()
    retiring_partitions: Sequence[int] = array(int32, tag=10000)
    shares_max: int = int32(tag=10001)
    """How many members may share one of its partitions; 0 where its partitions are assigned whole."""
    intervals: Sequence[PartitionKeyRanges] = array(PartitionKeyRanges, tag=10002)
    """Of a topic whose partitions may be shared: the keys that each partition holds, to be cut."""


@message(api_key=10002, versions="0", flexible="0+")
class ConsumerGroupPrepareAssignmentResponse:
    """The group at one epoch."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    group_epoch: int = int32()
    assignor_name: str = string()
    members: Sequence[Member] = array(Member)
    topics: Sequence[TopicMetadata] = array(TopicMetadata)
