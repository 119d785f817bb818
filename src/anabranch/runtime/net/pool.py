"""Memory for received bytes: the landing buffer that all channels of a loop share, and a bounded pool of buffers."""

from __future__ import annotations

import asyncio
import mmap
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from time import perf_counter

from anabranch.runtime.loop_steps import timed

LANDING_SIZE = 256 * 1024
POOL_IDLE_SIZE_MAX = 32 * 1024 * 1024
POOL_IDLE_BUFFER_SIZE_MAX = 8 * 1024 * 1024


SMALL_FRAME_SIZE = 16 * 1024
"""A frame up to this size never waits for memory."""
PROMPT_FRAME_SIZE_MAX = 1 << 20
"""A frame up to this size gets its whole buffer at once while a quarter of the limit is not in use."""
GROWTH = 4
WOKEN_MAX = 100
"""Waiting channels that are resumed when a frame is whole."""
WOKEN_BY_MEMORY_MAX = 4
"""Waiting channels that are resumed when a buffer comes back, beside the one whose frame was begun first."""
_thread = ThreadPoolExecutor(1, thread_name_prefix="unmap")
MAPPED_SIZE = 1 << 20
"""Above this size a buffer is memory of its own: it is not cleared before it is used, and it grows without a copy."""

FRAMES_ROUND_S = 0.003
"""How long channels that have more frames than their turn takes have turns before new events are looked at."""

Buffer = bytearray | mmap.mmap


class Turns:
    """Channels that have received more frames than their last turn took, in the order of their next turns.

    The rule: a few of them have their turns between two looks at the sockets, however many wait, so that a client that
    sends one request waits for FRAMES_ROUND_S and one frame, not for a frame of each of a thousand.
    """

    def __init__(self) -> None:
        self._line: deque[Callable[[], None]] = deque()
        self._is_due = False

    def __len__(self) -> int:
        return len(self._line)

    def wait(self, loop: asyncio.AbstractEventLoop, turn: Callable[[], None]) -> None:
        """Call `turn` when those before have had theirs."""
        self._line.append(turn)
        if not self._is_due:
            self._is_due = True
            loop.call_soon(timed(loop, "network", partial(self._take, loop)))

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        line, over = self._line, perf_counter() + FRAMES_ROUND_S
        try:
            while line:
                line.popleft()()
                if perf_counter() > over:
                    break
        finally:
            self._is_due = bool(line)
            if line:
                loop.call_soon(timed(loop, "network", partial(self._take, loop)))


