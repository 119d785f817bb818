"""DescribeSlices (API 10007), ours: which members of a group hold slices of partitions. The leader serves it."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, int64, message, string, struct


@struct()
class DescribeSlicesTopic:
    """Partitions of a topic."""

    name: str = string()
    partition_indexes: Sequence[int] = array(int32)


@message(api_key=10007, versions="0", flexible="0+")
class DescribeSlicesRequest:
    """Ask who holds slices of partitions that the broker leads."""

    group_id: str = string()
    topics: Sequence[DescribeSlicesTopic] = array(DescribeSlicesTopic)


@struct()
class DescribeSlicesMember:
    """The slices of one member in a partition."""

    member_id: str = string()
    slices: int = int32()
    records: int = int64()
    """Offsets of all its slices."""
    first_offset: int = int64()
    last_offset: int = int64()
    """Inclusive; other members may hold some of what lies between."""


@struct()
class DescribeSlicesResponsePartition:
    """The members that hold slices of a partition, by the first of them."""

    partition_index: int = int32()
    error_code: int = int16()
    members: Sequence[DescribeSlicesMember] = array(DescribeSlicesMember)


@struct()
class DescribeSlicesResponseTopic:
    """The partitions of a topic."""

    name: str = string()
    partitions: Sequence[DescribeSlicesResponsePartition] = array(DescribeSlicesResponsePartition)


@message(api_key=10007, versions="0", flexible="0+")
class DescribeSlicesResponse:
    """Who holds what; nobody in a group that is not known."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    topics: Sequence[DescribeSlicesResponseTopic] = array(DescribeSlicesResponseTopic)
