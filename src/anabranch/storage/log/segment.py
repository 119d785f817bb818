"""A segment: one file of record batches as they came from the wire, and a sparse index over it.

The index has an entry for a batch whenever `index.interval.bytes` of log have gone by since the last one: its first
offset, its position, and the largest timestamp before it. It is kept in memory, written when the segment is closed or
checkpointed, and rebuilt from the batch headers when its file is missing or does not fit. Files are made at the first
append, so that an empty partition costs nothing.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from anabranch.records.batch import HEADER_SIZE, BatchHeader, parse_header
from anabranch.runtime.disk import Disk, File

_INDEX_HEADER = struct.Struct(">4sIIqqq")
_INDEX_MAGIC = b"ANX1"
_WALK_SIZE = 64 * 1024
NO_TIMESTAMP = -1


class LogSlice:
    """Whole batches in a segment file, to be sent from there or mapped; keeps the file open for as long as it lives."""

    __slots__ = ("_file", "position", "size")

    def __init__(self, file: File, position: int, size: int) -> None:
        self._file = file
        self.position = position
        self.size = size

    @property
    def fd(self) -> int:
        """The segment's file descriptor."""
        return self._file.fd

    def __len__(self) -> int:
        return self.size

    def view(self) -> memoryview:
        """Map the bytes."""
        return self._file.map(self.size, self.position)


class MaxTimestamp(NamedTuple):
    """The largest timestamp of some batches, and the last offset of the first batch that has it."""

    timestamp: int
    offset: int


class Segment:
    """The batches from `base_offset` to where the next segment begins."""

    def __init__(self, disk: Disk, directory: Path, base_offset: int) -> None:
        self.base_offset = base_offset
        self.size = 0
        self.max_timestamp = MaxTimestamp(NO_TIMESTAMP, -1)
        self.first_append_ms: int | None = None
        self._disk = disk
        self.path = directory / f"{base_offset:020d}.log"
        self.index_path = directory / f"{base_offset:020d}.index"
        self._file: File | None = None
        self._offsets = array("I")
        self._positions = array("Q")
        self._times = array("q")
        self._indexed_to = 0

    @property
    def file(self) -> File:
        """The open file."""
        if self._file is None:
            self._file = self._disk.open(self.path, create=self.size == 0)
        return self._file

    @property
    def exists(self) -> bool:
        """Whether anything was ever appended, so that there is a file."""
        return self._file is not None or self.size > 0

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Write batches at the end; after an error the segment is what it was."""
        try:
            self.file.write(data, self.size)
        except OSError:
            self.file.truncate(self.size)
            raise
        self.size += len(data)

    def note(self, header: BatchHeader, position: int, index_interval: int) -> None:
        """Take a batch that is in the file into the index."""
        if position == 0 or position + header.size - self._indexed_to > index_interval:
            self._offsets.append(header.base_offset - self.base_offset)
            self._positions.append(position)
            self._times.append(self.max_timestamp.timestamp)
            self._indexed_to = position + header.size
        if header.max_timestamp > self.max_timestamp.timestamp:
            self.max_timestamp = MaxTimestamp(header.max_timestamp, header.last_offset)

    def floor(self, offset: int) -> int:
        """The position of an indexed batch that begins at or before `offset`."""
        index = bisect_right(self._offsets, offset - self.base_offset) - 1
        return self._positions[index] if index >= 0 else 0

    def cut_at_or_before(self, position: int) -> int:
        """The last indexed batch boundary that is not behind `position`."""
        if position >= self.size:
            return self.size
        index = bisect_right(self._positions, position) - 1
        return self._positions[index] if index >= 0 else 0

    def floor_of_timestamp(self, timestamp: int) -> int:
        """The position of an indexed batch before which no batch reaches `timestamp`."""
        index = bisect_left(self._times, timestamp) - 1
        return self._positions[index] if index >= 0 else 0

    def locate(self, offset: int) -> int:
        """The position of the batch that holds `offset`, or of the first one behind it; the size if there is none."""
        for position, header in self.walk(self.floor(offset)):
            if header.last_offset >= offset:
                return position
        return self.size

    def header_at(self, position: int) -> BatchHeader:
        """Read the header of the batch at `position`."""
        return parse_header(self.file.read(HEADER_SIZE, position), 0, self.size - position)

    def walk(self, position: int) -> Iterator[tuple[int, BatchHeader]]:
        """Read the headers from `position` to the end; DecodeError where one is no header."""
        window = b""
        start = position
        while position < self.size:
            if position + HEADER_SIZE > start + len(window) or position < start:
                start = position
                window = self.file.read(min(_WALK_SIZE, self.size - position), position)
            header = parse_header(window, position - start, self.size - position)
            yield position, header
            position += header.size

    def truncate(self, size: int) -> None:
        """Cut the file to `size`, a batch boundary, and the index with it; the largest timestamp is found anew."""
        if self.exists:
            self.file.truncate(size)
        self.size = size
        keep = bisect_left(self._positions, size)
        del self._offsets[keep:], self._positions[keep:], self._times[keep:]
        last = self._positions[-1] if keep else 0
        self.max_timestamp = MaxTimestamp(NO_TIMESTAMP, -1)
        for position, header in self.walk(0):
            if header.max_timestamp > self.max_timestamp.timestamp:
                self.max_timestamp = MaxTimestamp(header.max_timestamp, header.last_offset)
            if position == last:
                self._indexed_to = position + header.size

    def reindex(self, index_interval: int) -> None:
        """Build the index from the headers; DecodeError where one is no header."""
        self.clear_index()
        for position, header in self.walk(0):
            self.note(header, position, index_interval)

    def clear_index(self) -> None:
        """Forget the index, to build it anew with `note`."""
        self._offsets, self._positions, self._times = array("I"), array("Q"), array("q")
        self._indexed_to = 0
        self.max_timestamp = MaxTimestamp(NO_TIMESTAMP, -1)

    def save_index(self) -> None:
        """Write the index beside the log; it is only a shortcut, so it is not synced, but has a checksum."""
        body = self._offsets.tobytes() + self._positions.tobytes() + self._times.tobytes()
        count = len(self._offsets)
        data = _INDEX_HEADER.pack(_INDEX_MAGIC, crc32c(body), count, self.size, *self.max_timestamp) + body
        file = self._disk.open(self.index_path, create=True)
        file.write(data, 0)
        file.truncate(len(data))
        file.close()

    def load_index(self) -> int:
        """Read the index that was saved; answer the size of log that it covers, 0 when there is none that fits."""
        if not self._disk.exists(self.index_path):
            return 0
        data = self._disk.read(self.index_path)
        if len(data) < _INDEX_HEADER.size:
            return 0
        magic, crc, count, size, timestamp, offset = _INDEX_HEADER.unpack_from(data)
        body = memoryview(data)[_INDEX_HEADER.size :]
        if magic != _INDEX_MAGIC or size > self.size or len(body) != count * 20 or crc32c(body) != crc:
            return 0
        offsets, positions, times = array("I"), array("Q"), array("q")
        offsets.frombytes(body[: count * 4])
        positions.frombytes(body[count * 4 : count * 12])
        times.frombytes(body[count * 12 :])
        self._offsets, self._positions, self._times = offsets, positions, times
        self.max_timestamp = MaxTimestamp(timestamp, offset)
        self._indexed_to = positions[-1] if count else 0
        return int(size)

    def remove(self) -> None:
        """Take the files away; slices that are on their way stay readable."""
        for path in (self.path, self.index_path):
            self._disk.unlink(path)
