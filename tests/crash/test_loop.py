"""Thirty kills; `make crash` does a thousand."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.crash.loop import CrashLoop

KILLS, KILLS_MAX = 15, 40


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_killed_at_any_moment_a_broker_loses_doubles_and_brings_back_nothing(tmp_path: Path, durability: str) -> None:
    with contextlib.closing(CrashLoop(tmp_path, durability=durability, seed=1)) as loop:
        while loop.kills < KILLS or not loop.tells:
            assert loop.kills < KILLS_MAX, f"what is compared did not happen: {loop.summary()}"
            for _ in range(7):
                loop.round()
            loop.verify()
