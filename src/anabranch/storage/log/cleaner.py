"""Compaction: of each key's records in finished segments only the newest stays (`cleanup.policy=compact`).

    plan (in the log's thread) -> run (in another thread or process, it knows only paths) -> finish (in the log's)

Remaining records keep their offsets, and every batch keeps its envelope: base offset, last offset delta, leader epoch,
producer. A batch without records is dropped, but for the last one of a file, so that each file still ends where the
next begins, and the last one of a producer that may still be alive. A tombstone stays until it has been clean for
`delete.retention.ms`. A record without a key is removed. The active segment, and the log above the recovery point, are
never touched. A crash at any time leaves the old segments or the new one (`recovery`).

Only decided transactions are cleaned. Records of aborted ones are removed. A marker stays until nothing is
left of its transaction, and then for `delete.retention.ms` more, as a tombstone does: were it dropped earlier, the
transaction would look open. With the marker of an abort goes its line in the aborted-transaction index (`finish`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.base.ids import NO_PRODUCER_ID
from anabranch.machines.partition.aborted import AbortedTransaction
from anabranch.records.batch import (
    HEADER_SIZE,
    BatchHeader,
    build,
    check,
    expanded,
    parse_end_transaction_marker,
    parse_header,
)
from anabranch.records.compression import Compression, compress
from anabranch.records.rows import iterate
from anabranch.runtime.disk import Disk, File
from anabranch.storage.log.errors import OfflineLogError
from anabranch.storage.log.index import NO_TIMESTAMP
from anabranch.storage.log.log import RELATIVE_OFFSET_MAX, LocalLog
from anabranch.storage.log.recovery import CLEANED_SUFFIX, SWAP_SUFFIX, replace_by_swap
from anabranch.storage.log.segment import Segment, path_of

CHECKPOINT_FILE = "cleaner-checkpoint"
KEYS_SIZE_MAX = 128 << 20
"""Bytes that the keys of one run may take, with what it costs to keep them; the rest waits for the next run."""
KEY_OVERHEAD = 120
PRODUCER_IDLE_MAX_MS = 24 * 3600 * 1000
_READ_SIZE = 4 << 20
_WRITE_SIZE = 1 << 20


class Mark(NamedTuple):
    """Everything below `offset` was clean at `time_ms`."""

    offset: int
    time_ms: int


class Source(NamedTuple):
    """A segment to be cleaned."""

    base_offset: int
    end: int
    size: int


@dataclass(frozen=True, slots=True)
class Cleaning:
    """The plan of a cleaning. Groups of segments become one segment each."""

    directory: Path
    disk: Disk
    groups: tuple[tuple[Source, ...], ...]
    dirty_from: int
    """Below it every key is there once."""
    log_start: int
    drop_tombstones_before: int
    now_ms: int
    index_interval: int
    aborted: tuple[AbortedTransaction, ...] = ()

    def run(self) -> Cleaned:
        """Write the new segments beside the old ones, synced. Blocks for long; OSError, OfflineLogError."""
        try:
            newest = self._newest()
            groups = [self._clean(group, newest) for group in self.groups if group[0].base_offset < newest.end]
        except FileNotFoundError:
            return Cleaned(self, [], self.dirty_from, ())  # Retention was faster.
        except DecodeError as error:
            raise OfflineLogError(f"{self.directory}: {error}, in a segment that was to be compacted.") from error
        return Cleaned(self, [group for group in groups if group is not None], newest.end, tuple(newest.forgotten))

    def _newest(self) -> _Newest:
        """Find the newest offset of each key in the dirty part."""
        newest = _Newest(self.aborted)
        for source in (source for group in self.groups for source in group):
            if source.end <= self.dirty_from:
                continue
            for header, batch in self._batches(source):
                if header.producer_id != NO_PRODUCER_ID:
                    newest.of_producer[header.producer_id] = header.base_offset
                if not header.is_control and not newest.is_aborted(header):
                    for record in _records(header, batch):
                        if record.key is not None:
                            if record.key not in newest.of_key:
                                newest.size += len(record.key) + KEY_OVERHEAD
                            newest.of_key[record.key] = record.offset
                newest.end = header.next_offset
                if newest.size > KEYS_SIZE_MAX:
                    return newest
        return newest

    def _clean(self, group: tuple[Source, ...], newest: _Newest) -> CleanedGroup | None:
        """Write the new segment of a group; None when nothing can be dropped."""
        base = group[0].base_offset
        target = Segment(self.disk, self.directory, base, self.index_interval, suffix=CLEANED_SUFFIX)
        for path in (target.path, *target.index.paths):
            self.disk.unlink(path)
        pending = bytearray()
        changed = len(group) > 1
        for source in group:
            for header, batch in self._batches(source):
                last = source is group[-1] and header.next_offset == source.end
                kept = self._filter(header, batch, newest, last=last)
                changed |= kept is not batch
                if kept is None:
                    continue
                if len(pending) + len(kept) > _WRITE_SIZE:
                    target.append(pending)
                    pending = bytearray()
                written = parse_header(kept)
                target.note_header(target.size + len(pending), written)
                pending += kept
        target.append(pending)
        if not changed:
            self.disk.discard([target.path, *target.index.paths])
            return None
        for file in (target.file, *target.index.store()):
            file.sync()
        target.index.unsynced = False
        target.release()
        return CleanedGroup(group, target.size)

    def _filter(
        self, header: BatchHeader, batch: memoryview, newest: _Newest, *, last: bool
    ) -> memoryview | bytearray | None:
        """The batch with the records that stay: the same one if all do, None if it is not needed at all."""
        if header.is_control:
            return batch if self._marker_stays(header, batch, newest, last=last) else None
        kept = self._filter_records(header, batch, newest, last=last)
        if kept is not None and header.is_transactional:
            newest.present.add(header.producer_id)
        return kept

    def _marker_stays(self, header: BatchHeader, batch: memoryview, newest: _Newest, *, last: bool) -> bool:
        present = header.producer_id in newest.present
        newest.present.discard(header.producer_id)
        if last or present or header.base_offset >= min(self.drop_tombstones_before, newest.end):
            return True
        if self._speaks_for_producer(header, newest) or parse_end_transaction_marker(batch) is None:
            return True
        if header.base_offset in newest.aborted_at:
            newest.forgotten.append(header.base_offset)
        return False

    def _speaks_for_producer(self, header: BatchHeader, newest: _Newest) -> bool:
        """Whether the batch is the last that is known of a producer that may still be alive."""
        if header.producer_id == NO_PRODUCER_ID or header.max_timestamp <= self.now_ms - PRODUCER_IDLE_MAX_MS:
            return False
        return newest.of_producer.get(header.producer_id, header.base_offset) == header.base_offset

    def _filter_records(
        self, header: BatchHeader, batch: memoryview, newest: _Newest, *, last: bool
    ) -> memoryview | bytearray | None:
        if header.base_offset >= newest.end:
            return batch
        aborted = newest.is_aborted(header)
        kept, count, timestamp, dropped = bytearray(), 0, NO_TIMESTAMP, False
        for record in _records(header, batch):
            if not aborted and self._stays(record, newest):
                kept += record.data
                count += 1
                timestamp = max(timestamp, record.timestamp)
            else:
                dropped = True
        if not dropped and (count or last):
            return batch
        if not count and not last and not self._speaks_for_producer(header, newest):
            return None
        codec = header.compression if count else Compression.NONE
        return build(
            kept if codec is Compression.NONE else compress(codec, kept),
            record_count=count,
            base_timestamp=header.base_timestamp,
            max_timestamp=timestamp if count and not header.log_append_time else header.max_timestamp,
            attributes=header.attributes & ~7 | codec,
            base_offset=header.base_offset,
            last_offset_delta=header.last_offset_delta,
            leader_epoch=header.leader_epoch,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
        )

    def _stays(self, record: KeyedRecord, newest: _Newest) -> bool:
        if record.key is None or record.offset < self.log_start:
            return False
        if newest.of_key.get(record.key, -1) > record.offset:
            return False
        return not record.tombstone or record.offset >= self.drop_tombstones_before

    def _batches(self, source: Source) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Read and check every batch of a segment."""
        file = self.disk.open(path_of(self.directory, source.base_offset))
        position, start, window = 0, 0, memoryview(b"")
        while position < source.size:
            need = HEADER_SIZE
            for _ in range(2):
                if position + need > start + len(window):
                    start = position
                    window = memoryview(_read(file, min(max(_READ_SIZE, need), source.size - position), position))
                header = parse_header(window, position - start, source.size - position)
                need = header.size
            check(window, position - start, header)
            yield header, window[position - start : position - start + header.size]
            position += header.size


