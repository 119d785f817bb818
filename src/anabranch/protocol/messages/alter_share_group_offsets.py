"""AlterShareGroupOffsets (API 91)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, int64, message, string, struct, uuid


@struct()
class AlterShareGroupOffsetsRequestPartition:
    """The new start offset of one partition."""

    partition_index: int = int32()
    start_offset: int = int64()


@struct()
class AlterShareGroupOffsetsRequestTopic:
    """The new start offsets of one topic."""

    topic_name: str = string()
    partitions: Sequence[AlterShareGroupOffsetsRequestPartition] = array(AlterShareGroupOffsetsRequestPartition)


@message(api_key=91, versions="0", flexible="0+")
class AlterShareGroupOffsetsRequest:
    """Set the start offsets of a share group."""

    group_id: str = string()
    topics: Sequence[AlterShareGroupOffsetsRequestTopic] = array(AlterShareGroupOffsetsRequestTopic)


@struct()
class AlterShareGroupOffsetsResponsePartition:
    """The result for one partition."""

    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)


@struct()
class AlterShareGroupOffsetsResponseTopic:
    """The results for one topic."""

    topic_name: str = string()
    topic_id: UUID = uuid()
    partitions: Sequence[AlterShareGroupOffsetsResponsePartition] = array(AlterShareGroupOffsetsResponsePartition)


@message(api_key=91, versions="0", flexible="0+")
class AlterShareGroupOffsetsResponse:
    """The results for the partitions."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    responses: Sequence[AlterShareGroupOffsetsResponseTopic] = array(AlterShareGroupOffsetsResponseTopic)
