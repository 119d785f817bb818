"""OffsetDelete (API 47)."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, message, string, struct


@struct()
class OffsetDeleteRequestPartition:
    """A partition whose committed offset is deleted."""

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
    """The result for one offset."""

    partition_index: int = int32()
    error_code: int = int16()


@struct()
class OffsetDeleteResponseTopic:
    """The answers for one topic."""

    name: str = string()
    partitions: Sequence[OffsetDeleteResponsePartition] = array(OffsetDeleteResponsePartition)


@message(api_key=47, versions="0")
class OffsetDeleteResponse:
    """The results for the offsets."""

    error_code: int = int16()
    throttle_time_ms: int = int32()
    topics: Sequence[OffsetDeleteResponseTopic] = array(OffsetDeleteResponseTopic)
