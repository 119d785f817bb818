"""Whether the steps of a broker's event loop are short: 10 ms of processor time, whatever else the machine does.

A step takes longer where others use the machine: caches are cold, and a core is shared. So what is measured is done a
few times, and a step that is long each time is too long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from tests.support.broker import BrokerProcess

LONG_STEPS = "anabranch_loop_long_steps_total"
"""The metric that counts steps of more than 10 ms of processor time, by their work."""
TRIES = 4
Answer = TypeVar("Answer")


def long_steps(broker: BrokerProcess) -> Mapping[str, float]:
    """How many steps were too long so far, by their work."""
    return {name: count for name, count in broker.metrics().items() if name.startswith(LONG_STEPS)}


def long_each_time(
    broker: BrokerProcess, act: Callable[[], object], tries: int = TRIES
) -> tuple[Mapping[str, float], Collection[str]]:
    """Have a broker do something, and again while steps of the same work were too long each time.

    Return how many there were at the first time, by their work, and the works of which one was too long each time.
    """
    first: dict[str, float] = {}
    works: set[str] = set()
    for attempt in range(tries):
        before = long_steps(broker)
        act()
        found = {name: now - before.get(name, 0) for name, now in long_steps(broker).items()}
        found = {name: count for name, count in found.items() if count}
        if not attempt:
            first, works = found, {*found}
        works &= found.keys()
        if not works:
            break
    return first, works


def in_short_steps(
    broker: BrokerProcess, act: Callable[[], Answer], tries: int = TRIES, works: Collection[str] | None = None
) -> Answer:
    """Have a broker do something, again if a step of it was too long; AssertionError where one is each time.

    `works`: whose steps are meant; None for all.
    """
    meant = None if works is None else {f'{LONG_STEPS}{{work="{work}"}}' for work in works}
    found: list[Mapping[str, float]] = []
    for _ in range(tries):
        before = long_steps(broker)
        answer = act()
        after = long_steps(broker).items()
        found.append({name: now - before.get(name, 0) for name, now in after if meant is None or name in meant})
        if not any(found[-1].values()):
            return answer
    raise AssertionError(f"steps of more than 10 ms of processor time in each of {tries} tries: {found}")
