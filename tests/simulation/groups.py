"""Lives of groups, one for each seed: `python -m tests.simulation.groups --seeds 10000 --jobs 2`.

With `--fresh` more lives follow, from a seed made of the date on: no run has been there before. A seed that fails
prints the command that prints its whole transcript.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.simulation.groups_world import World

logging.getLogger("anabranch").addHandler(logging.NullHandler())

CHUNK = 20
PROGRESS_EVERY = 500


def _settle() -> None:
    """Keep the garbage collector from what all lives share, and from running often: a life leaves little behind."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 100)


def live(seed: int, **changed: Any) -> World:
    """A whole life, its theme `changed`. AssertionError names the command that replays it."""
    world = World(seed, **changed)
    try:
        world.live()
    except Exception as error:
        text = f"{error}\n\nseed {seed}, {world.lived_ms} ms; the whole story:\n  {command(seed)}"
        raise AssertionError(text) from error
    return world


def story(seed: int) -> tuple[str, bool]:
    """Run a seed; return its transcript, line by line, and whether the run ends well."""
    world = World(seed, show=True)
    assert world.transcript is not None
    try:
        world.live()
    except Exception:
        world.transcript.append(traceback.format_exc())
        return "\n".join(world.transcript), False
    return "\n".join(world.transcript), True


def command(seed: int) -> str:
    """Return the command that prints the transcript of a seed."""
    return f"PYTHONPATH=src:. python -m tests.simulation.groups --first {seed} --show"


def _lives(first: int, count: int) -> tuple[int, Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + count):
        world = World(seed)
        try:
            world.live()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = str(error).splitlines() or [type(error).__name__]
            failures.append(
                f"seed {seed}: {Path(place.filename).name}:{place.lineno}: {reason[0][:300]}\n  {command(seed)}"
            )
        counts += world.rules.counts
    return count, counts, failures


def _all_lives(first: int, seeds: int, jobs: int, chunk: int) -> Iterator[tuple[int, Counter[str], list[str]]]:
    firsts = range(first, first + seeds, chunk)
    sizes = [min(chunk, first + seeds - begin) for begin in firsts]
    if jobs == 1:
        _settle()
        yield from map(_lives, firsts, sizes)
        return
    with ProcessPoolExecutor(jobs, initializer=_settle) as pool:
        yield from pool.map(_lives, firsts, sizes)


def main() -> int:
    """Run seeds; the exit code is 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.groups", description="lives of groups, by seed")
    parser.add_argument("--seeds", type=int, default=200, help="how many lives")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--fresh", type=int, default=0, help="how many lives more, from a seed made of the date on")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--until-failure", action="store_true", help="end with the first life that fails")
    parser.add_argument("--show", action="store_true", help="tell the story of the first seed instead")
    given = parser.parse_args()
    if given.show:
        text, well = story(given.first)
        print(text)
        return 0 if well else 1
    failed = _run(given.first, given.seeds, given.jobs, until_failure=given.until_failure)
    if given.fresh:
        first = first_of_now()
        print(f"fresh seeds, made of the date: {first} and on", flush=True)
        failed += _run(first, given.fresh, given.jobs)
    return 1 if failed else 0


def first_of_now() -> int:
    """Return a seed made of the date and the time, beyond all fixed ones."""
    return int(time.strftime("%Y%m%d%H%M%S", time.gmtime())) * 100_000


def _run(first: int, seeds: int, jobs: int, *, until_failure: bool = False) -> int:
    """Run seeds, and return how many failed."""
    began = time.monotonic()
    counts: Counter[str] = Counter()
    done = failed = 0
    for count, found, failures in _all_lives(first, seeds, jobs, jobs if until_failure else CHUNK):
        before, done = done, done + count
        counts += found
        failed += len(failures)
        for failure in failures:
            print(failure, flush=True)
        if failed and until_failure:
            break
        if done // PROGRESS_EVERY > before // PROGRESS_EVERY and done < seeds:
            print(f"{done} of {seeds} lives, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    total = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{done - failed} of {done} lives ended well in {time.monotonic() - began:.0f} s: {total}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
