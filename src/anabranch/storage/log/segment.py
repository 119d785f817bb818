"""A segment: one file of record batches as they came from the wire, with a sparse index over it.

Positions of the newest batches are cached one by one, so that reads at the tail search nothing. Older
ones are found through the index and, from there, by reading headers. Files are made at the first append, so that an
empty partition costs nothing. Reads check as much as they need: DecodeError for bytes that are no batch.

The file is opened when it is needed and kept open, as far as its owner has room for it (`open_files`). With bytes that
were not synced it stays open.
"""

from __future__ import annotations

import contextlib
import errno
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from anabranch.base.errors import DecodeError
from anabranch.records.batch import HEADER_SIZE, BatchHeader, parse_header
from anabranch.runtime.disk import DISCARDED_SUFFIX, Disk, File
from anabranch.storage.interface import FetchedSlice, Slice
from anabranch.storage.log.config import LogConfig
from anabranch.storage.log.index import NO_TIMESTAMP, SparseIndex
from anabranch.storage.log.log_slice import LogSlice

LOG_SUFFIX = ".log"
RECENT_MAX = 256
_WALK_SIZE = 4096
COPIED_SIZE_MAX = 16 << 20
"""Bytes of a slice that is copied where there is no room for an open file."""
RELATIVE_OFFSET_MAX = (1 << 31) - 1


class MaxTimestamp(NamedTuple):
    """The largest timestamp of some batches, and the last offset of the first batch that has it."""

    timestamp: int
    offset: int


_NO_MAXIMUM = MaxTimestamp(NO_TIMESTAMP, -1)


class Owner(Protocol):
    """The log of a segment that shares room for open files with others."""

    lately_used: bool
    """Set with every use."""

    def make_room(self) -> bool:
        """Close files until one more may be opened; whether it may."""

    def opened(self, file: File) -> None:
        """Note the file that was opened."""

    def refusal(self) -> OSError:
        """The error where a file may not be opened."""


_NOTHING = array("q")
WRONG_ENTRIES_MAX = 8
"""Entries of the index, one before the other, that are wrong before it is built anew."""
_ENTRIES_AT_ONCE = 100_000
HEADERS_AT_A_TIME = 1_000
"""Headers of batches that are looked at before other work has its turn."""


