"""DescribeProducers (API 61). Flexible from the start."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, int64, message, string, struct


@struct()
class TopicRequest:
    """Partitions of one topic."""

    name: str = string()
    partition_indexes: Sequence[int] = array(int32)


@message(api_key=61, versions="0", flexible="0+")
class DescribeProducersRequest:
    """Ask for the producers of partitions."""

    topics: Sequence[TopicRequest] = array(TopicRequest)


@struct()
class ProducerState:
    """One producer, its last sequence and its open transaction, if any."""

    producer_id: int = int64()
    producer_epoch: int = int32()
    last_sequence: int = int32(default=-1)
    last_timestamp: int = int64(default=-1)
    coordinator_epoch: int = int32()
    current_txn_start_offset: int = int64(default=-1)


@struct()
class PartitionResponse:
    """The producers of one partition."""

    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    active_producers: Sequence[ProducerState] = array(ProducerState)


@struct()
class TopicResponse:
    """The answers for one topic."""

    name: str = string()
    partitions: Sequence[PartitionResponse] = array(PartitionResponse)


@message(api_key=61, versions="0", flexible="0+")
class DescribeProducersResponse:
    """The producers found."""

    throttle_time_ms: int = int32()
    topics: Sequence[TopicResponse] = array(TopicResponse)
