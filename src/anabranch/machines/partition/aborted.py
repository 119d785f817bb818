"""The aborted-transaction index of one partition; readers of committed records get its lines beside the records.

A line is written when the marker of an abort is appended, so lines are in the order of their `last_offset`. A line is
four integers in one array: a partition may have a million lines.

Lines are kept in chunks of 4,096, which do not change once they are full, so that a copy shares them. A look-up begins
with a binary search for the first marker that is not below its start. From there on it passes over what begins behind
its end as a whole: of each chunk, and of each 64 lines in it, the least first offset is kept. A transaction that stays
open for long, aborted or not, so costs those that read beside it the blocks that it is in: of a million lines at most
370 numbers are looked at for nothing, and 126 for each line that is found. The least offsets take one byte for each
eight lines (0.4 %), and a comparison or two when a line is added. Lines are dropped from the front by chunks; until
then what is dropped of one is passed over.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from anabranch.base.errors import DecodeError

_FIELDS = 4
_SIZE = 8 * _FIELDS
BLOCK, CHUNK = 64, 64 * 64
"""Lines of which the least first offset is kept."""


class AbortedTransaction(NamedTuple):
    """The producer's transactional records from `first_offset` up to the marker at `last_offset` are void."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int
    """The last stable offset when the marker was appended: no later line begins below it. Kept as Kafka keeps it."""


