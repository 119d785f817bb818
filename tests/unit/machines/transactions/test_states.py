"""The table of a transactional id's states: total, and with Kafka's names."""

from __future__ import annotations

from itertools import product

import pytest

from anabranch.machines.transactions.states import NEXT, REFUSED, TransactionEvent, TransactionState


def test_every_event_in_every_state_is_decided_exactly_once() -> None:
    assert NEXT.keys() | REFUSED == set(product(TransactionState, TransactionEvent))
    assert NEXT.keys().isdisjoint(REFUSED)


def test_a_decision_is_never_revised() -> None:
    """PREPARE_COMMIT only becomes COMPLETE_COMMIT, PREPARE_ABORT only COMPLETE_ABORT."""
    after = {state: {to for (it, _), to in NEXT.items() if it is state} for state in TransactionState}
    assert after[TransactionState.PREPARE_COMMIT] == {TransactionState.COMPLETE_COMMIT}
    assert after[TransactionState.PREPARE_ABORT] == {TransactionState.COMPLETE_ABORT}
    assert after[TransactionState.DEAD] == set()


def test_only_an_open_transaction_can_be_decided() -> None:
    deciding = {before for (before, event) in NEXT if event in (TransactionEvent.COMMITTED, TransactionEvent.ABORTED)}
    assert deciding == {TransactionState.ONGOING}


@pytest.mark.parametrize(
    ("state", "title", "prepared"),
    [
        (TransactionState.EMPTY, "Empty", False),
        (TransactionState.PREPARE_COMMIT, "PrepareCommit", True),
        (TransactionState.PREPARE_ABORT, "PrepareAbort", True),
        (TransactionState.COMPLETE_ABORT, "CompleteAbort", False),
    ],
)
def test_titles_are_those_of_kafka(state: TransactionState, title: str, prepared: bool) -> None:
    assert (state.title, state.prepared) == (title, prepared)
