"""ListOffsets (API 2). v2 adds `isolation_level`, `throttle_time_ms`; v4 adds `current_leader_epoch`, `leader_epoch`;
v6 is flexible; v10 adds `timeout_ms`.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int8, int16, int32, int64, message, string, struct


@struct()
class ListOffsetsPartition:
    """A time, or -1 for the end, -2 for the start, -3 for the largest timestamp."""

    partition_index: int = int32()
    current_leader_epoch: int = int32(since=4, default=-1)
    timestamp: int = int64()


@struct()
class ListOffsetsTopic:
    """Partitions of one topic."""

    name: str = string()
    partitions: Sequence[ListOffsetsPartition] = array(ListOffsetsPartition)


@message(api_key=2, versions="1-11", flexible="6+")
class ListOffsetsRequest:
    """Ask which offset a time has."""

    replica_id: int = int32()
    isolation_level: int = int8(since=2)
    topics: Sequence[ListOffsetsTopic] = array(ListOffsetsTopic)
    timeout_ms: int = int32(since=10)


@struct()
class ListOffsetsPartitionResponse:
    """The first offset at or after the time."""

    partition_index: int = int32()
    error_code: int = int16()
    timestamp: int = int64(default=-1)
    offset: int = int64(default=-1)
    leader_epoch: int = int32(since=4, default=-1)


@struct()
class ListOffsetsTopicResponse:
    """The answers for one topic."""

    name: str = string()
    partitions: Sequence[ListOffsetsPartitionResponse] = array(ListOffsetsPartitionResponse)


@message(api_key=2, versions="1-11", flexible="6+")
class ListOffsetsResponse:
    """The offsets found."""

    throttle_time_ms: int = int32(since=2)
    topics: Sequence[ListOffsetsTopicResponse] = array(ListOffsetsTopicResponse)
