"""Time, given in: wall clock for timestamps and retention, monotonic clock for timeouts.

The wall clock is set by people and by other machines, also wrongly. Nothing that waits depends on it (`SteadyTime`),
and nothing is deleted for its sake at once (`PatientTime`).
"""

from __future__ import annotations

import time

from anabranch.runtime.events import EventLogger

events = EventLogger("clock")
# As CLOCK_MONOTONIC, and goes on while the machine sleeps: other machines do, and so does the wall clock.
_ELAPSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
JUMP_MIN_MS = 60_000
"""A wall clock that runs ahead by more has been set forward."""
BELIEVED_AFTER_MS = 3_600_000
"""How long a clock must have been ahead until what it says is old may be deleted."""


class Clock:
    """The operating system's clocks."""

    def now_ms(self) -> int:
        """Wall-clock milliseconds since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Milliseconds that never go back; of use only as a difference."""
        return time.clock_gettime_ns(_ELAPSED) // 1_000_000


class SteadyTime:
    """Wall-clock time that does not jump: the wall clock's when this was made, the monotonic clock's from then on."""

    __slots__ = ("_clock", "_offset_ms")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms = clock.now_ms() - clock.monotonic_ms()

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self._offset_ms + self._clock.monotonic_ms()


class PatientTime:
    """Wall-clock time for what deletes by age: a clock that was set forward is believed after BELIEVED_AFTER_MS.

    One that was set back is believed at once: it deletes nothing. Ask now and then, or drift is taken for a jump.
    """

    __slots__ = ("_clock", "_doubted_since_ms", "_offset_ms")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms = clock.now_ms() - clock.monotonic_ms()
        self._doubted_since_ms: int | None = None

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        wall_ms, elapsed_ms = self._clock.now_ms(), self._clock.monotonic_ms()
        ahead_ms = wall_ms - elapsed_ms - self._offset_ms
        if ahead_ms <= JUMP_MIN_MS:
            self._offset_ms += max(ahead_ms, 0)
            self._doubted_since_ms = None
            return wall_ms
        if self._doubted_since_ms is None:
            self._doubted_since_ms = elapsed_ms
            events.warning(
                "the clock was set forward: what it makes old is kept for now",
                ahead_s=ahead_ms // 1_000,
                believed_in_s=BELIEVED_AFTER_MS // 1_000,
            )
        if elapsed_ms - self._doubted_since_ms >= BELIEVED_AFTER_MS:
            self._offset_ms += ahead_ms
            self._doubted_since_ms = None
            return wall_ms
        return self._offset_ms + elapsed_ms
