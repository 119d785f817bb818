"""ReadShareGroupStateSummary (API 87). v1 adds `delivery_complete_count`."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, int64, message, string, struct, uuid


@struct()
class PartitionData:
    """One partition."""

    partition: int = int32()
    leader_epoch: int = int32()


@struct()
class ReadStateSummaryData:
    """Partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionData] = array(PartitionData)


@message(api_key=87, versions="0-1", flexible="0+")
class ReadShareGroupStateSummaryRequest:
    """Read the start offsets of partitions in a share group."""

    group_id: str = string()
    topics: Sequence[ReadStateSummaryData] = array(ReadStateSummaryData)


@struct()
class PartitionResult:
    """The start offset of one partition."""

    partition: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    state_epoch: int = int32()
    leader_epoch: int = int32()
    start_offset: int = int64()
    delivery_complete_count: int = int32(since=1, default=-1)


@struct()
class ReadStateSummaryResult:
    """The start offsets of partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionResult] = array(PartitionResult)


@message(api_key=87, versions="0-1", flexible="0+")
class ReadShareGroupStateSummaryResponse:
    """The start offsets."""

    results: Sequence[ReadStateSummaryResult] = array(ReadStateSummaryResult)
