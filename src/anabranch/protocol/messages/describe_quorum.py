"""DescribeQuorum (API 55). v1 adds times of replicas; v2 adds messages, directories and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, int64, message, string, struct, uint16, uuid


@struct()
class PartitionData:
    """One partition of the quorum."""

    partition_index: int = int32()


@struct()
class TopicData:
    """Partitions of one topic."""

    topic_name: str = string()
    partitions: Sequence[PartitionData] = array(PartitionData)


@message(api_key=55, versions="0-2", flexible="0+")
class DescribeQuorumRequest:
    """Ask for the state of a quorum of controllers."""

    topics: Sequence[TopicData] = array(TopicData)


@struct()
class ReplicaState:
    """How far one replica is."""

    replica_id: int = int32()
    replica_directory_id: UUID = uuid(since=2)
    log_end_offset: int = int64()
    last_fetch_timestamp: int = int64(since=1, default=-1)
    last_caught_up_timestamp: int = int64(since=1, default=-1)


@struct()
class PartitionDataResult:
    """The state of one partition of the quorum."""

    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(since=2, nullable=True)
    leader_id: int = int32()
    leader_epoch: int = int32()
    high_watermark: int = int64()
    current_voters: Sequence[ReplicaState] = array(ReplicaState)
    observers: Sequence[ReplicaState] = array(ReplicaState)


@struct()
class TopicDataResult:
    """The states of partitions of one topic."""

    topic_name: str = string()
    partitions: Sequence[PartitionDataResult] = array(PartitionDataResult)


@struct()
class Listener:
    """Where a node listens."""

    name: str = string(since=2)
    host: str = string(since=2)
    port: int = uint16(since=2)


@struct()
class Node:
    """A node of the quorum."""

    node_id: int = int32(since=2)
    listeners: Sequence[Listener] = array(Listener, since=2)


@message(api_key=55, versions="0-2", flexible="0+")
class DescribeQuorumResponse:
    """The state of the quorum."""

    error_code: int = int16()
    error_message: str | None = string(since=2, nullable=True)
    topics: Sequence[TopicDataResult] = array(TopicDataResult)
    nodes: Sequence[Node] = array(Node, since=2)
