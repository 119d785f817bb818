"""CreateTopics (API 19). v5 adds `topic_config_error_code`, `num_partitions`, `replication_factor`, `configs` and is
flexible; v7 adds `topic_id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int8, int16, int32, message, string, struct, uuid


@struct()
class CreatableReplicaAssignment:
    """The brokers of one partition, chosen by hand."""

    partition_index: int = int32()
    broker_ids: Sequence[int] = array(int32)


@struct()
class CreatableTopicConfig:
    """A config of the new topic."""

    name: str = string()
    value: str | None = string(nullable=True)


@struct()
class CreatableTopic:
    """A topic to create; -1 as a count means the broker's default."""

    name: str = string()
    num_partitions: int = int32()
    replication_factor: int = int16()
    assignments: Sequence[CreatableReplicaAssignment] = array(CreatableReplicaAssignment)
    configs: Sequence[CreatableTopicConfig] = array(CreatableTopicConfig)


@message(api_key=19, versions="2-7", flexible="5+")
class CreateTopicsRequest:
    """Create topics, or only check that they could be."""

    topics: Sequence[CreatableTopic] = array(CreatableTopic)
    timeout_ms: int = int32(default=60000)
    validate_only: bool = boolean()


@struct()
class CreatableTopicConfigs:
    """A config that the created topic has."""

    name: str = string()
    value: str | None = string(nullable=True)
    read_only: bool = boolean()
    config_source: int = int8(default=-1)
    is_sensitive: bool = boolean()


@struct()
class CreatableTopicResult:
    """The result for one topic."""

    name: str = string()
    topic_id: UUID = uuid(since=7)
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    topic_config_error_code: int = int16(tag=0)
    num_partitions: int = int32(since=5, default=-1)
    replication_factor: int = int16(since=5, default=-1)
    configs: Sequence[CreatableTopicConfigs] | None = array(CreatableTopicConfigs, since=5, nullable=True)


@message(api_key=19, versions="2-7", flexible="5+")
class CreateTopicsResponse:
    """The results for the topics."""

    throttle_time_ms: int = int32()
    topics: Sequence[CreatableTopicResult] = array(CreatableTopicResult)
