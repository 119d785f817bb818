"""Folding a retiring log back: which of its records its survivor must be given once more, in batches to append.

    Folding(...)            a range of the log, from its start on, with as many keys as fit into memory
    .prepare()              in a thread: read what the family has of these keys, up to the ends at the time of the plan
    .next_chunk()           in a thread: the next records to append, until None
    .look(batches)          in a thread, or for little in the loop: what the survivor was given since
    .batch_of(chunk)        the batch to append, without the keys that the survivor was given since
    .done_to                behind the last chunk: all records below it are folded or superseded, none is undecided

The caller appends a batch only when every batch of the survivor has been looked at, in one step of its loop: so a copy
comes before all later writes of its key. Copies keep key, value, headers and timestamp; they have no producer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from anabranch.machines.compaction import Fold, Trace, decide_fold, superseded_by
from anabranch.records.batch import BatchHeader, build, headers
from anabranch.records.compression import COMPRESSION_MASK, Compression, compress
from anabranch.records.rows import moved
from anabranch.storage.interface import Slice
from anabranch.storage.log.batch_files import Aborted, batches, records
from anabranch.storage.log.evidence import KEY_OVERHEAD, KEYS_SIZE_MAX, LogFiles, reading, trace_keys

CHUNK_SIZE_MAX = 64 * 1024
CHUNK_RECORDS_MAX = 500
LOOKED_AT_ONCE_MAX = 500
"""Records that are looked at in the loop: less than a millisecond."""


class FoldedRecord(NamedTuple):
    """A record to be appended once more."""

    key: bytes
    timestamp: int
    data: bytes
    codec: Compression


@dataclass(slots=True)
class Chunk:
    """Records of one batch, in the order of their offsets."""

    records: list[FoldedRecord]


class Folding:
    """One range of a retiring log."""

    def __init__(
        self,
        retiring: LogFiles,
        family: Sequence[LogFiles],
        compression: Compression | None = None,
        keys_size_max: int = KEYS_SIZE_MAX,
    ) -> None:
        """`family`: the other logs, the survivor among them. `compression`: of the copies; None: as the originals."""
        self._retiring = retiring
        self._family = family
        self._compression = compression
        self._keys_size_max = keys_size_max
        self._traces: dict[bytes, tuple[Trace, ...]] = {}
        self._written: set[bytes] = set()
        """The keys that the survivor was given since, without a transaction."""
        self._undecided: set[bytes] = set()
        """The keys that the survivor was given since in transactions."""
        self._aborted = Aborted(retiring.aborted)
        self._chunks = self._read_chunks()
        self._end = retiring.log_start
        self._waits_at: int | None = None
        self._clean_to = {files.partition: files.dirty_from for files in family}
        self.postponed: set[int] = set()
        """The partitions with clean records that are newer than records of the range: were they tombstones, they must
        stay for `delete.retention.ms` after the range is deleted."""

    @property
    def done_to(self) -> int:
        """The offset below which nothing in the log is needed any more, once all chunks are appended durably."""
        return self._end if self._waits_at is None else min(self._end, self._waits_at)

    def prepare(self) -> None:
        """Choose the range, and read what the logs have of its keys. Blocks for long; OSError, UnreadableLogError."""
        size = 0
        with reading(self._retiring):
            for header, batch in self._batches():
                if size > self._keys_size_max:
                    break
                self._end = header.next_offset
                if header.is_control or self._aborted.has(header):
                    continue
                for record in records(header, batch):
                    if record.key is not None and record.key not in self._traces:
                        self._traces[record.key] = ()
                        size += len(record.key) + KEY_OVERHEAD
        trace_keys(self._traces, (self._retiring, *self._family))

    def next_chunk(self) -> Chunk | None:
        """Read the next records to append; None behind the last. Blocks; OSError, UnreadableLogError."""
        return next(self._chunks, None)

    def look(self, written: Slice) -> int:
        """Take in batches that the survivor was given since; return the offset behind them. DecodeError."""
        behind, view = -1, written.view()
        for position, header in headers(view):
            behind = header.next_offset
            if header.is_control:
                continue
            found = self._undecided if header.is_transactional else self._written
            for record in records(header, view[position : position + header.size]):
                if record.key in self._traces:
                    assert record.key is not None
                    found.add(record.key)
        return behind

    def batch_of(self, chunk: Chunk) -> bytearray | None:
        """Make the batch to append, of the records whose keys the survivor was not given since; None without any."""
        kept = [record for record in chunk.records if not self._was_written(record.key)]
        if not kept:
            return None
        base = kept[0].timestamp
        rows = b"".join(moved(record.data, record.timestamp - base, place) for place, record in enumerate(kept))
        codec = kept[0].codec if self._compression is None else self._compression
        return build(
            rows if codec is Compression.NONE else compress(codec, rows),
            record_count=len(kept),
            base_timestamp=base,
            max_timestamp=max(record.timestamp for record in kept),
            attributes=codec,
        )

    def touches(self, chunk: Chunk) -> bool:
        """Whether the survivor was given a key of the chunk since."""
        return any(self._was_written(record.key) for record in chunk.records)

    def _was_written(self, key: bytes) -> bool:
        if key in self._undecided:
            self._wait_at(self._traces[key])
            return True
        return key in self._written

    def _wait_at(self, traces: Iterable[Trace]) -> None:
        """Keep the log from the newest record of a key on: an open transaction decides about it."""
        newest = next(trace.newest for trace in traces if trace.partition == self._retiring.partition)
        self._waits_at = newest if self._waits_at is None else min(self._waits_at, newest)

    def _read_chunks(self) -> Iterator[Chunk]:
        pending: list[FoldedRecord] = []
        size = 0
        with reading(self._retiring):
            for header, batch in self._batches():
                if header.base_offset >= self._end:
                    break
                if header.is_control or self._aborted.has(header):
                    continue
                layout = self._retiring.layout_of(header)
                for record in records(header, batch):
                    if record.key is None or record.offset < self._retiring.log_start:
                        continue
                    traces = self._traces[record.key]
                    place = self._retiring.place(record.offset, layout)
                    fate = decide_fold(place, traces)
                    if fate is Fold.UNDECIDED:
                        self._wait_at(traces)
                    elif fate is Fold.SUPERSEDED:
                        newer = superseded_by(place, traces)
                        assert newer is not None
                        if newer.newest < self._clean_to.get(newer.partition, 0):
                            self.postponed.add(newer.partition)
                    elif not self._was_written(record.key):
                        data = bytes(record.data)
                        if pending and (size + len(data) > CHUNK_SIZE_MAX or len(pending) >= CHUNK_RECORDS_MAX):
                            yield Chunk(pending)
                            pending, size = [], 0
                        pending.append(FoldedRecord(record.key, record.timestamp, data, header.compression))
                        size += len(data)
        if pending:
            yield Chunk(pending)

    def _batches(self) -> Iterator[tuple[BatchHeader, memoryview]]:
        files = self._retiring
        for source in (*files.cleanable, *files.rest):
            yield from batches(files.disk, files.directory, source)


def is_little(written: Slice) -> bool:
    """Whether an event loop can look at batches itself: few records, none compressed. DecodeError."""
    count = 0
    for _, header in headers(written.view()):
        count += header.record_count
        if header.attributes & COMPRESSION_MASK or count > LOOKED_AT_ONCE_MAX:
            return False
    return True
