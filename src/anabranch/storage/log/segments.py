"""The segments of one log in the order of their offsets, and reads across them.

The last segment is the active one. Of the others, which only readers open, one at a time is kept open. Where a sound
batch is expected and none is found, the log is damaged: OfflineLogError, with the file and the reason.

A compacted segment may have batches without records, which keep the last sequence of a producer, or the end of a file.
A read passes over them to the next record, also into later segments, because librdkafka asks for twice as many bytes
after every answer without records, and reports MSG_SIZE_TOO_LARGE when that ends at 1 GiB, after ten answers. Only in
front of the limit they are given, to move the reader on.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from anabranch.base.errors import DecodeError
from anabranch.machines.progress import Rewritten
from anabranch.records.batch import BatchHeader
from anabranch.storage.interface import Slice
from anabranch.storage.log.config import LogConfig
from anabranch.storage.log.errors import OfflineLogError
from anabranch.storage.log.segment import Segment

if TYPE_CHECKING:
    from pathlib import Path

    from anabranch.runtime.disk import File
    from anabranch.runtime.syncs import Told
    from anabranch.storage.log.open_files import OpenFiles


class SharedFiles:
    """The share of one log in the open files of all."""

    __slots__ = ("_commit_then", "_letting_go", "_segments", "files", "lately_used")

    def __init__(self, segments: Segments, files: OpenFiles, commit_then: Callable[[Told], None]) -> None:
        self._segments = segments
        self.files = files
        self._commit_then = commit_then
        self._letting_go = False
        """Whether the files are to be closed after a sync that was asked for."""
        self.lately_used = False

    def make_room(self) -> bool:
        """As `Owner.make_room`."""
        return self.files.make_room()

    def opened(self, file: File) -> None:
        """As `Owner.opened`."""
        self.files.opened(self, file)

    def refusal(self) -> OSError:
        """As `Owner.refusal`."""
        return self.files.refusal()

    def let_go(self) -> bool:
        """As `FileHolder.let_go`."""
        self._segments.forget_open()
        for segment in self._segments:
            if segment.is_open:
                segment.release()
        if not any(segment.is_open for segment in self._segments):
            return True
        if not self._letting_go:
            self._letting_go = True
            self._commit_then(self._synced)
        return False

    def _synced(self, error: OSError | None) -> None:
        self._letting_go = False
        if error is None and not self.lately_used:
            self.let_go()


def _base_offset(segment: Segment) -> int:
    return segment.base_offset


def _damaged(segment: Segment, error: DecodeError) -> OfflineLogError:
    return OfflineLogError(f"{segment.path}: {error}, where a sound batch is expected.")


EMPTY_BATCHES_PASSED_MAX = 1_000
"""Batches without records that a read passes over before it gives them: a few milliseconds."""
SEGMENT_PASSED_COST = 4
"""Such batches that take as long as opening one segment."""
_STAMPS = count(1)


class Segments(list[Segment]):
    """A list of segments: at least one while the log is open, each beginning where the one before it ends."""

    __slots__ = ("_open_for_reading", "_sharing", "rewritten")

    _open_for_reading: Segment | None
    _sharing: SharedFiles | None
    rewritten: Rewritten
    """As `PartitionLog.rewritten`."""

    def __init__(self, segments: Sequence[Segment] = (), rewritten_to: int = 0) -> None:
        """`rewritten_to`: all before it may have been rewritten."""
        super().__init__(segments)
        self._open_for_reading = None
        self._sharing = None
        self.rewritten = Rewritten(next(_STAMPS), rewritten_to)

    def add(self, segment: Segment) -> Segment:
        """Append a segment, and return it."""
        segment.owner = self._sharing
        self.append(segment)
        return segment

    def remove_newest(self) -> list[Path]:
        """Take the newest segment out, and return its files, which are to be discarded.

        After an OSError it is in the log still, and can be removed again.
        """
        doomed = self[-1].remove()
        self.forget_open(self.pop())
        return doomed

    def share(self, files: OpenFiles, commit_then: Callable[[Told], None]) -> None:
        """Share the room for open files from now on; `commit_then` syncs the log."""
        self._sharing = SharedFiles(self, files, commit_then)
        self._sharing.let_go()
        for segment in self:
            segment.owner = self._sharing

    def share_no_more(self) -> None:
        """Open files as they are needed from now on."""
        if self._sharing is not None:
            self._sharing.files.forget(self._sharing)
            self._sharing = None
        for segment in self:
            segment.owner = None

    def are_over(self, size: int, end: int, now_ms: int, config: LogConfig) -> bool:
        """Whether an append of so many bytes, which leads to the offset `end`, begins a new segment."""
        return self[-1].is_over(size, end, now_ms, config, len(self))

    def take_before(self, offset: int) -> list[Segment]:
        """Take the segments out that end at or before `offset`, but for the last one."""
        count = self.index_of(offset)
        taken = self[:count]
        del self[:count]
        if self._open_for_reading is not None and self._open_for_reading.base_offset < self[0].base_offset:
            self._open_for_reading = None
        return taken

    def with_late_index(self) -> list[Segment]:
        """List the finished segments whose index is not synced."""
        return [segment for segment in self if segment.sealed and segment.index_unsynced]

    @property
    def size(self) -> int:
        """Bytes in all segments."""
        return sum(segment.size for segment in self)

    def index_of(self, offset: int) -> int:
        """The index of the segment that holds `offset`; the first one where all begin behind it."""
        return max(0, bisect_right(self, offset, key=_base_offset) - 1)

    def read(self, offset: int, size_max: int, limit: int) -> Slice | None:
        """Find batches from the one that holds `offset` on, in one segment and below `limit`, a batch boundary.

        At least one batch, and otherwise at most `size_max` bytes. None without a batch. Batches without records in
        front are passed over if there are others.
        """
        index = self.index_of(offset)
        segment = self[index]
        try:
            position = segment.locate(offset)
            if segment.sealed:
                segment, position = self._pass_over_empty(index, position, limit)
            stop = segment.size if limit >= segment.end else segment.locate(limit)
            cut = min(stop, segment.cut(position, size_max))
            if cut <= position < stop:
                cut = min(stop, position + segment.header_at(position).size)
        except DecodeError as error:
            raise _damaged(segment, error) from error
        if cut <= position:
            return None
        self._keep_open(segment)
        return segment.slice(position, cut - position)

    def _pass_over_empty(self, index: int, position: int, limit: int) -> tuple[Segment, int]:
        """Find the first batch with records from `position` of a segment on; below `limit`, or the last one without."""
        found = self[index], position
        left = EMPTY_BATCHES_PASSED_MAX
        for segment in self[index:]:
            if segment.base_offset >= limit:
                break
            for at, header in segment.walk(position):
                if header.base_offset >= limit:
                    break
                found = segment, at
                left -= 1
                if header.record_count or left <= 0:
                    return found
            if segment.sealed and segment is not self._open_for_reading:
                segment.release()
            position, left = 0, left - SEGMENT_PASSED_COST
        return found

    def recent_header(self, offset: int) -> BatchHeader | None:
        """Read the header of the batch that holds `offset`, one of the newest; None for older ones."""
        segment = self[-1]
        try:
            position = segment.recent_position(offset)
            return None if position is None else segment.header_at(position)
        except DecodeError as error:
            raise _damaged(segment, error) from error

    def slices(self, log_start: int) -> list[Slice]:
        """Find everything from `log_start` on, one slice for each segment; they stay as they are."""
        found: list[Slice] = []
        for segment in self:
            if segment.size and segment.end > log_start:
                try:
                    position = segment.locate(max(log_start, segment.base_offset))
                except DecodeError as error:
                    raise _damaged(segment, error) from error
                found.append(segment.slice(position, segment.size - position))
                if segment.sealed:
                    segment.release()
        return found

    def headers_from(self, offset: int) -> Iterator[BatchHeader]:
        """Read the headers of all batches that end at or behind `offset`, in order."""
        for segment in self[self.index_of(offset) :]:
            try:
                for _, header in segment.walk(segment.locate(offset)):
                    yield header
            except DecodeError as error:
                raise _damaged(segment, error) from error
            if segment.sealed or self._sharing is None:  # Logs that are opened together share no room for files yet.
                segment.release()

    def batch_for_timestamp(
        self, timestamp: int, bounds: Callable[[], tuple[int, int]]
    ) -> Slice | Awaitable[Slice | None] | None:
        """Find the first batch that has a record of `timestamp` or later.

        `bounds` tells where the log starts, and at which offset a batch that is found is none. A search that takes long
        is awaited; the log may change meanwhile.
        """
        start, limit = bounds()
        found = self._batch_for_timestamp(timestamp, start, limit)
        return self._search_on(timestamp, found, bounds) if isinstance(found, int) else found

    async def _search_on(self, timestamp: int, begin: int, bounds: Callable[[], tuple[int, int]]) -> Slice | None:
        found: Slice | int | None = begin
        while isinstance(found, int):
            await asyncio.sleep(0)
            start, limit = bounds()
            found = self._batch_for_timestamp(timestamp, max(start, found), limit)
        return found

    def _batch_for_timestamp(self, timestamp: int, begin: int, limit: int) -> Slice | int | None:
        for segment in self:
            try:
                found = segment.batch_for_timestamp(timestamp, begin)
            except DecodeError as error:
                raise _damaged(segment, error) from error
            if isinstance(found, int):
                return found
            if found is not None:
                position, header = found
                if header.base_offset >= limit:
                    return None
                self._keep_open(segment)
                return segment.slice(position, header.size)
        return None

    def max_timestamp(self, log_start: int) -> int | None:
        """The largest timestamp of the batches that do not end before `log_start`."""
        found = [segment.max_timestamp for segment in self if segment.max_timestamp.offset >= log_start]
        return max((largest.timestamp for largest in found), default=None)

    def make_last(self) -> bool:
        """Make the file of the segment of the next appends, if others have one; whether its name is to be synced."""
        last = self[-1]
        if last.durable_name or len(self) == 1:
            return False
        if not last.created:
            last.make()
        return True

    def put_in_place(self, bases: Sequence[int], segment: Segment) -> None:
        """Use a compacted segment instead of those with these base offsets; slices keep the files of these."""
        segment.load()
        segment.sealed = True
        segment.load_index()
        segment.release()
        first = next(index for index, old in enumerate(self) if old.base_offset == bases[0])
        segment.owner = self[first].owner
        self[first : first + len(bases)] = [segment]
        self.rewritten = Rewritten(next(_STAMPS), max(segment.end, self.rewritten.to))
        self.forget_open()

    def forget_open(self, segment: Segment | None = None) -> None:
        """Keep no segment open for readers any more, or not this one."""
        if segment is None or segment is self._open_for_reading:
            self._open_for_reading = None

    def _keep_open(self, segment: Segment) -> None:
        last = self._open_for_reading
        if segment is not last and segment.sealed:
            if last is not None:
                last.release()
            self._open_for_reading = segment