class BufferPool:
    """Receive buffers, bounded together (`queued.max.request.bytes`) and used again, because fresh pages are slow.

    The memory of a frame that is not whole is charged as its bytes arrive: its buffer grows, unless a buffer for all of
    it lies idle and a quarter of the limit is not in use. Half of the limit goes to
    whoever asks first, the other half is shared equally among the channels that hold a buffer, so that a few cannot
    keep the others out; the frame begun first always goes on, so that one is always completed. Where whole frames,
    which are being handled, hold more than half, all wait for these. The limit is passed by at most the frame begun
    first, and by SMALL_FRAME_SIZE for each connection.
    """

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.in_use = 0
        """Bytes of the buffers that were taken, until they are given back, large ones until the system has them."""
        self.turns = Turns()
        self._idle: dict[int, list[Buffer]] = {}
        self._idle_size = 0
        self._holders: dict[Hashable, int] = {}
        """The channels whose frame is not whole, the one begun first in front, and the bytes of its buffer."""
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._unmapped: list[Buffer] = []

    @property
    def scarce(self) -> bool:
        """Whether no more is received at a time than needs no memory of the pool, or little of it."""
        return self.in_use > self.size_max // 2

    @property
    def waiting(self) -> int:
        """Channels that wait for memory."""
        return len(self._waiting)

    def begin(self, holder: Hashable, size: int, arrived: int) -> Buffer:
        """Give the first buffer for a frame of `size` bytes, of which `arrived` are there and must be kept."""
        whole = size <= PROMPT_FRAME_SIZE_MAX and self.in_use + size <= self.size_max // 4
        whole = whole or self._has_idle(size, self.in_use)
        buffer = self.take(size if whole else max(arrived, min(size, SMALL_FRAME_SIZE)))
        self._holders[holder] = len(buffer)
        return buffer

    def grow(self, holder: Hashable, size: int, buffer: Buffer) -> Buffer | None:
        """Give a larger buffer for a frame of `size` bytes, with what is in `buffer`; None where its channel must wait.

        Nobody else may read `buffer`, which is larger now, or goes back. OSError where there is no memory.
        """
        before = len(buffer)
        wanted = _rounded(min(size, before * GROWTH))
        if before <= MAPPED_SIZE and self._has_idle(size, self.in_use - before):
            wanted = _rounded(size)
        if not self._may_hold(holder, wanted, before):
            return None
        self._holders[holder] = wanted
        if isinstance(buffer, mmap.mmap) and _resized(buffer, wanted):
            self.in_use += wanted - before
            return buffer
        larger = self.take(wanted)
        self._holders[holder] = len(larger)
        larger[:before] = buffer
        self.give(buffer)
        return larger

    def end(self, holder: Hashable) -> None:
        """Note that a channel's frame is whole, or given up; resume some of those that wait."""
        self._holders.pop(holder, None)
        self._wake(WOKEN_MAX)

    def _wake(self, most: int) -> None:
        """Resume the channel whose frame was begun first, if it waits, and some others."""
        first = next(iter(self._holders), None)
        woken = [first] if first in self._waiting else []
        woken += [other for other in islice(self._waiting, most) if other is not first]
        for other in woken:
            if (resume := self._waiting.pop(other, None)) is not None:
                resume()

    def _may_hold(self, holder: Hashable, size: int, before: int) -> bool:
        half = self.size_max // 2
        if size <= SMALL_FRAME_SIZE or self.in_use - before + size <= half:
            return True
        whole = self.in_use - sum(self._holders.values())
        return whole <= half and (size <= half // len(self._holders) or next(iter(self._holders)) is holder)

    def take(self, size: int) -> Buffer:
        """Give a buffer of at least `size` bytes."""
        rounded = _rounded(size)
        found = self._idle_for(rounded)
        if found:
            self.in_use += found
            self._idle_size -= found
            return self._idle[found].pop()
        self.in_use += rounded
        if rounded > MAPPED_SIZE:
            return mmap.mmap(-1, rounded, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return bytearray(rounded)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back. Where too many lie idle, it takes the place of those of another size."""
        size = len(buffer)
        if size > POOL_IDLE_BUFFER_SIZE_MAX:
            self._unmap(buffer)
            return
        self._is_free(size)
        while self._idle_size + size > POOL_IDLE_SIZE_MAX:
            other = next((each for each, idle in self._idle.items() if idle and each != size), None)
            if other is None:
                return
            self._idle[other].pop()
            self._idle_size -= other
        self._idle.setdefault(size, []).append(buffer)
        self._idle_size += size

    def _is_free(self, size: int) -> None:
        self.in_use -= size
        assert self.in_use >= 0
        if self._waiting:
            self._wake(WOKEN_BY_MEMORY_MAX)

    def _unmap(self, buffer: Buffer) -> None:
        """Have memory be given back to the system in a thread, which takes 0.2 ms for each megabyte.

        That begins when this step of the loop is over, so that who gave it back has forgotten it.
        """
        self._unmapped.append(buffer)
        if len(self._unmapped) == 1:
            loop = asyncio.get_running_loop()
            loop.call_soon(timed(loop, "network", partial(self._unmap_in_thread, loop)))

    def _unmap_in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        unmapped, self._unmapped = self._unmapped, []
        size = sum(map(len, unmapped))
        done = loop.run_in_executor(_thread, unmapped.clear)
        done.add_done_callback(timed(loop, "network", lambda _: self._is_free(size)))

    def _has_idle(self, size: int, in_use: int) -> bool:
        """Whether a buffer for a frame of `size` bytes lies idle, and a quarter of the limit is enough for it."""
        found = self._idle_for(_rounded(size))
        return bool(found) and in_use + found <= self.size_max // 4

    def _idle_for(self, rounded: int) -> int:
        """Return the size of idle buffers for so many bytes, 0 for none; large ones may be twice as large."""
        if self._idle.get(rounded) or rounded <= MAPPED_SIZE:
            return rounded if self._idle.get(rounded) else 0
        fitting = (size for size, idle in self._idle.items() if idle and rounded < size <= 2 * rounded)
        return min(fitting, default=0)

    def wait(self, holder: Hashable, resume: Callable[[], None]) -> None:
        """Call `resume` once when memory may be free again."""
        self._waiting[holder] = resume

    def forget(self, holder: Hashable) -> None:
        """Take back a `wait`."""
        self._waiting.pop(holder, None)


def _resized(buffer: mmap.mmap, size: int) -> bool:
    """Grow a buffer in place; False if views of an earlier request, which is not freed yet, keep it where it is."""
    try:
        buffer.resize(size)
    except BufferError:
        return False
    return True


def _rounded(size: int) -> int:
    """Up to a power of two below 1 MiB, then to the next whole MiB: few sizes, so that buffers fit again."""
    if size <= 1 << 20:
        return max(4096, 1 << (size - 1).bit_length())
    return -(-size // (1 << 20)) << 20


class Landing:
    """The buffer that all channels of a loop receive into first."""

    def __init__(self, size: int = LANDING_SIZE) -> None:
        self.view = memoryview(bytearray(size))
