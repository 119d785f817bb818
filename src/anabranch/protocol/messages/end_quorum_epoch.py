"""EndQuorumEpoch (API 54). v1 is flexible, and adds directories and endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, message, string, struct, uint16, uuid


@struct()
class ReplicaInfo:
    """A replica of the quorum."""

    candidate_id: int = int32(since=1)
    candidate_directory_id: UUID = uuid(since=1)


@struct()
class PartitionData:
    """The former leader of one partition."""

    partition_index: int = int32()
    leader_id: int = int32()
    leader_epoch: int = int32()
    preferred_successors: Sequence[int] = array(int32, until=0)
    preferred_candidates: Sequence[ReplicaInfo] = array(ReplicaInfo, since=1)


@struct()
class TopicData:
    """Former leaders of partitions of one topic."""

    topic_name: str = string()
    partitions: Sequence[PartitionData] = array(PartitionData)


@struct()
class LeaderEndpoint:
    """Where the former leader listens."""

    name: str = string(since=1)
    host: str = string(since=1)
    port: int = uint16(since=1)


@message(api_key=54, versions="0-1", flexible="1+")
class EndQuorumEpochRequest:
    """Tell a voter of the quorum that the leader resigns."""

    cluster_id: str | None = string(nullable=True, default=None)
    topics: Sequence[TopicData] = array(TopicData)
    leader_endpoints: Sequence[LeaderEndpoint] = array(LeaderEndpoint, since=1)


@struct()
class PartitionDataResult:
    """The leader of one partition, as the voter knows it."""

    partition_index: int = int32()
    error_code: int = int16()
    leader_id: int = int32()
    leader_epoch: int = int32()


@struct()
class TopicDataResult:
    """The results for partitions of one topic."""

    topic_name: str = string()
    partitions: Sequence[PartitionDataResult] = array(PartitionDataResult)


@struct()
class NodeEndpoint:
    """Where a node is found."""

    node_id: int = int32(since=1)
    host: str = string(since=1)
    port: int = uint16(since=1)


@message(api_key=54, versions="0-1", flexible="1+")
class EndQuorumEpochResponse:
    """The results for the partitions."""

    error_code: int = int16()
    topics: Sequence[TopicDataResult] = array(TopicDataResult)
    node_endpoints: Sequence[NodeEndpoint] = array(NodeEndpoint, since=1, tag=0)
