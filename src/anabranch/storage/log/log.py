"""The log of one partition: batches in segments, leader epochs, and their durability (storage.md, section 2).

    log start, recovery point <= flushed <= end          high watermark = flushed (fsync) or end (os)

- `append` gives offsets and writes; nothing else moves the end forward. When it fails the log is unchanged.
- `flushed` moves only after a sync of every file with bytes below it, and of its name. After a failed sync the kernel
  may call the unsynced tail clean though it never reached the disk, so a later sync that succeeds proves nothing.
  Before the log takes appends again that tail is cut (fsync: none of it was acknowledged), or read back, checked,
  written again and synced (os: readers may have seen it); what does not pass is cut.

One thread calls everything, except `Flush.run`, which blocks and may run in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.machines.progress import Rewritten
from anabranch.records.batch import BatchHeader, headers, stamp
from anabranch.runtime.disk import Disk
from anabranch.runtime.syncs import Told
from anabranch.storage.checkpoints import NOTHING_KNOWN, CheckpointError, Checkpoints
from anabranch.storage.interface import Appended, IsVoid, LogObserver, Slice, T, Unobserved, nothing_is_void
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.dropped import DroppedSegments
from anabranch.storage.log.epochs import LeaderEpochs
from anabranch.storage.log.errors import OfflineLogError, OffsetOutOfRangeError
from anabranch.storage.log.flush import Flush, plan_flush, tail_to_cut
from anabranch.storage.log.home import LogHome
from anabranch.storage.log.recovery import epochs_of_batches, recover
from anabranch.storage.log.retention import retained_from
from anabranch.storage.log.segment import Segment
from anabranch.storage.log.segments import Segments
from anabranch.storage.log.snapshots import Snapshots
from anabranch.storage.log.staging import Staging
from anabranch.storage.next_record import find_next_record, near_next_record

if TYPE_CHECKING:
    from anabranch.storage.log.group_commit import GroupCommit

__all__ = ["Flush", "LocalLog", "OfflineLogError", "OffsetOutOfRangeError"]

logger = logging.getLogger("anabranch.storage.log")
RESUME_INTERVAL_MS = 1_000  # After a failed sync, time between attempts to go on.


class LocalLog:
    """A `PartitionLog` on the local disk; use `LocalLog.open`.

    Beyond the interface only this package and upkeep know: opening, compaction (`cleaner`), group commit, `truncate`.
    """

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        disk: Disk,
        checkpoints: Checkpoints | None = None,
        commits: GroupCommit | None = None,
    ) -> None:
        self.directory = directory
        self._name = directory.name
        self._config = config
        self.log_start = self.end = self.flushed = 0
        self._seen = 0  # The end of unsynced records that readers may have seen, from before the log synced first.
        self.epochs = LeaderEpochs()
        self._observer: LogObserver = Unobserved()
        self._commits = commits
        self._disk = disk
        self._checkpoints = checkpoints
        self._shared = checkpoints is not None
        self._segments = Segments()
        self.dropped = DroppedSegments(disk)
        self._home = LogHome(disk, directory)
        self._snapshots = Snapshots(disk, directory)
        self.staging = Staging(disk, self._home)
        self._late_indexes: list[Segment] = []  # Finished segments whose index is not synced.
        self._generation = 0  # Grows when the log is cut or a sync fails: one begun before proves nothing of the rest.
        self._failure: OSError | None = None
        self._tried_at_ms: int | None = None  # To go on after a failed sync.
        self._doubtful_end = -1  # Where the log ended when a sync failed, until the log is resumed.

    # -- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        directory: Path,
        config: LogConfig,
        *,
        disk: Disk,
        start_offset: int = 0,
        visit: Callable[[BatchHeader], None] | None = None,
        checkpoints: Checkpoints | None = None,
        commits: GroupCommit | None = None,
        power_lost: bool = False,
        exists: bool | None = None,
    ) -> LocalLog:
        """Open the log in `directory` and recover it; a new log has none until something is written.

        A new log starts at `start_offset`: a partition that is created again goes on where its earlier life stopped.
        `visit` sees the header of every batch that recovery checks, in order. Without the `checkpoints` of a directory
        of logs it keeps its own; without `commits`, which make logs durable together, it cannot be asked to `commit`.
        `power_lost`: unsynced bytes may be missing in any order. `exists`: whether `directory` does. OfflineLogError.
        """
        log = cls(directory, config, disk, checkpoints, commits)
        log._home.exists = disk.exists(directory) if exists is None else exists
        log._load(start_offset, visit or (lambda header: None), power_lost=power_lost)
        return log

    def _load(self, start_offset: int, visit: Callable[[BatchHeader], None], *, power_lost: bool) -> None:
        try:
            known = self._points.known(self._name)
        except CheckpointError as error:
            raise OfflineLogError(str(error)) from error
        point = known.recovery_point
        if not self._home.exists and known == NOTHING_KNOWN:  # Nothing was ever written.
            self.log_start = self.end = self.flushed = start_offset
            self._add_segment()
            return
        self._home.make(self.epochs)
        found = self._home.epochs_file.load()
        sound, self.epochs = found is not None, found or epochs_of_batches(self._disk, self.directory)
        loaded = self.epochs.entries
        self.epochs.truncate_from((start_offset if point is None else point) + 1)
        recovered, self.log_start, self.end, compacted, as_appended_from = recover(
            self._disk,
            self.directory,
            known=known,
            start_offset=start_offset,
            epochs=self.epochs,
            index_interval=self._config.index_interval_bytes,
            visit=visit,
            power_lost=power_lost,
        )
        self._segments = Segments(recovered, as_appended_from if compacted or self._config.compact else 0)
        if not recovered:
            self._add_segment()
        self._late_indexes = self._segments.with_late_index()
        self.epochs.truncate_from(self.end + 1)
        if loaded:
            self.epochs.start(loaded[-1][0], self.end)  # It was begun, whatever became of its records.
        self.epochs.truncate_before(self.log_start)
        self.flushed = self.end
        self._snapshots.forget_above(self.end)
        self._home.durable = point is not None
        synced = sound and (not loaded or loaded[-1][1] < (point or 0))  # Above it perhaps written without a sync.
        self._home.epochs_file.durable = synced and self.epochs.entries == loaded
        self._home.epochs_file.written = self.epochs.entries == loaded and (sound or not loaded)
        if known.log_start is not None and self.log_start > known.log_start:
            self.checkpoint()  # A power loss took the first files: a kill before the next note must not find it so.
        elif compacted and point is None:
            self.note_points()  # From here on it goes up: a start takes a gap above it for a loss.

    @property
    def _points(self) -> Checkpoints:
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self._disk, self.directory)
        return self._checkpoints

    def checkpoint(self) -> None:
        """Record durably where the log starts and up to where recovery need not check it again. Blocks; OSError."""
        self.note_points()
        self._points.save()

    def note_points(self, start: int | None = None) -> None:
        """Note what `checkpoint` records, of a log that may be about to start at `start`; to be saved. OSError."""
        self._home.make_durable(self.epochs)
        self._home.epochs_file.sync(self.epochs)
        begin = start if start is not None and self.log_start < start <= self.flushed else self.log_start
        self._points.record(self._name, log_start=begin, recovery_point=self.recovery_point, synced=self.flushed)

    @property
    def recovery_point(self) -> int:
        """The offset below which batches, and their index entries, are durable: no recovery need check them."""
        point = next((segment.base_offset for segment in self._segments if segment.index_unsynced), self.flushed)
        return min(self.flushed, max(point, self._points.recovery_point(self._name) or 0))

    def close(self) -> None:
        """Sync, write the files that spare the next opening its checks, and close the files. Blocks; OSError.

        Shared checkpoints are only updated: their owner saves them, once for all logs.
        """
        self._segments.share_no_more()
        self.dropped.close()
        if self._failure is None and self._segments and self._home.exists:
            self._segments[-1].seal()
            self.flush()
            self._note_checkpoint()
            self._home.close(self.epochs)
        self._segments = Segments()

    def _note_checkpoint(self) -> None:
        """Update the checkpoint if it changed; save it unless it is shared."""
        known = self._points.log_start(self._name), self._points.recovery_point(self._name)
        stale = self._home.exists and known != (self.log_start, self.recovery_point)
        if stale and (self.flushed > 0 or known != (None, None)):
            self.note_points()
            if not self._shared:
                self._points.save()

    @property
    def config(self) -> LogConfig:
        """The settings; `configure` replaces them."""
        return self._config

    def configure(self, config: LogConfig) -> None:
        """Go on with other settings."""
        self._seen = self.high_watermark
        self._config = config

    def abandon(self) -> None:
        """Note nothing of the log any more, which is about to be deleted: its syncs that still end are not noted."""
        self._home.abandoned, self._observer = True, Unobserved()
        self.dropped.forget()
        self._segments.share_no_more()

    def observe(self, observer: LogObserver) -> None:
        """Set the observer of the log's changes; a log has one."""
        self._observer = observer

    # -- appending -----------------------------------------------------------------------------------------------

    def append(
        self, data: bytearray | memoryview, leader_epoch: int, now_ms: int, header: BatchHeader | None = None
    ) -> Appended:
        """As `PartitionLog.append`: `data` is written as it is, or was written by `staging`."""
        if self._failure is not None:
            self._resume(now_ms)
        base = end = self.end
        if not self._home.exists:
            self._home.make(self.epochs)
        found = list(headers(data)) if header is None else ((0, header),)
        for position, each in found:
            stamp(data, position, end, leader_epoch)
            end += each.last_offset_delta + 1
        assert found and position + each.size == len(data), "whole batches are appended, and at least one"
        segments, ready = self._segments, self.staging.ready
        staged = ready.pop(id(data), None) if ready else None
        is_over = segments[-1].size > 0 if staged else segments.are_over(len(data), end, now_ms, self._config)
        segment = self._roll() if is_over else segments[-1]
        at = segment.size
        segment.append(data) if staged is None else segment.adopt(staged.stamped(), len(data))
        if segment.first_append_ms is None:
            segment.first_append_ms = now_ms
        if leader_epoch > self.epochs.latest:
            self.epochs.start(leader_epoch, base)
            self._home.epochs_file.outdated()
        offset = base
        for position, each in found:
            segment.note(offset, at + position, each.size, offset + each.last_offset_delta + 1, each.max_timestamp)
            offset = segment.end
        self.end = end
        return tuple.__new__(Appended, (base, end - 1))  # At half the cost of `Appended(...)`.

    def _roll(self) -> Segment:
        self._segments[-1].cut_leftover()
        self._segments[-1].seal()
        self._late_indexes.append(self._segments[-1])
        return self._add_segment()

    def _add_segment(self) -> Segment:
        return self._segments.add(Segment(self._disk, self.directory, self.end, self._config.index_interval_bytes))

    # -- durability ----------------------------------------------------------------------------------------------

    @property
    def high_watermark(self) -> int:
        """The offset below which records may be read."""
        return max(self.flushed, self._seen) if self._config.durability is Durability.FSYNC else self.end

    def begin_flush(self) -> Flush:
        """Return the sync that makes everything appended so far durable; OSError after a failed sync."""
        if self._failure is not None:
            raise self._failure
        unsynced = self._segments[self._segments.index_of(self.flushed) :]
        flush, left = plan_flush(
            [*(each for each in self._late_indexes if each not in unsynced and each in self._segments), *unsynced],
            flushed=self.flushed,
            end=self.end,
            generation=self._generation,
            directory=self.directory,
            parent_durable=self._home.durable,
            disk=self._disk,
        )
        self._late_indexes = left
        return flush

    def end_flush(self, flush: Flush, error: OSError | None = None) -> bool:
        """Apply the result of a flush; False if it proves nothing, as it failed or the log was cut since."""
        if error is not None:
            self._failure = error
            self._tried_at_ms = None
            self._generation += 1
        elif flush.generation == self._generation:
            self.flushed = max(self.flushed, flush.end)
            flush.note_durable()
            self._home.durable |= self.directory.parent in flush.directories
            if self._home.durable and not self._home.abandoned:
                self._points.record(self._name, log_start=self.log_start, synced=self.flushed)
            return True
        self._late_indexes += [segment for segment in flush.indexed if segment in self._segments]
        return False

    def flush(self) -> None:
        """Make everything appended so far durable. Blocks; raises OSError."""
        if self._failure is not None:
            self._resume(None)
        flush = self.begin_flush()
        try:
            flush.run()
        except OSError as error:
            self.end_flush(flush, error)
            raise
        self.end_flush(flush)

    @property
    def flush_due(self) -> bool:
        """Whether a finished segment is not synced yet: a flush is due even without waiters."""
        return self._failure is None and self.flushed < self._segments[-1].base_offset

    def opens_file(self, size: int, now_ms: int) -> bool:
        """Whether an append of so many bytes has to open its file, or to make it."""
        segments = self._segments
        return not segments[-1].is_open or segments.are_over(size, self.end, now_ms, self._config)

    def commit_then(self, done: Told) -> None:
        """Make all that was appended durable, and call `done` with the OSError that prevents it, or None."""
        assert self._commits is not None
        self._commits.commit_then(self, done, self._observer.high_watermark_moved)

    def commit(self) -> asyncio.Future[None]:
        """As `commit_then`, as a future of the caller's own."""
        assert self._commits is not None
        return self._commits.commit(self, self._observer.high_watermark_moved)

    def resume(self, now_ms: int) -> None:
        """After a failed sync, cut the uncertain tail and take appends again; OSError while the disk refuses."""
        if self._failure is not None:
            self._resume(now_ms)

    def _resume(self, now_ms: int | None) -> None:
        """As `resume`; without `now_ms` the time since the last attempt does not matter."""
        assert self._failure is not None
        if now_ms is not None:
            # A clock that was set back must not make the log wait until it is as late again.
            if self._tried_at_ms is not None and 0 <= now_ms - self._tried_at_ms < RESUME_INTERVAL_MS:
                raise self._failure
            self._tried_at_ms = now_ms
        self._doubtful_end = max(self._doubtful_end, self.end)
        first, epoch = self._segments.index_of(self.flushed), self.epochs.latest
        cut = tail_to_cut(self._segments[first:], self.flushed, is_seen=self.high_watermark > self.flushed)
        if cut is not None:
            self.truncate(*cut)
        self.epochs.start(epoch, self.end)
        for segment in self._segments[first:]:
            if segment.created:
                segment.sync()
        self._disk.sync_directory(self.directory)
        self._failure = None
        before, self._doubtful_end = self._doubtful_end, -1
        if self.end < before:
            logger.warning("%s: cut from offset %d back to %d", self.directory, before, self.end)
            self._observer.log_cut(self.end)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, offset: int, size_max: int, *, end: int | None = None) -> Slice | None:
        """Find the batches from the one that holds `offset` on, at least one, and otherwise not more than `size_max`.

        Nothing at or above `end` (default: the high watermark), which is a batch boundary, is given; None when there
        is nothing. Raises OffsetOutOfRangeError, and OfflineLogError when the log is damaged there.
        """
        limit = self.high_watermark if end is None else min(end, self.end)
        if not self.log_start <= offset <= self.end:
            raise OffsetOutOfRangeError(
                f"Offset {offset} is not in {self.directory.name}, which has {self.log_start} to {self.end}."
            )
        return None if offset >= limit else self._segments.read(offset, size_max, limit)

    def slices(self) -> list[Slice]:
        """As `PartitionLog.slices`, one for each segment. OfflineLogError when the log is damaged at its start."""
        return self._segments.slices(self.log_start)

    def headers_from(self, offset: int) -> Iterator[BatchHeader]:
        """Read the headers of all batches that end at or behind `offset`, in order; OfflineLogError."""
        return self._segments.headers_from(offset)

    def next_record(self, offset: int, is_void: IsVoid = nothing_is_void) -> int | Awaitable[int]:
        """As `PartitionLog.next_record`: at once at the log's end, also where one marker is left there."""
        offset = max(offset, self.log_start)
        if offset >= self.end:
            return offset
        found = near_next_record(self._segments.recent_header(offset), offset, self.end)
        return find_next_record(self, offset, is_void) if found is None else found

    # -- epochs and timestamps -----------------------------------------------------------------------------------

    def start_epoch(self, epoch: int) -> None:
        """End the current leader epoch at the log's end and begin `epoch` there; an epoch not above it is no change.

        The epoch survives a crash of the process, not of the machine. OSError, with the epochs unchanged.
        """
        if epoch > self.epochs.latest:
            before = self.epochs.entries
            self.epochs.start(epoch, self.end)
            try:
                self._home.write_epochs(self.epochs)
            except OSError:
                self.epochs = LeaderEpochs(before)
                raise

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """Answer OffsetForLeaderEpoch: the largest epoch not above `epoch`, and its end; (-1, -1) where unknown."""
        return self.epochs.end_of(epoch, self.end)

    def batch_for_timestamp(self, timestamp: int) -> Slice | Awaitable[Slice | None] | None:
        """Find the first batch, below the high watermark, that has a record of `timestamp` or later."""
        return self._segments.batch_for_timestamp(timestamp, lambda: (self.log_start, self.high_watermark))

    def batch_of_max_timestamp(self) -> Slice | Awaitable[Slice | None] | None:
        """Find the first batch that has the largest timestamp in the log."""
        newest = self._segments.max_timestamp(self.log_start)
        return None if newest is None else self.batch_for_timestamp(newest)

    # -- cutting -------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes in all segments."""
        return self._segments.size

    @property
    def rewritten(self) -> Rewritten:
        """As `PartitionLog.rewritten`."""
        return self._segments.rewritten

    def delete_before(self, offset: int) -> None:
        """Move the log start to `offset`, durably, and drop the segments below it, but not yet their files."""
        if self._failure is not None:
            self._resume(None)  # A cut that is half done must be whole before anything else changes the segments.
        if not self.log_start <= offset <= self.high_watermark:
            raise OffsetOutOfRangeError(
                f"Records before offset {offset} cannot be deleted from {self.directory.name}: it has "
                f"{self.log_start} to {self.high_watermark}."
            )
        self._move_log_start(offset)

    def _move_log_start(self, offset: int) -> None:
        if offset > self.flushed:  # A log start above the synced end is taken for damage.
            self.flush()
        self._observer.before_delete(offset)
        before, self.log_start = self.log_start, offset
        try:
            if not self._points.has_saved(self._name, offset):  # As a rule that was done beside the loop.
                self.checkpoint()
        except OSError:
            self.log_start = before
            raise
        self._drop_below_log_start()

    def _drop_below_log_start(self) -> None:
        if self.log_start >= self.end:
            with contextlib.suppress(OSError):
                if self._segments[-1].size:
                    self._roll()
                self._segments.make_last()  # Else a file of deleted records that cannot be removed might be the newest.
        self.dropped.add(self._segments.take_before(self.log_start))
        before = self.epochs.entries
        self.epochs.truncate_before(self.log_start)
        if self.epochs.entries != before:
            self._home.epochs_file.outdated()

    async def remove_dropped(self) -> None:
        """As `PartitionLog.remove_dropped`."""
        await self.dropped.remove()

    def retained_from(self, now_ms: int, before: int | None = None) -> int:
        """Return the offset at which the log would start after `retain`."""
        if self._failure is not None:
            return self.log_start
        limit = self.high_watermark if before is None else min(before, self.high_watermark)
        return retained_from(self._segments, self._config, self.log_start, limit, now_ms)

    async def checkpoint_beside(self, start: int | None = None) -> None:
        """As `checkpoint`, in a thread, of a log that is about to start at `start`: a deletion finds that done."""
        self.note_points(start)
        if start is None or not self._points.has_saved(self._name, start):
            await asyncio.get_running_loop().run_in_executor(None, self._points.save)

    def retain(self, now_ms: int, before: int | None = None) -> int:
        """Drop whole segments that are past `retention.ms` or above `retention.bytes`; answer the bytes dropped.

        Called every now and then, it also notes how far the log need not be checked again after a crash.
        """
        if self._failure is not None:
            return 0
        start = self.retained_from(now_ms, before)
        if start > self.log_start:
            before = self.size
            self._move_log_start(start)
            return before - self.size
        self._late_indexes = self._segments.with_late_index()  # Also those that a reader had built anew.
        self._note_checkpoint()
        return 0

    def truncate(self, offset: int, position: int | None = None) -> None:
        """Cut the log so that it ends at `offset`, or at the start of the batch that holds it, but not below its start.

        `position`: where the batch at `offset` begins, which is not read then. Blocks; OSError: to be done again.
        """
        index = self._segments.index_of(offset)
        segment = self._segments[index]
        end = max(offset, segment.base_offset)
        if position is None:
            end = min(end, segment.end)
            position = segment.locate(offset) if segment.size else 0
            if position < segment.size:
                end = segment.header_at(position).base_offset
        if end < self.log_start:
            index, position, end = 0, 0, self.log_start
        self.end = end
        self.flushed, self._seen = min(self.flushed, end), min(self._seen, end)
        self._generation += 1
        if self._points.go_above(self._name, self.flushed):
            self.checkpoint()
        while len(self._segments) > index + 1:
            self._disk.discard(self._segments.remove_newest())
        segment = self._segments[index]
        if position == 0 and end != segment.base_offset:
            self.dropped.remove_at_once()  # Or the newest file that is left would end below the log start.
            self._disk.discard(self._segments.remove_newest())
            self._add_segment()
        elif position < segment.size or segment.sealed:
            segment.truncate(position, end)
            segment.sync()
        self._snapshots.forget_above(end)
        self._disk.sync_directory(self.directory)
        self.epochs.truncate_from(end + 1)
        self._home.epochs_file.outdated()

    # -- compaction ----------------------------------------------------------------------------------------------

    @property
    def disk(self) -> Disk:
        """The disk that holds the log."""
        return self._disk

    def note_recovery_point(self) -> int:
        """Note the recovery point, and return it; it holds when the checkpoints are saved. OSError."""
        self._note_checkpoint()
        return self._points.recovery_point(self._name) or 0

    def finish_segment(self, before: int) -> bool:
        """Take no more appends into the active segment if records below `before` are in it; whether that was so."""
        due = self._segments[-1].size > 0 and self._segments[-1].base_offset < before and self._failure is None
        if due:
            self._roll()
        return due

    @property
    def segments(self) -> Segments:  # Only upkeep of this package may change them.
        """The segments."""
        return self._segments

    # -- snapshots of producer state -----------------------------------------------------------------------------

    def write_snapshot(self, data: bytes, *, only: bool = False) -> None:
        """Keep `data`, state derived from the log up to its end, beside it.

        Of others stays none, or the newest of a synced end: a power loss takes snapshots with the records they are of.
        """
        self._home.make_durable(self.epochs)
        self._snapshots.write(data, self.end, flushed=self.flushed, only=only)

    async def write_snapshot_beside(self, make: Callable[[], bytes], *, replace: bool = False) -> bool:
        """Make and keep a snapshot in a thread. False if one as new is there, or the log was cut."""
        self._home.make_durable(self.epochs)
        generation = self._generation
        write = self._snapshots.writer(make, self.end, flushed=self.flushed, replace=replace)
        return await asyncio.get_running_loop().run_in_executor(None, write) and self._generation == generation

    async def forget_snapshots_below(self, offset: int) -> None:
        """Remove the snapshots taken below `offset`, if one taken there or later is left."""
        await asyncio.get_running_loop().run_in_executor(None, self._snapshots.forget_below, offset)

    def has_snapshot_from(self, offset: int) -> bool:
        """Whether a snapshot covers every record below `offset`, also after a power loss."""
        return self._snapshots.cover(offset, flushed=self.flushed)

    def newest_snapshot(self, restore: Callable[[bytes], T]) -> tuple[int, T] | None:
        """As `PartitionLog.newest_snapshot`."""
        return self._snapshots.newest(self.log_start, self.end, restore) if self._home.exists else None
