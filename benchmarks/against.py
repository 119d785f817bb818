"""This checkout against another one, for example the state before a change: `--against DIR`.

Both checkouts run their own code of the same benchmark, their own side only (`--alone`), each in a process of its own.
They take turns, and the one that goes first changes from round to round, so that a machine that gets slower or faster
does so for both. A ratio is this checkout divided by the other; "worse" is the part lost, negative for a gain.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]


def against(names: Sequence[str], other: Path, *, rounds: int, small: bool) -> Iterator[str]:
    """Measure each benchmark in both checkouts and yield a line for each figure."""
    checkouts = (HERE, other.resolve())
    for name in names:
        measured: dict[tuple[str, str, str], tuple[list[float], list[float]]] = {}
        for number in range(rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                for line in _measured(checkouts[side], name, small=small):
                    sides = measured.setdefault((line["benchmark"], line["figure"], line["better"]), ([], []))
                    sides[side].append(next(iter(line["sides"].values()))["median"])
        for figure, (ours, theirs) in measured.items():
            if ours and theirs:
                yield _line(*figure, statistics.median(ours), statistics.median(theirs))


def _measured(checkout: Path, name: str, *, small: bool) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks", name, "--alone", "--rounds", "1", *(["--small"] if small else [])]
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed in {checkout}:\n{done.stdout}{done.stderr}")
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def _line(benchmark: str, figure: str, better: str, ours: float, theirs: float) -> str:
    ratio = ours / theirs if theirs else float("nan")
    worse = 1 - ratio if better == "more" else ratio - 1
    return (
        f"{benchmark} {figure}: {ours:.4g} against {theirs:.4g}, {ratio:.3f}x ({better} is better, {worse:+.1%} worse)"
    )
