"""Keyed timers over an event loop and a clock, for every shell that runs a machine.

A timer has a key and a time; `due` is called with the key once the clock has reached the time. The rules:
- one timer a key: setting a key again replaces its time;
- a timer that is moved later keeps its place in the loop and is scheduled anew when the loop wakes it, because the
  sessions of group members are prolonged far more often than they end;
- a timer is forgotten before `due` is called, so that `due` may set the same key again;
- the loop only wakes: whether a timer is due is read from the clock;
- a loop that has stood still (a stopped process, a paused machine) finds timers due and, unread, what others sent in
  time to move them: the first of them that comes late gives all of them, once, `AFTER_STANDSTILL_S` more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from anabranch.runtime.loop_steps import name_of, timed

STANDSTILL_S = 0.5
"""A loop that wakes a timer so late stood still."""
AFTER_STANDSTILL_S = 1.0
"""How long the loop reads what has arrived before any timer is due again."""


class _Timer:
    __slots__ = ("at_ms", "handle", "is_spared")

    def __init__(self, at_ms: int, handle: asyncio.TimerHandle) -> None:
        self.at_ms = at_ms
        self.handle = handle
        self.is_spared = False
        """Whether it has waited out a standstill since it was set."""


class Timers:
    """Timers of one owner; used within a running event loop only."""

    __slots__ = ("_due", "_now_ms", "_spared_until", "_timers")

    def __init__(self, now_ms: Callable[[], int], due: Callable[[Hashable], None]) -> None:
        """`now_ms` is the clock of the times given to `set`; it should not jump (`SteadyTime`)."""
        self._now_ms = now_ms
        self._due = due
        self._timers: dict[Hashable, _Timer] = {}
        self._spared_until = float("-inf")
        """Until then, by the loop's time, timers wait for what arrived while the loop stood still."""

    def __len__(self) -> int:
        """Count the timers that are set."""
        return len(self._timers)

    def __contains__(self, key: Hashable) -> bool:
        """Whether a timer is set."""
        return key in self._timers

    def set(self, key: Hashable, at_ms: int) -> None:
        """Call `due(key)` at `at_ms`, and not at any time set for this key before."""
        timer = self._timers.get(key)
        if timer is None:
            self._timers[key] = _Timer(at_ms, self._schedule(key, at_ms))
            return
        moved_later = at_ms >= timer.at_ms
        timer.at_ms = at_ms
        timer.is_spared = False
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
        return self._call_later(key, max(0, at_ms - self._now_ms()) / 1000)

    def _call_later(self, key: Hashable, delay_s: float) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(delay_s, timed(loop, name_of(self._due), self._wake), key, loop.time() + delay_s)

    def _wake(self, key: Hashable, expected: float) -> None:
        """Look at a timer; `expected` is the loop's time when it should have been."""
        timer = self._timers[key]
        if timer.at_ms > self._now_ms():
            timer.handle = self._schedule(key, timer.at_ms)
            return
        if not timer.is_spared and self._spares(expected):
            timer.is_spared = True
            timer.handle = self._call_later(key, self._spared_until - asyncio.get_running_loop().time())
            return
        del self._timers[key]
        self._due(key)

    def _spares(self, expected: float) -> bool:
        """Whether a timer must wait, because the loop stood still until a moment ago."""
        now = asyncio.get_running_loop().time()
        if now - expected > STANDSTILL_S:
            self._spared_until = now + AFTER_STANDSTILL_S
        return now < self._spared_until
