"""AlterPartition (API 56). v3 adds the epochs of brokers."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int8, int16, int32, int64, message, struct, uuid


@struct()
class BrokerState:
    """A replica in sync, and the epoch of its broker."""

    broker_id: int = int32(since=3)
    broker_epoch: int = int64(since=3, default=-1)


@struct()
class PartitionData:
    """The new replicas in sync of one partition."""

    partition_index: int = int32()
    leader_epoch: int = int32()
    new_isr: Sequence[int] = array(int32, until=2)
    new_isr_with_epochs: Sequence[BrokerState] = array(BrokerState, since=3)
    leader_recovery_state: int = int8()
    partition_epoch: int = int32()


@struct()
class TopicData:
    """Partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionData] = array(PartitionData)


@message(api_key=56, versions="2-3", flexible="2+")
class AlterPartitionRequest:
    """Change the replicas in sync of partitions that the broker leads."""

    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    topics: Sequence[TopicData] = array(TopicData)


@struct()
class PartitionDataResult:
    """The state of one partition."""

    partition_index: int = int32()
    error_code: int = int16()
    leader_id: int = int32()
    leader_epoch: int = int32()
    isr: Sequence[int] = array(int32)
    leader_recovery_state: int = int8()
    partition_epoch: int = int32()


@struct()
class TopicDataResult:
    """The results for partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionDataResult] = array(PartitionDataResult)


@message(api_key=56, versions="2-3", flexible="2+")
class AlterPartitionResponse:
    """The results for the partitions."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    topics: Sequence[TopicDataResult] = array(TopicDataResult)
