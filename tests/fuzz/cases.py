"""Cases of fuzzers that damage files, in lives with a seed and a directory each."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Life(Protocol):
    """What ends with damage to one file or more."""

    def run(self) -> list[str]:
        """Return what became of each damaged file."""


def run_cases(made: Callable[[int, Path], Life], first: int, count: int) -> Counter[str]:
    """Run the life of each seed from `first` on, until there are so many cases; how many ended how.

    A life that fails says its seed first.
    """
    outcomes: Counter[str] = Counter()
    for seed in itertools.count(first):
        if outcomes.total() >= count:
            print(f"{outcomes.total():6} cases, seeds {first} to {seed - 1}")
            return outcomes
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "data"
            path.mkdir()
            try:
                outcomes.update(made(seed, path).run())
            except BaseException:
                print(f"after {outcomes.total()} cases; replay with: run({seed}, 1)", flush=True)
                raise
    raise AssertionError


def show(outcomes: Counter[str]) -> None:
    """Print how many cases ended how."""
    for ended, times in sorted(outcomes.items()):
        print(f"{times:6} {ended}")
