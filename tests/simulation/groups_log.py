"""A coordinator's log without a disk, with faults: the part of `PartitionLog` that `Partition` and `Shard` use.

Batches are appended at once and durable when a sync of them is done. A sync may be late, or fail; after one that failed
the log takes nothing until it is resumed, which cuts the unsynced records. A power loss keeps some of them, in order.
Nothing below the high watermark is ever lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from anabranch.machines.groups.records import CoordinatorRecord, decode_record
from anabranch.records.batch import BatchHeader, parse_end_transaction_marker, parse_header
from anabranch.records.key_values import decode_pairs, encode_pairs
from anabranch.storage.interface import Appended, FetchedSlice, LogObserver, Unobserved

T = TypeVar("T")


class Entry(NamedTuple):
    """One record."""

    offset: int
    key: bytes
    value: bytes | None
    record: CoordinatorRecord


class Batch(NamedTuple):
    """The records of one append, or those that compaction has left of them."""

    end: int
    data: bytes
    entries: tuple[Entry, ...]
    producer_id: int = -1
    """Of a transaction's batch or marker."""
    is_committed: bool | None = None
    """Of a marker: how it ends the transaction."""


class Standing(NamedTuple):
    """A batch, and what has become of the transaction that it is of."""

    batch: Batch
    counts: bool | None
    """None: its transaction is open."""


def at(offset: int, data: bytes | bytearray | memoryview) -> bytes:
    """A batch with the offset that a log gives it: of two transactions the later record of a key counts."""
    return offset.to_bytes(8) + bytes(data[8:])


class FalseLog:
    """The log of one partition."""

    flush_due = False
    log_start = 0
    directory = Path("log")

    def __init__(self, on_append: Callable[[Batch], None], on_cut: Callable[[int], None]) -> None:
        """`on_append` is called with every batch, `on_cut` with the log's end after a loss of records."""
        self.batches: list[Batch] = []
        self.end = 0
        self.flushed = 0
        self.refuses = False
        """The next append fails: the disk is full."""
        self._observer: LogObserver = Unobserved()
        self._on_append = on_append
        self._on_cut = on_cut
        self.failure: OSError | None = None
        """Of the last sync, until the log is resumed."""
        self._cuts = 0
        self._clean_to = 0
        """Everything below was clean after the last compaction: older tombstones may go with the next one."""

    # -- as a partition log --------------------------------------------------------------------------------------------

    def observe(self, observer: LogObserver) -> None:
        self._observer = observer

    @property
    def high_watermark(self) -> int:
        return self.flushed

    def append(self, data: bytearray | memoryview, leader_epoch: int, now_ms: int, header: BatchHeader) -> Appended:
        if self.failure is not None:
            raise self.failure
        if self.refuses:
            self.refuses = False
            raise OSError(28, "the disk is full")
        base = self.end
        entries = []
        marker = parse_end_transaction_marker(data) if header.is_control else None
        for index, (key, value) in enumerate(() if header.is_control else decode_pairs(memoryview(data), header)):
            assert key is not None
            record = decode_record(key, value)
            assert record is not None
            entries.append(Entry(base + index, key, value, record))
        self.end = base + header.record_count
        committed = None if marker is None else marker.commit
        self.batches.append(Batch(self.end, at(base, data), tuple(entries), header.producer_id, committed))
        self._on_append(self.batches[-1])
        return Appended(base, self.end - 1)

    def resume(self, now_ms: int) -> None:
        if self.failure is not None:
            self.failure = None
            before = self.end
            self._cut(self.flushed)
            if self.end < before:
                self._observer.log_cut(self.end)

    def slices(self) -> list[FetchedSlice]:
        return [FetchedSlice(b"".join(batch.data for batch in self.batches))]

    def newest_snapshot(self, restore: Callable[[bytes], T]) -> tuple[int, T] | None:
        del restore
        return None

    def headers_from(self, offset: int) -> Iterator[BatchHeader]:
        return (header for batch in self.batches if (header := parse_header(batch.data)).base_offset >= offset)

    def read(self, offset: int, size_max: int, *, end: int) -> FetchedSlice:
        return FetchedSlice(
            next(batch.data for batch in self.batches if parse_header(batch.data).base_offset == offset)
        )

    # -- its disk ------------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Iterator[Entry]:
        """All records, in order."""
        return (entry for batch in self.batches for entry in batch.entries)

    def standing(self) -> list[Standing]:
        """All batches, in order, each with whether it counts."""
        found: list[Standing] = []
        open_: dict[int, list[int]] = {}
        for place, batch in enumerate(self.batches):
            is_open = batch.producer_id >= 0 and batch.is_committed is None
            found.append(Standing(batch, None if is_open else True))
            if is_open:
                open_.setdefault(batch.producer_id, []).append(place)
            elif batch.producer_id >= 0:
                for ended in open_.pop(batch.producer_id, []):
                    found[ended] = Standing(found[ended].batch, batch.is_committed)
        return found

    def begin_sync(self) -> tuple[int, int]:
        """Begin a sync; the result is for `synced`."""
        return self.end, self._cuts

    def synced(self, begun: tuple[int, int]) -> None:
        """End a sync, which covers nothing if the log was cut meanwhile."""
        end, cuts = begun
        if cuts == self._cuts:
            self.flushed = max(self.flushed, end)

    def lose_power(self, end: int) -> None:
        """Keep unsynced records below `end` only, and count them as synced from then on, as a restarted broker does."""
        assert end >= self.flushed
        self.failure = None
        self._cut(end)
        self.flushed = self.end
        self._observer = Unobserved()

    def _cut(self, end: int) -> None:
        before = self.end
        while self.batches and self.batches[-1].end > end:
            self.batches.pop()
            self.end = self.batches[-1].end if self.batches else 0
        if before > end:
            self.end = max(self.end, end)
            self._cuts += 1
            self._on_cut(self.end)

    def compact(self, end: int) -> int:
        """Of each key below `end` keep the last record; tombstones go a turn later. Answers how many records stay."""
        standing = self.standing()
        first_open = next((it.batch for it in standing if it.counts is None), None)
        end = min(end, self.flushed, self.end if first_open is None else first_open.entries[0].offset)
        last = {
            entry.key: entry.offset for it in standing if it.counts for entry in it.batch.entries if entry.offset < end
        }
        batches = []
        for batch, counts in standing:
            if batch.is_committed is not None or (counts is False and batch.end > end):
                batches.append(batch)  # A marker stays: what is left of its transaction counts by it.
                continue
            if counts is False:
                continue
            kept = tuple(
                entry
                for entry in batch.entries
                if entry.offset >= end
                or (last[entry.key] == entry.offset and not (entry.value is None and entry.offset < self._clean_to))
            )
            if len(kept) == len(batch.entries):
                batches.append(batch)
            elif kept:
                epoch = parse_header(batch.data).producer_epoch
                pairs = [(entry.key, entry.value) for entry in kept]
                data = encode_pairs(pairs, 0, producer_id=batch.producer_id, producer_epoch=epoch)
                batches.append(Batch(batch.end, at(kept[0].offset, data), kept, batch.producer_id))
        self.batches = batches
        self._clean_to = max(self._clean_to, end)
        return sum(len(batch.entries) for batch in batches)
