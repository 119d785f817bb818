"""How much a fetch is answered with, and when: the budget of its bytes.

At least one batch is given, however large, if there is any; beyond it `max_bytes` holds for the answer, and
`partition_max_bytes` for each partition. A fetch that finds fewer than `min_bytes` waits, unless the reader must hear
of something at once.
"""

from __future__ import annotations


class FetchBudget:
    """The bytes of one answer: what is taken, and what may be."""

    __slots__ = ("_size_max", "_size_min", "size", "urgent")

    def __init__(self, size_min: int, size_max: int, broker_size_max: int) -> None:
        """`size_min`, `size_max`: of the request; `broker_size_max`: what the broker allows for any answer."""
        self._size_max = max(0, min(size_max, broker_size_max))
        self._size_min = min(size_min, self._size_max)
        self.size = 0
        """Bytes taken."""
        self.urgent = False
        """Whether the reader must hear of something at once: an error, or a log that diverges from its own."""

    @property
    def reached(self) -> bool:
        """Whether there is no reason to wait for more."""
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
        """Give back what was taken for a partition that is read again."""
        self.size -= size
