"""OffsetForLeaderEpoch (API 23). v3 adds `replica_id`; v4 is flexible."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, int64, message, string, struct


@struct()
class OffsetForLeaderPartition:
    """A leader epoch of one partition."""

    partition: int = int32()
    current_leader_epoch: int = int32(default=-1)
    leader_epoch: int = int32()


@struct()
class OffsetForLeaderTopic:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[OffsetForLeaderPartition] = array(OffsetForLeaderPartition)


@message(api_key=23, versions="2-4", flexible="4+")
class OffsetForLeaderEpochRequest:
    """Ask where leader epochs end."""

    replica_id: int = int32(since=3, default=-2)
    topics: Sequence[OffsetForLeaderTopic] = array(OffsetForLeaderTopic)


@struct()
class EpochEndOffset:
    """The largest epoch up to the one asked for, and the offset after its last record."""

    error_code: int = int16()
    partition: int = int32()
    leader_epoch: int = int32(default=-1)
    end_offset: int = int64(default=-1)


@struct()
class OffsetForLeaderTopicResult:
    """The answers for one topic."""

    topic: str = string()
    partitions: Sequence[EpochEndOffset] = array(EpochEndOffset)


@message(api_key=23, versions="2-4", flexible="4+")
class OffsetForLeaderEpochResponse:
    """Where the epochs end."""

    throttle_time_ms: int = int32()
    topics: Sequence[OffsetForLeaderTopicResult] = array(OffsetForLeaderTopicResult)