class _Newest:
    """The input of a run: the newest offset of each key, up to `end`, and of each producer; the aborted batches."""

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self.present: set[int] = set()
        """Producers with a remaining batch of a transaction, until its marker."""
        self.forgotten: list[int] = []
        """Markers of aborted transactions that were dropped."""
        self.aborted_at: set[int] = set()
        self._aborted: dict[int, list[AbortedTransaction]] = {}
        for line in aborted:
            self.aborted_at.add(line.last_offset)
            self._aborted.setdefault(line.producer_id, []).append(line)
        self.of_key: dict[bytes, int] = {}
        self.of_producer: dict[int, int] = {}
        self.size = 0
        self.end = 0

    def is_aborted(self, header: BatchHeader) -> bool:
        """Whether the batch belongs to a transaction that was aborted."""
        lines = self._aborted.get(header.producer_id)
        if lines is None or not header.is_transactional:
            return False
        index = bisect_right(lines, header.base_offset, key=lambda line: line.last_offset)
        return index < len(lines) and lines[index].first_offset <= header.base_offset


class CleanedGroup(NamedTuple):
    """A new segment, by its size, and those that it replaces."""

    sources: tuple[Source, ...]
    size: int

    @property
    def bases(self) -> list[int]:
        return [source.base_offset for source in self.sources]


