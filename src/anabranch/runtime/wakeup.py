"""A flag that tasks wait for, up to a time: an `asyncio.Event` with a timeout, at a fraction of the cost.

A driver waits after each of its steps, so a wait is one future and one timer: no scope, no cancellation, no exception.
"""

from __future__ import annotations

import asyncio


class Wakeup:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[asyncio.Future[bool]] = []

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and wake the tasks that wait for it."""
        self._is_set = True
        for waiter in self._waiters:
            _end(waiter, True)

    def clear(self) -> None:
        """Unset the flag."""
        self._is_set = False

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the flag is set; return whether that was within the time."""
        if self._is_set:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, _end, waiter, False)
        self._waiters.append(waiter)
        try:
            return await waiter
        finally:
            self._waiters.remove(waiter)
            if timer is not None:
                timer.cancel()


def _end(waiter: asyncio.Future[bool], is_set: bool) -> None:
    if not waiter.done():
        waiter.set_result(is_set)
