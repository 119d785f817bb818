"""Segment files as the cleaner reads them, in a thread of its own: batch by batch, every checksum compared."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.base.limits import RECORDS_PER_BATCH_MAX
from anabranch.machines.partition.aborted import AbortedTransaction
from anabranch.records.batch import HEADER_SIZE, BatchHeader, check, expanded, parse_header
from anabranch.records.rows import iterate
from anabranch.records.timestamps import timestamp_of
from anabranch.runtime.disk import Disk, File
from anabranch.storage.log.segment import Segment, path_of

_READ_SIZE = 4 << 20


class Source(NamedTuple):
    """A segment file, up to `size` bytes, where the offset `end` begins."""

    base_offset: int
    end: int
    size: int


class KeyedRecord(NamedTuple):
    """One record, as far as compaction needs it; `data` is all of its bytes."""

    offset: int
    timestamp: int
    key: bytes | None
    tombstone: bool
    data: memoryview


class Aborted:
    """The aborted transactions of one log."""

    def __init__(self, lines: Iterable[AbortedTransaction]) -> None:
        self.markers: set[int] = set()
        """The offsets of the markers."""
        self._lines: dict[int, list[AbortedTransaction]] = {}
        for line in lines:
            self.markers.add(line.last_offset)
            self._lines.setdefault(line.producer_id, []).append(line)

    def has(self, header: BatchHeader) -> bool:
        """Whether the batch belongs to a transaction that was aborted."""
        lines = self._lines.get(header.producer_id)
        if lines is None or not header.is_transactional:
            return False
        index = bisect_right(lines, header.base_offset, key=lambda line: line.last_offset)
        return index < len(lines) and lines[index].first_offset <= header.base_offset


def source_of(segment: Segment) -> Source:
    """Note a segment as it is now."""
    return Source(segment.base_offset, segment.end, segment.size)


def batches(disk: Disk, directory: Path, source: Source) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Read and check every batch of a segment. FileNotFoundError where retention was faster; DecodeError."""
    if not source.size:
        return
    file = disk.open(path_of(directory, source.base_offset))
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


def records(header: BatchHeader, batch: memoryview) -> Iterator[KeyedRecord]:
    """Take the records of a batch apart; DecodeError where they are malformed, or more than a batch may have."""
    if header.record_count > RECORDS_PER_BATCH_MAX:
        raise DecodeError(f"a batch of {header.record_count} records, where {RECORDS_PER_BATCH_MAX} are allowed")
    data = memoryview(expanded(batch, header))
    for span in iterate(data, header.record_count, header.base_offset):
        yield KeyedRecord(
            header.base_offset + span.offset_delta,
            timestamp_of(header, span),
            None if span.key_end < 0 else bytes(data[span.key_start : span.key_end]),
            span.value_end < 0,
            data[span.start : span.end],
        )


def _read(file: File, size: int, position: int) -> bytes:
    data = file.read(size, position)
    if len(data) < size:
        raise DecodeError(f"{file.path} ends at {position + len(data)}, expected {position + size}")
    return data
