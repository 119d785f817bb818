"""The byte budget of a fetch: the size of the response, and whether to wait for more.

At least one batch is returned, however large, if one exists; beyond that `max_bytes` limits the response, and
`partition_max_bytes` each partition. A fetch that finds fewer than `min_bytes` waits, unless the response is urgent.

A reader of committed records is told which aborted transactions have records in what it is given. These, too, are
bounded: a partition is read up to where the response has enough of them (`AbortedTransactions.reach`).
"""

from __future__ import annotations

ABORTED_MAX = 2_000
"""Aborted transactions of a response, beside those that are open where it stops: 2 ms to find and to tell."""


class FetchBudget:
    """The bytes of one response: those taken, and those still allowed."""

    __slots__ = ("_size_max", "_size_min", "aborted", "size", "urgent")

    def __init__(self, size_min: int, size_max: int, broker_size_max: int) -> None:
        """`size_min`, `size_max`: of the request. `broker_size_max`: the broker's limit for every response."""
        self._size_max = max(0, min(size_max, broker_size_max))
        self._size_min = min(size_min, self._size_max)
        self.size = 0
        """Bytes taken."""
        self.aborted = 0
        """Aborted transactions that the reader is told of."""
        self.urgent = False
        """Whether to answer at once: for an error, a log that diverges from the reader's, or aborted transactions."""

    @property
    def reached(self) -> bool:
        """Whether to wait no longer."""
        return self.size >= self._size_min or self.urgent

    @property
    def aborted_room(self) -> int:
        """The number of aborted transactions for which the response has room."""
        return max(0, ABORTED_MAX - self.aborted)

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

    def give_back(self, size: int, aborted: int = 0) -> None:
        """Return the bytes and the aborted transactions taken for a partition that is read again."""
        self.size -= size
        self.aborted -= aborted
