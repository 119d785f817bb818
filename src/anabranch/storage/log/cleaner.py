"""Compaction: removes the records of finished segments that `machines.compaction` lets go (`cleanup.policy=compact`).

    plan (in the log's thread) -> run (in another thread or process, it knows only paths) -> finish (`replacing`)

A cleaning has a subject, the log that is dirty, and looks into the other logs of its family. The keys of the subject's
dirty part are searched in all of them (`evidence`); records with a newer one go wherever they lie; tombstones go from
the subject alone. A log without a family is cleaned by its own records.

Remaining records keep their offsets, and every batch keeps its envelope: base offset, last offset delta, leader epoch,
producer. A batch without records is dropped, but for the last one of a file, so that each file still ends where the
next begins, and the last one of a producer that may still be alive. A record without a key is removed. The active
segment, and the log above the recovery point, are never touched. A crash at any time leaves the old segments or the new
one (`recovery`).

Only decided transactions are cleaned. Records of aborted ones are removed. A marker stays until nothing is
left of its transaction, and then for `delete.retention.ms` more, as a tombstone does: were it dropped earlier, the
transaction would look open. With the marker of an abort goes its line in the aborted-transaction index (`finish`).
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.base.ids import NO_PRODUCER_ID
from anabranch.machines.cleaning import UNLIMITED_MS, Dirt, Rules, Urgency, urgency_of
from anabranch.machines.compaction import may_hide_older, superseded_by
from anabranch.machines.partition.aborted import AbortedTransaction
from anabranch.records.batch import BatchHeader, build, parse_end_transaction_marker, parse_header
from anabranch.records.compression import Compression, compress
from anabranch.storage.log.batch_files import Aborted, KeyedRecord, Source, batches, records, source_of
from anabranch.storage.log.evidence import Evidence, LogFiles, UnreadableLogError
from anabranch.storage.log.index import NO_TIMESTAMP
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.marks import clean_to, load_marks
from anabranch.storage.log.recovery import CLEANED_SUFFIX, SWAP_SUFFIX
from anabranch.storage.log.segment import RELATIVE_OFFSET_MAX, Segment

PRODUCER_IDLE_MAX_MS = 24 * 3600 * 1000
_WRITE_SIZE = 1 << 20


class CleanedGroup(NamedTuple):
    """A new segment, by its size, and those that it replaces."""

    sources: tuple[Source, ...]
    size: int

    @property
    def bases(self) -> list[int]:
        return [source.base_offset for source in self.sources]


@dataclass(slots=True)
class Cleaned:
    """The result of a run for one log."""

    files: LogFiles
    index_interval: int
    now_ms: int
    clean_to: int
    groups: list[CleanedGroup] = field(default_factory=list)
    forgotten: tuple[int, ...] = ()
    """Offsets of markers of aborted transactions that are no more. The owner of the aborted-transaction index
    drops their lines, durably, before `finish`: a line without its marker would hide too many records from readers."""
    postponed: set[int] = field(default_factory=set)
    """The partitions with tombstones that must stay for `delete.retention.ms` from now on, because records that they
    hide go only now: `postpone_tombstones` of their logs comes before any `finish`."""

    @property
    def changes_nothing(self) -> bool:
        """Whether the log stays as it is, and is no cleaner than it was."""
        return not self.groups and not self.forgotten and self.clean_to <= self.files.dirty_from


@dataclass(frozen=True, slots=True)
class Cleaning:
    """The plan of a cleaning: of its subject groups of segments become one segment each."""

    subject: LogFiles
    family: Sequence[LogFiles]
    """The other logs."""
    complete: bool
    """Whether all other logs of the family could be taken in."""
    now_ms: int
    index_interval: int
    for_retention: bool = False
    """Whether retention deletes records of the subject, too: only those in front of which nothing older is left."""

    def run(self) -> list[Cleaned]:
        """Write the new segments beside the old ones, synced; the subject comes first. Blocks for long.

        OSError; UnreadableLogError, which names the log that cannot be read.
        """
        try:
            for files in (self.subject, *self.family):
                _remove_stale(files)
            evidence = Evidence(self.subject, self.family, complete=self.complete)
            cleaned = [_Rewriting(self, self.subject, evidence).run()]
            cleaned += [_Rewriting(self, files, evidence).run() for files in self.family]
        except FileNotFoundError:
            return []  # Retention was faster.
        return cleaned


def _remove_stale(files: LogFiles) -> None:
    """Remove new segments that an error has kept from being put in place, or away, durably: a start would finish them.

    Their names are given to new ones, which begin where they do and may end elsewhere.
    """
    disk, directory = files.disk, files.directory
    stale = [directory / name for name in disk.names(directory) if name.endswith(SWAP_SUFFIX)]
    if stale:
        disk.discard(stale)
        disk.sync_directory(directory)


class _Rewriting:
    """One log in a run: its segments are read, and written anew without the records that go."""

    def __init__(self, cleaning: Cleaning, files: LogFiles, evidence: Evidence) -> None:
        self._files = files
        self._evidence = evidence
        self._is_subject = files is cleaning.subject
        self._end = evidence.end if self._is_subject else files.dirty_from
        """Below it all keys are in the evidence; aborted records and markers go below it only."""
        self._drop_before = files.drop_tombstones_before if self._is_subject else 0
        self._aborted = Aborted(files.aborted)
        self._present: set[int] = set()
        """Producers with a remaining batch of a transaction, until its marker."""
        self._forgotten: list[int] = []
        self._clean_to = {each.partition: each.dirty_from for each in (cleaning.subject, *cleaning.family)}
        sure = evidence.complete and not (cleaning.for_retention and evidence.leaves_older())
        clean_to = self._end if sure else files.dirty_from
        self._cleaned = Cleaned(files, cleaning.index_interval, cleaning.now_ms, clean_to)

    def run(self) -> Cleaned:
        files, cleaned = self._files, self._cleaned
        try:
            if self._is_subject:
                groups: Iterable[tuple[Source, ...]] = (
                    group for group in files.groups if group[0].base_offset < self._end or self._evidence.of_family
                )
            else:
                groups = ((source,) for group in files.groups for source in group if self._has_superseded(source))
            for group in groups:
                written = self._clean(group)
                if written is not None:
                    cleaned.groups.append(written)
        except DecodeError as error:
            raise UnreadableLogError(files, error) from error
        cleaned.forgotten = tuple(self._forgotten)
        return cleaned

    def _has_superseded(self, source: Source) -> bool:
        """Whether a segment of another log than the subject has a record that goes."""
        files = self._files
        for header, batch in batches(files.disk, files.directory, source):
            if not header.is_control and not self._aborted.has(header):
                layout = files.layout_of(header)
                if any(self._is_superseded(record, layout) for record in records(header, batch)):
                    return True
        return False

    def _clean(self, group: tuple[Source, ...]) -> CleanedGroup | None:
        """Write the new segment of a group; None when nothing can be dropped."""
        disk, directory = self._files.disk, self._files.directory
        base = group[0].base_offset
        target = Segment(disk, directory, base, self._cleaned.index_interval, suffix=CLEANED_SUFFIX)
        for path in (target.path, *target.index.paths):
            disk.unlink(path)
        pending = bytearray()
        changed = len(group) > 1
        for source in group:
            for header, batch in batches(disk, directory, source):
                last = source is group[-1] and header.next_offset == source.end
                kept = self._filter(header, batch, last=last)
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
            disk.discard([target.path, *target.index.paths])
            return None
        for file in (target.file, *target.index.store()):
            file.sync()
        target.index.unsynced = False
        target.release()
        return CleanedGroup(group, target.size)

    def _filter(self, header: BatchHeader, batch: memoryview, *, last: bool) -> memoryview | bytearray | None:
        """The batch with the records that stay: the same one if all do, None if it is not needed at all."""
        if header.is_control:
            return batch if self._marker_stays(header, batch, last=last) else None
        kept = self._filter_records(header, batch, last=last)
        if kept is not None and header.is_transactional:
            self._present.add(header.producer_id)
        return kept

    def _marker_stays(self, header: BatchHeader, batch: memoryview, *, last: bool) -> bool:
        present = header.producer_id in self._present
        self._present.discard(header.producer_id)
        if last or present or header.base_offset >= min(self._drop_before, self._end):
            return True
        if self._speaks_for_producer(header) or parse_end_transaction_marker(batch) is None:
            return True
        if header.base_offset in self._aborted.markers:
            self._forgotten.append(header.base_offset)
        return False

    def _speaks_for_producer(self, header: BatchHeader) -> bool:
        """Whether the batch is the last that is known of a producer that may still be alive."""
        oldest_alive = self._cleaned.now_ms - PRODUCER_IDLE_MAX_MS
        if header.producer_id == NO_PRODUCER_ID or header.max_timestamp <= oldest_alive:
            return False
        if not self._is_subject:
            return True
        return self._evidence.of_producer.get(header.producer_id, header.base_offset) == header.base_offset

    def _filter_records(self, header: BatchHeader, batch: memoryview, *, last: bool) -> memoryview | bytearray | None:
        if header.base_offset >= self._end and not self._evidence.of_family:
            return batch
        aborted, layout = self._aborted.has(header), self._files.layout_of(header)
        kept, count, timestamp, dropped = bytearray(), 0, NO_TIMESTAMP, False
        for record in records(header, batch):
            goes = record.offset < self._end if aborted else self._goes(record, layout)
            if goes:
                dropped = True
            else:
                kept += record.data
                count += 1
                timestamp = max(timestamp, record.timestamp)
        if not dropped and (count or last):
            return batch
        if not count and not last and not self._speaks_for_producer(header):
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

    def _goes(self, record: KeyedRecord, layout: int) -> bool:
        if record.offset < self._end and (record.key is None or record.offset < self._files.log_start):
            return True
        if record.key is None:
            return False
        if self._is_superseded(record, layout):
            return True
        if not record.tombstone or not self._is_subject or record.offset >= self._files.dirty_from:
            return False
        return self._tombstone_goes(record, layout)

    def _is_superseded(self, record: KeyedRecord, layout: int) -> bool:
        traces = None if record.key is None else self._evidence.traces.get(record.key)
        newer = None if traces is None else superseded_by(self._files.place(record.offset, layout), traces)
        if newer is None:
            return False
        if newer.partition != self._files.partition and newer.newest < self._clean_to[newer.partition]:
            self._cleaned.postponed.add(newer.partition)
        return True

    def _tombstone_goes(self, record: KeyedRecord, layout: int) -> bool:
        """Whether a tombstone that was clean before this run goes."""
        if self._evidence.of_family:
            assert record.key is not None
            traces = self._evidence.traces.get(record.key)
            if traces is None or not self._evidence.complete:
                return False
            if may_hide_older(self._files.place(record.offset, layout), traces):
                return False
        return record.offset < self._drop_before


# -- on the logs -----------------------------------------------------------------------------------------------------


class Member(NamedTuple):
    """A log of a family, as its owner knows it."""

    log: LocalLog
    partition: int = 0
    layout_ends: Sequence[int] = ()
    """The ends of the log's ended segments, ascending."""
    layouts: Sequence[int] = (0,)
    """The layouts of the segments: one more than ends."""
    stable: int | None = None
    """The last stable offset, None where nothing is transactional."""
    aborted: Iterable[AbortedTransaction] = ()
    """The whole index of aborted transactions."""
    recovery_point: int | None = None
    """The recovery point that was noted durably; None: it is noted when it is needed, which blocks."""