class Segment:
    """The batches from `base_offset` to `end`, where the next segment begins."""

    __slots__ = (
        "_directory",
        "_disk",
        "_file",
        "_first_timestamp",
        "_index",
        "_index_interval",
        "_indexed_to",
        "_leftover",
        "_recent_offsets",
        "_recent_positions",
        "_suffix",
        "_to_index_anew",
        "base_offset",
        "created",
        "durable_name",
        "end",
        "first_append_ms",
        "max_timestamp",
        "owner",
        "sealed",
        "size",
        "unsynced",
    )

    def __init__(self, disk: Disk, directory: Path, base_offset: int, index_interval: int, *, suffix: str = "") -> None:
        self.base_offset = base_offset
        self.end = base_offset
        self.size = 0
        self.created = False
        """Whether the file exists."""
        self.durable_name = False
        """Whether the file's name was synced."""
        self.sealed = False
        """Whether nothing will be appended any more."""
        self.unsynced = False
        """Whether the file may have bytes that are not synced: it stays open then."""
        self.max_timestamp = _NO_MAXIMUM
        self.first_append_ms: int | None = None
        self.owner: Owner | None = None
        """Who is asked before the file is opened; nobody while the log is opened, and in threads."""
        self._directory = directory
        self._suffix = suffix
        self._index: SparseIndex | None = None
        self._first_timestamp: int | None = None
        self._disk = disk
        self._index_interval = index_interval
        self._file: File | None = None
        self._indexed_to = 0
        self._to_index_anew = False
        """Whether much of the index is wrong, or a read failed that it was made from, which is tried once more."""
        self._leftover = False
        """Whether bytes of an append that failed may lie behind the end: a later one must not cover a part of them."""
        self._recent_offsets = _NOTHING
        self._recent_positions = _NOTHING

    def is_over(self, size: int, end: int, now_ms: int, config: LogConfig, count: int) -> bool:
        """Whether an append of so many bytes, which leads to the offset `end`, begins a new segment.

        `count`: the segments of the log, this one among them.
        """
        if self.size == 0:
            return False
        age_ms = 0 if self.first_append_ms is None else now_ms - self.first_append_ms
        if age_ms >= config.segment_ms and (
            self.size >= config.small_segment_bytes or age_ms >= config.small_segment_ms * count
        ):
            return True
        return self.size + size > config.segment_bytes or end - self.base_offset > RELATIVE_OFFSET_MAX

    @property
    def path(self) -> Path:
        """Where the batches are."""
        return path_of(self._directory, self.base_offset, self._suffix)

    @property
    def is_named(self) -> bool:
        """Whether the file has its name: that of a compacted segment may lie beside those that it replaces."""
        return not self._suffix

    def named(self, suffix: str) -> None:
        """Note that the file has another name now; those of its index stay as they are."""
        self._index, self._suffix = self.index, suffix

    @property
    def index(self) -> SparseIndex:
        """The index over the batches."""
        if self._index is None:
            self._index = SparseIndex(self._disk, self._directory, self.base_offset, self._suffix)
        return self._index

    @property
    def index_unsynced(self) -> bool:
        """Whether the index has unsynced entries."""
        return self._index is not None and self._index.unsynced

    @property
    def file(self) -> File:
        """The open file; created if missing. OSError, also where there is no room for it."""
        if self._file is None:
            self._make_room()
        return self._file or self._opened()

    def _make_room(self) -> None:
        if self.owner is not None and not self.owner.make_room():
            raise self.owner.refusal()

    def make(self) -> None:
        """Make the file, empty, and close it again. OSError."""
        self._disk.open(self.path, create=True)
        self.created = True

    def _opened(self) -> File:
        file = self._disk.open(self.path, create=not self.created)
        self.created = True
        return self._keep(file)

    def _keep(self, file: File) -> File:
        self._file = file
        if self.owner is not None:
            self.owner.opened(file)
        return file

    @property
    def _readable(self) -> File:
        """The open file, or, where there is no room for it, one of the caller's own."""
        if self._file is not None:
            return self._file
        if self.owner is None or self.owner.make_room():
            return self._opened()
        return self._disk.open(self.path)

    @property
    def is_open(self) -> bool:
        """Whether the file is kept open."""
        return self._file is not None

    def release(self) -> None:
        """Close the file until it is needed again, unless it has unsynced bytes; slices keep theirs."""
        if not self.unsynced:
            self._file = None
        if self._index is not None:
            self._index.release()

    def slice(self, position: int, size: int) -> Slice:
        """Give a stretch of the file: of the open one, or, where there is no room for it, a copy."""
        file = self._readable
        if self.owner is not None:
            self.owner.lately_used = True
        if file is self._file or size > COPIED_SIZE_MAX:
            return LogSlice(file, position, size, self.end if position + size == self.size else None)
        return FetchedSlice(file.read(size, position))

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Write batches at the end; `note` each of them afterwards. After an error the segment is unchanged."""
        file = self._file or self.file
        if self._leftover:
            self.cut_leftover()
        if self.owner is not None:
            self.owner.lately_used = True
        self.unsynced = True
        try:
            file.write(data, self.size)
        except OSError:
            try:
                file.truncate(self.size)
            except OSError:
                self._leftover = True
            raise
        self.size += len(data)

    def adopt(self, file: File, size: int) -> None:
        """Give a file of batches the name of this segment, which is empty; `note` each of them afterwards. OSError."""
        self._make_room()
        self._disk.rename(file.path, self.path)
        file.path, self.size = self.path, size
        self.created, self.durable_name, self.unsynced, self._leftover = True, False, True, False
        self._keep(file)

    def cut_leftover(self) -> None:
        """Cut what an append that failed has left: at the next start it would count, or hide what follows. OSError."""
        if self._leftover:
            self.file.truncate(self.size)
            self._leftover = False

    def sync(self) -> None:
        """Make all bytes of the file durable. Blocks; OSError."""
        self.file.sync()
        self.unsynced = False

    def note(self, base_offset: int, position: int, size: int, next_offset: int, timestamp: int) -> None:
        """Index a batch of the file; `timestamp` is the largest of its records'."""
        if position == 0 or position + size - self._indexed_to > self._index_interval:
            index = self._index
            (self.index if index is None else index).append(base_offset, position, *self.max_timestamp)
            self._indexed_to = position + size
        if timestamp > self.max_timestamp.timestamp:
            self.max_timestamp = tuple.__new__(MaxTimestamp, (timestamp, next_offset - 1))
        self.end = next_offset
        if self._recent_offsets is _NOTHING:
            self._recent_offsets, self._recent_positions = array("q"), array("q")
        self._recent_offsets.append(base_offset)
        self._recent_positions.append(position)
        if len(self._recent_offsets) > RECENT_MAX:
            del self._recent_offsets[: RECENT_MAX // 2], self._recent_positions[: RECENT_MAX // 2]

    def note_header(self, position: int, header: BatchHeader) -> None:
        """Index a batch by its header."""
        self.note(header.base_offset, position, header.size, header.next_offset, header.max_timestamp)

    def seal(self) -> None:
        """Finish the segment: drop the state of the tail, write the index if the disk permits, close what is synced."""
        self.sealed = True
        self._clear_recent()
        with contextlib.suppress(OSError):
            self.cut_leftover()
            if self.size:
                self.index.store()
        self.release()

    def truncate(self, size: int, end: int) -> None:
        """Cut the file to `size` bytes, a batch boundary, where the next offset is `end`."""
        self._first_timestamp = None
        self._clear_recent()
        self.index.cut_from_position(size)
        if self.created:
            self.file.truncate(size)
        self.size, self.end, self.sealed = size, end, False
        self._leftover = self._to_index_anew = False
        try:
            self._restore_from_index()
        except DecodeError:
            with contextlib.suppress(DecodeError):  # What is damaged before the cut is there still.
                self.rebuild_index()
        except OSError:
            self._to_index_anew = True
            raise

    # -- reading -------------------------------------------------------------------------------------------------

    def position_at(self, offset: int) -> int:
        """The position where the batches below `offset` end, of a segment without gaps. OSError.

        What lies there is not read: it may be damaged.
        """
        if offset <= self.base_offset:
            return 0
        if offset >= self.end or (self._recent_offsets and self._recent_offsets[0] <= offset):
            return self.locate(offset)
        try:
            position = self.locate(offset - 1)
            header = self.header_at(position)
            if header.next_offset != offset:
                raise DecodeError(f"the one at position {position} ends before offset {header.next_offset}")
        except DecodeError as error:
            raise OSError(
                errno.EIO, f"{self.path}: the batch before offset {offset} cannot be read: {error}"
            ) from error
        return position + header.size

    def locate(self, offset: int) -> int:
        """The position of the batch that holds `offset`, or of the first one behind it; the size without one."""
        if offset >= self.end:
            return self.size
        recent = self._recent_offsets
        if recent and recent[0] <= offset:
            return self._recent_positions[bisect_right(recent, offset) - 1]
        self._index_if_due()
        try:
            return self._find(offset)
        except DecodeError:
            self.rebuild_index()
            return self._find(offset)

    def recent_position(self, offset: int) -> int | None:
        """The position of the batch that holds `offset`, if it is one of the newest."""
        recent = self._recent_offsets
        if not recent or not recent[0] <= offset < self.end:
            return None
        return self._recent_positions[bisect_right(recent, offset) - 1]

    def _find(self, offset: int) -> int:
        begin, position = self.index.floor(offset)
        for at, header in self.walk(position):
            if at == position and position and (header.base_offset != begin or begin > offset):
                found = f"found {header.base_offset}, looked for {offset}"
                raise DecodeError(f"the index has offset {begin} at position {position}, {found}")
            if header.last_offset >= offset:
                return at
        if position:  # All offsets before the end are in a batch.
            raise DecodeError(f"the index has offset {begin} at position {position}, and {offset} is not from there on")
        return self.size

    def cut(self, position: int, size_max: int) -> int:
        """The last known batch boundary that is at most `size_max` bytes behind `position`."""
        limit = position + size_max
        if limit >= self.size:
            return self.size
        recent = self._recent_positions
        if recent and recent[0] <= limit:
            return recent[bisect_right(recent, limit) - 1]
        return self._indexed(limit, position)

    def _indexed(self, limit: int, position: int) -> int:
        """The last position of the index that is at most `limit`, if it is above `position`; else one that is not."""
        found = limit + 1
        for _ in range(WRONG_ENTRIES_MAX):
            offset, found = self.index.floor_of_position(found - 1)
            if found > limit:
                break
            with contextlib.suppress(DecodeError):
                if found <= position or self.header_at(found).base_offset == offset:
                    return found
        self._to_index_anew = True
        return position

    def header_at(self, position: int) -> BatchHeader:
        """Read the header of the batch at `position`."""
        if position < 0:
            raise DecodeError(f"the index has position {position}")
        return parse_header(self._readable.read(HEADER_SIZE, position), 0, self.size - position)

    def walk(self, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
        """Read the headers from `position` to the end."""
        if position < 0:
            raise DecodeError(f"the index has position {position}")
        window, start = b"", 0
        file = self._readable if position < self.size else None
        while position < self.size:
            if not start <= position <= start + len(window) - HEADER_SIZE:
                start = position
                assert file is not None
                window = file.read(min(_WALK_SIZE, self.size - position), position)
            header = parse_header(window, position - start, self.size - position)
            yield position, header
            position += header.size

    def batch_for_timestamp(self, timestamp: int, begin: int) -> tuple[int, BatchHeader] | int | None:
        """The first batch that has a record of `timestamp` or later and does not end before the offset `begin`.

        After HEADERS_AT_A_TIME batches without one, the offset from which to go on.
        """
        self._index_if_due()
        if self.max_timestamp.timestamp < timestamp or self.end <= begin:
            return None
        try:
            at = self._begin_of_search(timestamp)
        except DecodeError:
            self.rebuild_index()
            at = self._begin_of_search(timestamp)
        if begin > self.base_offset:
            at = max(at, self.locate(begin))
        for looked, (position, header) in enumerate(self.walk(at)):
            if header.max_timestamp >= timestamp and header.last_offset >= begin:
                return position, header
            if looked == HEADERS_AT_A_TIME:
                return header.next_offset
        return None

    def _begin_of_search(self, timestamp: int) -> int:
        """The position of a batch before which none reaches `timestamp`. DecodeError where the index is wrong."""
        entry = self.index.floor_of_timestamp(timestamp)
        if entry is None or not entry[1]:
            return 0
        offset, position, largest, largest_offset = entry
        if largest >= timestamp:
            raise DecodeError(f"the index has timestamp {largest} where earlier ones than {timestamp} are")
        if self.header_at(position).base_offset != offset:
            raise DecodeError(f"the index has offset {offset} at position {position}, which begins elsewhere")
        self._check_time(largest, largest_offset)
        return position

    def _check_time(self, timestamp: int, offset: int) -> None:
        """Compare a largest timestamp of the index with the batch that it is of. DecodeError."""
        if timestamp == NO_TIMESTAMP:
            return
        for _, header in self.walk(self.index.floor(offset)[1]):
            if header.last_offset >= offset:
                if (header.max_timestamp, header.last_offset) == (timestamp, offset):
                    return
                break
        raise DecodeError(f"the index has timestamp {timestamp} for offset {offset}, where it is not")

    # -- opening -------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the size of the file; `load_index` or recovery does the rest."""
        self.created = self.durable_name = True
        self.size = self.file.size()

    def load_index(self, end: int | None = None) -> int:
        """Take in the batches before the offset `end`, by default all: from the index, or all headers if it is wrong.

        Return the position at which they end. DecodeError for bytes that are no batch.
        """
        if self.size == 0 or (end is not None and end <= self.base_offset):
            self.begin_anew()
            return 0
        try:
            if self.index.load():
                offset, position = self.index.floor(self.base_offset if end is None else end - 1)
                if end is None:
                    offset, position, _, _ = self.index.last()
                if position < self.size and self.header_at(position).base_offset == offset:
                    self.index.cut_from_position(position + 1)
                    found = self._restore_from_index(end)
                    if end is None or self.end >= end:
                        return found
        except DecodeError:
            pass
        return self.rebuild_index(end)

    def rebuild_index(self, end: int | None = None) -> int:
        """Build the index from the headers of the batches before the offset `end`; answer where they end.

        After a DecodeError or an OSError it ends where it did: what was not read must not seem to be synced, or gone.
        What was indexed stays.
        """
        if not self.size:
            self.begin_anew()
            return 0
        before = self.end, self.max_timestamp
        again, self._to_index_anew = self._to_index_anew, False
        self.begin_anew()
        try:
            for position, header in self.walk():
                if header.next_offset - self.base_offset > RELATIVE_OFFSET_MAX + 1:
                    raise DecodeError(f"the batch at position {position} begins at offset {header.base_offset}")
                self.note_header(position, header)
                if end is not None and header.next_offset >= end:
                    break
        except (DecodeError, OSError) as error:
            self._clear_recent()
            self.end, self.max_timestamp = before
            self._to_index_anew = isinstance(error, OSError) and not again
            raise
        if self.sealed:
            self.seal()
        return position + header.size

    def _index_if_due(self) -> None:
        if self._to_index_anew:
            with contextlib.suppress(OSError, DecodeError):
                self.rebuild_index()

    def begin_anew(self) -> None:
        """Forget all that is known of the batches, to `note` them again."""
        self._clear_recent()
        self.index.clear()
        self._indexed_to = 0
        self.end = self.base_offset
        self.max_timestamp = _NO_MAXIMUM

    def _restore_from_index(self, end: int | None = None) -> int:
        """Find `end` and the largest timestamp: from the index's last entry, and the batches from there on.

        These are indexed where that is due: the index may have been built as far as a read that failed.
        Return the position where the batches before the offset `end` end. DecodeError for bytes that are no batch, and
        where the timestamp of the entry is not that of its batch; after that, or an OSError, nothing has changed.
        """
        largest, indexed_to, found, behind = _NO_MAXIMUM, 0, self.end, 0
        missing: list[tuple[int, int, int, int]] = []
        if self.size:
            if not len(self.index):
                raise DecodeError("the index is empty")
            first, last, timestamp, timestamp_offset = self.index.last()
            self._check_time(timestamp, timestamp_offset)
            if timestamp != NO_TIMESTAMP:
                largest = MaxTimestamp(timestamp, timestamp_offset)
            for position, header in self.walk(last):
                behind = position + header.size
                if position == last:
                    if header.base_offset != first:
                        raise DecodeError(f"the index ends with offset {first} at {last}, found {header.base_offset}")
                    indexed_to = behind
                elif behind - indexed_to > self._index_interval and len(missing) < _ENTRIES_AT_ONCE:
                    missing.append((header.base_offset, position, *largest))
                    indexed_to = behind
                if header.max_timestamp > largest.timestamp:
                    largest = MaxTimestamp(header.max_timestamp, header.last_offset)
                found = header.next_offset
                if end is not None and found >= end:
                    break
            if not behind:
                raise DecodeError(f"the index ends at position {last}, the batches at {self.size}")
        for entry in missing:
            self.index.append(*entry)
        self.end, self.max_timestamp, self._indexed_to = found, largest, indexed_to
        return behind

    def _clear_recent(self) -> None:
        self._recent_offsets = self._recent_positions = _NOTHING

    def first_timestamp(self) -> int | None:
        """The largest timestamp of the first batch; None without one, or where it cannot be read. OSError."""
        if self._first_timestamp is None and self.size:
            with contextlib.suppress(DecodeError):
                timestamp = self.header_at(0).max_timestamp
                self._first_timestamp = timestamp if timestamp >= 0 else None
            if self.sealed:
                self.release()
        return self._first_timestamp

    # -- removing ------------------------------------------------------------------------------------------------

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files: that of the batches first."""
        return self.path, *self.index.paths

    def remove(self) -> list[Path]:
        """Rename the files out of the log; return the new names, for their removal."""
        doomed = []
        for path in self.paths:
            if self._disk.exists(path):
                away = path.with_name(path.name + DISCARDED_SUFFIX)
                with contextlib.suppress(FileNotFoundError):  # An earlier broker of this process may be removing it.
                    self._disk.rename(path, away)
                    doomed.append(away)
        return doomed


def path_of(directory: Path, base_offset: int, suffix: str = "") -> Path:
    """Where the segment's batches are; with a suffix, until they have their name."""
    return directory / f"{base_offset:020d}{LOG_SUFFIX}{suffix}"
