"""DescribeTransactions (API 65). Flexible from the start."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, int64, message, string, struct


@message(api_key=65, versions="0", flexible="0+")
class DescribeTransactionsRequest:
    """Ask about transactions."""

    transactional_ids: Sequence[str] = array(string)


@struct()
class TopicData:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[int] = array(int32)


@struct()
class TransactionState:
    """A transaction, its state and its partitions."""

    error_code: int = int16()
    transactional_id: str = string()
    transaction_state: str = string()
    transaction_timeout_ms: int = int32()
    transaction_start_time_ms: int = int64()
    producer_id: int = int64()
    producer_epoch: int = int16()
    topics: Sequence[TopicData] = array(TopicData)


@message(api_key=65, versions="0", flexible="0+")
class DescribeTransactionsResponse:
    """The transactions asked about."""

    throttle_time_ms: int = int32()
    transaction_states: Sequence[TransactionState] = array(TransactionState)