def urgency(member: Member, now_ms: int) -> Urgency | None:
    """How urgent a cleaning is (`machines.cleaning`); None where it is not due. Blocks shortly; OSError."""
    log = member.log
    segments = _cleanable(member, now_ms) if log.config.compact and len(log.segments) > 1 else []
    if not segments:
        return None
    dirty_from, rules = clean_to(log), rules_of(log)
    dirty = [segment for segment in segments if segment.end > dirty_from]
    dirty_size = sum(segment.size for segment in dirty)
    oldest: int | None = None
    if rules.lag_max_ms < UNLIMITED_MS:
        first = (segment.first_timestamp() for segment in dirty)
        oldest = min((timestamp for timestamp in first if timestamp is not None), default=None)
    size = sum(segment.size for segment in segments)
    return urgency_of(Dirt(size - dirty_size, dirty_size, oldest), rules, now_ms)


def rules_of(log: LocalLog) -> Rules:
    """The configs of a log that say when it is cleaned."""
    return Rules(log.config.min_cleanable_dirty_ratio, log.config.max_compaction_lag_ms)


def is_due(member: Member, now_ms: int) -> bool:
    """Whether a cleaning is due. Blocks shortly; OSError."""
    return urgency(member, now_ms) is not None


def plan(subject: Member, now_ms: int, family: Sequence[Member] = (), *, complete: bool = True) -> Cleaning:
    """Plan a cleaning of a log that `is_due`. Blocks for checkpoints; OSError.

    `family`: the other logs that may hold its keys; not `complete` if one of them cannot be read now.
    """
    files = [files_of(member, now_ms) for member in (subject, *family)]
    return cleaning_of(subject.log, files, now_ms, complete=complete)


