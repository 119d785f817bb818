"""Compacted topics through resizes: whoever reads one ends with the last value of each key, at any time."""

from __future__ import annotations

import pytest

from tests.simulation.compacted_world import World
from tests.simulation.groups import first_of_now
from tests.support.thorough import thorough

HISTORIES = thorough(104, 8)
PER_TEST = 8
FRESH = thorough(24, 0)
"""Histories from a seed made of the date on, where all of it is run: no run has been there before."""


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


@pytest.mark.parametrize("first", range(0, 2 * HISTORIES, PER_TEST))
def test_a_reader_ends_with_the_last_value_of_each_key_whatever_happens(first: int) -> None:
    worlds = [play(seed) for seed in range(first, first + PER_TEST)]
    assert sum(world.saved for world in worlds) > 5_000
    assert sum(world.folded for world in worlds) > 0
    assert sum(world.emptied for world in worlds) > 0
    assert sum(world.failures for world in worlds) == 0


@pytest.mark.parametrize("first", range(0, HISTORIES, PER_TEST))
def test_a_reader_of_a_topic_that_also_expires_never_ends_with_an_older_value(first: int) -> None:
    worlds = [play(seed, policy="compact,delete", retention_ms=150) for seed in range(first, first + PER_TEST)]
    assert sum(world.folded for world in worlds) > 0
    assert sum(world.failures for world in worlds) == 0


@pytest.mark.skipif(not FRESH, reason="the short form has the same histories every time")
@pytest.mark.parametrize(("policy", "retention_ms"), [("compact", -1), ("compact,delete", 150)])
def test_nor_is_it_otherwise_in_histories_where_no_run_has_been(
    policy: str, retention_ms: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first = first_of_now()
    with capsys.disabled():
        print(f"fresh seeds, made of the date: {first} and on", flush=True)
    for seed in range(first, first + FRESH):
        assert play(seed, policy=policy, retention_ms=retention_ms).failures == 0
