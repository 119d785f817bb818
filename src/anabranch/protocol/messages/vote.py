"""Vote (API 52). v1 adds directories of voters; v2 adds `pre_vote`."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct, uint16, uuid


@struct()
class PartitionData:
    """The candidate for one partition."""

    partition_index: int = int32()
    replica_epoch: int = int32()
    replica_id: int = int32()
    replica_directory_id: UUID = uuid(since=1)
    voter_directory_id: UUID = uuid(since=1)
    last_offset_epoch: int = int32()
    last_offset: int = int64()
    pre_vote: bool = boolean(since=2)


@struct()
class TopicData:
    """Candidates for the partitions of one topic."""

    topic_name: str = string()
    partitions: Sequence[PartitionData] = array(PartitionData)


@message(api_key=52, versions="0-2", flexible="0+")
class VoteRequest:
    """Ask a voter of the quorum for its vote."""

    cluster_id: str | None = string(nullable=True, default=None)
    voter_id: int = int32(since=1, default=-1)
    topics: Sequence[TopicData] = array(TopicData)


@struct()
class PartitionDataResult:
    """The vote for one partition."""

    partition_index: int = int32()
    error_code: int = int16()
    leader_id: int = int32()
    leader_epoch: int = int32()
    vote_granted: bool = boolean()


@struct()
class TopicDataResult:
    """The votes for partitions of one topic."""

    topic_name: str = string()
    partitions: Sequence[PartitionDataResult] = array(PartitionDataResult)


@struct()
class NodeEndpoint:
    """Where a node is found."""

    node_id: int = int32(since=1)
    host: str = string(since=1)
    port: int = uint16(since=1)


@message(api_key=52, versions="0-2", flexible="0+")
class VoteResponse:
    """The votes."""

    error_code: int = int16()
    topics: Sequence[TopicDataResult] = array(TopicDataResult)
    node_endpoints: Sequence[NodeEndpoint] = array(NodeEndpoint, since=1, tag=0)
