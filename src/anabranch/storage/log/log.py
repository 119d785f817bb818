"""The log of one partition: batches in segments, leader epochs, and what is durable of them (storage.md, section 2).

    log start <= recovery point <= flushed <= end          high watermark = flushed (fsync) or end (os)

The rules it keeps:
- `append` gives offsets and writes; nothing else moves the end forward. When it fails the log is what it was.
- `flushed` moves only after fdatasync of every file that holds bytes below it. When that fails, what the kernel holds
  of the unsynced tail can no longer be trusted, so the tail, which nobody was promised, is cut before the log takes
  appends again.
- Opening checks everything from the recovery point on and cuts the log at the first torn or corrupt batch, saying so.
  Below the recovery point nothing is ever cut: a log that is broken there is offline.

One thread calls everything, except `Flush.run`, which blocks and is made for another thread.
"""

from __future__ import annotations

import logging
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from anabranch.base.errors import AnabranchError, DecodeError
from anabranch.records.batch import BatchHeader, headers, stamp
from anabranch.runtime.disk import Disk, File
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.epochs import LeaderEpochs
from anabranch.storage.log.recovery import scan
from anabranch.storage.log.segment import LogSlice, Segment

logger = logging.getLogger("anabranch.storage.log")

EPOCHS_FILE = "leader-epoch-checkpoint"
CHECKPOINT_FILE = "log-checkpoint"
SNAPSHOT_SUFFIX = ".snapshot"
SNAPSHOTS_KEPT = 2
RELATIVE_OFFSET_MAX = (1 << 31) - 1
_CHECKPOINT = struct.Struct(">qq")


class OffsetOutOfRangeError(AnabranchError):
    """An offset that the log does not have: below its start, or above its end."""


class OfflineLogError(AnabranchError):
    """A log that is damaged where it was known to be sound. It is left as it is; the other partitions serve."""


class Appended(NamedTuple):
    """The offsets that an append was given."""

    base_offset: int
    last_offset: int


class TimestampedOffset(NamedTuple):
    """An answer about time: an offset, its timestamp in ms, and the leader epoch it was appended under."""

    offset: int
    timestamp: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class Flush:
    """The work of making a log durable up to `end`; made by `begin_flush`, given back to `end_flush`."""

    end: int
    files: tuple[File, ...]
    directory: Path | None
    disk: Disk

    def run(self) -> None:
        """Sync. Blocks; may run in any thread."""
        for file in self.files:
            file.sync()
        if self.directory is not None:
            self.disk.sync_directory(self.directory)


