"""Chance: the only place where randomness enters. Machines are given ids, they never make them.

A seed makes every draw repeatable, which is how a simulation replays a failure; without one the system's own source
is used, and ids are as hard to guess as it makes them.
"""

from __future__ import annotations

import random
from uuid import UUID


class Chance:
    """A source of ids and numbers."""

    def __init__(self, seed: int | None = None) -> None:
        self._random: random.Random = random.SystemRandom() if seed is None else random.Random(seed)

    def below(self, bound: int) -> int:
        """Draw a number from 0 to `bound`, `bound` exclusive."""
        return self._random.randrange(bound)

    def between(self, low: int, high: int) -> int:
        """Draw a number from `low` to `high`, both inclusive."""
        return self._random.randint(low, high)

    def uuid(self) -> UUID:
        """Make a version 4 UUID. Its base64 form never starts with '-', which would read as an option (as in Kafka)."""
        while True:
            made = UUID(int=self._random.getrandbits(128), version=4)
            if made.bytes[0] >> 2 != 62:
                return made
