"""The space that clients' records leave free on the disk: the broker's own writes have room when records fill it.

Committed offsets, ends of transactions, changes of topics, checkpoints: on a disk that records have filled to the last
byte all of them fail, and with them whatever would free space: retention, DeleteRecords, DeleteTopics, compaction. So
records are refused before that. Other programs may fill the disk further; a start then has the reserve
(`storage.directory`), and so have deletions: they write before they free.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from anabranch.base.limits import DISK_FREE_SIZE_MIN
from anabranch.runtime.clock import Clock
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.metrics import Metrics
from anabranch.storage.directory import DataDirectory

events = EventLogger("disk")
LOOK_INTERVAL_MS = 100
"""What other programs write is noticed that late; what is appended counts at once."""
LINES_INTERVAL_S, LINES_MAX = 10.0, 4
"""Lines of the log, at most so many in the interval: temporary files come and go at the bound."""


class DiskSpace:
    """Tells whether the file system has room for records."""

    def __init__(
        self, free: Callable[[], int], clock: Clock, metrics: Metrics, *, free_min: int = DISK_FREE_SIZE_MIN
    ) -> None:
        """`free` asks the file system for its free bytes, `free_min` of which records do not take; OSError."""
        self._free = free
        self._clock = clock
        self._free_min = free_min
        self._left = 0
        """Bytes for records, by the last look and what was appended since."""
        self._look_due_ms: int | None = None
        self._refusing = False
        self._lines = EventLimit(LINES_INTERVAL_S, LINES_MAX)
        self._refused = metrics.counter(
            "anabranch_disk_refused_batches_total", "Batches refused for want of space on the disk."
        )
        metrics.gauge("anabranch_disk_free_bytes", "Free bytes of the disk.", free)

    def refusal(self, size: int, now_ms: int) -> str | None:
        """Count a batch that is about to be appended; a sentence if there is no room for it.

        `now_ms` is of any clock that never goes back, the same for all calls.
        """
        self._left -= size
        if self._look_due_ms is None or now_ms >= self._look_due_ms or (self._left < 0 and not self._refusing):
            self._look_due_ms = now_ms + LOOK_INTERVAL_MS
            self._look(size)
        if self._left >= 0:
            return None
        self._left += size  # For a smaller one there may be room.
        self._refused.add()
        return f"The disk is nearly full: log.dirs.free.bytes.min keeps {self._free_min} bytes free."

    def _look(self, size: int) -> None:
        try:
            free = self._free()
        except OSError:  # The append itself will tell what is wrong.
            free = self._free_min + size
        self._left = free - self._free_min - size
        if (self._left < 0) != self._refusing:
            self._refusing = self._left < 0
            if self._lines.admit(self._clock.monotonic_ms() / 1000) is None:
                return
            if self._refusing:
                events.error("records refused: the disk is nearly full", free=free, free_min=self._free_min)
            else:
                events.info("records taken again: the disk has space", free=free)


class DeletionRoom:
    """Gives deletions the reserve where the disk is full, and makes it again of what they have freed."""

    def __init__(self, directory: DataDirectory, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._directory = directory
        self._in_thread = in_thread
        self._deletions = 0
        """Those that have the reserve."""
        self._failing: set[str] = set()
        """What failed at the last attempt: it is logged when that begins."""

    @asynccontextmanager
    async def taken(self, *, needed: bool = True) -> AsyncIterator[None]:
        """Have room meanwhile, if that is needed and can be had."""
        if not needed or not self._is_full():
            yield
            return
        self._deletions += 1
        try:
            await self._try(self._directory.make_room, "reserve not given up")
            yield
        finally:
            self._deletions -= 1
            await self.keep_reserve()

    async def keep_reserve(self) -> None:
        """Reserve space again, as far as there is any, and no deletion uses it."""
        if not self._deletions:
            await self._try(self._directory.keep_reserve, "space for a start on a full disk not reserved")

    def _is_full(self) -> bool:
        try:
            return self._directory.is_full
        except OSError:  # The deletion itself will tell what is wrong.
            return False

    async def _try(self, work: Callable[[], None], failure: str) -> None:
        try:
            await self._in_thread(work)
            self._failing.discard(failure)
        except OSError as error:
            if failure not in self._failing:
                events.warning(failure, reason=error)
            self._failing.add(failure)
