"""The budget of a fetch: one batch at least, the limits of answer and partition, and when to wait no longer."""

from __future__ import annotations

import pytest

from anabranch.machines.partition.fetching import FetchBudget


def test_the_first_batch_fits_however_large() -> None:
    budget = FetchBudget(1, 100, 1_000)
    assert budget.room(50) == 50
    assert budget.take(5_000)
    assert budget.room(50) is None, "nothing more, not even one batch"
    assert not budget.take(1)
    assert budget.size == 5_000


def test_no_room_at_all_is_room_for_one_batch() -> None:
    budget = FetchBudget(0, 0, 1_000)
    assert budget.room(50) == 0
    assert budget.take(70)
    assert budget.room(50) is None


def test_a_partition_without_room_of_its_own_is_given_one_batch_only_if_it_is_the_first() -> None:
    budget = FetchBudget(0, 100, 1_000)
    assert budget.room(0) == 0
    assert budget.take(10)
    assert budget.room(0) is None


def test_later_batches_stay_within_the_limit() -> None:
    budget = FetchBudget(0, 100, 1_000)
    assert budget.take(60)
    assert budget.room(1_000) == 40
    assert not budget.take(41)
    assert budget.take(40)
    assert budget.room(1_000) is None


def test_the_brokers_limit_holds_for_what_a_request_wants_at_least_too() -> None:
    budget = FetchBudget(500, 1_000, 100)
    assert budget.room(1_000) == 100
    assert not budget.reached
    budget.take(100)
    assert budget.reached


def test_what_is_given_back_may_be_taken_again() -> None:
    budget = FetchBudget(0, 100, 1_000)
    budget.take(60)
    budget.take(30)
    budget.give_back(60)
    assert budget.room(1_000) == 70


@pytest.mark.parametrize(
    ("size_min", "taken", "reached"), [(0, 0, True), (1, 0, False), (10, 9, False), (10, 10, True)]
)
def test_a_fetch_waits_for_its_least_bytes(size_min: int, taken: int, reached: bool) -> None:
    budget = FetchBudget(size_min, 100, 1_000)
    budget.take(taken)
    assert budget.reached is reached


def test_what_is_urgent_does_not_wait() -> None:
    budget = FetchBudget(10, 100, 1_000)
    budget.urgent = True
    assert budget.reached


def test_negative_sizes_ask_for_nothing() -> None:
    budget = FetchBudget(-5, -7, 1_000)
    assert budget.reached
    assert budget.room(10) == 0
