"""Failures of the upkeep of logs, logged as changes: when the upkeep of a log begins to fail, and when it has ended.

A full disk fails each log at each interval, which says nothing new. Every failure counts in a metric; lines are
limited, as many logs begin to fail at once. A failure of another kind is a change, too.
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.base.errors import DecodeError
from anabranch.base.ids import TopicPartition
from anabranch.runtime.clock import Clock
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.metrics import Metrics
from anabranch.storage.interface import OfflineLogError

events = EventLogger("replicas")
LINES_INTERVAL_S, LINES_MAX = 10.0, 10
EXPECTED = (OSError, OfflineLogError, DecodeError)
"""Others are defects."""


class UpkeepFailures:
    """The logs whose retention or producer snapshot failed at the last attempt."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._count = metrics.counter(
            "anabranch_upkeep_failures_total", "Logs whose retention or producer snapshot failed."
        )
        self._clock = clock
        self._lines = EventLimit(LINES_INTERVAL_S, LINES_MAX)
        self._kinds: dict[TopicPartition, str] = {}

    def failed(self, name: TopicPartition, error: Exception) -> None:
        """The upkeep of a log has failed."""
        self._count.add()
        kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        if self._kinds.get(name) == kind:
            return
        self._kinds[name] = kind
        suppressed = self._lines.admit(self._clock.monotonic_ms() / 1000)
        if suppressed is None:
            return
        event = "retention or producer snapshot failed"
        if isinstance(error, EXPECTED):
            events.warning(event, partition=name, reason=error, suppressed=suppressed)
        else:
            events.error(event, partition=name, exception=error, suppressed=suppressed)

    def succeeded(self, name: TopicPartition) -> None:
        """The upkeep of a log has come to its end."""
        if self._kinds.pop(name, None) is not None:
            suppressed = self._lines.admit(self._clock.monotonic_ms() / 1000)
            if suppressed is not None:
                events.info("retention and producer snapshots go on", partition=name, suppressed=suppressed)

    def forget(self, is_gone: Callable[[TopicPartition], bool]) -> None:
        """Forget logs that have been removed."""
        self._kinds = {name: kind for name, kind in self._kinds.items() if not is_gone(name)}
