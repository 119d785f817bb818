"""Stretches of files that are mapped for reading, and stay as they are when the file is cut.

The processor reports a page that is behind the end of its file, or that the disk cannot read, by SIGBUS, which ends the
process. The rules: a file is cut by `cut` alone, which first puts a copy of what it cuts off in the place of all
mapped pages of that; and a thread that reads much has it read in by `read_in` before, where a disk that fails is an
OSError. Pages are replaced in one step of the system, so that readers in other threads notice nothing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

_MADV_POPULATE_READ = 22
"""Linux 5.14; others refuse it."""
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_UNREADABLE = frozenset((errno.EFAULT, 133))
"""EFAULT where reading would have been answered by a signal, and EHWPOISON, which Python does not name."""
_FAILED = ctypes.c_void_p(-1).value


class Mapped(mmap.mmap):
    """A stretch of a file."""

    file: tuple[int, int]
    """The file's device and number."""
    position: int
    """Where the stretch begins in it, in bytes."""
    end: int
    """Where what is mapped of it ends; behind that are copies."""


_LIVING: WeakSet[Mapped] = WeakSet()
_CHANGING = threading.Lock()
"""Held while something is mapped or cut: between the two there is no stretch that is not known."""


def stretch(fd: int, size: int, position: int) -> memoryview:
    """Map `size` bytes of an open file from `position` on. OSError, also where the file ends before."""
    aligned = position - position % mmap.ALLOCATIONGRANULARITY
    with _CHANGING:
        try:
            mapped = Mapped(fd, position + size - aligned, prot=mmap.PROT_READ, offset=aligned)
        except ValueError as error:
            raise OSError(errno.EIO, f"the file ends before position {position + size}: {error}") from error
        mapped.file, mapped.position, mapped.end = _identity(fd), aligned, position + size
        _LIVING.add(mapped)
    return memoryview(mapped)[position - aligned :]


def read_in(view: memoryview) -> memoryview:
    """Have bytes, if they are mapped, read from the disk by the calling thread. OSError where they cannot be.

    Other threads go on meanwhile, which those of Python do not while `mmap.madvise` waits for a disk.
    """
    if isinstance(view.obj, Mapped) and len(view):
        at = _address(view)
        begin = at - at % mmap.PAGESIZE
        if _calls().madvise(begin, at + len(view) - begin, _MADV_POPULATE_READ) and ctypes.get_errno() in _UNREADABLE:
            raise OSError(errno.EIO, "mapped bytes of a file cannot be read")
    return view


def cut(fd: int, size: int) -> None:
    """Cut an open file to `size` bytes; what is mapped of the rest stays as it is. OSError, and then nothing is cut."""
    with _CHANGING:
        for mapped in _reaching(_identity(fd), size):
            _keep(mapped, fd, size)
        os.ftruncate(fd, size)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _reaching(file: tuple[int, int], size: int) -> list[Mapped]:
    """The stretches of a file of which something behind its first `size` bytes is mapped."""
    return [each for each in list(_LIVING) if each.file == file and each.end > size]


def _keep(mapped: Mapped, fd: int, size: int) -> None:
    """Copy what a stretch has behind the first `size` bytes of the file, by whole pages, and put it in their place."""
    start = max(mapped.position, size - size % mmap.PAGESIZE)
    wanted = -(-(mapped.end - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    calls = _calls()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = calls.mmap(None, wanted, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if copy == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with suppress(OSError):  # What a disk cannot read any more is zeros: checksums tell.
        os.preadv(fd, [(ctypes.c_char * wanted).from_address(copy)], start)
    place = _address(mapped) + start - mapped.position
    if calls.mremap(copy, wanted, wanted, _MREMAP_MAYMOVE | _MREMAP_FIXED, place) == _FAILED:
        failure = ctypes.get_errno()
        calls.munmap(copy, wanted)
        raise OSError(failure, os.strerror(failure))
    mapped.end = start


class _Calls(NamedTuple):
    """Calls of the system, and of Python's own library; those of the system let other threads go on."""

    mmap: Any
    mremap: Any
    munmap: Any
    madvise: Any
    get_buffer: Any
    release_buffer: Any


@cache
def _calls() -> _Calls:
    library, python = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None)
    at, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = (at, size, flags, flags, flags, ctypes.c_long)
    library.mremap.argtypes = (at, size, size, flags, at)
    library.munmap.argtypes = (at, size)
    library.madvise.argtypes = (at, size, flags)
    library.mmap.restype = library.mremap.restype = at
    python.PyObject_GetBuffer.argtypes = (ctypes.py_object, at, flags)
    python.PyBuffer_Release.argtypes = (at,)
    return _Calls(
        library.mmap,
        library.mremap,
        library.munmap,
        library.madvise,
        python.PyObject_GetBuffer,
        python.PyBuffer_Release,
    )


def _address(lying: Mapped | memoryview) -> int:
    """Where a stretch, or a view of it, lies: of memory that may not be written only a buffer tells."""
    calls, buffer = _calls(), (ctypes.c_void_p * 16)()  # A Py_buffer: its first field is the address, its size 80.
    calls.get_buffer(lying, ctypes.addressof(buffer), 0)
    address = buffer[0]
    calls.release_buffer(ctypes.addressof(buffer))
    assert address is not None
    return int(address)
