"""Memory that is lent again and again, without NumPy: touching fresh memory costs more than copying into it.

    Shelf --take--> memoryview --the last view of it gone--> Shelf

The rule of `records.arrow.slabs`: only the finalizer of what all views refer to puts memory back, in any thread; there
is no lock for them, each step on the shelf is one operation of a list. Here that is a ctypes array over the memory.

Memory is made in stretches and cut off piece by piece as it is asked for. What comes back to a full shelf gives its
pages away at once, and its addresses with the last piece of the stretch. Huge pages are not asked for: they are quick
once they are there, but where a host must find the memory first, new ones cost three times as much as small ones.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from functools import lru_cache
from typing import Any, NamedTuple

SIZE_MIN = 128 * 1024
"""Less is not lent: the allocator has it at hand, in less time than lending takes."""
SIZE_MAX = 8 * 1024 * 1024
PARTS_PER_DOUBLING = 4
"""Sizes that memory comes in: at most a quarter of new memory is not used."""
SHELF_SIZE_MAX = 96 * 1024 * 1024
"""Bytes on a shelf when memory comes back: about what four readers that share a partition, a little apart, have lent.

Threads that put some back at the same time may add a piece each.
"""
STRETCH_SIZE = 8 * 1024 * 1024
"""Bytes of addresses that are made at a time."""


class Piece(NamedTuple):
    """Memory of one size, within a stretch that stays for as long as this."""

    stretch: mmap.mmap
    offset: int


class Shelf:
    """Memory that is not lent."""

    def __init__(self) -> None:
        self._free: dict[int, list[Piece]] = {}
        """By size."""
        self._rest: tuple[mmap.mmap, int, int] | None = None
        """The newest stretch, and from where to where nothing of it was lent yet."""
        self._cutting = threading.Lock()

    def take(self, size: int) -> memoryview:
        """Lend `size` bytes of any content, writable."""
        if not SIZE_MIN <= size <= SIZE_MAX:
            return memoryview(bytearray(size))
        room = size_lent(size)
        piece = _popped(self._free, room)
        if piece is None:
            larger = sorted(each for each, free in self._free.copy().items() if free and room < each <= 2 * room)
            for each in larger:
                piece = _popped(self._free, each)
                if piece is not None:
                    room = each
                    break
            else:
                piece = self._cut(room)
        lent = _lent_type(room).from_buffer(*piece)
        lent.shelf, lent.piece = self, piece
        return memoryview(lent).cast("B")[:size]

    def _cut(self, room: int) -> Piece:
        """Take a piece of what was never lent."""
        with self._cutting:
            if self._rest is None or self._rest[2] - self._rest[1] < room:
                self._rest = _stretch()
            stretch, start, end = self._rest
            self._rest = stretch, start + room, end
            return Piece(stretch, start)

    def copy(self, data: memoryview) -> bytes | memoryview:
        """Copy bytes into memory that is lent, or of their own where they are few."""
        if len(data) < SIZE_MIN:
            return bytes(data)
        lent = self.take(len(data))
        lent[:] = data
        return lent

    def put_back(self, piece: Piece, room: int) -> None:
        """Take memory back; called by what was lent. A full shelf gives up what is of another size instead."""
        while self.size >= SHELF_SIZE_MAX:
            other = next((each for each, free in self._free.copy().items() if free and each != room), room)
            dropped = piece if other == room else _popped(self._free, other)
            if dropped is not None:
                dropped.stretch.madvise(mmap.MADV_DONTNEED, dropped.offset, other)
            if dropped is piece:
                return
        self._free.setdefault(room, []).append(piece)

    @property
    def size(self) -> int:
        """Bytes on the shelf."""
        return sum(room * len(free) for room, free in self._free.copy().items())


def _popped(pieces: dict[int, list[Piece]], room: int) -> Piece | None:
    try:
        return pieces[room].pop()
    except (KeyError, IndexError):
        return None


def _stretch() -> tuple[mmap.mmap, int, int]:
    """Make a new stretch."""
    return mmap.mmap(-1, STRETCH_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0, STRETCH_SIZE


def size_lent(size: int) -> int:
    """The bytes that are lent where `size` are asked for."""
    step = max(mmap.PAGESIZE, 1 << (size - 1).bit_length() - 1) // PARTS_PER_DOUBLING
    return -(-size // step) * step


@lru_cache(maxsize=256)
def _lent_type(size: int) -> Any:
    def put_back(self: Any) -> None:
        self.shelf.put_back(self.piece, size)

    return type("Lent", (ctypes.c_char * size,), {"__del__": put_back})
