"""Names by the time at which they are due, against the plain list of all of them."""

from __future__ import annotations

import random

from anabranch.machines.transactions.schedule import STEPS, Schedule

AHEAD_MAX_MS = 50 * STEPS
STEP_MS = AHEAD_MAX_MS // STEPS


def test_what_is_due_is_found_a_step_late_at_the_most_and_nothing_early() -> None:
    chance = random.Random(7)
    schedule, due_at = Schedule(AHEAD_MAX_MS), dict[str, int]()
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
    schedule = Schedule(AHEAD_MAX_MS)
    for due_ms in range(0, AHEAD_MAX_MS, STEP_MS):
        schedule.set("name", due_ms)
    schedule.drop("name")
    assert not schedule._names
    assert not schedule._steps


def test_steps_are_of_a_millisecond_where_the_longest_time_is_short() -> None:
    schedule = Schedule(1)
    schedule.set("name", 5)
    assert list(schedule.due(4)) == []
    assert list(schedule.due(5)) == ["name"]
