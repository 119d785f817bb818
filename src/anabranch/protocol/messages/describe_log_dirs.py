"""DescribeLogDirs (API 35). v2 is flexible; v3 adds `error_code`; v4 adds `total_bytes`, `usable_bytes`; v5 adds
`is_cordoned`.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct


@struct()
class DescribableLogDirTopic:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[int] = array(int32)


@message(api_key=35, versions="1-5", flexible="2+")
class DescribeLogDirsRequest:
    """Ask how large partitions are on disk; null means all of them."""

    topics: Sequence[DescribableLogDirTopic] | None = array(DescribableLogDirTopic, nullable=True)


@struct()
class DescribeLogDirsPartition:
    """The size of one partition."""

    partition_index: int = int32()
    partition_size: int = int64()
    offset_lag: int = int64()
    is_future_key: bool = boolean()


@struct()
class DescribeLogDirsTopic:
    """Partitions of one topic."""

    name: str = string()
    partitions: Sequence[DescribeLogDirsPartition] = array(DescribeLogDirsPartition)


@struct()
class DescribeLogDirsResult:
    """The logs of one data directory."""

    error_code: int = int16()
    log_dir: str = string()
    topics: Sequence[DescribeLogDirsTopic] = array(DescribeLogDirsTopic)
    total_bytes: int = int64(since=4, default=-1)
    usable_bytes: int = int64(since=4, default=-1)
    is_cordoned: bool = boolean(since=5)


@message(api_key=35, versions="1-5", flexible="2+")
class DescribeLogDirsResponse:
    """The logs of the data directories."""

    throttle_time_ms: int = int32()
    error_code: int = int16(since=3)
    results: Sequence[DescribeLogDirsResult] = array(DescribeLogDirsResult)
