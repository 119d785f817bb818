"""The clock of everything that runs in a world of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anabranch.runtime.clock import Clock

if TYPE_CHECKING:
    from tests.simulation.groups_world import World


class WorldClock(Clock):
    """The world's time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now_ms(self) -> int:
        return self._world.now_ms

    monotonic_ms = now_ms
