"""AddPartitionsToTxn (API 24). v3 is flexible; v4 adds `transactions`, `error_code`, `results_by_transaction`."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct


@struct()
class AddPartitionsToTxnTopic:
    """Partitions of one topic."""

    name: str = string()
    partitions: Sequence[int] = array(int32)


@struct()
class AddPartitionsToTxnTransaction:
    """One transaction and the partitions it is to hold."""

    transactional_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    verify_only: bool = boolean()
    topics: Sequence[AddPartitionsToTxnTopic] = array(AddPartitionsToTxnTopic)


@message(api_key=24, versions="0-5", flexible="3+")
class AddPartitionsToTxnRequest:
    """Add partitions to transactions: to one, up to v3 and from any client."""

    transactions: Sequence[AddPartitionsToTxnTransaction] = array(AddPartitionsToTxnTransaction, since=4)
    v3_and_below_transactional_id: str = string(until=3)
    v3_and_below_producer_id: int = int64(until=3)
    v3_and_below_producer_epoch: int = int16(until=3)
    v3_and_below_topics: Sequence[AddPartitionsToTxnTopic] = array(AddPartitionsToTxnTopic, until=3)


@struct()
class AddPartitionsToTxnPartitionResult:
    """The result for one partition."""

    partition_index: int = int32()
    partition_error_code: int = int16()


@struct()
class AddPartitionsToTxnTopicResult:
    """The answers for one topic."""

    name: str = string()
    results_by_partition: Sequence[AddPartitionsToTxnPartitionResult] = array(AddPartitionsToTxnPartitionResult)


@struct()
class AddPartitionsToTxnResult:
    """The answers for one transaction."""

    transactional_id: str = string()
    topic_results: Sequence[AddPartitionsToTxnTopicResult] = array(AddPartitionsToTxnTopicResult)


@message(api_key=24, versions="0-5", flexible="3+")
class AddPartitionsToTxnResponse:
    """The results for the partitions."""

    throttle_time_ms: int = int32()
    error_code: int = int16(since=4)
    results_by_transaction: Sequence[AddPartitionsToTxnResult] = array(AddPartitionsToTxnResult, since=4)
    results_by_topic_v3_and_below: Sequence[AddPartitionsToTxnTopicResult] = array(
        AddPartitionsToTxnTopicResult, until=3
    )