def cleaning_of(log: LocalLog, files: Sequence[LogFiles], now_ms: int, *, complete: bool) -> Cleaning:
    """The cleaning of `log`, whose files come first, then those of the other logs."""
    return Cleaning(
        subject=files[0],
        family=files[1:],
        complete=complete,
        now_ms=now_ms,
        index_interval=log.config.index_interval_bytes,
        for_retention=log.config.delete,
    )


def files_of(member: Member, now_ms: int) -> LogFiles:
    """Note the files of a log as they are now. Blocks for a checkpoint; OSError, also before `replacing.resuming`."""
    log = member.log
    if not all(segment.is_named for segment in log.segments):
        raise OSError(errno.EBUSY, "its compacted segments have no names yet", str(log.directory))
    marks = load_marks(log)
    cleanable = _cleanable(member, now_ms)
    behind = cleanable[-1].end if cleanable else log.log_start
    rest = [segment for segment in log.segments if segment.size and segment.end > behind]
    old = [mark.offset for mark in marks if mark.time_ms <= now_ms - log.config.delete_retention_ms]
    stable = log.flushed if member.stable is None else min(member.stable, log.flushed)
    return LogFiles(
        partition=member.partition,
        directory=log.directory,
        disk=log.disk,
        groups=tuple(_grouped(cleanable, log.config.segment_bytes)),
        rest=tuple(source_of(segment) for segment in rest),
        dirty_from=max([mark.offset for mark in marks], default=0),
        log_start=log.log_start,
        decided_to=stable,
        drop_tombstones_before=max(old, default=0),
        aborted=member.aborted,
        layout_ends=member.layout_ends,
        layouts=member.layouts,
    )


