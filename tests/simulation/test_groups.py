"""Lives of groups, with faults everywhere: one owner for each partition at all times, and in quiet times every group
converges. `make simulate` lives many more of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from anabranch.server.coordinators import shard
from anabranch.server.coordinators.turns import Turns, Work
from tests.simulation.groups import command, live, story
from tests.support.thorough import thorough

SEEDS = thorough(60, 20)
SEEDS_PER_TEST = 20
APART_SEEDS = thorough(40, 5)
APART_SEEDS_PER_TEST = 5


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_whatever_fails_every_partition_has_one_owner_and_every_group_converges(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        counts += live(seed).rules.counts
    for name, least in {
        "taken": 300,
        "removed": 50,
        "commits": 300,
        "epochs": 150,
        "upgrades": 2,
        "cuts": 1,
        "loads": 40,
    }.items():
        assert counts[name] >= least, f"these lives were dull: {counts}"


@pytest.mark.parametrize("first", range(0, APART_SEEDS, APART_SEEDS_PER_TEST))
def test_it_makes_no_difference_that_decisions_are_made_in_a_thread(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those are that look at many partitions: here all of them are, and whatever comes meanwhile waits in line."""
    monkeypatch.setattr(shard, "ON_LOOP_MAX", -1)
    apart = 0
    made = Turns.take

    def take(turns: Turns, work: Work) -> Any:
        nonlocal apart
        apart += 1
        return made(turns, work)

    monkeypatch.setattr(Turns, "take", take)
    counts: Counter[str] = Counter()
    for seed in range(first, first + APART_SEEDS_PER_TEST):
        counts += live(seed).rules.counts
    assert apart > 500 and counts["taken"] >= 50 and counts["commits"] >= 50, (apart, counts)


def test_a_seed_reproduces_a_life_byte_for_byte() -> None:
    assert story(7) == story(7)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_reproduces_a_life_in_another_process_too(hash_seed: str) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tests.simulation.groups", "--first", "11", "--show"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=True,
        text=True,
        timeout=600,  # Where others go first it takes long.
    )
    assert told.stdout == story(11)[0] + "\n"


def test_a_life_that_fails_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.groups_world.World.missing", lambda _: "all of it")
    with pytest.raises(AssertionError, match="all of it") as failure:
        live(3)
    assert command(3) in str(failure.value)
