"""The outcomes owed to callers: of every record, of every table, and of all records before a flush."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anabranch.base.errors import AnabranchError

if TYPE_CHECKING:
    from anabranch.client.producer.rows import Columns, ColumnsPart


class DeliveryError(AnabranchError):
    """Some records were not delivered; `first` is the error of the first of them."""

    def __init__(self, record_count: int, first: Exception) -> None:
        records = "1 record was" if record_count == 1 else f"{record_count} records were"
        super().__init__(f"{records} not delivered: {first}")
        self.record_count = record_count
        self.first = first


@dataclass(slots=True)
class ColumnsMetadata:
    """The partitions and offsets of the rows of a table."""

    topic: str
    record_count: int = 0
    offsets: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Partition to the first and the last offset of the table's rows."""


class TableDelivery:
    """The outcome of a table, collected from the outcomes of its batches."""

    __slots__ = ("error", "failed", "generation", "metadata", "open_count", "promise")

    def __init__(self, topic: str, promise: Any, generation: int) -> None:
        self.generation = generation
        self.metadata = ColumnsMetadata(topic)
        self.promise = promise
        self.open_count = 0
        self.failed = 0
        self.error: Exception | None = None

    def complete(self, part: ColumnsPart, topic: str, base_offset: int, append_time_ms: int) -> None:
        """Count the rows of a batch that was appended."""
        self.delivered(part.partition, base_offset, part.record_count)

    def reject(self, rows: Columns | ColumnsPart, error: Exception) -> None:
        """Count rows that failed, for the reason of all of them."""
        self.fail(error, rows.record_count)
        mark_retrieved(self.promise)

    def delivered(self, partition: int, base_offset: int, count: int) -> None:
        """Count rows appended to the log from `base_offset` on (-1: unknown offset)."""
        metadata = self.metadata
        metadata.record_count += count
        if base_offset >= 0:
            first, last = metadata.offsets.get(partition, (base_offset, base_offset))
            metadata.offsets[partition] = (min(first, base_offset), max(last, base_offset + count - 1))
        self._close(count)

    def fail(self, error: Exception, count: int) -> None:
        """Count failed rows."""
        self.error = self.error or error
        self.failed += count
        self._close(count)

    def _close(self, count: int) -> None:
        self.open_count -= count
        if self.open_count == 0 and not self.promise.done():
            if self.error is None:
                self.promise.set_result(self.metadata)
            else:
                self.promise.set_exception(DeliveryError(self.failed, self.error))


class OpenRecords:
    """Records without an outcome, by generation: a flush waits for its generation and all earlier ones."""

    def __init__(self) -> None:
        self.generation = 0
        """Incremented by every flush."""
        self.counts: dict[int, int] = {0: 0}
        """The number of open records of each generation."""
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        self._failed_count = 0
        self._failure: Exception | None = None

    @property
    def count(self) -> int:
        """The number of open records."""
        return sum(self.counts.values())

    def close(self, generation: int, count: int) -> None:
        """Count records with an outcome."""
        self.counts[generation] -= count

    def failed(self, error: Exception, count: int) -> None:
        """Keep a failure until `raise_failures`."""
        self._failure = self._failure or error
        self._failed_count += count

    def forget_failures(self) -> None:
        """Drop the failures so far."""
        self._failure, self._failed_count = None, 0

    def raise_failures(self) -> None:
        """Raise `DeliveryError` for the failures since the last call."""
        if self._failure is not None:
            error, count = self._failure, self._failed_count
            self.forget_failures()
            raise DeliveryError(count, error)

    def begin_flush(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Start a new generation; the future completes when no record of an earlier one is open."""
        flushed: asyncio.Future[None] = loop.create_future()
        self._flushes.append((self.generation, flushed))
        self.generation += 1
        self.counts[self.generation] = 0
        return flushed

    def end_flushes(self) -> None:
        """Complete the flushes whose records all have an outcome."""
        if not self._flushes:
            return
        oldest = min(number for number, count in self.counts.items() if count or number == self.generation)
        for number, flushed in self._flushes:
            if number < oldest and not flushed.done():
                flushed.set_result(None)
        self._flushes = [flush for flush in self._flushes if not flush[1].done()]
        self.counts = {number: count for number, count in self.counts.items() if number >= oldest}


def fail_promise(promise: Any, error: Exception) -> None:
    """Fail one record."""
    if not promise.done():
        promise.set_exception(error)
        mark_retrieved(promise)


def mark_retrieved(promise: Any) -> None:
    """Keep asyncio from logging the error of a future never awaited: `flush` and `close` raise the error too."""
    if isinstance(promise, asyncio.Future) and promise.done() and not promise.cancelled():
        promise.exception()
