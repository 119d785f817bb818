"""ListTransactions (API 66). v1 adds `duration_filter`; v2 adds `transactional_id_pattern`."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, int64, message, string, struct


@message(api_key=66, versions="0-2", flexible="0+")
class ListTransactionsRequest:
    """Ask for transactions; empty filters let all pass."""

    state_filters: Sequence[str] = array(string)
    producer_id_filters: Sequence[int] = array(int64)
    duration_filter: int = int64(since=1, default=-1)
    transactional_id_pattern: str | None = string(since=2, nullable=True, default=None)


@struct()
class TransactionState:
    """One transaction."""

    transactional_id: str = string()
    producer_id: int = int64()
    transaction_state: str = string()


@message(api_key=66, versions="0-2", flexible="0+")
class ListTransactionsResponse:
    """The transactions of this coordinator."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    unknown_state_filters: Sequence[str] = array(string)
    transaction_states: Sequence[TransactionState] = array(TransactionState)
