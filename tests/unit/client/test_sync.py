from __future__ import annotations

from threading import Thread

import pytest

from anabranch.client.sync import Outcome, _News


def test_an_outcome_is_told_to_who_waits_and_who_asked_to_be_called() -> None:
    outcome: Outcome[int] = Outcome(_News())
    called: list[Outcome[int]] = []
    outcome.add_done_callback(called.append)
    with pytest.raises(TimeoutError):
        outcome.result(0.01)
    thread = Thread(target=outcome.set_result, args=(7,))
    thread.start()
    assert outcome.result(10) == 7
    thread.join()
    outcome.add_done_callback(called.append)
    assert called == [outcome, outcome]


def test_an_error_is_raised_for_who_waits() -> None:
    outcome: Outcome[int] = Outcome(_News())
    outcome.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        outcome.result()


def test_no_callback_is_lost_or_called_twice_when_the_outcome_comes_meanwhile() -> None:
    for _ in range(2_000):
        outcome: Outcome[int] = Outcome(_News())
        called: list[Outcome[int]] = []
        thread = Thread(target=outcome.set_result, args=(1,))
        thread.start()
        outcome.add_done_callback(called.append)
        thread.join()
        assert called == [outcome]
