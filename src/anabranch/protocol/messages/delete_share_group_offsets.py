"""DeleteShareGroupOffsets (API 92)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, message, string, struct, uuid


@struct()
class DeleteShareGroupOffsetsRequestTopic:
    """One topic."""

    topic_name: str = string()


@message(api_key=92, versions="0", flexible="0+")
class DeleteShareGroupOffsetsRequest:
    """Delete the start offsets of a share group."""

    group_id: str = string()
    topics: Sequence[DeleteShareGroupOffsetsRequestTopic] = array(DeleteShareGroupOffsetsRequestTopic)


@struct()
class DeleteShareGroupOffsetsResponseTopic:
    """The result for one topic."""

    topic_name: str = string()
    topic_id: UUID = uuid()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)


@message(api_key=92, versions="0", flexible="0+")
class DeleteShareGroupOffsetsResponse:
    """The results for the topics."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    responses: Sequence[DeleteShareGroupOffsetsResponseTopic] = array(DeleteShareGroupOffsetsResponseTopic)
