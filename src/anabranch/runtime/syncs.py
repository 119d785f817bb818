"""Syncs beside a loop: it goes on while files become durable, and is called when they are.

Linux's asynchronous I/O (`io_submit(2)`, IOCB_CMD_FDSYNC, since Linux 4.18) takes any number of files in one call, and
rings an event descriptor when their bytes are on the disk: no thread waits for them. A thread for each costs the loop
more than all else that it does for a batch: every one that comes back asks for the interpreter's lock. Where the
kernel has no such thing, or does not take a file, a thread syncs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import platform
import queue
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct

from anabranch.runtime.disk import File
from anabranch.runtime.loop_steps import timed

SYNC_THREADS = 16
"""Syncs that run side by side where threads do them. A file system writes its journal once for all that wait for it:
16 files took 7 ms one after another, or with 4 threads, and 3 ms with 8 or 16 (ext4)."""
IN_FLIGHT_MAX = 256
"""Files that the kernel syncs at a time; threads do the others."""

Told = Callable[[OSError | None], None]
"""The callback of a finished sync, with its error if it failed."""

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""The numbers of io_setup, io_destroy, io_getevents and io_submit."""
_FDSYNC = 3
_RINGS = 1
_REQUEST = Struct("<QIIHhIQQqQII")
"""An iocb: data, key, flags, operation, priority, file, buffer, size, offset, reserved, flags, event descriptor."""
_EVENT = Struct("<QQqq")
"""An io_event: data, iocb, result, result."""


class Syncs:
    """Syncs files, or runs other blocking work, and calls back in the loop of the caller."""

    def __init__(self, threads: int = SYNC_THREADS, *, native: bool = True) -> None:
        self._threads = _Threads(threads)
        self._wants_native = native
        self._native: _Native | None = None

    def sync(self, files: Sequence[File], done: Told) -> None:
        """Make the bytes of files durable, then call `done`, with the first error if any."""
        job = _Job(len(files), done)
        if self._wants_native:
            self._wants_native = False
            with contextlib.suppress(OSError):
                self._native = _Native(_Kernel(), asyncio.get_running_loop(), self._threads)
        for file in files:
            if self._native is not None and type(file) is File:
                self._native.sync(file, job)
            else:
                self._threads.run(file.sync, job.told)
        if not files:
            loop = asyncio.get_running_loop()
            loop.call_soon(timed(loop, "commit", done), None)

    def run(self, work: Callable[[], None], done: Told) -> None:
        """Run blocking work in a thread, then call `done` with its OSError, or None."""
        self._threads.run(work, done)

    def close(self) -> None:
        """Let threads and descriptors go, when nothing is under way."""
        self._threads.close()
        if self._native is not None:
            self._native.close()
            self._native = None


class _Job:
    """Files that are synced for the same sake."""

    __slots__ = ("_done", "_error", "_left")

    def __init__(self, files: int, done: Told) -> None:
        self._left = files
        self._done = done
        self._error: OSError | None = None

    def told(self, error: OSError | None) -> None:
        """Another one is durable, or cannot be made so."""
        self._error = self._error or error
        self._left -= 1
        if not self._left:
            self._done(self._error)