class Cleaned(NamedTuple):
    """The result of a run."""

    cleaning: Cleaning
    groups: list[CleanedGroup]
    clean_to: int
    forgotten: tuple[int, ...]
    """Offsets of markers of aborted transactions that are no more. The owner of the aborted-transaction index
    drops their lines, durably, before `finish`: a line without its marker would hide too many records from readers."""


def plan(
    log: LocalLog, now_ms: int, *, stable: int | None = None, aborted: Iterable[AbortedTransaction] = ()
) -> Cleaning | None:
    """Plan a cleaning if it is worth it (`min.cleanable.dirty.ratio`), else None. Blocks for a checkpoint; OSError.

    `stable` is the last stable offset, None where nothing is transactional; `aborted` is the whole index.
    """
    if not log.config.compact:
        return None
    marks = _load_marks(log)
    dirty_from = max([mark.offset for mark in marks], default=0)
    segments = log.finished_segments()
    latest = now_ms - log.config.min_compaction_lag_ms
    while segments and segments[-1].max_timestamp.timestamp > latest > 0:
        segments.pop()
    while segments and stable is not None and segments[-1].end > stable:
        segments.pop()
    total = sum(segment.size for segment in segments)
    dirty = sum(segment.size for segment in segments if segment.end > dirty_from)
    if not dirty or dirty < total * log.config.min_cleanable_dirty_ratio:
        return None
    old = [mark.offset for mark in marks if mark.time_ms <= now_ms - log.config.delete_retention_ms]
    return Cleaning(
        directory=log.directory,
        disk=log.disk,
        groups=tuple(_grouped(segments, log.config.segment_bytes)),
        dirty_from=dirty_from,
        log_start=log.log_start,
        drop_tombstones_before=max(old, default=0),
        now_ms=now_ms,
        index_interval=log.config.index_interval_bytes,
        aborted=tuple(aborted),
    )


