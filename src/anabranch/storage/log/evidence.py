"""The evidence of a cleaning: of each key that matters, the records in all logs of a family (`machines.compaction`).

The keys that matter are those of the subject's dirty part, and those of its clean tombstones if the subject has a
family. Their number is bounded (`KEYS_SIZE_MAX`): beyond it the dirty part ends (`end`), and the rest waits for the
next run. For a log without a family one reading of the dirty part is enough; a family is read as a whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from anabranch.base.errors import DecodeError
from anabranch.base.ids import NO_PRODUCER_ID
from anabranch.machines.compaction import Place, Trace
from anabranch.machines.partition.aborted import AbortedTransaction
from anabranch.records.batch import BatchHeader
from anabranch.runtime.disk import Disk
from anabranch.storage.log.batch_files import Aborted, Source, batches, records
from anabranch.storage.log.errors import OfflineLogError

KEYS_SIZE_MAX = 128 << 20
"""Bytes that the keys of one run may take, with what it costs to keep them; the rest waits for the next run."""
KEY_OVERHEAD = 350


@dataclass(frozen=True, slots=True)
class LogFiles:
    """One log as a cleaning sees it: paths and offsets at the time of the plan."""

    partition: int
    directory: Path
    disk: Disk
    groups: tuple[tuple[Source, ...], ...]
    """The segments that may be written anew, in groups that fit into one segment."""
    rest: tuple[Source, ...]
    """The segments behind them, up to the log's end."""
    dirty_from: int
    """Below it every key is there once."""
    log_start: int
    decided_to: int
    """Below it records are durable, and their transactions decided."""
    drop_tombstones_before: int
    aborted: Iterable[AbortedTransaction] = ()
    layout_ends: Sequence[int] = ()
    layouts: Sequence[int] = (0,)

    def layout_of(self, header: BatchHeader) -> int:
        """The layout of the segment with a batch."""
        return self.layouts[bisect_right(self.layout_ends, header.base_offset)]

    def place(self, offset: int, layout: int) -> Place:
        """The place of a record of this log."""
        return Place(self.partition, layout, offset)

    @property
    def cleanable_to(self) -> int:
        """The offset behind the segments that may be written anew."""
        return self.groups[-1][-1].end if self.groups else self.log_start

    @property
    def cleanable(self) -> Iterator[Source]:
        """The segments that may be written anew."""
        return (source for group in self.groups for source in group)


class UnreadableLogError(OfflineLogError):
    """A log with batches, or records in them, that cannot be read."""

    def __init__(self, files: LogFiles, reason: DecodeError) -> None:
        super().__init__(f"{files.directory}: {reason}, in a segment that was to be compacted.")
        self.partition = files.partition


class Evidence:
    """The records of the keys that matter, and the producers of the subject's dirty part."""

    def __init__(self, subject: LogFiles, family: Sequence[LogFiles], *, complete: bool) -> None:
        """Read the logs. Blocks for long; OSError, FileNotFoundError where retention was faster, UnreadableLogError."""
        self.traces: dict[bytes, tuple[Trace, ...]] = {}
        self.of_family = bool(family) or not complete
        """Whether other logs may have records of the subject's keys."""
        self.complete = complete
        self.of_producer: dict[int, int] = {}
        """The newest batch of each producer."""
        self.end = subject.dirty_from
        """The dirty part is in the evidence up to here."""
        self._size = 0
        self._cleanable_to = {files.partition: files.cleanable_to for files in (subject, *family)}
        self._read_dirty(subject)
        if family:
            self._add_tombstones(subject)
            self.traces = dict.fromkeys(self.traces, ())
            trace_keys(self.traces, (subject, *family))

    def leaves_older(self) -> bool:
        """Whether older records of the keys that matter are left where nothing can be removed now, in other logs."""
        for traces in self.traces.values():
            newest = max((trace.newest_layout for trace in traces), default=-1)
            for trace in traces:
                fixed = trace.undecided or trace.newest >= self._cleanable_to[trace.partition]
                if fixed and trace.oldest_layout < newest:
                    return True
        return False

    def _read_dirty(self, subject: LogFiles) -> None:
        aborted = Aborted(subject.aborted)
        with reading(subject):
            for source in subject.cleanable:
                if source.end <= subject.dirty_from:
                    continue
                for header, batch in batches(subject.disk, subject.directory, source):
                    if header.producer_id != NO_PRODUCER_ID:
                        self.of_producer[header.producer_id] = header.base_offset
                    if not header.is_control and not aborted.has(header):
                        layout = subject.layout_of(header)
                        for record in records(header, batch):
                            if record.key is not None:
                                self._admit(record.key)
                                self.traces[record.key] = (Trace(subject.partition, record.offset, layout),)
                    self.end = header.next_offset
                    if self._size > KEYS_SIZE_MAX:
                        return

    def _add_tombstones(self, subject: LogFiles) -> None:
        """Add the keys of the tombstones below the dirty part, as far as there is room."""
        with reading(subject):
            for source in subject.cleanable:
                if source.base_offset >= subject.dirty_from:
                    return
                for header, batch in batches(subject.disk, subject.directory, source):
                    if header.is_control:
                        continue
                    for record in records(header, batch):
                        if record.tombstone and record.key is not None and record.offset < subject.dirty_from:
                            if self._size > KEYS_SIZE_MAX:
                                return
                            self._admit(record.key)
                            self.traces.setdefault(record.key, ())

    def _admit(self, key: bytes) -> None:
        if key not in self.traces:
            self._size += len(key) + KEY_OVERHEAD


def trace_keys(traces: dict[bytes, tuple[Trace, ...]], family: Sequence[LogFiles]) -> None:
    """Fill in the traces of the given keys: every record of theirs in every log of a family, up to the logs' ends.

    Blocks for long; OSError, FileNotFoundError, UnreadableLogError.
    """
    for files in family:
        aborted = Aborted(files.aborted)
        with reading(files):
            for source in (*files.cleanable, *files.rest):
                for header, batch in batches(files.disk, files.directory, source):
                    if not header.is_control and not aborted.has(header):
                        trace_batch(traces, files, header, batch)


def trace_batch(
    traces: dict[bytes, tuple[Trace, ...]], files: LogFiles, header: BatchHeader, batch: memoryview
) -> None:
    """Add the records of one batch, which comes behind those seen of its log, to the traces of their keys."""
    layout, decided = files.layout_of(header), header.next_offset <= files.decided_to
    for record in records(header, batch):
        known = None if record.key is None or record.offset < files.log_start else traces.get(record.key)
        if known is None:
            continue
        assert record.key is not None
        others, last = known, Trace(files.partition)
        if known and known[-1].partition == files.partition:
            others, last = known[:-1], known[-1]
        traces[record.key] = (*others, last.with_record(record.offset, layout, decided=decided))


@contextmanager
def reading(files: LogFiles) -> Iterator[None]:
    """Name the log in the error about bytes that are no batch, or no record."""
    try:
        yield
    except DecodeError as error:
        raise UnreadableLogError(files, error) from error
