"""AlterPartitionReassignments (API 45). v1 adds `allow_replication_factor_change`."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int16, int32, message, string, struct


@struct()
class ReassignablePartition:
    """One partition and the brokers it goes to; null cancels its reassignment."""

    partition_index: int = int32()
    replicas: Sequence[int] | None = array(int32, nullable=True, default=None)


@struct()
class ReassignableTopic:
    """Partitions of one topic."""

    name: str = string()
    partitions: Sequence[ReassignablePartition] = array(ReassignablePartition)


@message(api_key=45, versions="0-1", flexible="0+")
class AlterPartitionReassignmentsRequest:
    """Place replicas on other brokers, or cancel that."""

    timeout_ms: int = int32(default=60000)
    allow_replication_factor_change: bool = boolean(since=1, default=True)
    topics: Sequence[ReassignableTopic] = array(ReassignableTopic)


@struct()
class ReassignablePartitionResponse:
    """The result for one partition."""

    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


@struct()
class ReassignableTopicResponse:
    """The results for one topic."""

    name: str = string()
    partitions: Sequence[ReassignablePartitionResponse] = array(ReassignablePartitionResponse)


@message(api_key=45, versions="0-1", flexible="0+")
class AlterPartitionReassignmentsResponse:
    """A result for each partition."""

    throttle_time_ms: int = int32()
    allow_replication_factor_change: bool = boolean(since=1, default=True)
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    responses: Sequence[ReassignableTopicResponse] = array(ReassignableTopicResponse)
