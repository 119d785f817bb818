"""Time."""

from __future__ import annotations

import time

from anabranch.runtime.clock import Clock


def test_the_wall_clock_is_in_milliseconds_and_the_other_never_goes_back() -> None:
    clock = Clock()
    assert abs(clock.now_ms() - time.time() * 1000) < 5_000
    assert clock.monotonic_ms() <= clock.monotonic_ms()
