"""OffsetDelete (API 47)."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, message, string, struct


@struct()
class OffsetDeleteRequestPartition:
    """A partition whose offset goes."""

    partition_index: int = int32()


@struct()
class OffsetDeleteRequestTopic:
    """Partitions of one topic."""

    name: str = string()
    partitions: Sequence[OffsetDeleteRequestPartition] = array(OffsetDeleteRequestPartition)


@message(api_key=47, versions="0")
class OffsetDeleteRequest:
    """Delete committed offsets of a group."""

    group_id: str = string()
    topics: Sequence[OffsetDeleteRequestTopic] = array(OffsetDeleteRequestTopic)


@struct()
class OffsetDeleteResponsePartition:
    """What became of one offset."""

    partition_index: int = int32()
    error_code: int = int16()


@struct()
class OffsetDeleteResponseTopic:
    """The answers for one topic."""

    name: str = string()
    partitions: Sequence[OffsetDeleteResponsePartition] = array(OffsetDeleteResponsePartition)


@message(api_key=47, versions="0")
class OffsetDeleteResponse:
    """What became of the offsets."""

    error_code: int = int16()
    throttle_time_ms: int = int32()
    topics: Sequence[OffsetDeleteResponseTopic] = array(OffsetDeleteResponseTopic)
