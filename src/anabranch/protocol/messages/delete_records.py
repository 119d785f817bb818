"""DeleteRecords (API 21). v2 is flexible."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, int64, message, string, struct


@struct()
class DeleteRecordsPartition:
    """The offset below which records go; -1 is the high watermark."""

    partition_index: int = int32()
    offset: int = int64()


@struct()
class DeleteRecordsTopic:
    """Partitions of one topic."""

    name: str = string()
    partitions: Sequence[DeleteRecordsPartition] = array(DeleteRecordsPartition)


@message(api_key=21, versions="0-2", flexible="2+")
class DeleteRecordsRequest:
    """Delete the oldest records."""

    topics: Sequence[DeleteRecordsTopic] = array(DeleteRecordsTopic)
    timeout_ms: int = int32()


@struct()
class DeleteRecordsPartitionResult:
    """Where the partition starts now."""

    partition_index: int = int32()
    low_watermark: int = int64()
    error_code: int = int16()


@struct()
class DeleteRecordsTopicResult:
    """The answers for one topic."""

    name: str = string()
    partitions: Sequence[DeleteRecordsPartitionResult] = array(DeleteRecordsPartitionResult)


@message(api_key=21, versions="0-2", flexible="2+")
class DeleteRecordsResponse:
    """Where the partitions start now."""

    throttle_time_ms: int = int32()
    topics: Sequence[DeleteRecordsTopicResult] = array(DeleteRecordsTopicResult)
