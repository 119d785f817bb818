"""Memory that is lent again and again, without NumPy: touching fresh memory costs more than copying into it.

    Shelf --take--> memoryview --the last view of it gone--> Shelf

The rule of `records.arrow.slabs`: only the finalizer of what all views refer to puts memory back, in any thread; there
is no lock, each step on the shelf is one operation of a list. Here that is a ctypes array over the memory.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from typing import Any

SIZE_MIN = 128 * 1024
"""Less is not lent: the allocator has it at hand, in less time than lending takes."""
SIZE_MAX = 8 * 1024 * 1024
PARTS_PER_DOUBLING = 4
"""Sizes that memory comes in: at most a quarter of it is not used."""
SHELF_SIZE_MAX = 32 * 1024 * 1024
"""Bytes on a shelf when memory comes back; threads that put some back at the same time may add a piece each."""


class Shelf:
    """Memory that is not lent."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        """By size."""

    def take(self, size: int) -> memoryview:
        """Lend `size` bytes of any content, writable."""
        if not SIZE_MIN <= size <= SIZE_MAX:
            return memoryview(bytearray(size))
        room = size_lent(size)
        try:
            memory = self._free.setdefault(room, []).pop()
        except IndexError:
            memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        lent = _lent_type(room).from_buffer(memory)
        lent.shelf, lent.memory = self, memory
        return memoryview(lent).cast("B")[:size]

    def copy(self, data: memoryview) -> bytes | memoryview:
        """Copy bytes into memory that is lent, or of their own where they are few."""
        if len(data) < SIZE_MIN:
            return bytes(data)
        lent = self.take(len(data))
        lent[:] = data
        return lent

    def put_back(self, memory: mmap.mmap) -> None:
        """Take memory back; called by what was lent."""
        if self.size < SHELF_SIZE_MAX:
            self._free[len(memory)].append(memory)

    @property
    def size(self) -> int:
        """Bytes on the shelf."""
        return sum(room * len(free) for room, free in self._free.copy().items())


def size_lent(size: int) -> int:
    """The bytes that are lent where `size` are asked for."""
    step = max(mmap.PAGESIZE, 1 << (size - 1).bit_length() - 1) // PARTS_PER_DOUBLING
    return -(-size // step) * step


@lru_cache(maxsize=256)
def _lent_type(size: int) -> Any:
    def put_back(self: Any) -> None:
        self.shelf.put_back(self.memory)

    return type("Lent", (ctypes.c_char * size,), {"__del__": put_back})
