"""Metadata (API 3). v1 adds `rack`, `is_internal`, `controller_id`; v2 adds `cluster_id`; v3 adds `throttle_time_ms`;
v4 adds `allow_auto_topic_creation`; v5 adds `offline_replicas`; v7 adds `leader_epoch`; v8 adds
`include_cluster_authorized_operations`, `include_topic_authorized_operations`, `topic_authorized_operations`,
`cluster_authorized_operations`; v9 is flexible; v10 adds `topic_id`; v13 adds `error_code`.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct, uuid


@struct()
class TopicLayout:
    """One layout of a topic's lineage, in the order in which they ruled (ours).

    Layouts keep their numbers, and those without records are left out: the first one has a number, if not 0, and each
    whose number does not follow that of the one before.
    """

    count: int = int32()
    number: int = int32(tag=10000, default=-1)


@struct()
class MetadataRequestTopic:
    """A topic asked for, by name or by id."""

    topic_id: UUID = uuid(since=10)
    name: str | None = string(nullable="10+")


@message(api_key=3, versions="0-13", flexible="9+")
class MetadataRequest:
    """Ask for topics; null means all of them (an empty array in v0). Ours: whether to include their lineage."""

    topics: Sequence[MetadataRequestTopic] | None = array(MetadataRequestTopic, nullable="1+")
    allow_auto_topic_creation: bool = boolean(since=4, default=True)
    include_cluster_authorized_operations: bool = boolean(since=8, until=10)
    include_topic_authorized_operations: bool = boolean(since=8)
    include_lineage: bool = boolean(tag=10000)


@struct()
class MetadataResponseBroker:
    """Where a broker listens."""

    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(since=1, nullable=True, default=None)


@struct()
class MetadataResponsePartition:
    """Leader and replicas of a partition; ours: whether it is retiring."""

    error_code: int = int16()
    partition_index: int = int32()
    leader_id: int = int32()
    leader_epoch: int = int32(since=7, default=-1)
    replica_nodes: Sequence[int] = array(int32)
    isr_nodes: Sequence[int] = array(int32)
    offline_replicas: Sequence[int] = array(int32, since=5)
    retiring: bool = boolean(tag=10000)


@struct()
class RemovedPartition:
    """A retiring partition that was removed, and the offset at which it ended (ours); it may be created again there."""

    partition: int = int32()
    next_offset: int = int64()


@struct()
class MetadataResponseTopic:
    """A topic and its partitions; ours: its counts, the layouts of its lineage, and the partitions removed."""

    error_code: int = int16()
    name: str | None = string(nullable="12+")
    topic_id: UUID = uuid(since=10)
    is_internal: bool = boolean(since=1)
    partitions: Sequence[MetadataResponsePartition] = array(MetadataResponsePartition)
    topic_authorized_operations: int = int32(since=8, default=-2147483648)
    initial_partition_count: int = int32(tag=10000, default=-1)
    undeleted_partition_count: int = int32(tag=10001, default=-1)
    layouts: Sequence[TopicLayout] = array(TopicLayout, tag=10002)
    removed: Sequence[RemovedPartition] = array(RemovedPartition, tag=10003)


@message(api_key=3, versions="0-13", flexible="9+")
class MetadataResponse:
    """The cluster as clients see it."""

    throttle_time_ms: int = int32(since=3)
    brokers: Sequence[MetadataResponseBroker] = array(MetadataResponseBroker)
    cluster_id: str | None = string(since=2, nullable=True, default=None)
    controller_id: int = int32(since=1, default=-1)
    topics: Sequence[MetadataResponseTopic] = array(MetadataResponseTopic)
    cluster_authorized_operations: int = int32(since=8, until=10, default=-2147483648)
    error_code: int = int16(since=13)
