"""The books of slices of one leader: which member of which group holds what of a partition (ADR 0053).

`machines.partition.slices` decides. Books are in memory alone: a new leader, or this broker after a restart, begins
with empty ones. They are dropped when no member has a session any more. Members that are gone, and slices that were
held for too long, are noticed at each claim, and of groups that claim no more by `sweep`, from time to time.

All books have one budget of memory: without room a claim gets nothing, as from a full book.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import ApiError
from anabranch.base.limits import SLICES_SIZE_MAX
from anabranch.machines.partition.slices import Slice, SliceRoom, Slices, SliceSettings
from anabranch.runtime.clock import Clock
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.slice_waits import SliceWaits

events = EventLogger("slices")
LINES_INTERVAL_S = 60.0
"""The log has one line about sweeps that fail in this interval."""
WORK_AT_A_TIME = 500
"""Slices that `sweep` frees before other work has its turn, and ten times the books that it looks at: 2 ms."""
SWEEP_INTERVAL_MS = 1_000

Live = Callable[[str], Callable[[str], bool]]
"""Gives for a group the function that tells whether a member is in it; ApiError while that is not known."""


class Book(NamedTuple):
    """A group in a partition, under one leader epoch."""

    group_id: str
    topic_id: UUID
    partition: int
    leader_epoch: int


class SliceBooks:
    """The slices of all groups in all partitions of this leader."""

    def __init__(
        self, live: Live, clock: Clock, metrics: Metrics, *, hold_ms: int, size_max: int = SLICES_SIZE_MAX
    ) -> None:
        """`size_max`: bytes of memory for all books."""
        self._room = SliceRoom(size_max)
        self._live = live
        self._clock = clock
        self._settings = SliceSettings(hold_ms=hold_ms)
        self._books: dict[Book, Slices] = {}
        self.waits = SliceWaits()
        """The fetches that wait for slices."""
        self.claims = metrics.counter("anabranch_slices_claimed_total", "Slices of partitions that members got.")
        self._failures = metrics.counter("anabranch_slices_sweep_failures_total", "Books that a sweep left out.")
        self._lines = EventLimit(LINES_INTERVAL_S)
        self._again_of_dropped = 0
        gauge = metrics.gauge
        metrics.total(
            "anabranch_slices_held", "Slices that members hold.", lambda: map(len, list(self._books.values()))
        )
        gauge("anabranch_slices_bytes", "Memory for slices and the sessions of members.", lambda: self._room.size)
        gauge("anabranch_slices_offered_again", "Slices that were not committed by who had them.", self._offered_again)

    @property
    def now_ms(self) -> int:
        """The clock of the books, in ms."""
        return self._clock.monotonic_ms()

    def __len__(self) -> int:
        return len(self._books)

    def of(self, group_id: str, partition: Partition) -> Slices:
        """The slices of a group in a partition, made if there are none."""
        key = self._key(group_id, partition)
        found = self._books.get(key)
        if found is None:
            if partition.leadership is None:  # A partition that was removed meanwhile is not kept in mind.
                return Slices(self._settings)
            found = self._books[key] = Slices(self._settings, self._room)
        return found

    async def sweep(self) -> None:
        """Free what is held by nobody any more, in all books, and drop those in which nothing is.

        A defect in a book is logged, and leaves out that book alone.
        """
        work = 0
        for key in [*self._books]:
            slices = self._books.get(key)
            if slices is None:
                continue
            more = True
            while more:
                try:
                    more = slices.sweep(self._live(key.group_id), self.now_ms)
                except ApiError:  # The coordinator reads its log.
                    more = False
                except Exception as error:  # A defect, which concerns this book alone.
                    more = False
                    self._failed(key, error)
                work += 10 + slices.work
                if work >= WORK_AT_A_TIME:
                    work = 0
                    await asyncio.sleep(0)
            if slices.is_idle and self._books.get(key) is slices:
                del self._books[key]
                self._again_of_dropped += slices.offered_again

    def _failed(self, book: Book, error: Exception) -> None:
        self._failures.add()
        suppressed = self._lines.admit(self.now_ms / 1000)
        if suppressed is not None:
            name = f"{book.topic_id}-{book.partition}"
            events.error(
                "slices not swept", group=book.group_id, partition=name, exception=error, suppressed=suppressed
            )

    def _offered_again(self) -> int:
        return self._again_of_dropped + sum(slices.offered_again for slices in self._books.values())

    def held(self, group_id: str, partition: Partition) -> Sequence[Slice]:
        """The slices that members of a group hold of a partition, in any order."""
        slices = self._books.get(self._key(group_id, partition))
        return () if slices is None else slices.held()

    def _key(self, group_id: str, partition: Partition) -> Book:
        return Book(group_id, partition.topic_id, partition.name.partition, partition.leader_epoch)

    def holders_of(
        self, group_id: str, partition: Partition, member_id: str, ranges: Sequence[tuple[int, int]]
    ) -> Iterable[Slice | None]:
        """As `Slices.holders_of`, of a group in a partition. ApiError as `live`."""
        slices = self._books.get(self._key(group_id, partition))
        if slices is None:
            return [None] * len(ranges)
        return slices.holders_of(member_id, ranges, self._live(group_id), self.now_ms)

    def forget(self, topic_id: UUID, partitions: Collection[int]) -> None:
        """Drop what is known of partitions that were removed."""
        for key in [key for key in self._books if key.topic_id == topic_id and key.partition in partitions]:
            dropped = self._books.pop(key)
            self._again_of_dropped += dropped.offered_again
            dropped.clear()
