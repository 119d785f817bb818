"""Memory for received bytes: the landing buffer that all channels of a loop share, and a bounded pool of buffers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

LANDING_SIZE = 256 * 1024
POOL_IDLE_SIZE_MAX = 32 * 1024 * 1024
POOL_IDLE_BUFFER_SIZE_MAX = 8 * 1024 * 1024


class BufferPool:
    """Receive buffers, bounded together (`queued.max.request.bytes`) and used again, because fresh pages are slow.

    A channel may take a buffer for the frame it has begun while anything is left of the limit, so the limit is passed
    by at most one frame; the others wait between two frames, in turn, until buffers come back.
    """

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.in_use = 0
        self._idle: dict[int, list[bytearray]] = {}
        self._idle_size = 0
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def exhausted(self) -> bool:
        """Whether a channel between two frames must wait."""
        return self.in_use >= self.size_max

    @property
    def waiting(self) -> int:
        """Channels that wait for memory."""
        return len(self._waiting)

    def take(self, size: int) -> bytearray:
        """Give a buffer of at least `size` bytes."""
        rounded = _rounded(size)
        self.in_use += rounded
        idle = self._idle.get(rounded)
        if idle:
            self._idle_size -= rounded
            return idle.pop()
        return bytearray(rounded)

    def give(self, buffer: bytearray) -> None:
        """Take a buffer back, and resume channels that wait for memory."""
        size = len(buffer)
        self.in_use -= size
        assert self.in_use >= 0
        if size <= POOL_IDLE_BUFFER_SIZE_MAX and self._idle_size + size <= POOL_IDLE_SIZE_MAX:
            self._idle.setdefault(size, []).append(buffer)
            self._idle_size += size
        for _ in range(len(self._waiting)):
            if self.exhausted:
                break
            self._waiting.popleft()()

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` once when memory is free again, in the order of asking."""
        self._waiting.append(resume)

    def forget(self, resume: Callable[[], None]) -> None:
        """Take back a `wait`."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(resume)


def _rounded(size: int) -> int:
    """Up to a power of two below 1 MiB, then to the next whole MiB: few sizes, so that buffers fit again."""
    if size <= 1 << 20:
        return max(4096, 1 << (size - 1).bit_length())
    return -(-size // (1 << 20)) << 20


class Landing:
    """The buffer that all channels of a loop receive into first."""

    def __init__(self, size: int = LANDING_SIZE) -> None:
        self.view = memoryview(bytearray(size))
