"""InitializeShareGroupState (API 83)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, int64, message, string, struct, uuid


@struct()
class PartitionData:
    """The first state of one partition."""

    partition: int = int32()
    state_epoch: int = int32()
    start_offset: int = int64()


@struct()
class InitializeStateData:
    """First states of partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionData] = array(PartitionData)


@message(api_key=83, versions="0", flexible="0+")
class InitializeShareGroupStateRequest:
    """Begin the state of partitions in a share group."""

    group_id: str = string()
    topics: Sequence[InitializeStateData] = array(InitializeStateData)


@struct()
class PartitionResult:
    """The result for one partition."""

    partition: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)


@struct()
class InitializeStateResult:
    """The results for partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionResult] = array(PartitionResult)


@message(api_key=83, versions="0", flexible="0+")
class InitializeShareGroupStateResponse:
    """The results for the partitions."""

    results: Sequence[InitializeStateResult] = array(InitializeStateResult)
