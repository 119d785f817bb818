"""OffsetCommit (API 8). v3 adds `throttle_time_ms`; v6 adds `committed_leader_epoch`; v7 adds `group_instance_id`; v8
is flexible; v10 adds `topic_id`.

Ours, in the flexible versions: a commit of a part of what lies above the stable offset (cooperative.md, section 1), by
ranges of offsets, by ranges of keys, or by both. `committed_offset` is -1 then.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct, uuid


@struct()
class OffsetRange:
    """Offsets between two bounds, both inclusive (ours)."""

    start: int = int64()
    end: int = int64()


@struct()
class KeyRangeOffset:
    """The next offset to read of the keys between two places of the key space, both inclusive (ours).

    Below `offset` every record with a key of the range is processed. -1 says nothing of them: of keys that others have
    moved on, their owner commits metadata alone.
    """

    start: int = int64()
    end: int = int64()
    offset: int = int64()


@struct()
class OffsetCommitRequestPartition:
    """Progress in one partition; ours: processed offsets above the stable offset, and progress by ranges of keys."""

    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32(since=6, default=-1)
    committed_metadata: str | None = string(nullable=True)
    offset_ranges: Sequence[OffsetRange] = array(OffsetRange, tag=10000)
    key_range_offsets: Sequence[KeyRangeOffset] = array(KeyRangeOffset, tag=10001)


@struct()
class OffsetCommitRequestTopic:
    """Partitions of one topic."""

    name: str = string(until=9)
    topic_id: UUID = uuid(since=10)
    partitions: Sequence[OffsetCommitRequestPartition] = array(OffsetCommitRequestPartition)


@message(api_key=8, versions="2-10", flexible="8+")
class OffsetCommitRequest:
    """Make a group's progress durable; ours: whether the stable offsets are wanted, which some clients cannot skip."""

    group_id: str = string()
    generation_id_or_member_epoch: int = int32(default=-1)
    member_id: str = string()
    group_instance_id: str | None = string(since=7, nullable=True, default=None)
    retention_time_ms: int = int64(until=4, default=-1)
    topics: Sequence[OffsetCommitRequestTopic] = array(OffsetCommitRequestTopic)
    wants_stable_offset: bool = boolean(tag=10000)


@struct()
class OffsetCommitResponsePartition:
    """The result for one commit; ours: the stable offset after it, and why a commit by ranges was refused."""

    partition_index: int = int32()
    error_code: int = int16()
    last_stable_offset: int = int64(tag=10000, default=-1)
    error_message: str | None = string(tag=10001, nullable=True, default=None)


@struct()
class OffsetCommitResponseTopic:
    """The answers for one topic."""

    name: str = string(until=9)
    topic_id: UUID = uuid(since=10)
    partitions: Sequence[OffsetCommitResponsePartition] = array(OffsetCommitResponsePartition)


@message(api_key=8, versions="2-10", flexible="8+")
class OffsetCommitResponse:
    """The results for the commits."""

    throttle_time_ms: int = int32(since=3)
    topics: Sequence[OffsetCommitResponseTopic] = array(OffsetCommitResponseTopic)
