"""Names by the time at which they are due, against the plain list of all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from anabranch.machines.transactions.schedule import STEPS, Schedule

AHEAD_MAX_MS = 50 * STEPS
STEP_MS = AHEAD_MAX_MS // STEPS


def test_what_is_due_is_found_a_step_late_at_the_most_and_nothing_early() -> None:
    chance = random.Random(7)
    schedule, due_at = Schedule(AHEAD_MAX_MS, AHEAD_MAX_MS), dict[str, int]()
    for now_ms in range(0, 4 * AHEAD_MAX_MS, AHEAD_MAX_MS // 40):
        for _ in range(30):
            name = f"n{chance.randrange(100)}"
            if chance.random() < 0.3:
                schedule.drop(name)
                due_at.pop(name, None)
            else:
                due_at[name] = now_ms + chance.randrange(AHEAD_MAX_MS)
                schedule.set(name, due_at[name])
        found = list(schedule.due(now_ms))
        assert len(found) == len(set(found))
        assert {name for name, due_ms in due_at.items() if due_ms <= now_ms - STEP_MS} <= set(found)
        assert all(due_at[name] <= now_ms for name in found)
        assert set(schedule) == set(due_at)
        assert len(schedule) == len(due_at)


def test_what_is_dropped_leaves_nothing_behind() -> None:
    schedule = Schedule(AHEAD_MAX_MS, AHEAD_MAX_MS)
    for due_ms in range(0, AHEAD_MAX_MS, STEP_MS):
        schedule.set("name", due_ms)
    schedule.drop("name")
    assert not schedule._names
    assert not schedule._steps
    assert not schedule._heap


def test_steps_are_of_a_millisecond_where_the_longest_time_is_short() -> None:
    schedule = Schedule(1, 1)
    schedule.set("name", 5)
    assert list(schedule.due(4)) == []
    assert list(schedule.due(5)) == ["name"]


def test_a_step_is_no_longer_than_a_name_may_be_late() -> None:
    schedule = Schedule(1_000 * STEPS, 10)
    schedule.set("name", 101)
    assert list(schedule.due(109)) == []
    assert list(schedule.due(110)) == ["name"]
    assert list(schedule.due(110)) == ["name"], "it is due until it is dropped"


def test_a_look_at_what_is_due_visits_no_step_that_is_not() -> None:
    looked_at: list[int] = []

    class Watched(dict[int, dict[str, None]]):
        def __getitem__(self, step: int) -> dict[str, None]:
            looked_at.append(step)
            return super().__getitem__(step)

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("a look at all steps")

    schedule = Schedule(AHEAD_MAX_MS, 1)
    for due_ms in range(1_000):
        schedule.set(f"n{due_ms}", due_ms)
    schedule.drop("n0")
    schedule._names = Watched(schedule._names)
    assert list(schedule.due(3)) == ["n1", "n2", "n3"]
    assert set(looked_at) <= {0, 1, 2, 3}
