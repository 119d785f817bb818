"""Time."""

from __future__ import annotations

import time

import pytest

from anabranch.runtime.clock import BELIEVED_AFTER_MS, JUMP_MIN_MS, Clock, PatientTime, SteadyTime

START_MS = 1_700_000_000_000


class SetClock(Clock):
    """Two clocks that a test sets."""

    wall_ms = START_MS
    elapsed_ms = 5_000

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_ms(self) -> int:
        return self.elapsed_ms

    def pass_by(self, ms: int) -> None:
        self.wall_ms += ms
        self.elapsed_ms += ms


def test_the_wall_clock_is_in_milliseconds_and_the_other_never_goes_back() -> None:
    clock = Clock()
    assert abs(clock.now_ms() - time.time() * 1000) < 5_000
    assert clock.monotonic_ms() <= clock.monotonic_ms()


def test_steady_time_does_not_follow_the_wall_clock_when_that_is_set() -> None:
    clock = SetClock()
    steady = SteadyTime(clock)
    assert steady.now_ms() == START_MS
    clock.wall_ms -= 3_600_000
    clock.elapsed_ms += 25
    assert steady.now_ms() == START_MS + 25


def test_patient_time_believes_a_clock_that_was_set_forward_when_it_has_stayed_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SetClock()
    patient = PatientTime(clock)
    clock.pass_by(1_000)
    assert patient.now_ms() == START_MS + 1_000
    clock.wall_ms += 10**9
    assert patient.now_ms() == START_MS + 1_000
    clock.pass_by(BELIEVED_AFTER_MS - 1)
    assert patient.now_ms() == START_MS + BELIEVED_AFTER_MS + 999
    assert len(caplog.records) == 1, "it is said once"
    clock.pass_by(1)
    assert patient.now_ms() == clock.wall_ms
    clock.pass_by(1)
    assert patient.now_ms() == clock.wall_ms


def test_patient_time_forgets_a_jump_that_was_taken_back_and_follows_drift() -> None:
    clock = SetClock()
    patient = PatientTime(clock)
    clock.wall_ms += 10**9
    assert patient.now_ms() == START_MS
    clock.pass_by(BELIEVED_AFTER_MS // 2)
    clock.wall_ms -= 10**9
    assert patient.now_ms() == clock.wall_ms
    clock.pass_by(BELIEVED_AFTER_MS // 2)
    clock.wall_ms += 10**9
    assert patient.now_ms() == clock.wall_ms - 10**9
    clock.wall_ms -= 2 * 10**9
    assert patient.now_ms() == clock.wall_ms, "a clock that was set back deletes nothing"
    clock.wall_ms += 10**9
    for _ in range(10):
        clock.wall_ms += JUMP_MIN_MS
        assert patient.now_ms() == clock.wall_ms
