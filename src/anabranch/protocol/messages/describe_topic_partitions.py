"""DescribeTopicPartitions (API 75). Flexible from the start."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, message, nested, string, struct, uuid


@struct()
class TopicRequest:
    """A topic asked for."""

    name: str = string()


@struct()
class Cursor:
    """Where the listing goes on."""

    topic_name: str = string()
    partition_index: int = int32()


@message(api_key=75, versions="0", flexible="0+")
class DescribeTopicPartitionsRequest:
    """Ask for topics page by page."""

    topics: Sequence[TopicRequest] = array(TopicRequest)
    response_partition_limit: int = int32(default=2000)
    cursor: Cursor | None = nested(Cursor, nullable=True)


@struct()
class DescribeTopicPartitionsResponsePartition:
    """Leader and replicas of a partition."""

    error_code: int = int16()
    partition_index: int = int32()
    leader_id: int = int32()
    leader_epoch: int = int32(default=-1)
    replica_nodes: Sequence[int] = array(int32)
    isr_nodes: Sequence[int] = array(int32)
    eligible_leader_replicas: Sequence[int] | None = array(int32, nullable=True, default=None)
    last_known_elr: Sequence[int] | None = array(int32, nullable=True, default=None)
    offline_replicas: Sequence[int] = array(int32)


@struct()
class DescribeTopicPartitionsResponseTopic:
    """A topic and its partitions."""

    error_code: int = int16()
    name: str | None = string(nullable=True)
    topic_id: UUID = uuid()
    is_internal: bool = boolean()
    partitions: Sequence[DescribeTopicPartitionsResponsePartition] = array(DescribeTopicPartitionsResponsePartition)
    topic_authorized_operations: int = int32(default=-2147483648)


@message(api_key=75, versions="0", flexible="0+")
class DescribeTopicPartitionsResponse:
    """One page of topics."""

    throttle_time_ms: int = int32()
    topics: Sequence[DescribeTopicPartitionsResponseTopic] = array(DescribeTopicPartitionsResponseTopic)
    next_cursor: Cursor | None = nested(Cursor, nullable=True)
