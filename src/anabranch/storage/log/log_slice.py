"""What a log gives to read: a stretch of a segment's file, whose bytes go from there to the socket, or are mapped."""

from __future__ import annotations

from anabranch.base.errors import DecodeError
from anabranch.records.batch import HEADER_SIZE, OFFSET_MAX, parse_header
from anabranch.runtime.disk import File
from anabranch.runtime.net.channel import FileSlice
from anabranch.storage.interface import Slice


class LogSlice(Slice):
    """Whole batches in a segment file, to be sent from there or mapped; keeps the file open for as long as it lives."""

    __slots__ = ("_end", "_file", "position")

    def __init__(self, file: File, position: int, size: int, end: int | None = None) -> None:
        """`end`: the offset behind it, where it is the last of the file."""
        self._end = end
        self._file = file
        self.position = position
        self.size = size

    @property
    def fd(self) -> int:
        """The segment's file descriptor."""
        return self._file.fd

    @property
    def wire(self) -> FileSlice:
        """The slice itself: its bytes go from the file to the socket unread."""
        return self

    def view(self) -> memoryview:
        """Map the bytes."""
        return self._file.map(self.size, self.position)

    def next_offset(self) -> int | None:
        """Read the header of the batch behind the slice, unless it is the last of the file."""
        if self._end is not None:
            return self._end
        behind = self._file.read(HEADER_SIZE, self.position + self.size)
        try:
            return parse_header(behind, 0, OFFSET_MAX).base_offset
        except DecodeError:
            return None
