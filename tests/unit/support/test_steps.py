"""Long steps of a broker: those that come each time are told from those that come by chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import cast

from tests.support.broker import BrokerProcess
from tests.support.steps import LONG_STEPS, TRIES, long_each_time


class Broker:
    """Has long steps as it is told, one time after the other."""

    def __init__(self, *times: str) -> None:
        """`times`: the works of which a step is long, a letter each."""
        self._times = iter(times)
        self._steps = Counter(a=7)
        self.done = 0

    def act(self) -> None:
        self.done += 1
        self._steps.update(next(self._times))

    def metrics(self) -> Mapping[str, float]:
        return {f"{LONG_STEPS}{work}": float(count) for work, count in self._steps.items()} | {"others": 1.0}


def found(*times: str) -> tuple[dict[str, float], set[str], int]:
    broker = Broker(*times)
    first, works = long_each_time(cast(BrokerProcess, broker), broker.act)
    strip = len(LONG_STEPS)
    return {name[strip:]: count for name, count in first.items()}, {name[strip:] for name in works}, broker.done


def test_what_has_no_long_step_is_done_once() -> None:
    assert found("") == ({}, set(), 1)


def test_a_step_that_is_long_each_time_is_found_also_beside_others() -> None:
    assert found(*["ab", "a", "bab", "a"][:TRIES]) == ({"a": 1, "b": 1}, {"a"}, TRIES)


def test_steps_of_different_works_are_long_by_chance() -> None:
    assert found("aab", "bc", "ca") == ({"a": 2, "b": 1}, set(), 3)
