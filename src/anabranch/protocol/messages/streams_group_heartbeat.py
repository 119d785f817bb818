"""StreamsGroupHeartbeat (API 88)."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int8, int16, int32, int64, message, nested, string, struct, uint16


@struct()
class KeyValue:
    """A pair of texts."""

    key: str = string()
    value: str = string()


@struct()
class TopicInfo:
    """An internal topic of the application."""

    name: str = string()
    partitions: int = int32()
    replication_factor: int = int16()
    topic_configs: Sequence[KeyValue] = array(KeyValue)


@struct()
class CopartitionGroup:
    """Topics with the same partitions, by their positions."""

    source_topics: Sequence[int] = array(int16)
    source_topic_regex: Sequence[int] = array(int16)
    repartition_source_topics: Sequence[int] = array(int16)


@struct()
class Subtopology:
    """A part of the topology whose tasks run together."""

    subtopology_id: str = string()
    source_topics: Sequence[str] = array(string)
    source_topic_regex: Sequence[str] = array(string)
    state_changelog_topics: Sequence[TopicInfo] = array(TopicInfo)
    repartition_sink_topics: Sequence[str] = array(string)
    repartition_source_topics: Sequence[TopicInfo] = array(TopicInfo)
    copartition_groups: Sequence[CopartitionGroup] = array(CopartitionGroup)


@struct()
class Topology:
    """The topology of the application."""

    epoch: int = int32()
    subtopologies: Sequence[Subtopology] = array(Subtopology)


@struct()
class TaskIds:
    """Tasks of one subtopology."""

    subtopology_id: str = string()
    partitions: Sequence[int] = array(int32)


@struct()
class Endpoint:
    """Where a member answers questions."""

    host: str = string()
    port: int = uint16()


@struct()
class TaskOffset:
    """How far one task is."""

    subtopology_id: str = string()
    partition: int = int32()
    offset: int = int64()


@message(api_key=88, versions="0", flexible="0+")
class StreamsGroupHeartbeatRequest:
    """Join a streams group, keep the session, leave (KIP-1071)."""

    group_id: str = string()
    member_id: str = string()
    member_epoch: int = int32()
    endpoint_information_epoch: int = int32()
    instance_id: str | None = string(nullable=True, default=None)
    rack_id: str | None = string(nullable=True, default=None)
    rebalance_timeout_ms: int = int32(default=-1)
    topology: Topology | None = nested(Topology, nullable=True)
    active_tasks: Sequence[TaskIds] | None = array(TaskIds, nullable=True)
    standby_tasks: Sequence[TaskIds] | None = array(TaskIds, nullable=True)
    warmup_tasks: Sequence[TaskIds] | None = array(TaskIds, nullable=True)
    process_id: str | None = string(nullable=True, default=None)
    user_endpoint: Endpoint | None = nested(Endpoint, nullable=True)
    client_tags: Sequence[KeyValue] | None = array(KeyValue, nullable=True)
    task_offsets: Sequence[TaskOffset] | None = array(TaskOffset, nullable=True)
    task_end_offsets: Sequence[TaskOffset] | None = array(TaskOffset, nullable=True)
    shutdown_application: bool = boolean()


@struct()
class Status:
    """A condition of the group."""

    status_code: int = int8()
    status_detail: str = string()


@struct()
class TopicPartition:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[int] = array(int32)


@struct()
class EndpointToPartitions:
    """The partitions of one member."""

    user_endpoint: Endpoint = nested(Endpoint)
    active_partitions: Sequence[TopicPartition] = array(TopicPartition)
    standby_partitions: Sequence[TopicPartition] = array(TopicPartition)


@message(api_key=88, versions="0", flexible="0+")
class StreamsGroupHeartbeatResponse:
    """The member's epoch and tasks."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    member_id: str = string()
    member_epoch: int = int32()
    heartbeat_interval_ms: int = int32()
    acceptable_recovery_lag: int = int32()
    task_offset_interval_ms: int = int32()
    status: Sequence[Status] | None = array(Status, nullable=True)
    active_tasks: Sequence[TaskIds] | None = array(TaskIds, nullable=True)
    standby_tasks: Sequence[TaskIds] | None = array(TaskIds, nullable=True)
    warmup_tasks: Sequence[TaskIds] | None = array(TaskIds, nullable=True)
    endpoint_information_epoch: int = int32()
    partitions_by_user_endpoint: Sequence[EndpointToPartitions] | None = array(EndpointToPartitions, nullable=True)
