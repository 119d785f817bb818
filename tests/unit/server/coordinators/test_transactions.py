"""Which transactions ListTransactions passes."""

from __future__ import annotations

import pytest

from anabranch.machines.transactions.states import TransactionState
from anabranch.machines.transactions.transaction import NOT_STARTED, Transaction
from anabranch.server.coordinators.transactions import TransactionFilter

NOW_MS = 10_000


def known(
    state: TransactionState = TransactionState.ONGOING, producer_id: int = 7, started_ms: int = 4_000
) -> Transaction:
    return Transaction(producer_id, 0, -1, 60_000, state, frozenset(), 0, started_ms)


EVERYTHING = TransactionFilter(None, frozenset(), -1, lambda name: True)


@pytest.mark.parametrize(
    ("wanted", "transaction", "passes"),
    [
        (EVERYTHING, known(), True),
        (EVERYTHING, known(TransactionState.EMPTY, started_ms=NOT_STARTED), True),
        (EVERYTHING._replace(states={TransactionState.ONGOING}), known(), True),
        (EVERYTHING._replace(states={TransactionState.EMPTY}), known(), False),
        (EVERYTHING._replace(states=frozenset()), known(), False),  # only states that no transaction has were named
        (EVERYTHING._replace(producer_ids={7, 8}), known(), True),
        (EVERYTHING._replace(producer_ids={8}), known(), False),
        (EVERYTHING._replace(open_for_ms=6_000), known(), True),
        (EVERYTHING._replace(open_for_ms=6_001), known(), False),
        (EVERYTHING._replace(open_for_ms=0), known(started_ms=NOT_STARTED), False),
        (EVERYTHING._replace(matches=lambda name: name == "tx"), known(), True),
        (EVERYTHING._replace(matches=lambda name: name == "other"), known(), False),
        (EVERYTHING._replace(states={TransactionState.ONGOING}, producer_ids={8}), known(), False),
    ],
)
def test_a_transaction_passes_if_it_satisfies_every_filter(
    wanted: TransactionFilter, transaction: Transaction, passes: bool
) -> None:
    assert wanted.passes("tx", transaction, NOW_MS) is passes
