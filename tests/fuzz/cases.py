"""Cases of fuzzers that damage files, one for each seed, in a directory of its own."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Case(Protocol):
    """One case."""

    def run(self) -> str:
        """Return what became of it."""


def run_cases(made: Callable[[int, Path], Case], seeds: range) -> Counter[str]:
    """Run the case of each seed; how many ended how. One that fails says its seed first."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "data"
            path.mkdir()
            try:
                outcomes[made(seed, path).run()] += 1
            except BaseException:
                print(f"replay with: run({seed}, 1)")
                raise
    return outcomes


def show(outcomes: Counter[str]) -> None:
    """Print how many cases ended how."""
    for ended, times in sorted(outcomes.items()):
        print(f"{times:6} {ended}")
