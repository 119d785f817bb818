"""DescribeLoad (API 10006), ours: what is appended to each part of a partition's keys. The leader serves it."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, float64, int16, int32, int64, message, string, struct


@struct()
class DescribeLoadTopic:
    """Partitions of a topic."""

    name: str = string()
    partition_indexes: Sequence[int] = array(int32)


@message(api_key=10006, versions="0", flexible="0+")
class DescribeLoadRequest:
    """Ask for the load of partitions that the broker leads."""

    topics: Sequence[DescribeLoadTopic] = array(DescribeLoadTopic)


@struct()
class DescribeLoadResponsePartition:
    """The load of a partition, by parts of its interval of the key space: they are equal, and ascend."""

    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    key_range_start: int = int64()
    key_range_end: int = int64(default=-1)
    """Inclusive; below the start while the partition is not observed yet, and there are no parts then."""
    observed_ms: int = int64()
    records_per_second: Sequence[float] = array(float64)
    bytes_per_second: Sequence[float] = array(float64)
    """Of records that are not compressed."""


@struct()
class DescribeLoadResponseTopic:
    """The partitions of a topic."""

    name: str = string()
    partitions: Sequence[DescribeLoadResponsePartition] = array(DescribeLoadResponsePartition)


@message(api_key=10006, versions="0", flexible="0+")
class DescribeLoadResponse:
    """What was appended lately: a record counts half as much after `half_life_ms`."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    half_life_ms: int = int64()
    topics: Sequence[DescribeLoadResponseTopic] = array(DescribeLoadResponseTopic)
