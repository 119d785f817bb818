"""Long work on the event loop, done a few items at a time.

A step of the loop that depends on how much there is holds up everybody. What names many things is taken so many at a
time, and the other tasks of the loop have their turn in between; whatever was true before may have changed after it.

How many are few depends on the machine, and on what they are. So a turn ends with the time, too, by the clock of the
loop: where that stands still, as in a simulation, turns end where they did in the run before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

from anabranch.runtime.loop_steps import timed

T = TypeVar("T")
FEW = 4
"""Items at a time where a small file may be written for each, which takes 0.2 to 0.6 ms."""
TURN_S = 0.002
"""How long a turn lasts before no further item is taken."""


def turn_end() -> float:
    """When a turn that begins now is over, by the clock of the loop."""
    return asyncio.get_running_loop().time() + TURN_S


async def in_turns(items: Iterable[T], at_a_time: int = FEW) -> AsyncIterator[T]:
    """Yield items; other work has its turn after each `at_a_time` of them, and when they have taken `TURN_S`."""
    now, over = asyncio.get_running_loop().time, turn_end()
    for place, item in enumerate(items, 1):
        yield item
        if place % at_a_time == 0 or now() >= over:
            await asyncio.sleep(0)
            over = turn_end()


def spent_in_parts(items: list[T], at_a_time: int) -> Iterator[list[T]]:
    """Yield the items of a list, the last ones first, and drop them from it: each part is freed with its turn."""
    while items:
        part = items[-at_a_time:]
        del items[-at_a_time:]
        yield part


class KeyedTurns:
    """One at a time of each key, in the order in which they come: of a line, no key takes more than one place."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, asyncio.Lock] = {}
        self._counts: dict[Hashable, int] = {}

    @asynccontextmanager
    async def taken(self, key: Hashable) -> AsyncIterator[None]:
        """Wait until no other of this key has the turn, and have it meanwhile."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._counts[key] = self._counts.get(key, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key], self._locks[key]

    def __len__(self) -> int:
        """The keys that have a turn or wait for one."""
        return len(self._locks)


class Pace:
    """So many items in a turn of the loop, of all who do some; in the order in which they come."""

    def __init__(self, most: int) -> None:
        """`most`: the items of a turn; nobody is to take more at once."""
        self._most = most
        self._room = most
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        """Wait until so many items may be done in this turn of the loop."""
        if self._room >= count and not self._line:
            self._admit(count)
            return
        turn = asyncio.get_running_loop().create_future()
        self._line.append((count, turn))
        await turn

    def _admit(self, count: int) -> None:
        assert count <= self._room, (count, self._most)
        if self._room == self._most:
            loop = asyncio.get_running_loop()
            loop.call_soon(timed(loop, "pace", self._renew))
        self._room -= count

    def _renew(self) -> None:
        """Let those go on that have room in the next turn."""
        self._room = self._most
        while self._line and self._line[0][0] <= self._room:
            count, turn = self._line.popleft()
            if not turn.done():  # Or whoever waited is gone.
                self._admit(count)
                turn.set_result(None)
