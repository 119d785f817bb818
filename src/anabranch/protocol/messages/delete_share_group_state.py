"""DeleteShareGroupState (API 86)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, message, string, struct, uuid


@struct()
class PartitionData:
    """One partition."""

    partition: int = int32()


@struct()
class DeleteStateData:
    """Partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionData] = array(PartitionData)


@message(api_key=86, versions="0", flexible="0+")
class DeleteShareGroupStateRequest:
    """Delete the state of partitions in a share group."""

    group_id: str = string()
    topics: Sequence[DeleteStateData] = array(DeleteStateData)


@struct()
class PartitionResult:
    """The result for one partition."""

    partition: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)


@struct()
class DeleteStateResult:
    """The results for partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionResult] = array(PartitionResult)


@message(api_key=86, versions="0", flexible="0+")
class DeleteShareGroupStateResponse:
    """The results for the partitions."""

    results: Sequence[DeleteStateResult] = array(DeleteStateResult)
