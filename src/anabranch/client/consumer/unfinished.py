"""The records of one consumer that its application has not finished, where it says of each when it is done.

For `acknowledgement.mode=explicit`, and for the parallel handler (`pool`). The rule: a record is handed out only when
all earlier records of its key in its partition are done, so all that is handed out may be worked on at the same time.
`machines.clients.processing.tracker` decides; here records come from the handout, and progress goes to the fetcher.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from typing import Protocol

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.handout import Handout
from anabranch.client.consumer.record import Record
from anabranch.client.settings import ConsumerSettings, taken
from anabranch.machines.clients.fetching import Deliverable, Fetcher
from anabranch.machines.clients.key_ranges import KeyRanges, has
from anabranch.machines.clients.processing import Entry, Ranges, Tracker, TrackerSettings

PLACED_MAX = 500
"""Keys that are hashed at a time."""
TAKEN_MAX = 500
"""Records taken at a time: a step of the loop stays short."""


class Owner(Protocol):
    """What carries out the work, if not the application by itself."""

    async def settle(self, partitions: Sequence[TopicPartition], partly: Container[TopicPartition] = ()) -> None:
        """Finish the records of partitions that run, within a time; start no others. `partly`: those that leave."""

    def lost(self, entries: Sequence[Entry]) -> None:
        """End the work on records that nobody counts any more."""


class Unfinished:
    """The taken records of one consumer."""

    def __init__(
        self,
        settings: ConsumerSettings,
        fetcher: Fetcher,
        handout: Handout,
        now_ms: Callable[[], int],
        deliverable: Callable[[], list[Deliverable]] | None = None,
    ) -> None:
        self.tracker = Tracker(taken(TrackerSettings, settings))
        self.owner: Owner | None = None
        self._fetcher = fetcher
        self._handout = handout
        self._deliverable = deliverable or fetcher.deliverable
        self._now_ms = now_ms
        self._leases = itertools.count(1)

    async def fill(self, records_max: int = TAKEN_MAX) -> bool:
        """Take at most `records_max` fetched records, as far as there is room; return whether there may be more."""
        self.retain(self._fetcher.assignment)
        parts = self._deliverable()
        self._follow()
        for part in parts:
            if not self._fetcher.is_next(part):
                continue
            if records_max <= 0:
                return True
            records_max -= await self._handout.take_some(part, self.tracker, records_max, self._leases) or 0
        return records_max <= 0

    def hand_out(self, records_max: int) -> list[Record]:
        """Return records that may be worked on at the same time."""
        found: list[Record] = []
        now_ms = self._now_ms()
        while len(found) < records_max:
            entry = self.tracker.next(now_ms)
            if entry is None:
                break
            found.append(record_of(entry))
        return found

    def note_progress(self) -> None:
        """Tell the fetcher how far partitions are processed: gates and commits depend on it."""
        self._follow()
        for tp in self.tracker.moved():
            if tp in self._fetcher.assignment and (position := self._fetcher.position(tp)) is not None:
                self._fetcher.finished(tp, self.tracker.stable(tp, position))

    def _follow(self) -> None:
        """Follow positions that were moved over fetches in which nothing was wanted."""
        for tp in self.tracker.partitions:
            if self._fetcher.asks_for_some(tp) and (position := self._fetcher.position(tp)) is not None:
                self.tracker.stands(tp, position)

    def consumed(self) -> dict[TopicPartition, int]:
        """Return the stable offset of every partition with a position: all records before are done."""
        self.note_progress()
        return {tp: self.tracker.stable(tp, position) for tp, position in self._fetcher.positions().items()}

    def retain(self, assignment: Iterable[TopicPartition]) -> None:
        """Forget partitions that are not assigned any more."""
        self.forget(self.tracker.partitions - set(assignment))

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget the records of these partitions; what the application has of them counts for nothing."""
        for tp in partitions:
            running = self.tracker.forget(tp)
            self.tracker.release(tp)
            if self.owner is not None and running:
                self.owner.lost(running)

    async def part(self, tp: TopicPartition, keys: KeyRanges) -> None:
        """Let no record run any more whose key lies in ranges that go to others."""
        leaving: list[Entry] = []
        for number, entry in enumerate(self.tracker.entries(tp), 1):
            if number % PLACED_MAX == 0:
                await asyncio.sleep(0)
            place = self._fetcher.place(tp, entry.key, entry.offset)
            if place is None or has(keys, place):
                leaving.append(entry)
        self.tracker.part(tp, leaving)

    def narrowed(self, tp: TopicPartition) -> None:
        """Forget the records of keys that went to others."""
        running = self.tracker.part_with(tp)
        if self.owner is not None and running:
            self.owner.lost(running)
        self.stands(tp)

    def stands(self, tp: TopicPartition) -> None:
        """Follow the position of a shared partition, without forgetting what was taken of it."""
        if tp in self._fetcher.assignment and (position := self._fetcher.position(tp)) is not None:
            self.tracker.stands(tp, position)
            self._fetcher.finished(tp, self.tracker.stable(tp, position))

    def wind_up(self) -> None:
        """Leave the partitions as they are without acknowledgements: what is not done is handed out again."""
        for tp, position in self._fetcher.positions().items():
            ranges: Ranges = self.tracker.finished(tp, position)
            stable = self.tracker.stable(tp, position)
            if stable != position:
                self._handout.skip_too(tp, ranges)
                self._fetcher.restart(tp, stable)
        self.forget(list(self.tracker.partitions))


def record_of(entry: Entry) -> Record:
    """Return the record of an entry, as it is handed out now."""
    record: Record = entry.record
    return record if entry.deliveries == 1 else record._replace(delivery_count=entry.deliveries)


Handler = Callable[[Record], Awaitable[object]] | Callable[[Record], object]
