"""Failures of the upkeep of logs, logged as changes: when work on a log begins to fail, and when it succeeds again.

A full disk fails each log at each interval, which says nothing new. Every failure counts in a metric; lines are
limited, as many logs begin to fail at once. A failure of another kind is a change, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from anabranch.base.errors import DecodeError
from anabranch.base.ids import TopicPartition
from anabranch.runtime.clock import Clock
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.metrics import Counter, Metrics
from anabranch.storage.interface import OfflineLogError

LINES_INTERVAL_S, LINES_MAX = 10.0, 10
EXPECTED = (OSError, OfflineLogError, DecodeError)
"""Others are defects."""


Name = TypeVar("Name", bound=Hashable)


def of_retention(metrics: Metrics, clock: Clock, events: EventLogger) -> UpkeepFailures[TopicPartition]:
    """The failures of retention, and of snapshots of producers."""
    return UpkeepFailures(
        metrics.counter("anabranch_upkeep_failures_total", "Logs whose retention or producer snapshot failed."),
        clock,
        events,
        on_failure="retention or producer snapshot failed",
        on_success="retention and producer snapshots go on",
    )


class UpkeepFailures(Generic[Name]):
    """The logs on which some work failed at the last attempt."""

    def __init__(self, count: Counter, clock: Clock, events: EventLogger, *, on_failure: str, on_success: str) -> None:
        """`on_failure` is the event when work on a log begins to fail, `on_success` when it succeeds after that."""
        self._count = count
        self._clock = clock
        self._events = events
        self._on_failure = on_failure
        self._on_success = on_success
        self._lines = EventLimit(LINES_INTERVAL_S, LINES_MAX)
        self._kinds: dict[Name, str] = {}

    def failed(self, name: Name, error: Exception) -> None:
        """The upkeep of a log has failed."""
        self._count.add()
        kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        if self._kinds.get(name) == kind:
            return
        self._kinds[name] = kind
        suppressed = self._lines.admit(self._clock.monotonic_ms() / 1000)
        if suppressed is None:
            return
        if isinstance(error, EXPECTED):
            self._events.warning(self._on_failure, partition=name, reason=error, suppressed=suppressed)
        else:
            self._events.error(self._on_failure, partition=name, exception=error, suppressed=suppressed)

    def succeeded(self, name: Name) -> None:
        """The upkeep of a log has come to its end."""
        if self._kinds.pop(name, None) is not None:
            suppressed = self._lines.admit(self._clock.monotonic_ms() / 1000)
            if suppressed is not None:
                self._events.info(self._on_success, partition=name, suppressed=suppressed)

    def forget(self, is_gone: Callable[[Name], bool]) -> None:
        """Forget logs that have been removed."""
        self._kinds = {name: kind for name, kind in self._kinds.items() if not is_gone(name)}
