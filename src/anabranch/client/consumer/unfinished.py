"""The records of one consumer that its application has not finished, where it says of each when it is done.

For `acknowledgement.mode=explicit`, and for the parallel handler (`pool`). The rule: a record is handed out only when
all earlier records of its key in its partition are done, so all that is handed out may be worked on at the same time.
`machines.clients.processing.tracker` decides; here records come from the handout, and progress goes to the fetcher.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.handout import Handout
from anabranch.client.consumer.record import Record
from anabranch.client.settings import ConsumerSettings, taken
from anabranch.machines.clients.fetching import Deliverable, Fetcher
from anabranch.machines.clients.processing import Entry, Ranges, Tracker, TrackerSettings

TAKEN_MAX = 500
"""Records taken at a time: a step of the loop stays short."""


class Owner(Protocol):
    """What carries out the work, if not the application by itself."""

    async def settle(self, partitions: Sequence[TopicPartition]) -> None:
        """Finish the records of partitions that run, within a time; start no others."""

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
        for part in self._deliverable():
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
        for tp in self.tracker.moved():
            if tp in self._fetcher.assignment and (position := self._fetcher.position(tp)) is not None:
                self._fetcher.finished(tp, self.tracker.stable(tp, position))

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

    def wind_up(self) -> None:
        """Leave the partitions as they are without acknowledgements: what is not done is handed out again."""
        for tp, position in self._fetcher.positions().items():
            ranges: Ranges = self.tracker.finished(tp, position)
            stable = self.tracker.stable(tp, position)
            if stable != position:
                self._handout.forget_decoded(tp)
                self._handout.skip(tp, ranges)
                self._fetcher.seek(tp, stable)
        self.forget(list(self.tracker.partitions))


def record_of(entry: Entry) -> Record:
    """Return the record of an entry, as it is handed out now."""
    record: Record = entry.record
    return record if entry.deliveries == 1 else record._replace(delivery_count=entry.deliveries)


Handler = Callable[[Record], Awaitable[object]] | Callable[[Record], object]
