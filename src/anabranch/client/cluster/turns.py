"""Whom to ask, again and again, about a topic of which single brokers may have heard late, or never.

An open connection goes on to the same broker, so that "any broker" is the same one each time. The rule: after any
broker each known one has its turn, always one that was asked least often. One that cannot be reached counts as asked
`UNREACHABLE_TURNS` times: its timeouts are long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

UNREACHABLE_TURNS = 10


class Turns:
    """The turns of one question."""

    def __init__(self) -> None:
        self._counts: Counter[int | None] = Counter()
        self._last: int | None = None
        self.is_heard = True
        """Whether the last one was reached."""

    def next(self, nodes: Collection[int]) -> int | None:
        """Return the node to ask, of the known ones; None for any broker."""
        self._last = min((None, *nodes), key=lambda node: self._counts[node])
        self._counts[self._last] += 1
        self.is_heard = True
        return self._last

    def unreachable(self) -> None:
        """Note that the last one could not be reached."""
        self.is_heard = False
        if self._last is not None:
            self._counts[self._last] += UNREACHABLE_TURNS - 1

    def all_asked(self, nodes: Collection[int]) -> bool:
        """Whether each of the known nodes has had a turn."""
        return all(self._counts[node] for node in nodes)
