"""Memory that ends, or begins, at a guard page: an access beyond it crashes the process at once (SIGSEGV)."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

from anabranch.records.arrow.slabs import Slab, memory_of

_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def fenced(size: int) -> NDArray[np.uint8]:
    """Return `size` bytes of 0xA5, the last of which is the last of a page, before one that must not be touched."""
    pages = -(-size // mmap.PAGESIZE)
    memory = np.frombuffer(mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE), np.uint8)
    _guard(memory.ctypes.data + pages * mmap.PAGESIZE)
    lent = memory[pages * mmap.PAGESIZE - size : pages * mmap.PAGESIZE]
    lent.fill(0xA5)
    return lent


def fenced_copy(data: bytes | bytearray | memoryview) -> NDArray[np.uint8]:
    """Copy bytes to memory that ends where they end."""
    copy = fenced(len(data))
    copy[:] = np.frombuffer(data, np.uint8)
    return copy


def copy_behind_fence(data: bytes | bytearray | memoryview) -> NDArray[np.uint8]:
    """Copy bytes to memory that begins where a page does, after one that must not be touched."""
    memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE + len(data)), np.uint8)
    _guard(memory.ctypes.data)
    copy = memory[mmap.PAGESIZE :]
    copy[:] = np.frombuffer(data, np.uint8)
    return copy


def _guard(page: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), _PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")


class FencedShelf:
    """Lends exactly as much as was asked for (`records.arrow` takes its memory from such a shelf)."""

    def take(self, size: int) -> Slab:
        """Lend `size` bytes up to a fence."""
        return Slab(memory_of(fenced(size)))

    def take_view(self, size: int) -> tuple[memoryview, int]:
        """Lend `size` bytes up to a fence, to be written."""
        slab = self.take(size)
        return slab.data, slab.address