def finished_segments(log: LocalLog, point: int | None = None) -> list[Segment]:
    """List the segments that take no more appends and that no recovery will check.

    `point`: the recovery point that was noted durably; without, it is noted now, which blocks. OSError.
    """
    if point is None:
        log.checkpoint()
        point = log.note_recovery_point()
    return [segment for segment in log.segments[:-1] if segment.sealed and segment.end <= point]


def active_since_ms(log: LocalLog) -> int | None:
    """When the first batch of the active segment was appended, or its timestamp after a start; None without one."""
    active = log.segments[-1]
    return None if not active.size else active.first_append_ms or active.first_timestamp()


def _cleanable(member: Member, now_ms: int) -> list[Segment]:
    """The finished segments with decided transactions that are older than `min.compaction.lag.ms`."""
    segments = finished_segments(member.log, member.recovery_point)
    latest = now_ms - member.log.config.min_compaction_lag_ms
    while segments and segments[-1].max_timestamp.timestamp > latest > 0:
        segments.pop()
    while segments and member.stable is not None and segments[-1].end > member.stable:
        segments.pop()
    return segments


def _grouped(segments: list[Segment], size_max: int) -> Iterator[tuple[Source, ...]]:
    """Neighbours that fit into one segment, as they are now."""
    group: list[Source] = []
    for segment in segments:
        source = source_of(segment)
        size = sum(other.size for other in group) + source.size
        if group and (size > size_max or source.end - group[0].base_offset > RELATIVE_OFFSET_MAX):
            yield tuple(group)
            group = []
        group.append(source)
    if group:
        yield tuple(group)
