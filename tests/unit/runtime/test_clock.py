"""Time."""

from __future__ import annotations

import time

from anabranch.runtime.clock import Clock, SteadyTime


def test_the_wall_clock_is_in_milliseconds_and_the_other_never_goes_back() -> None:
    clock = Clock()
    assert abs(clock.now_ms() - time.time() * 1000) < 5_000
    assert clock.monotonic_ms() <= clock.monotonic_ms()


def test_steady_time_does_not_follow_the_wall_clock_when_that_is_set() -> None:
    class SetClock(Clock):
        wall_ms = 1_700_000_000_000
        elapsed_ms = 5_000

        def now_ms(self) -> int:
            return self.wall_ms

        def monotonic_ms(self) -> int:
            return self.elapsed_ms

    clock = SetClock()
    steady = SteadyTime(clock)
    assert steady.now_ms() == 1_700_000_000_000
    clock.wall_ms -= 3_600_000
    clock.elapsed_ms += 25
    assert steady.now_ms() == 1_700_000_000_025