class _Kernel:
    """The system calls. OSError where the kernel lacks them."""

    def __init__(self) -> None:
        numbers = _CALLS.get(platform.machine())
        if sys.platform != "linux" or sys.byteorder != "little" or numbers is None:
            raise OSError(errno.ENOSYS, "no asynchronous I/O")
        _, self._destroy, self._events, self._submit = numbers
        # None of these calls blocks as they are used here, so the interpreter's lock is kept.
        self._call = ctypes.PyDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._call.argtypes = (ctypes.c_long,) * 6
        context = ctypes.c_ulong(0)
        self._checked(self._call(numbers[0], IN_FLIGHT_MAX, ctypes.addressof(context), 0, 0, 0))
        self._context = context.value
        self._requests = bytearray(IN_FLIGHT_MAX * _REQUEST.size)
        self._happened = bytearray(IN_FLIGHT_MAX * _EVENT.size)
        self._no_time = bytearray(16)
        at = _address(self._requests)
        self._pointers = array("Q", range(at, at + len(self._requests), _REQUEST.size))
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def submit(self, wanted: Sequence[tuple[int, int]]) -> int:
        """Begin to sync files, each a number and its descriptor; return the count of the first ones submitted."""
        for place, (number, fd) in enumerate(wanted):
            _REQUEST.pack_into(
                self._requests, place * _REQUEST.size, number, 0, 0, _FDSYNC, 0, fd, 0, 0, 0, 0, _RINGS, self.bell
            )
        taken = self._call(self._submit, self._context, len(wanted), self._pointers.buffer_info()[0], 0, 0)
        return max(0, int(taken))

    def ended(self) -> list[tuple[int, int]]:
        """The finished syncs: a number each, and 0 or a negative errno."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        room, no_time = _address(self._happened), _address(self._no_time)
        count = self._checked(self._call(self._events, self._context, 0, IN_FLIGHT_MAX, room, no_time))
        events = _EVENT.iter_unpack(memoryview(self._happened)[: count * _EVENT.size])
        return [(number, result) for number, _, result, _ in events]

    def close(self) -> None:
        """Let go."""
        self._call(self._destroy, self._context, 0, 0, 0, 0)
        os.close(self.bell)

    @staticmethod
    def _checked(answer: int) -> int:
        if answer < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return answer


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _Native:
    """Syncs by the kernel: all that are asked for in one turn of the loop begin together."""

    def __init__(self, kernel: _Kernel, loop: asyncio.AbstractEventLoop, threads: _Threads) -> None:
        self._kernel = kernel
        self._loop = loop
        self._threads = threads
        self._wanted: list[tuple[File, _Job]] = []
        self._running: dict[int, tuple[File, _Job]] = {}
        """By number; the file stays open as long as it is here."""
        self._number = 0
        loop.add_reader(kernel.bell, timed(loop, "commit", self._on_ended))

    def sync(self, file: File, job: _Job) -> None:
        """Sync one file of a job."""
        if not self._wanted:
            self._loop.call_soon(timed(self._loop, "commit", self._begin))
        self._wanted.append((file, job))

    def _begin(self) -> None:
        wanted, self._wanted = self._wanted, []
        free = IN_FLIGHT_MAX - len(self._running)
        numbered = list(enumerate(wanted[:free], self._number))
        self._number += len(numbered)
        self._running.update(numbered)
        taken = self._kernel.submit([(number, file.fd) for number, (file, _) in numbered]) if numbered else 0
        for number, _ in numbered[taken:]:
            del self._running[number]
        for file, job in wanted[taken:]:
            self._threads.run(file.sync, job.told)

    def _on_ended(self) -> None:
        for number, result in self._kernel.ended():
            file, job = self._running.pop(number)
            job.told(None if result >= 0 else OSError(-result, os.strerror(-result), str(file.path)))

    def close(self) -> None:
        """Let go."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._kernel.bell)
        self._kernel.close()


class _Threads:
    """Threads for blocking work. The loop calls back for all work finished since its last turn at once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads: list[threading.Thread] = []
        self._todo: queue.SimpleQueue[tuple[Callable[[], None], Told, asyncio.AbstractEventLoop] | None]
        self._todo = queue.SimpleQueue()
        self._done: deque[tuple[Told, OSError | None]] = deque()
        self._open = 0
        """Pieces of work without a callback yet."""
        self._telling = False
        """Whether the loop is scheduled to call back."""

    def run(self, work: Callable[[], None], done: Told) -> None:
        """Do it in a thread, then call `done` in the loop that this is called in."""
        self._open += 1
        if len(self._threads) < min(self._open, self._count):
            thread = threading.Thread(target=self._work, name=f"sync-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._todo.put((work, done, asyncio.get_running_loop()))

    def _work(self) -> None:
        while (task := self._todo.get()) is not None:
            work, done, loop = task
            error: OSError | None = None
            try:
                work()
            except Exception as failure:
                error = failure if isinstance(failure, OSError) else OSError(errno.EIO, f"{failure!r}")
            self._done.append((done, error))
            del task, work, done  # Else a thread without work would keep the file open.
            # In this order, here and in `_tell`: what was done before the mark was seen is told of by who set it.
            if not self._telling:
                self._telling = True
                with contextlib.suppress(RuntimeError):  # The loop is closed: no callback can run.
                    loop.call_soon_threadsafe(timed(loop, "commit", self._tell))

    def _tell(self) -> None:
        self._telling = False
        loop = asyncio.get_running_loop()
        while self._done:
            done, error = self._done.popleft()
            self._open -= 1
            loop.call_soon(timed(loop, "commit", done), error)

    def close(self) -> None:
        """Let the threads end."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
