"""ControlledShutdown (API 7), which Kafka 4 has no more. v3 is flexible; v2 adds the broker's epoch."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, int64, message, string, struct


@message(api_key=7, versions="1-3", flexible="3+")
class ControlledShutdownRequest:
    """Ask the controller to move leaders away from a broker that stops."""

    broker_id: int = int32()
    broker_epoch: int = int64(since=2, default=-1)


@struct()
class RemainingPartition:
    """A partition that the broker still leads."""

    topic_name: str = string()
    partition_index: int = int32()


@message(api_key=7, versions="1-3", flexible="3+")
class ControlledShutdownResponse:
    """The partitions that the broker still leads."""

    error_code: int = int16()
    remaining_partitions: Sequence[RemainingPartition] = array(RemainingPartition)
