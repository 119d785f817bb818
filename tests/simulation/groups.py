"""Lives of groups, one per seed: `python -m tests.simulation.groups --seeds 10000 [--first 0] [--jobs 2]`.

A seed that fails prints the command that tells its whole story.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

from tests.simulation.groups_world import World

CHUNK = 20


def live(seed: int, *, show: bool = False) -> World:
    """A whole life. AssertionError names the command that replays it."""
    world = World(seed, show=show)
    try:
        world.live()
    except Exception as error:
        if show:
            assert world.transcript is not None
            sys.stdout.write("\n".join([*world.transcript, ""]))
            raise
        text = f"{error}\n\nseed {seed}, {world.now_ms - 1_000_000} ms; replay it with:\n  {replay_command(seed)}\n"
        raise AssertionError(text) from error
    return world


def replay_command(seed: int) -> str:
    """What tells the story of a seed."""
    return f"PYTHONPATH=src:. python -m tests.simulation.groups --first {seed} --seeds 1 --show"


def _lives(first: int, count: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    counts: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + count):
        try:
            world = live(seed)
        except Exception as error:
            cause = error.__cause__ or error
            frames = [f for f in traceback.extract_tb(cause.__traceback__)]
            place = frames[-1]
            failures.append(
                (seed, f"{Path(place.filename).name}:{place.lineno} {type(cause).__name__} {str(cause)[:160]}")
            )
        else:
            counts += world.rules.counts
    return counts, failures


def main() -> int:
    """Run seeds; the exit code is 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="tell what happens; for one seed")
    given = parser.parse_args()
    if given.show:
        world = live(given.first, show=True)
        assert world.transcript is not None
        sys.stdout.write("\n".join([*world.transcript, ""]))
        return 0
    began = time.monotonic()
    firsts = range(given.first, given.first + given.seeds, CHUNK)
    sizes = [min(CHUNK, given.first + given.seeds - first) for first in firsts]
    counts: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    done = 0
    with ProcessPoolExecutor(given.jobs) as pool:
        for found, failed in pool.map(_lives, firsts, sizes) if given.jobs > 1 else map(_lives, firsts, sizes):
            counts += found
            failures += failed
            done += CHUNK
            if done % 500 == 0:
                print(f"{done} lives, {len(failures)} failed, {time.monotonic() - began:.0f} s", flush=True)
            for seed, reason in failed:
                print(f"seed {seed}: {reason}\n  {replay_command(seed)}", flush=True)
    took = time.monotonic() - began
    print(f"{given.seeds - len(failures)} of {given.seeds} lives in {took:.1f} s; {dict(sorted(counts.items()))}")
    return 1 if failures else 0


__all__ = ["live", "repeat", "replay_command"]

if __name__ == "__main__":
    sys.exit(main())
