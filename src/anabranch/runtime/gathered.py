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

    __slots__ = ("_at", "_count", "_ends", "_holds", "_memory", "_next", "_numbers", "_sent")

    def __init__(self, memory: memoryview, count: int, ends_at: int, holds: object) -> None:
        """`memory` begins with `count` pieces and has their ends from `ends_at` on; `holds` what they point to."""
        self._memory = memory
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._count = count
        self._numbers = memory[: PIECE_SIZE * count].cast("q")
        self._ends = memory[ends_at : ends_at + END_SIZE * count].cast("q")
        self._holds = holds
        self._next = 0
        self._sent = 0

    def __len__(self) -> int:
        return self._ends[-1] - self._sent if self._count else 0

    @property
    def unsent(self) -> tuple[int, int]:
        """The address of the next piece, and how many may be sent from there at once."""
        return self._at + PIECE_SIZE * self._next, min(self._count - self._next, PIECES_AT_A_TIME)

    def advance(self, size: int) -> None:
        """Note that so many bytes more are sent."""
        self._sent += size
        place = self._next = bisect_right(self._ends, self._sent, self._next)
        if place < self._count:
            left = self._ends[place] - self._sent
            start, whole = self._numbers[2 * place : 2 * place + 2]
            self._numbers[2 * place] = start + whole - left
            self._numbers[2 * place + 1] = left

    def joined(self) -> memoryview:
        """Copy the bytes that are not sent into one piece."""
        made = bytearray(len(self))
        if made:
            at = ctypes.addressof(ctypes.c_char.from_buffer(made))
            numbers = self._numbers[2 * self._next :].tolist()
            for start, size in zip(numbers[::2], numbers[1::2], strict=True):
                ctypes.memmove(at, start, size)
                at += size
        return memoryview(made)
