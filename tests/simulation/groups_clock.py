"""The clock, and the chance, of everything that runs in a world of groups."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from anabranch.runtime.clock import Clock

if TYPE_CHECKING:
    from tests.simulation.groups_world import World


class Chance(random.Random):
    """Draws the same numbers as the class it extends, without the steps for arguments that nobody gives here."""

    def randint(self, a: int, b: int) -> int:
        count = b - a + 1
        assert count > 0, (a, b)
        bits = count.bit_length()
        drawn = self.getrandbits(bits)
        while drawn >= count:
            drawn = self.getrandbits(bits)
        return a + drawn


class WorldClock(Clock):
    """The world's time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now_ms(self) -> int:
        return self._world.now_ms

    monotonic_ms = now_ms
