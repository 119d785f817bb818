"""The aborted-transaction index of one partition; readers of committed records get its lines beside the records.

A line is written when the marker of an abort is appended, so lines are in the order of their `last_offset`. A line is
four integers in one array: a partition may have a million lines.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from anabranch.base.errors import DecodeError

_FIELDS = 4
_SIZE = 8 * _FIELDS


class AbortedTransaction(NamedTuple):
    """The producer's transactional records from `first_offset` up to the marker at `last_offset` are void."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int
    """The last stable offset when the marker was appended: no later line begins below it."""


class AbortedTransactions:
    """The lines, oldest first."""

    def __init__(self) -> None:
        self._lines = array("q")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AbortedTransactions) and self._lines == other._lines

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._lines) // _FIELDS

    def __iter__(self) -> Iterator[AbortedTransaction]:
        return (self._at(index) for index in range(len(self)))

    def add(self, line: AbortedTransaction) -> None:
        """Append a line; its marker comes after those of all other lines."""
        assert not self._lines or self._lines[-2] < line.last_offset
        self._lines.extend(line)

    def between(self, start: int, end: int) -> list[AbortedTransaction]:
        """Return the lines of transactions with records from `start` to `end`, `end` exclusive."""
        found: list[AbortedTransaction] = []
        for index in range(self._behind(start), len(self)):
            line = self._at(index)
            if line.first_offset < end:
                found.append(line)
            if line.last_stable_offset >= end:
                break
        return found

    def is_void(self, producer_id: int, offset: int) -> bool:
        """Whether the producer's transactional record at `offset` belongs to an aborted transaction."""
        for index in range(self._behind(offset), len(self)):
            line = self._at(index)
            if line.producer_id == producer_id and line.first_offset <= offset:
                return True
            if line.last_stable_offset > offset:
                break
        return False

    def forget_before(self, offset: int) -> None:
        """Drop the lines with markers below `offset`: their records are deleted."""
        gone = self._behind(offset)
        if gone:
            del self._lines[: gone * _FIELDS]

    def forget(self, markers: Iterable[int]) -> None:
        """Drop the lines with markers at these offsets."""
        gone = set(markers)
        kept = [line for line in self if line.last_offset not in gone]
        self._lines = array("q", [number for line in kept for number in line])

    def copy(self) -> AbortedTransactions:
        """Return an index of its own with these lines."""
        made = AbortedTransactions()
        made._lines = self._lines[:]
        return made

    def to_bytes(self) -> bytes:
        """Return the lines as bytes, big-endian."""
        lines = self._lines[:]
        if sys.byteorder == "little":
            lines.byteswap()
        return lines.tobytes()

    @classmethod
    def from_bytes(cls, data: memoryview | bytes) -> AbortedTransactions:
        """Parse the bytes of `to_bytes`. Raises `DecodeError` for a partial line."""
        if len(data) % _SIZE:
            raise DecodeError(f"an aborted-transaction index of {len(data)} bytes, which is no whole number of lines")
        index = cls()
        index._lines.frombytes(data)
        if sys.byteorder == "little":
            index._lines.byteswap()
        return index

    def _at(self, index: int) -> AbortedTransaction:
        return AbortedTransaction(*self._lines[index * _FIELDS : (index + 1) * _FIELDS])

    def _behind(self, offset: int) -> int:
        """Return the index of the first line with its marker at or after `offset`."""
        return bisect_left(range(len(self)), offset, key=lambda index: self._lines[index * _FIELDS + 2])
