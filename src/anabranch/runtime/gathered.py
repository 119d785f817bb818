"""Bytes that lie in many pieces and are sent from there: what is copied together to be sent is copied twice.

    kernel --pieces--> Gathered --writev, 1,024 pieces at a time--> socket

A piece is the address and the size of some bytes, as the system takes them (struct iovec); beside the pieces is how
many bytes there are up to the end of each, so that where a socket took only a part is found without adding up. What
the pieces point to is held for as long as this lives. The rule: who sends it is the last who uses it.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right

PIECES_AT_A_TIME = 1024
"""Pieces that the system takes at once (IOV_MAX)."""
PIECE_SIZE, END_SIZE = 16, 8


class Gathered:
    """Bytes in pieces, of which those at the front may have been sent."""

    __slots__ = ("_at", "_count", "_ends_at", "_holds", "_memory", "_next", "_sent", "_size")

    def __init__(self, memory: memoryview, at: int, count: int, ends_at: int, size: int, holds: object) -> None:
        """`memory`, at the address `at`, begins with `count` pieces and has their ends from `ends_at` on.

        `size`: the bytes of all pieces; `holds` what they point to.
        """
        self._memory = memory
        self._at = at
        self._count = count
        self._ends_at = ends_at
        self._size = size
        self._holds = holds
        self._next = 0
        self._sent = 0

    def __len__(self) -> int:
        return self._size - self._sent

    @property
    def unsent(self) -> tuple[int, int]:
        """The address of the next piece, and how many may be sent from there at once."""
        return self._at + PIECE_SIZE * self._next, min(self._count - self._next, PIECES_AT_A_TIME)

    def advance(self, size: int) -> None:
        """Note that so many bytes more are sent."""
        self._sent += size
        ends = self._memory[self._ends_at : self._ends_at + END_SIZE * self._count].cast("q")
        place = self._next = bisect_right(ends, self._sent, self._next)
        if place < self._count:
            numbers = self._memory[: PIECE_SIZE * self._count].cast("q")
            left = ends[place] - self._sent
            start, whole = numbers[2 * place : 2 * place + 2]
            numbers[2 * place] = start + whole - left
            numbers[2 * place + 1] = left

    def joined(self) -> memoryview:
        """Copy the bytes that are not sent into one piece."""
        made = bytearray(len(self))
        if made:
            at = ctypes.addressof(ctypes.c_char.from_buffer(made))
            numbers = self._memory[PIECE_SIZE * self._next : PIECE_SIZE * self._count].cast("q").tolist()
            for start, size in zip(numbers[::2], numbers[1::2], strict=True):
                ctypes.memmove(at, start, size)
                at += size
        return memoryview(made)
