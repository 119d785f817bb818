"""What coordinators know of transactions (DescribeTransactions)."""

from __future__ import annotations

from typing import NamedTuple

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.protocol.messages.describe_transactions import TransactionState


class TransactionDescription(NamedTuple):
    """The newest transaction of a transactional id."""

    transactional_id: str
    state: str
    """Kafka's name of it: `Ongoing` if the transaction is open."""
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_ms: int
    """When it began, by the coordinator's clock, in ms since 1970; -1 if none is open."""


def description_of(found: TransactionState) -> TransactionDescription | None:
    """Return the description in an answer; None for an unknown transactional id. Raises `ApiError`."""
    code = ErrorCode.of(found.error_code)
    if code is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
        return None
    if code is not ErrorCode.NONE:
        raise ApiError(code, f"transactional id '{found.transactional_id}' cannot be described")
    return TransactionDescription(
        found.transactional_id,
        found.transaction_state,
        found.producer_id,
        found.producer_epoch,
        found.transaction_timeout_ms,
        found.transaction_start_time_ms,
    )
