"""The line of one shard: what is decided apart from the event loop, and what waits for it.

Some decisions look at 100,000 partitions, and take a second. They are made in a thread, one of a shard at a time, while
the loop goes on. The rules:
- the machine has one decision at a time, as ever: what comes while one is made apart waits, in the order in which it
  came, so that everything is decided, written and applied in that order;
- a decision that is small, and finds nobody in line, is made at once, without any of this;
- a timer that rang, and waits in line, is void when a decision before it has ordered another time for it, or none;
- whoever waits for a turn and is cancelled goes on waiting until it is over: what it asked for is in memory until then;
- the line is worked off for `STRETCH_MS` before other work of the loop has its turn: with one piece of work in each
  iteration of the loop, the line grows while more than that comes;
- of all shards only `APART_MAX` decide apart at a time, the others in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from anabranch.runtime.clock import Clock
from anabranch.runtime.collector import look_at_young

Work = Callable[[], Awaitable[Any]]
Found = TypeVar("Found")
APART_MAX = 2
"""Decisions that are made apart at a time, of all shards. More do no more work, as one thread has the interpreter at a
time, but each keeps the loop waiting for it, and takes a thread that other work needs. Beside eight shards that decide
about 40,000 partitions each a small request took 96 to 311 ms at the 99th percentile with six at a time, 48 with two.
"""
STRETCH_MS = 2
"""How long a line is worked off before other work of the loop has its turn."""


class _Blocks:
    """What has one turn together (`Turns.between`)."""

    def __init__(self) -> None:
        self.begins: list[asyncio.Future[None]] = []
        self.left = 0
        """Blocks that are not over, or have not begun."""
        self.ended: asyncio.Future[None] | None = None
        """None before their turn."""


class Turns:
    """The line of one shard; used within a running event loop only."""

    def __init__(self, name: str, clock: Clock) -> None:
        """`name`: of the shard."""
        self._name = name
        self._clock = clock
        self._line: deque[tuple[Work, asyncio.Future[Any]]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._rung: dict[Hashable, object] = {}
        """Timers that wait in line, each with the turn that it has."""
        self._blocks: _Blocks | None = None
        """Those at the end of the line."""

    def __len__(self) -> int:
        return len(self._line)

    @property
    def busy(self) -> bool:
        """Whether something is decided apart, or waits for that."""
        return self._working is not None

    def take(self, work: Work) -> asyncio.Future[Any]:
        """Have work done when everything before it is; a future of its reply, which may itself have to wait.

        Work whose future was cancelled is done all the same, nobody waits for its reply, and then the future ends.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Any] = loop.create_future()
        self._blocks = None
        self._line.append((work, turn))
        if self._working is None:
            self._working = loop.create_task(self._work_off(), name=f"turns of {self._name}")
        return loop.create_task(_reply(turn), name=f"turn of {self._name}")

    @asynccontextmanager
    async def between(self) -> AsyncIterator[None]:
        """A turn for a block, which awaits nothing: it waits until everything before it is done.

        Blocks that come one behind the other have their turn together: they change nothing for each other.
        """
        if not self.busy:
            yield
            return
        blocks = self._blocks
        if blocks is None:
            blocks = _Blocks()
            self.take(partial(self._begin, blocks))
            self._blocks = blocks
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        blocks.begins.append(begins)
        blocks.left += 1
        try:
            await begins
            yield
        finally:
            blocks.left -= 1
            if not blocks.left and blocks.ended is not None and not blocks.ended.done():
                blocks.ended.set_result(None)

    async def _begin(self, blocks: _Blocks) -> None:
        if self._blocks is blocks:
            self._blocks = None
        for begins in blocks.begins:
            if not begins.done():
                begins.set_result(None)
        if blocks.left:
            blocks.ended = asyncio.get_running_loop().create_future()
            await blocks.ended

    async def _work_off(self) -> None:
        turn: asyncio.Future[Any] | None = None
        began_ms = self._clock.monotonic_ms()
        try:
            while self._line:
                work, turn = self._line.popleft()
                try:
                    turn.set_result(await work())
                except Exception as error:
                    turn.set_exception(error)
                turn = None
                del work
                if self._clock.monotonic_ms() - began_ms >= STRETCH_MS:
                    await asyncio.sleep(0)
                    began_ms = self._clock.monotonic_ms()
        finally:
            self._working = None
            for left in [turn, *(turn for _, turn in self._line)]:  # The loop ends.
                if left is not None:
                    left.cancel()
            self._line.clear()

    # -- timers --------------------------------------------------------------------------------------------------------

    def rings(self, key: Hashable) -> object:
        """Note that a timer rang and waits in line; the mark of its turn."""
        mark = self._rung[key] = object()
        return mark

    def still_rings(self, key: Hashable, mark: object) -> bool:
        """Whether a timer whose turn has come has no other time, and rang no second time."""
        if self._rung.get(key) is not mark:
            return False
        del self._rung[key]
        return True

    def ordered(self, key: Hashable) -> None:
        """Void the turn of a timer that is set anew, or canceled."""
        if self._rung:
            self._rung.pop(key, None)


async def _reply(turn: asyncio.Future[Any]) -> Any:
    """The reply of a turn; where this is cancelled, its end is awaited all the same, and nobody waits for its reply."""
    try:
        reply = await asyncio.shield(turn)
    except asyncio.CancelledError:
        await asyncio.wait([turn])
        if not turn.cancelled() and turn.exception() is None and isinstance(reply := turn.result(), asyncio.Future):
            reply.cancel()
        raise
    finally:
        del turn  # Or what it failed with holds this frame, and the frame holds it.
    return await reply if isinstance(reply, asyncio.Future) else reply


async def in_thread(work: Callable[[], Found]) -> Found:
    """Do something in a thread."""

    def done() -> Found:
        try:
            return work()
        finally:
            look_at_young()

    return await asyncio.get_running_loop().run_in_executor(None, done)
