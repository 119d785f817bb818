"""The table of a transactional id's states: total, and with Kafka's names."""

from __future__ import annotations

from itertools import product

import pytest

from anabranch.machines.transactions.states import NEXT, REFUSED, Event, State


def test_every_event_in_every_state_is_decided_exactly_once() -> None:
    assert NEXT.keys() | REFUSED == set(product(State, Event))
    assert NEXT.keys().isdisjoint(REFUSED)


def test_a_decision_is_never_revised() -> None:
    """PREPARE_COMMIT only becomes COMPLETE_COMMIT, PREPARE_ABORT only COMPLETE_ABORT."""
    after = {state: {to for (it, _), to in NEXT.items() if it is state} for state in State}
    assert after[State.PREPARE_COMMIT] == {State.COMPLETE_COMMIT}
    assert after[State.PREPARE_ABORT] == {State.COMPLETE_ABORT}
    assert after[State.DEAD] == set()


def test_only_an_open_transaction_can_be_decided() -> None:
    deciding = {before for (before, event) in NEXT if event in (Event.COMMITTED, Event.ABORTED)}
    assert deciding == {State.ONGOING}


@pytest.mark.parametrize(
    ("state", "title", "prepared"),
    [
        (State.EMPTY, "Empty", False),
        (State.PREPARE_COMMIT, "PrepareCommit", True),
        (State.PREPARE_ABORT, "PrepareAbort", True),
        (State.COMPLETE_ABORT, "CompleteAbort", False),
    ],
)
def test_titles_are_those_of_kafka(state: State, title: str, prepared: bool) -> None:
    assert (state.title, state.prepared) == (title, prepared)