def finish(log: LocalLog, cleaned: Cleaned) -> int:
    """Put the new segments in the place of the old ones; answer the bytes that were saved. Blocks shortly; OSError."""
    cleaning, saved = cleaned.cleaning, 0
    there = {_source(segment) for segment in log.finished_segments()}
    for group in cleaned.groups:
        if there.issuperset(group.sources):  # Else retention was faster; recovery removes the files of the run.
            _swap(log, cleaning, group)
            saved += sum(source.size for source in group.sources) - group.size
    if cleaned.clean_to <= cleaning.dirty_from:
        return saved
    retention_start = cleaning.now_ms - log.config.delete_retention_ms
    marks = [*_load_marks(log), Mark(cleaned.clean_to, cleaning.now_ms)]
    old = [mark for mark in marks if mark.time_ms <= retention_start]
    marks = [*old[-1:], *(mark for mark in marks if mark.time_ms > retention_start)]
    lines = ["0", str(len(marks)), *(f"{mark.offset} {mark.time_ms}" for mark in marks)]
    log.disk.replace(log.directory / CHECKPOINT_FILE, ("\n".join(lines) + "\n").encode())
    return saved


def _swap(log: LocalLog, cleaning: Cleaning, group: CleanedGroup) -> None:
    base, directory, disk = group.bases[0], cleaning.directory, cleaning.disk
    path = path_of(directory, base)
    disk.rename(path.with_name(path.name + CLEANED_SUFFIX), path.with_name(path.name + SWAP_SUFFIX))
    disk.sync_directory(directory)
    log.let_go_of(group.bases)
    replace_by_swap(disk, directory, base, group.bases)
    segment = Segment(disk, directory, base, cleaning.index_interval)
    for old, new in zip(
        Segment(disk, directory, base, 0, suffix=CLEANED_SUFFIX).index.paths, segment.index.paths, strict=True
    ):
        disk.rename(old, new)
    log.put_in_place(group.bases, segment)


def _grouped(segments: list[Segment], size_max: int) -> Iterator[tuple[Source, ...]]:
    """Neighbours that fit into one segment, as they are now."""
    group: list[Source] = []
    for segment in segments:
        source = _source(segment)
        size = sum(other.size for other in group) + source.size
        if group and (size > size_max or source.end - group[0].base_offset > RELATIVE_OFFSET_MAX):
            yield tuple(group)
            group = []
        group.append(source)
    if group:
        yield tuple(group)


def _source(segment: Segment) -> Source:
    return Source(segment.base_offset, segment.end, segment.size)


def _load_marks(log: LocalLog) -> list[Mark]:
    """Read the checkpoint of earlier runs; nothing from a damaged one, so that everything is cleaned again."""
    path = log.directory / CHECKPOINT_FILE
    if not log.disk.exists(path):
        return []
    try:
        _, _, *lines = log.disk.read(path).decode().splitlines()
        return [Mark(*map(int, line.split(" "))) for line in lines]
    except (ValueError, TypeError):
        return []


class KeyedRecord(NamedTuple):
    """One record, as far as compaction needs it; `data` is all of its bytes."""

    offset: int
    timestamp: int
    key: bytes | None
    tombstone: bool
    data: memoryview


def _records(header: BatchHeader, batch: memoryview) -> Iterator[KeyedRecord]:
    """Take the records of a batch apart; DecodeError where they are malformed."""
    records = memoryview(expanded(batch, header))
    for span in iterate(records, header.record_count, header.base_offset):
        yield KeyedRecord(
            header.base_offset + span.offset_delta,
            header.base_timestamp + span.timestamp_delta,
            None if span.key_end < 0 else bytes(records[span.key_start : span.key_end]),
            span.value_end < 0,
            records[span.start : span.end],
        )


def _read(file: File, size: int, position: int) -> bytes:
    data = file.read(size, position)
    if len(data) < size:
        raise DecodeError(f"{file.path} ends at {position + len(data)}, expected {position + size}")
    return data
