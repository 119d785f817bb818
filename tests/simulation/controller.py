"""Lives of a cluster that is resized, one for each seed: `python -m tests.simulation.controller --seeds 1000`.

With `--fresh` more lives follow, from a seed made of the date on.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.groups import first_of_now
from tests.simulation.test_controller import live


def _failure(seed: int) -> str | None:
    """Run a life; return why it fails, None if it ends well."""
    try:
        live(seed)
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[:1]}"
    return None


def main() -> int:
    """Run seeds; the exit code is 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.controller", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many lives")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--fresh", type=int, default=0, help="how many lives more, from a seed made of the date on")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--until-failure", action="store_true", help="end with the first life that fails")
    given = parser.parse_args()
    seeds = [*range(given.first, given.first + given.seeds)]
    if given.fresh:
        first = first_of_now()
        print(f"fresh seeds, made of the date: {first} and on", flush=True)
        seeds += range(first, first + given.fresh)
    failures: list[str] = []
    if given.jobs == 1:
        for seed in seeds:
            if (failure := _failure(seed)) is not None:
                failures.append(failure)
                if given.until_failure:
                    break
    else:
        with ProcessPoolExecutor(given.jobs) as pool:
            failures = [failure for failure in pool.map(_failure, seeds, chunksize=5) if failure is not None]
    for failure in failures:
        print(failure)
    print(f"{len(seeds) - len(failures)} of {len(seeds)} lives of a cluster ended well")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