class PartitionLog:
    """Use `PartitionLog.open`."""

    def __init__(self, directory: Path, config: LogConfig, disk: Disk) -> None:
        self.directory = directory
        self.config = config
        self.log_start = 0
        self.end = 0
        self.flushed = 0
        self.epochs = LeaderEpochs()
        self.on_truncate: Callable[[int], None] = lambda end: None
        """Called with the new end when an unsynced tail had to be cut."""
        self._disk = disk
        self._segments: list[Segment] = []
        self._unsynced: list[Segment] = []
        self._directory_unsynced = False
        self._suspended: OSError | None = None

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
    ) -> PartitionLog:
        """Open the log in `directory`, made if it is not there, and recover it.

        A new log starts at `start_offset`: a partition that is created again goes on where its earlier life stopped.
        `visit` sees the header of every batch that recovery checks, in order. Raises OfflineLogError.
        """
        log = cls(directory, config, disk)
        disk.make_directory(directory)
        log._load(start_offset, visit or (lambda header: None))
        return log

    def _load(self, start_offset: int, visit: Callable[[BatchHeader], None]) -> None:
        names = self._disk.names(self.directory)
        for name in names:
            if name.endswith((".deleted", ".tmp", ".cleaned")):
                self._disk.unlink(self.directory / name)
        bases = sorted(int(name[:-4]) for name in names if name.endswith(".log"))
        recovery_point = self.log_start = start_offset
        if CHECKPOINT_FILE in names:
            self.log_start, recovery_point = self._load_checkpoint()
        elif bases:
            self.log_start = recovery_point = bases[0]
        self.end = self.log_start if not bases else bases[0]
        self._load_epochs(rebuild=EPOCHS_FILE not in names and bool(bases))
        self.epochs.truncate_from(recovery_point + 1)
        for index, base in enumerate(bases):
            segment = Segment(self._disk, self.directory, base)
            segment.size = self._disk.open(segment.path).size()
            following = bases[index + 1] if index + 1 < len(bases) else None
            if following is not None and following <= self.log_start:
                segment.remove()
                continue
            if not self._load_segment(segment, following, recovery_point, visit):
                for later in bases[index + 1 :]:
                    logger.warning("%s: removed, because the log was cut before it", self._path_of(later))
                    Segment(self._disk, self.directory, later).remove()
                self._disk.sync_directory(self.directory)
                break
        if self.end < self.log_start == recovery_point:
            self._start_over_at(self.log_start)
        if not self._segments:
            self._segments.append(Segment(self._disk, self.directory, self.end))
        self.log_start = max(self.log_start, self._segments[0].base_offset)
        self.epochs.truncate_from(self.end + 1)
        if self._directory_unsynced:
            self._disk.sync_directory(self.directory)
            self._directory_unsynced = False
        self.flushed = self.end
        if self.end < recovery_point:
            raise OfflineLogError(
                f"{self.directory}: the log ends at offset {self.end}, but was synced up to {recovery_point}. "
                "Files are missing or were cut; restore them, or delete the topic."
            )

    def _start_over_at(self, offset: int) -> None:
        """Drop files that a power loss brought back: all of their records were deleted."""
        for segment in self._segments:
            segment.remove()
        self._disk.sync_directory(self.directory)
        self._segments = []
        self.end = offset

    def _load_segment(
        self, segment: Segment, following: int | None, recovery_point: int, visit: Callable[[BatchHeader], None]
    ) -> bool:
        """Take a segment in; False when records are missing at its end, so that what follows it is void."""
        interval = self.config.index_interval_bytes
        try:
            if following is not None and following <= recovery_point:
                if segment.load_index() != segment.size:
                    segment.reindex(interval)
                self._segments.append(segment)
                self.end = following
                return True
            if segment.base_offset > max(self.end, recovery_point):
                logger.warning("%s: removed, because the log ends at offset %d before it", segment.path, self.end)
                segment.remove()
                return False
            self.end = max(self.end, segment.base_offset)
            sound_size = self._load_sound_part(segment, recovery_point)
        except DecodeError as error:
            raise OfflineLogError(
                f"{segment.path}: {error}, below the recovery point {recovery_point}. Nothing was cut; "
                "restore the file, or delete the topic."
            ) from error

        def found(position: int, header: BatchHeader) -> None:
            segment.note(header, position, interval)
            self.epochs.start(header.leader_epoch, header.base_offset)
            self.end = header.next_offset
            visit(header)

        tail = scan(segment.file, sound_size, segment.size, self.end, found)
        self._segments.append(segment)
        if tail.size > sound_size:
            segment.file.sync()
            self._directory_unsynced = True
        if tail.reason is None:
            return True
        logger.warning(
            "%s: cut at position %d of %d: %s. Offsets go on at %d",
            *(segment.path, tail.size, segment.size, tail.reason, self.end),
        )
        segment.truncate(tail.size)
        segment.file.sync()
        return following == self.end

    def _load_sound_part(self, segment: Segment, recovery_point: int) -> int:
        """Index what lies below the recovery point; say at which position it ends."""
        if segment.size and segment.load_index() == segment.size:
            end = max(header.next_offset for _, header in segment.walk(segment.floor(recovery_point)))
            if end <= recovery_point:
                self.end = end
                return segment.size
        segment.clear_index()
        if self.end >= recovery_point:
            return 0
        for position, header in segment.walk(0):
            segment.note(header, position, self.config.index_interval_bytes)
            self.end = header.next_offset
            if self.end >= recovery_point:
                return position + header.size
        return segment.size

    def _load_checkpoint(self) -> tuple[int, int]:
        data = self._disk.read(self.directory / CHECKPOINT_FILE)
        if len(data) != _CHECKPOINT.size:
            raise OfflineLogError(f"{self.directory / CHECKPOINT_FILE} is {len(data)} bytes long, expected 16.")
        log_start, recovery_point = _CHECKPOINT.unpack(data)
        return log_start, recovery_point

    def _load_epochs(self, *, rebuild: bool) -> None:
        path = self.directory / EPOCHS_FILE
        if self._disk.exists(path):
            try:
                self.epochs = LeaderEpochs.from_bytes(self._disk.read(path))
            except ValueError as error:
                logger.warning("%s: %s; read from the batches instead", path, error)
                rebuild = True
        if rebuild:
            for name in self._disk.names(self.directory):
                if name.endswith(".log"):
                    segment = Segment(self._disk, self.directory, int(name[:-4]))
                    segment.size = segment.file.size()
                    try:
                        for _, header in segment.walk(0):
                            self.epochs.start(header.leader_epoch, header.base_offset)
                    except DecodeError:
                        break

    def checkpoint(self) -> None:
        """Write down, durably, where the log starts and up to where it need not be checked again."""
        self._disk.replace(self.directory / EPOCHS_FILE, self.epochs.to_bytes())
        data = _CHECKPOINT.pack(self.log_start, max(self.flushed, self.log_start))
        self._disk.replace(self.directory / CHECKPOINT_FILE, data)

    def close(self) -> None:
        """Sync, write indexes and checkpoint: the next opening checks nothing."""
        if self._suspended is None:
            self.flush()
            for segment in self._segments:
                if segment.exists:
                    segment.save_index()
            self.checkpoint()
        self._segments = []

    # -- appending -----------------------------------------------------------------------------------------------

    def append(self, data: bytearray | memoryview, leader_epoch: int, now_ms: int) -> Appended:
        """Append whole, checked batches; offsets and the epoch are stamped into `data`, which is written as it is.

        Raises OSError, with the log unchanged, when the disk refuses.
        """
        if self._suspended is not None:
            self._resume()
        base = self.end
        found = list(headers(data))
        for position, header in found:
            stamp(data, position, self.end, leader_epoch)
            self.end += header.last_offset_delta + 1
        end, self.end = self.end, base
        segment = self._segment_for(len(data), end, now_ms)
        if not self._unsynced or self._unsynced[-1] is not segment:
            self._unsynced.append(segment)
        position_in_file = segment.size
        segment.append(data)
        if segment.first_append_ms is None:
            segment.first_append_ms = now_ms
        if self.epochs.latest < leader_epoch:
            self.start_epoch(leader_epoch)
        offset = base
        for position, header in found:
            stamped = header._replace(base_offset=offset, leader_epoch=leader_epoch)
            segment.note(stamped, position_in_file + position, self.config.index_interval_bytes)
            offset = stamped.next_offset
        self.end = end
        return Appended(base, end - 1)

    def _segment_for(self, size: int, end: int, now_ms: int) -> Segment:
        active = self._segments[-1]
        if not active.exists:
            self._directory_unsynced = True
            return active
        began = active.first_append_ms
        expired = began is not None and now_ms - began >= self.config.segment_ms
        full = active.size + size > self.config.segment_bytes or end - active.base_offset > RELATIVE_OFFSET_MAX
        return self._roll() if full or expired else active

    def _roll(self) -> Segment:
        self._segments[-1].save_index()
        self._segments.append(Segment(self._disk, self.directory, self.end))
        self._directory_unsynced = True
        return self._segments[-1]

    # -- durability ----------------------------------------------------------------------------------------------

    @property
    def high_watermark(self) -> int:
        """The offset below which records may be read."""
        return self.flushed if self.config.durability is Durability.FSYNC else self.end

    def begin_flush(self) -> Flush:
        """Say what has to be synced for everything appended so far to be durable; OSError after a failed sync."""
        if self._suspended is not None:
            raise self._suspended
        directory = self.directory if self._directory_unsynced else None
        self._directory_unsynced = False
        unsynced, self._unsynced = self._unsynced, []
        return Flush(self.end, tuple(segment.file for segment in unsynced), directory, self._disk)

    def end_flush(self, flush: Flush, error: OSError | None = None) -> None:
        """Take note of what a flush has done."""
        if error is None:
            self.flushed = max(self.flushed, min(flush.end, self.end))
        else:
            self._suspended = error
            self._directory_unsynced = True

    def flush(self) -> None:
        """Make everything appended so far durable. Blocks; raises OSError."""
        flush = self.begin_flush()
        try:
            flush.run()
        except OSError as error:
            self.end_flush(flush, error)
            raise
        self.end_flush(flush)

    def _resume(self) -> None:
        """Cut the tail that a failed sync left in doubt, and take appends again if the disk lets us."""
        self.truncate(self.flushed)
        for segment in self._segments:
            if segment.exists and segment.base_offset <= self.flushed:
                segment.file.sync()
        self._suspended = None
        self.on_truncate(self.end)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, offset: int, size_max: int, *, end: int | None = None) -> LogSlice | None:
        """Find the batches from the one that holds `offset` on, at least one, and otherwise not more than `size_max`.

        Nothing at or above `end` (default: the high watermark), which is a batch boundary, is given; None when there
        is nothing. Raises OffsetOutOfRangeError, and OfflineLogError when the log is damaged there.
        """
        limit = self.high_watermark if end is None else end
        if offset < self.log_start or offset > self.end:
            raise OffsetOutOfRangeError(
                f"Offset {offset} is not in {self.directory.name}, which has {self.log_start} to {self.end}."
            )
        if offset >= limit:
            return None
        index = self._segment_index(offset)
        segment = self._segments[index]
        try:
            position = segment.locate(offset)
            if position >= segment.size and index + 1 < len(self._segments):
                segment = self._segments[index + 1]
                position = 0
            if position >= segment.size or segment.base_offset >= limit:
                return None
            last = index + 1 >= len(self._segments) or segment is self._segments[-1]
            bounded = limit < self.end and (last or limit < self._segments[index + 1].base_offset)
            stop = segment.locate(limit) if bounded else segment.size
            cut = min(stop, segment.cut_at_or_before(position + size_max))
            if cut <= position:
                cut = min(stop, position + segment.header_at(position).size)
        except DecodeError as error:
            raise OfflineLogError(f"{segment.path}: {error}, where a sound batch is expected.") from error
        return LogSlice(segment.file, position, cut - position) if cut > position else None

    def headers_from(self, offset: int) -> Iterator[BatchHeader]:
        """Read the headers of all batches that end at or behind `offset`, in order."""
        for segment in self._segments[self._segment_index(offset) :]:
            for _, header in segment.walk(segment.floor(offset)):
                if header.last_offset >= offset:
                    yield header

    def _segment_index(self, offset: int) -> int:
        return max(0, bisect_right(self._segments, offset, key=lambda segment: segment.base_offset) - 1)

    # -- epochs and timestamps -----------------------------------------------------------------------------------

    def start_epoch(self, epoch: int) -> None:
        """End the current leader epoch at the log's end and begin `epoch` there; an epoch not above it is no change."""
        if self.epochs.start(epoch, self.end):
            self._save_epochs()

    def _save_epochs(self) -> None:
        data = self.epochs.to_bytes()
        temporary = self.directory / (EPOCHS_FILE + ".tmp")
        file = self._disk.open(temporary, create=True)
        file.truncate(0)
        file.write(data, 0)
        file.close()
        self._disk.rename(temporary, self.directory / EPOCHS_FILE)

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """Answer OffsetForLeaderEpoch: the largest epoch not above `epoch`, and its end; (-1, -1) where unknown."""
        return self.epochs.end_of(epoch, self.end)

    def batch_for_timestamp(self, timestamp: int) -> LogSlice | None:
        """Find the first batch, below the high watermark, that has a record of `timestamp` or later."""
        for segment in self._segments:
            if segment.max_timestamp.timestamp < timestamp:
                continue
            for position, header in segment.walk(segment.floor_of_timestamp(timestamp)):
                if header.base_offset >= self.high_watermark:
                    return None
                if header.max_timestamp >= timestamp and header.last_offset >= self.log_start:
                    return LogSlice(segment.file, position, header.size)
        return None

    def batch_of_max_timestamp(self) -> LogSlice | None:
        """Find the first batch that has the largest timestamp in the log."""
        found = [segment for segment in self._segments if segment.max_timestamp.offset >= self.log_start]
        if not found:
            return None
        segment = max(found, key=lambda segment: segment.max_timestamp.timestamp)
        position = segment.locate(segment.max_timestamp.offset)
        return LogSlice(segment.file, position, segment.header_at(position).size)

    # -- cutting -------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes in all segments."""
        return sum(segment.size for segment in self._segments)

    def delete_before(self, offset: int) -> None:
        """Move the log start to `offset`, durably, and drop the segments that lie below it (DeleteRecords)."""
        if not self.log_start <= offset <= self.high_watermark:
            raise OffsetOutOfRangeError(
                f"Records before offset {offset} cannot be deleted from {self.directory.name}: it has "
                f"{self.log_start} to {self.high_watermark}."
            )
        self.log_start = offset
        self.checkpoint()
        self._drop_below_log_start()

    def _drop_below_log_start(self) -> int:
        dropped = 0
        if self.log_start >= self.end and self._segments[-1].exists:
            self._roll()
        while len(self._segments) > 1 and self._segments[1].base_offset <= self.log_start:
            segment = self._segments.pop(0)
            self._unsynced = [other for other in self._unsynced if other is not segment]
            dropped += segment.size
            segment.remove()
        before = self.epochs.entries
        self.epochs.truncate_before(self.log_start)
        if self.epochs.entries != before:
            self._save_epochs()
        return dropped

    def retain(self, now_ms: int) -> int:
        """Drop whole segments that are past `retention.ms` or above `retention.bytes`; answer the bytes dropped."""
        if not self.config.delete:
            return self._drop_below_log_start()
        start = self.log_start
        excess = self.size - self.config.retention_bytes if self.config.retention_bytes >= 0 else 0
        for index, segment in enumerate(self._segments):
            last = index + 1 == len(self._segments)
            segment_end = self.end if last else self._segments[index + 1].base_offset
            newest = segment.max_timestamp.timestamp
            expired = 0 <= self.config.retention_ms < now_ms - newest and newest >= 0
            too_much = not last and excess >= segment.size > 0
            if segment_end > self.high_watermark or not segment.exists or not (expired or too_much):
                break
            start = segment_end
            excess -= segment.size
        if start <= self.log_start:
            return self._drop_below_log_start()
        self.log_start = start
        self.checkpoint()
        return self._drop_below_log_start()

    def truncate(self, offset: int) -> None:
        """Cut the log so that it ends at `offset`, or at the start of the batch that holds it."""
        while len(self._segments) > 1 and self._segments[-1].base_offset >= offset:
            gone = self._segments.pop()
            self._unsynced = [segment for segment in self._unsynced if segment is not gone]
            gone.remove()
            self._disk.sync_directory(self.directory)
        segment = self._segments[-1]
        position = segment.locate(offset) if segment.exists else 0
        if position < segment.size:
            offset = segment.header_at(position).base_offset
            segment.truncate(position)
        self.end = min(self.end, max(offset, segment.base_offset))
        self.flushed = min(self.flushed, self.end)
        self.epochs.truncate_from(self.end + 1)
        self._save_epochs()

    # -- snapshots of producer state -----------------------------------------------------------------------------

    def write_snapshot(self, data: bytes) -> None:
        """Keep `data`, what somebody knows of the log up to its end, beside it; the two newest are kept."""
        self._disk.replace(self.directory / f"{self.end:020d}{SNAPSHOT_SUFFIX}", data)
        for offset in sorted(self._snapshot_offsets())[:-SNAPSHOTS_KEPT]:
            self._disk.unlink(self.directory / f"{offset:020d}{SNAPSHOT_SUFFIX}")

    def snapshots(self) -> Iterator[tuple[int, bytes]]:
        """Read the snapshots that fit the log, newest first, each with the offset it was written at."""
        for offset in sorted(self._snapshot_offsets(), reverse=True):
            if offset <= self.end:
                yield offset, self._disk.read(self.directory / f"{offset:020d}{SNAPSHOT_SUFFIX}")

    def _snapshot_offsets(self) -> list[int]:
        names = self._disk.names(self.directory)
        return [int(name[: -len(SNAPSHOT_SUFFIX)]) for name in names if name.endswith(SNAPSHOT_SUFFIX)]

    def _path_of(self, base_offset: int) -> Path:
        return self.directory / f"{base_offset:020d}.log"
