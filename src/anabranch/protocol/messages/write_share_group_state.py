"""WriteShareGroupState (API 85). v1 adds `delivery_complete_count`."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int8, int16, int32, int64, message, string, struct, uuid


@struct()
class StateBatch:
    """Records of the same state of delivery."""

    first_offset: int = int64()
    last_offset: int = int64()
    delivery_state: int = int8()
    delivery_count: int = int16()


@struct()
class PartitionData:
    """The state of one partition."""

    partition: int = int32()
    state_epoch: int = int32()
    leader_epoch: int = int32()
    start_offset: int = int64()
    delivery_complete_count: int = int32(since=1, default=-1)
    state_batches: Sequence[StateBatch] = array(StateBatch)


@struct()
class WriteStateData:
    """The states of partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionData] = array(PartitionData)


@message(api_key=85, versions="0-1", flexible="0+")
class WriteShareGroupStateRequest:
    """Write the state of partitions in a share group."""

    group_id: str = string()
    topics: Sequence[WriteStateData] = array(WriteStateData)


@struct()
class PartitionResult:
    """The result for one partition."""

    partition: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)


@struct()
class WriteStateResult:
    """The results for partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionResult] = array(PartitionResult)


@message(api_key=85, versions="0-1", flexible="0+")
class WriteShareGroupStateResponse:
    """The results for the partitions."""

    results: Sequence[WriteStateResult] = array(WriteStateResult)
