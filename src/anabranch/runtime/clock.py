"""Time, given in: wall clock for timestamps and retention, monotonic clock for timeouts."""

from __future__ import annotations

import time


class Clock:
    """The operating system's clocks."""

    def now_ms(self) -> int:
        """Wall-clock milliseconds since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Milliseconds that never go back; of use only as a difference."""
        return time.monotonic_ns() // 1_000_000


class SteadyTime:
    """Wall-clock time that does not jump: the wall clock's when this was made, the monotonic clock's from then on."""

    __slots__ = ("_clock", "_offset_ms")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms = clock.now_ms() - clock.monotonic_ms()

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self._offset_ms + self._clock.monotonic_ms()
