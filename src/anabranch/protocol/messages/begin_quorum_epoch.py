"""BeginQuorumEpoch (API 53). v1 is flexible, and adds directories and endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, message, string, struct, uint16, uuid


@struct()
class PartitionData:
    """The new leader of one partition."""

    partition_index: int = int32()
    voter_directory_id: UUID = uuid(since=1)
    leader_id: int = int32()
    leader_epoch: int = int32()


@struct()
class TopicData:
    """New leaders of partitions of one topic."""

    topic_name: str = string()
    partitions: Sequence[PartitionData] = array(PartitionData)


@struct()
class LeaderEndpoint:
    """Where the leader listens."""

    name: str = string(since=1)
    host: str = string(since=1)
    port: int = uint16(since=1)


@message(api_key=53, versions="0-1", flexible="1+")
class BeginQuorumEpochRequest:
    """Tell a voter of the quorum the new leader."""

    cluster_id: str | None = string(nullable=True, default=None)
    voter_id: int = int32(since=1, default=-1)
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


@message(api_key=53, versions="0-1", flexible="1+")
class BeginQuorumEpochResponse:
    """The results for the partitions."""

    error_code: int = int16()
    topics: Sequence[TopicDataResult] = array(TopicDataResult)
    node_endpoints: Sequence[NodeEndpoint] = array(NodeEndpoint, since=1, tag=0)
