"""Upkeep that fails says so when that begins, when it fails in another way, and when it has ended; it always counts."""

from __future__ import annotations

import errno

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.runtime.events import EventLogger
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions.upkeep_failures import LINES_INTERVAL_S, LINES_MAX, UpkeepFailures
from tests.support.replicas import SetClock

FULL, IO = OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")
NAMES = [TopicPartition("t", number) for number in range(LINES_MAX + 5)]


class Rig:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        self._caplog = caplog
        self.metrics, self.clock = Metrics(), SetClock()
        self.counter = self.metrics.counter("failures", "")
        self.failures: UpkeepFailures[TopicPartition] = UpkeepFailures(
            self.counter, self.clock, EventLogger("upkeep"), on_failure="it fails", on_success="it goes on"
        )

    def said(self) -> list[str]:
        """The levels of the lines since the last call."""
        levels = [record.levelname for record in self._caplog.records]
        self._caplog.clear()
        return levels

    @property
    def count(self) -> float:
        return self.counter.value


@pytest.fixture
def rig(caplog: pytest.LogCaptureFixture) -> Rig:
    return Rig(caplog)


def test_a_log_whose_upkeep_goes_on_failing_is_named_once_and_again_when_it_succeeds(rig: Rig) -> None:
    for _ in range(3):
        rig.failures.failed(NAMES[0], FULL)
    assert (rig.said(), rig.count) == (["WARNING"], 3)
    for _ in range(2):
        rig.failures.succeeded(NAMES[0])
    assert rig.said() == ["INFO"]
    rig.failures.failed(NAMES[0], FULL)
    assert rig.said() == ["WARNING"]


def test_a_failure_of_another_kind_is_named_and_a_defect_is_an_error(rig: Rig) -> None:
    rig.failures.failed(NAMES[0], FULL)
    rig.failures.failed(NAMES[0], IO)
    rig.failures.failed(NAMES[0], KeyError("defect"))
    assert rig.said() == ["WARNING", "WARNING", "ERROR"]


def test_many_logs_that_fail_at_once_take_few_lines(rig: Rig) -> None:
    for name in NAMES:
        rig.failures.failed(name, FULL)
    assert (len(rig.said()), rig.count) == (LINES_MAX, len(NAMES))
    rig.clock.ms += int(LINES_INTERVAL_S * 1000)
    rig.failures.failed(TopicPartition("u", 0), FULL)
    assert rig.said() == ["WARNING"]


def test_a_log_that_was_removed_and_made_again_is_named_again(rig: Rig) -> None:
    rig.failures.failed(NAMES[0], FULL)
    rig.failures.failed(NAMES[1], FULL)
    rig.said()
    rig.failures.forget(lambda name: name == NAMES[0])
    rig.failures.failed(NAMES[0], FULL)
    rig.failures.failed(NAMES[1], FULL)
    assert rig.said() == ["WARNING"]
