"""The byte budget of a fetch: the size of the response, and whether to wait for more.

At least one batch is returned, however large, if one exists; beyond that `max_bytes` limits the response, and
`partition_max_bytes` each partition. A fetch that finds fewer than `min_bytes` waits, unless the response is urgent.
"""

from __future__ import annotations


class FetchBudget:
    """The bytes of one response: those taken, and those still allowed."""

    __slots__ = ("_size_max", "_size_min", "size", "urgent")

    def __init__(self, size_min: int, size_max: int, broker_size_max: int) -> None:
        """`size_min`, `size_max`: of the request. `broker_size_max`: the broker's limit for every response."""
        self._size_max = max(0, min(size_max, broker_size_max))
        self._size_min = min(size_min, self._size_max)
        self.size = 0
        """Bytes taken."""
        self.urgent = False
        """Whether to answer at once: because of an error, or of a log that diverges from the reader's."""

    @property
    def reached(self) -> bool:
        """Whether to wait no longer."""
        return self.size >= self._size_min or self.urgent

    def room(self, partition_size_max: int) -> int | None:
        """Bytes that may be read from the next partition; 0 for one batch of any size, None for nothing at all."""
        room = min(partition_size_max, self._size_max - self.size)
        if room > 0:
            return room
        return None if self.size else 0

    def take(self, size: int) -> bool:
        """Take batches that were found, if they fit: the first ones always do."""
        if self.size and self.size + size > self._size_max:
            return False
        self.size += size
        return True

    def give_back(self, size: int) -> None:
        """Return the bytes taken for a partition that is read again."""
        self.size -= size
