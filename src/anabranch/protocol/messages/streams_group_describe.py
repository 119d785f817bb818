"""StreamsGroupDescribe (API 89)."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int16, int32, int64, message, nested, string, struct, uint16


@message(api_key=89, versions="0", flexible="0+")
class StreamsGroupDescribeRequest:
    """Describe streams groups."""

    group_ids: Sequence[str] = array(string)
    include_authorized_operations: bool = boolean()


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
class Subtopology:
    """A part of the topology whose tasks run together."""

    subtopology_id: str = string()
    source_topics: Sequence[str] = array(string)
    repartition_sink_topics: Sequence[str] = array(string)
    state_changelog_topics: Sequence[TopicInfo] = array(TopicInfo)
    repartition_source_topics: Sequence[TopicInfo] = array(TopicInfo)


@struct()
class Topology:
    """The topology of the application."""

    epoch: int = int32()
    subtopologies: Sequence[Subtopology] | None = array(Subtopology, nullable=True)


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


@struct()
class TaskIds:
    """Tasks of one subtopology."""

    subtopology_id: str = string()
    partitions: Sequence[int] = array(int32)


@struct()
class Assignment:
    """The tasks of a member."""

    active_tasks: Sequence[TaskIds] = array(TaskIds)
    standby_tasks: Sequence[TaskIds] = array(TaskIds)
    warmup_tasks: Sequence[TaskIds] = array(TaskIds)


@struct()
class Member:
    """One member of the group."""

    member_id: str = string()
    member_epoch: int = int32()
    instance_id: str | None = string(nullable=True, default=None)
    rack_id: str | None = string(nullable=True, default=None)
    client_id: str = string()
    client_host: str = string()
    topology_epoch: int = int32()
    process_id: str = string()
    user_endpoint: Endpoint | None = nested(Endpoint, nullable=True)
    client_tags: Sequence[KeyValue] = array(KeyValue)
    task_offsets: Sequence[TaskOffset] = array(TaskOffset)
    task_end_offsets: Sequence[TaskOffset] = array(TaskOffset)
    assignment: Assignment = nested(Assignment)
    target_assignment: Assignment = nested(Assignment)
    is_classic: bool = boolean()


@struct()
class DescribedGroup:
    """One group, or why it is not described."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    group_id: str = string()
    group_state: str = string()
    group_epoch: int = int32()
    assignment_epoch: int = int32()
    topology: Topology | None = nested(Topology, nullable=True)
    members: Sequence[Member] = array(Member)
    authorized_operations: int = int32(default=-2147483648)


@message(api_key=89, versions="0", flexible="0+")
class StreamsGroupDescribeResponse:
    """The groups."""

    throttle_time_ms: int = int32()
    groups: Sequence[DescribedGroup] = array(DescribedGroup)