class _Chunk:
    """Up to CHUNK lines."""

    __slots__ = ("blocks", "least", "lines")

    def __init__(self, lines: array[int]) -> None:
        firsts = lines[1::_FIELDS]
        self.lines = lines
        self.blocks = array("q", [min(firsts[at : at + BLOCK]) for at in range(0, len(firsts), BLOCK)])
        """The least first offset of each block of lines."""
        self.least = min(self.blocks)

    def add(self, line: AbortedTransaction) -> None:
        """Append a line."""
        first, blocks = line.first_offset, self.blocks
        if len(self.lines) % (BLOCK * _FIELDS) == 0:
            blocks.append(first)
        elif first < blocks[-1]:
            blocks[-1] = first
        self.least = min(self.least, first)
        self.lines.extend(line)

    def found(self, begin: int, end_offset: int) -> Iterator[int]:
        """Find the lines from number `begin` on that begin before `end_offset`; yields where in `lines` they are."""
        if self.least >= end_offset:
            return
        lines, at = self.lines, begin * _FIELDS
        for number in range(begin // BLOCK, len(self.blocks)):
            behind = min((number + 1) * BLOCK * _FIELDS, len(lines))
            if self.blocks[number] < end_offset:
                for place in range(at, behind, _FIELDS):
                    if lines[place + 1] < end_offset:
                        yield place
            at = behind


class AbortedTransactions:
    """The lines, oldest first."""

    def __init__(self, lines: Iterable[AbortedTransaction] = ()) -> None:
        self._chunks: list[_Chunk] = []
        """All but the last are full, and may be those of copies, too."""
        self._begin = 0
        """The lines of the first chunk before it are dropped."""
        self._end = 0
        """The lines of all chunks."""
        for line in lines:
            self.add(line)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AbortedTransactions) and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return self._end - self._begin

    def __iter__(self) -> Iterator[AbortedTransaction]:
        return self._from(self._begin)

    @property
    def newest_marker(self) -> int:
        """The offset of the newest marker, that of a dropped line perhaps; -1 without one."""
        return self._chunks[-1].lines[-2] if self._chunks else -1

    def add(self, line: AbortedTransaction) -> None:
        """Append a line; its marker comes after those of all other lines."""
        assert self.newest_marker < line.last_offset
        if self._end % CHUNK == 0:
            self._chunks.append(_Chunk(array("q", line)))
        else:
            self._chunks[-1].add(line)
        self._end += 1

    def between(self, start: int, end: int) -> list[AbortedTransaction]:
        """Return the lines of transactions with records from `start` to `end`, `end` exclusive."""
        return [_line(lines, place) for lines, place in self._found(start, end)]

    def is_void(self, producer_id: int, offset: int) -> bool:
        """Whether the producer's transactional record at `offset` belongs to an aborted transaction."""
        return any(lines[place] == producer_id for lines, place in self._found(offset, offset + 1))

    def reach(self, start: int, end: int, most: int) -> tuple[int, int]:
        """Find up to where at most `most` markers lie from `start` on: `end`, or the offset of the next marker.

        Return that offset, and how many lie before it. Records from `start` to there belong to that many lines, and
        those of the transactions that were open there.
        """
        first = self._behind(start)
        count = max(0, self._behind(end) - first)
        return (end, count) if count <= most else (self._marker(first + most), most)

    def forget_before(self, offset: int) -> None:
        """Drop the lines with markers below `offset`: their records are deleted."""
        begin = self._behind(offset)
        gone = begin // CHUNK if begin < self._end else len(self._chunks)
        del self._chunks[:gone]
        self._begin = max(0, begin - gone * CHUNK)
        self._end = max(0, self._end - gone * CHUNK)

    def without(self, markers: Collection[int]) -> AbortedTransactions:
        """Return an index without the lines with markers at these offsets. Takes a second for a million lines."""
        gone = frozenset(markers)
        return AbortedTransactions(line for line in self if line.last_offset not in gone)

    def follow(self, other: AbortedTransactions, since: int) -> None:
        """Take over what `other`, whose newest marker was at `since`, was given and has dropped at its front since."""
        self.forget_before(other._marker(other._begin) if len(other) else since + 1)
        for line in other._from(other._behind(since + 1)):
            self.add(line)

    def copy(self) -> AbortedTransactions:
        """Return an index of its own with these lines."""
        made = AbortedTransactions()
        made._chunks, made._begin, made._end = self._chunks[:], self._begin, self._end
        if made._end % CHUNK:
            made._chunks[-1] = _Chunk(made._chunks[-1].lines[:])
        return made

    def to_bytes(self) -> bytes:
        """Return the lines as bytes, big-endian."""
        parts: list[bytes] = []
        for number, chunk in enumerate(self._chunks):
            lines = chunk.lines[0 if number else self._begin * _FIELDS :]
            if sys.byteorder == "little":
                lines.byteswap()
            parts.append(lines.tobytes())
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: memoryview | bytes) -> AbortedTransactions:
        """Parse the bytes of `to_bytes`. Raises `DecodeError` for a partial line."""
        if len(data) % _SIZE:
            raise DecodeError(f"an aborted-transaction index of {len(data)} bytes, which is no whole number of lines")
        index = cls()
        index._end = len(data) // _SIZE
        for at in range(0, len(data), CHUNK * _SIZE):
            lines = array("q", bytes(data[at : at + CHUNK * _SIZE]))
            if sys.byteorder == "little":
                lines.byteswap()
            index._chunks.append(_Chunk(lines))
        return index

    def _found(self, start: int, end: int) -> Iterator[tuple[array[int], int]]:
        """Find the lines with markers at or after `start` that begin before `end`, oldest first."""
        number, begin = divmod(self._behind(start), CHUNK)
        for chunk in self._chunks[number:]:
            for place in chunk.found(begin, end):
                yield chunk.lines, place
            begin = 0

    def _from(self, index: int) -> Iterator[AbortedTransaction]:
        for at in range(index, self._end):
            yield _line(self._chunks[at // CHUNK].lines, at % CHUNK * _FIELDS)

    def _marker(self, index: int) -> int:
        return self._chunks[index // CHUNK].lines[index % CHUNK * _FIELDS + 2]

    def _behind(self, offset: int) -> int:
        """Return the index of the first line with its marker at or after `offset`."""
        return bisect_left(range(self._end), offset, self._begin, key=self._marker)


def _line(lines: array[int], place: int) -> AbortedTransaction:
    return AbortedTransaction(*lines[place : place + _FIELDS])
