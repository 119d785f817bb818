"""Memory that requests and answers hold: whose turn it is, and which fetch must answer early.

Nothing here measures memory: callers say how many bytes they take, no fewer than they will. The rule: one request alone
always has room, so that each is handled some day; further ones wait their turn, and nobody overtakes. Whoever holds
memory must therefore be done without others. A fetch that waits for records is not: it may be ended at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

GATHERED_AT_A_TIME = 8
"""Long answers that are gathered side by side: each has a step in every turn of the loop."""
GATHERED_SIZE_MIN = 64 * 1024
"""Bytes that a long answer counts at least."""


class DecodedMemory:
    """The memory of large requests that are decoded, over all connections (`queued.max.decoded.bytes`).

    A decoded request takes many times its bytes. One for which there is no room waits its turn; when no other is
    decoded there is always room for one. So no request may count that waits for others to come.
    """

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.held = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._going_on = False
        """Whether one is begun: it may give its bytes back at once, as thousands of requests do that are not wanted."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def take(self, size: int, begin: Callable[[], None]) -> None:
        """Call `begin` when there is room for `size` bytes, at once or later; then `give` them back."""
        self._waiting.append((size, begin))
        self._go_on()

    def give(self, size: int) -> None:
        """Give back the bytes of one request."""
        self.held -= size
        self._go_on()

    def _go_on(self) -> None:
        if self._going_on:
            return
        self._going_on = True
        try:
            while self._waiting and (not self.held or self.held + self._waiting[0][0] <= self.size_max):
                size, begin = self._waiting.popleft()
                self.held += size
                begin()
        finally:
            self._going_on = False


class GatheredMemory:
    """The memory of long answers, over all connections, from when they prove to be long until they are encoded.

    How much an answer will take is not known before. It counts as much as the largest of its API took of late; one of
    an API that is not known takes all the room, alone. The holders, which are connections, have their turns in
    rotation: one that asks for much waits behind itself.
    """

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.held = 0
        self._begun = 0
        self._largest: dict[int, int] = {}
        self._waiting: dict[Hashable, deque[tuple[int, Callable[[int], None]]]] = {}
        self._going_on = False

    @property
    def waiting(self) -> int:
        """How many answers wait."""
        return sum(map(len, self._waiting.values()))

    def take(self, holder: Hashable, api_key: int, begin: Callable[[int], None]) -> None:
        """Call `begin` with the bytes that an answer counts, when its turn comes or at once; then `give` them back."""
        self._waiting.setdefault(holder, deque()).append((api_key, begin))
        self._go_on()

    def give(self, size: int) -> None:
        """Give back the bytes of one answer."""
        self.held -= size
        self._begun -= 1
        self._go_on()

    def learn(self, api_key: int, size: int) -> None:
        """Note the bytes that a long answer of an API took."""
        self._largest[api_key] = max(size, GATHERED_SIZE_MIN, self._largest.get(api_key, 0) * 7 // 8)

    def _go_on(self) -> None:
        if self._going_on:
            return
        self._going_on = True
        try:
            while self._waiting and self._begun < GATHERED_AT_A_TIME and self._begin_next():
                pass
        finally:
            self._going_on = False

    def _begin_next(self) -> bool:
        holder, asked = next(iter(self._waiting.items()))
        api_key, begin = asked[0]
        size = min(self._largest.get(api_key, self.size_max), self.size_max)
        if self._begun and self.held + size > self.size_max:
            return False
        asked.popleft()
        del self._waiting[holder]
        if asked:
            self._waiting[holder] = asked
        self.held += size
        self._begun += 1
        begin(size)
        return True


class FetchPart:
    """The memory of one fetch."""

    __slots__ = ("end", "ended", "size")

    def __init__(self) -> None:
        self.size = 0
        """Bytes."""
        self.end: Callable[[], None] | None = None
        """Ends its wait for records, while it waits."""
        self.ended = False
        """Whether its wait was ended to make room."""


class FetchMemory(DecodedMemory):
    """The memory of fetches, over all connections (`queued.max.fetch.bytes`): of partitions that they read and watch.

    A large fetch `take`s its bytes in turn, a small one `hold`s them when it begins to wait. While there is too little
    room, or another waits its turn, those that wait for records are ended: each answers with what it has found. Large
    ones are ended first, to within a factor of two, and of those the one that has waited longest. None is ended in
    vain: as long as that would not make room, because others read, these will answer soon or wait as well.
    """

    def __init__(self, size_max: int) -> None:
        super().__init__(size_max)
        self.ended = 0
        """Waits ended so far."""
        self._ending = 0
        """Bytes of fetches that were ended and hold their memory still."""
        self._idle = 0
        """Bytes of fetches that wait for records."""
        self._waits: dict[int, dict[FetchPart, None]] = {}
        """The fetches that wait for records, by the binary logarithm of their bytes."""

    def hold(self, part: FetchPart, size: int) -> None:
        """Add bytes to a fetch, without a turn."""
        if part.ended:
            self._ending += size
        part.size += size
        self.held += size
        self._end_some()

    def wait(self, part: FetchPart, end: Callable[[], None]) -> None:
        """Note that a fetch waits for records; `end` may be called at once, and at most once."""
        part.end = end
        self._idle += part.size
        self._waits.setdefault(part.size.bit_length(), {})[part] = None
        self._end_some()

    def resume(self, part: FetchPart) -> None:
        """Note that a fetch waits no longer."""
        if part.end is not None:
            part.end = None
            self._forget(part)

    def free(self, part: FetchPart) -> None:
        """Give back the bytes of a fetch."""
        size, part.size = part.size, 0
        if part.ended:
            self._ending -= size
        self.give(size)

    def _go_on(self) -> None:
        super()._go_on()
        self._end_some()

    def _end_some(self) -> None:
        while self._waits:
            part = next(iter(self._waits[max(self._waits)]))
            if self._waiting:
                short = min(self.held, self.held + self._waiting[0][0] - self.size_max)
            else:
                short = self.held - max(self.size_max, part.size)
            if not self._ending < short <= self._ending + self._idle:
                return
            self._forget(part)
            self._ending += part.size
            self.ended += 1
            end, part.end, part.ended = part.end, None, True
            assert end is not None
            end()

    def _forget(self, part: FetchPart) -> None:
        alike = self._waits[part.size.bit_length()]
        del alike[part]
        self._idle -= part.size
        if not alike:
            del self._waits[part.size.bit_length()]
