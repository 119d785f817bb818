"""DescribeShareGroupOffsets (API 90). v1 adds the lag."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, int64, message, string, struct, uuid


@struct()
class DescribeShareGroupOffsetsRequestTopic:
    """Partitions of one topic."""

    topic_name: str = string()
    partitions: Sequence[int] = array(int32)


@struct()
class DescribeShareGroupOffsetsRequestGroup:
    """One group, and the topics asked for; null means all."""

    group_id: str = string()
    topics: Sequence[DescribeShareGroupOffsetsRequestTopic] | None = array(
        DescribeShareGroupOffsetsRequestTopic, nullable=True
    )


@message(api_key=90, versions="0-1", flexible="0+")
class DescribeShareGroupOffsetsRequest:
    """Ask for the start offsets of share groups."""

    groups: Sequence[DescribeShareGroupOffsetsRequestGroup] = array(DescribeShareGroupOffsetsRequestGroup)


@struct()
class DescribeShareGroupOffsetsResponsePartition:
    """The start offset of one partition."""

    partition_index: int = int32()
    start_offset: int = int64()
    leader_epoch: int = int32()
    lag: int = int64(since=1, default=-1)
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)


@struct()
class DescribeShareGroupOffsetsResponseTopic:
    """The start offsets of one topic."""

    topic_name: str = string()
    topic_id: UUID = uuid()
    partitions: Sequence[DescribeShareGroupOffsetsResponsePartition] = array(DescribeShareGroupOffsetsResponsePartition)


@struct()
class DescribeShareGroupOffsetsResponseGroup:
    """The start offsets of one group."""

    group_id: str = string()
    topics: Sequence[DescribeShareGroupOffsetsResponseTopic] = array(DescribeShareGroupOffsetsResponseTopic)
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)


@message(api_key=90, versions="0-1", flexible="0+")
class DescribeShareGroupOffsetsResponse:
    """The start offsets."""

    throttle_time_ms: int = int32()
    groups: Sequence[DescribeShareGroupOffsetsResponseGroup] = array(DescribeShareGroupOffsetsResponseGroup)
