"""OffsetFetch (API 9). v2 adds `error_code`; v3 adds `throttle_time_ms`; v5 adds `committed_leader_epoch`; v6 is
flexible; v7 adds `require_stable`; v8 adds `groups`; v9 adds `member_id`, `member_epoch`; v10 adds `topic_id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct, uuid
from anabranch.protocol.messages.offset_commit import KeyRangeOffset, OffsetRange


@struct()
class OffsetFetchRequestTopic:
    """Partitions of one topic, up to v7."""

    name: str = string()
    partition_indexes: Sequence[int] = array(int32)


@struct()
class OffsetFetchRequestTopics:
    """Partitions of one topic, from v8."""

    name: str = string(until=9)
    topic_id: UUID = uuid(since=10)
    partition_indexes: Sequence[int] = array(int32)


@struct()
class OffsetFetchRequestGroup:
    """One group; null topics mean all it has committed."""

    group_id: str = string()
    member_id: str | None = string(since=9, nullable=True, default=None)
    member_epoch: int = int32(since=9, default=-1)
    topics: Sequence[OffsetFetchRequestTopics] | None = array(OffsetFetchRequestTopics, nullable=True)


@message(api_key=9, versions="1-10", flexible="6+")
class OffsetFetchRequest:
    """Ask for committed offsets: of several groups from v8, of one, in the fields above the array, before."""

    group_id: str = string(until=7)
    topics: Sequence[OffsetFetchRequestTopic] | None = array(OffsetFetchRequestTopic, until=7, nullable="2+")
    groups: Sequence[OffsetFetchRequestGroup] = array(OffsetFetchRequestGroup, since=8)
    require_stable: bool = boolean(since=7)


@struct()
class OffsetFetchResponsePartition:
    """Progress in one partition, up to v7; ours: processed offsets above it, and progress by ranges of keys."""

    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32(since=5, default=-1)
    metadata: str | None = string(nullable=True)
    error_code: int = int16()
    committed_range_offsets: Sequence[OffsetRange] = array(OffsetRange, tag=10000)
    key_range_offsets: Sequence[KeyRangeOffset] = array(KeyRangeOffset, tag=10001)
    passed_key_ranges: Sequence[KeyRangeOffset] = array(KeyRangeOffset, tag=10002)


@struct()
class OffsetFetchResponseTopic:
    """The answers for one topic, up to v7."""

    name: str = string()
    partitions: Sequence[OffsetFetchResponsePartition] = array(OffsetFetchResponsePartition)


@struct()
class OffsetFetchResponsePartitions:
    """Progress in one partition, from v8; ours: processed offsets above it, and progress by ranges of keys.

    `passed_key_ranges`: by ranges of keys, how far owners have come, where that is not as far as the progress.
    """

    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32(default=-1)
    metadata: str | None = string(nullable=True)
    error_code: int = int16()
    committed_range_offsets: Sequence[OffsetRange] = array(OffsetRange, tag=10000)
    key_range_offsets: Sequence[KeyRangeOffset] = array(KeyRangeOffset, tag=10001)
    passed_key_ranges: Sequence[KeyRangeOffset] = array(KeyRangeOffset, tag=10002)


@struct()
class OffsetFetchResponseTopics:
    """The answers for one topic, from v8."""

    name: str = string(until=9)
    topic_id: UUID = uuid(since=10)
    partitions: Sequence[OffsetFetchResponsePartitions] = array(OffsetFetchResponsePartitions)


@struct()
class OffsetFetchResponseGroup:
    """The answers for one group."""

    group_id: str = string()
    topics: Sequence[OffsetFetchResponseTopics] = array(OffsetFetchResponseTopics)
    error_code: int = int16()


@message(api_key=9, versions="1-10", flexible="6+")
class OffsetFetchResponse:
    """Committed offsets: of several groups from v8, of one, in the fields above the array, before."""

    throttle_time_ms: int = int32(since=3)
    topics: Sequence[OffsetFetchResponseTopic] = array(OffsetFetchResponseTopic, until=7)
    error_code: int = int16(since=2, until=7)
    groups: Sequence[OffsetFetchResponseGroup] = array(OffsetFetchResponseGroup, since=8)
