"""Compacted topics through resizes: whoever reads one ends with the last value of each key, at any time."""

from __future__ import annotations

import pytest

from tests.simulation.compacted_world import World

HISTORIES = 8


def play(seed: int, steps: int = 120, *, policy: str = "compact", retention_ms: int = -1) -> World:
    world = World(seed, policy=policy, retention_ms=retention_ms)
    try:
        for _ in range(steps):
            world.step()
            world.check()
    except BaseException:
        print(f"replay with: play({seed}, policy={policy!r}, retention_ms={retention_ms})")
        raise
    finally:
        world.close()
    return world


@pytest.mark.parametrize("part", range(2))
def test_a_reader_ends_with_the_last_value_of_each_key_whatever_happens(part: int) -> None:
    worlds = [play(seed) for seed in range(part * HISTORIES, (part + 1) * HISTORIES)]
    assert sum(world.saved for world in worlds) > 5_000
    assert sum(world.folded for world in worlds) > 0
    assert sum(world.emptied for world in worlds) > 0
    assert sum(world.failures for world in worlds) == 0


def test_a_reader_of_a_topic_that_also_expires_never_ends_with_an_older_value() -> None:
    worlds = [play(seed, policy="compact,delete", retention_ms=150) for seed in range(HISTORIES)]
    assert sum(world.folded for world in worlds) > 0
    assert sum(world.failures for world in worlds) == 0
