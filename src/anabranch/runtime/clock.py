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
