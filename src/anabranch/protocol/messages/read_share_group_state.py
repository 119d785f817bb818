"""ReadShareGroupState (API 84)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int8, int16, int32, int64, message, string, struct, uuid


@struct()
class PartitionData:
    """One partition."""

    partition: int = int32()
    leader_epoch: int = int32()


@struct()
class ReadStateData:
    """Partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionData] = array(PartitionData)


@message(api_key=84, versions="0", flexible="0+")
class ReadShareGroupStateRequest:
    """Read the state of partitions in a share group."""

    group_id: str = string()
    topics: Sequence[ReadStateData] = array(ReadStateData)


@struct()
class StateBatch:
    """Records of the same state of delivery."""

    first_offset: int = int64()
    last_offset: int = int64()
    delivery_state: int = int8()
    delivery_count: int = int16()


@struct()
class PartitionResult:
    """The state of one partition."""

    partition: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    state_epoch: int = int32()
    start_offset: int = int64()
    state_batches: Sequence[StateBatch] = array(StateBatch)


@struct()
class ReadStateResult:
    """The states of partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionResult] = array(PartitionResult)


@message(api_key=84, versions="0", flexible="0+")
class ReadShareGroupStateResponse:
    """The states."""

    results: Sequence[ReadStateResult] = array(ReadStateResult)
