"""ElectLeaders (API 43). v1 adds `election_type` and a top-level `error_code`; v2 is flexible."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int8, int16, int32, message, string, struct


@struct()
class TopicPartitions:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[int] = array(int32)


@message(api_key=43, versions="0-2", flexible="2+")
class ElectLeadersRequest:
    """Elect leaders of partitions; null means all partitions."""

    election_type: int = int8(since=1)
    topic_partitions: Sequence[TopicPartitions] | None = array(TopicPartitions, nullable=True)
    timeout_ms: int = int32(default=60000)


@struct()
class PartitionResult:
    """The result for one partition."""

    partition_id: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


@struct()
class ReplicaElectionResult:
    """The results for one topic."""

    topic: str = string()
    partition_result: Sequence[PartitionResult] = array(PartitionResult)


@message(api_key=43, versions="0-2", flexible="2+")
class ElectLeadersResponse:
    """A result for each partition."""

    throttle_time_ms: int = int32()
    error_code: int = int16(since=1)
    replica_election_results: Sequence[ReplicaElectionResult] = array(ReplicaElectionResult)
