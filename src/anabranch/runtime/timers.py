"""Keyed timers over an event loop and a clock, for every shell that runs a machine.

A timer has a key and a time; `due` is called with the key once the clock has reached the time. The rules:
- one timer a key: setting a key again replaces its time;
- a timer that is moved later keeps its place in the loop and is scheduled anew when the loop wakes it, because the
  sessions of group members are prolonged far more often than they end;
- a timer is forgotten before `due` is called, so that `due` may set the same key again;
- the loop only wakes: whether a timer is due is read from the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from anabranch.runtime.loop_steps import name_of, timed


class _Timer:
    __slots__ = ("at_ms", "handle")

    def __init__(self, at_ms: int, handle: asyncio.TimerHandle) -> None:
        self.at_ms = at_ms
        self.handle = handle


class Timers:
    """Timers of one owner; used within a running event loop only."""

    __slots__ = ("_due", "_now_ms", "_timers")

    def __init__(self, now_ms: Callable[[], int], due: Callable[[Hashable], None]) -> None:
        """`now_ms` is the clock of the times given to `set`; it should not jump (`SteadyTime`)."""
        self._now_ms = now_ms
        self._due = due
        self._timers: dict[Hashable, _Timer] = {}

    def __len__(self) -> int:
        """Count the timers that are set."""
        return len(self._timers)

    def set(self, key: Hashable, at_ms: int) -> None:
        """Call `due(key)` at `at_ms`, and not at any time set for this key before."""
        timer = self._timers.get(key)
        if timer is None:
            self._timers[key] = _Timer(at_ms, self._schedule(key, at_ms))
            return
        moved_later = at_ms >= timer.at_ms
        timer.at_ms = at_ms
        if not moved_later:
            timer.handle.cancel()
            timer.handle = self._schedule(key, at_ms)

    def cancel(self, key: Hashable) -> None:
        """Forget the timer of `key`, if one is set."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.handle.cancel()

    def cancel_all(self) -> None:
        """Forget every timer."""
        for timer in self._timers.values():
            timer.handle.cancel()
        self._timers.clear()

    def _schedule(self, key: Hashable, at_ms: int) -> asyncio.TimerHandle:
        delay_s = max(0, at_ms - self._now_ms()) / 1000
        loop = asyncio.get_running_loop()
        return loop.call_later(delay_s, timed(loop, name_of(self._due), self._wake), key)

    def _wake(self, key: Hashable) -> None:
        timer = self._timers[key]
        if timer.at_ms > self._now_ms():
            timer.handle = self._schedule(key, timer.at_ms)
            return
        del self._timers[key]
        self._due(key)
