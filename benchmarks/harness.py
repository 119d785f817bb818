"""How a comparison is measured, so that a ratio means something on a noisy machine.

Both sides do the same work with the same driver. Each is warmed once and that round is thrown away; then they take
turns, the one that goes first changing from round to round. A figure is the median over the rounds, a ratio is ours
divided by the peer's in that one run, and a bar is a bound on the ratio. Every figure is one line of JSON that says
what was measured against what, and where.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

RESULTS = Path(__file__).with_name("results")
Value = TypeVar("Value")
Round = Callable[[], Mapping[str, float]]
"""One measurement of one side: figures by name."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much work to do: as much as a figure needs, or as little as shows that the code still runs."""

    rounds: int = 3
    small: bool = False
    alone: bool = False
    """Whether only our own side is measured, as where two checkouts are compared (`benchmarks.against`)."""

    def choose(self, full: Value, small: Value) -> Value:
        """Return the size to use."""
        return small if self.small else full


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that is measured, and the bound on its ratio: at least for more, at most for less, None for no bound."""

    figure: str
    unit: str
    better: Literal["more", "less"]
    bound: float | None = None

    def holds(self, ratio: float) -> bool | None:
        """Tell whether the ratio keeps the bound; None when there is none."""
        if self.bound is None:
            return None
        return ratio >= self.bound if self.better == "more" else ratio <= self.bound

    def __str__(self) -> str:
        if self.bound is None:
            return "none"
        return f"{'>=' if self.better == 'more' else '<='} {self.bound:g}x"


@dataclass(frozen=True, slots=True)
class Result:
    """A figure of every side; the first side is ours, the second, where there is one, the peer it is held against."""

    benchmark: str
    what: str
    bar: Bar
    sides: Mapping[str, Sequence[float]]
    small: bool
    environment: Mapping[str, object]

    @property
    def identity(self) -> tuple[object, object]:
        return self.benchmark, self.bar.figure

    @property
    def medians(self) -> dict[str, float]:
        return {side: statistics.median(rounds) for side, rounds in self.sides.items()}

    @property
    def ratio(self) -> float | None:
        """Ours divided by the peer's, or None when nothing is compared."""
        ours, *peers = self.medians.values()
        return ours / peers[0] if peers and peers[0] else None

    @property
    def holds(self) -> bool | None:
        return None if self.ratio is None else self.bar.holds(self.ratio)

    def line(self) -> str:
        """Return the result as one line of JSON."""
        medians = self.medians
        sides = {
            side: {"median": _rounded(medians[side]), "rounds": [_rounded(value) for value in rounds]}
            for side, rounds in self.sides.items()
        }
        return json.dumps(
            {
                "benchmark": self.benchmark,
                "figure": self.bar.figure,
                "unit": self.bar.unit,
                "better": self.bar.better,
                "what": self.what,
                "sides": sides,
                "ratio": None if self.ratio is None else _rounded(self.ratio),
                "bar": str(self.bar),
                "holds": self.holds,
                "small": self.small,
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "environment": self.environment,
            }
        )

    def __str__(self) -> str:
        sides = ", ".join(f"{side} {_rounded(median):g} {self.bar.unit}" for side, median in self.medians.items())
        verdict = {True: " holds", False: " FAILS", None: ""}[self.holds]
        ratio = "" if self.ratio is None else f": {self.ratio:.2f}x (bar {self.bar}{verdict})"
        return f"{self.benchmark} {self.bar.figure}: {sides}{ratio}"


def compare(
    benchmark: str, *, what: str, sides: Mapping[str, Round], bars: Sequence[Bar], scale: Scale
) -> list[Result]:
    """Measure the sides in turn and return a result for each bar; a single side is measured without comparison.

    `what` says in a sentence or two what work is done, with which client and settings. Small rounds are not warmed for:
    their figures mean nothing.
    """
    if scale.alone:
        sides = dict([next(iter(sides.items()))])
    if not scale.small:
        for measure in sides.values():
            measure()
    measured: dict[str, list[Mapping[str, float]]] = {side: [] for side in sides}
    for number in range(scale.rounds):
        for side in list(sides) if number % 2 == 0 else reversed(list(sides)):
            measured[side].append(sides[side]())
    return [
        Result(
            benchmark=benchmark,
            what=what,
            bar=bar,
            sides={side: [figures[bar.figure] for figures in rounds] for side, rounds in measured.items()},
            small=scale.small,
            environment=environment(),
        )
        for bar in bars
    ]


def record(name: str, results: Iterable[Result], *, directory: Path = RESULTS) -> list[Result]:
    """Print each result as it comes, and put it in `<name>.jsonl` in place of what the same benchmark gave before.

    Small results go to `<name>.local.jsonl`, which is not kept.
    """
    directory.mkdir(exist_ok=True)
    kept: list[Result] = []
    for result in results:
        kept.append(result)
        print(result.line(), flush=True)
        print(result, file=sys.stderr, flush=True)
        path = directory / (f"{name}.local.jsonl" if result.small else f"{name}.jsonl")
        earlier = [line for line in _lines(str(path)) if _identity(json.loads(line)) != result.identity]
        path.write_text("".join(f"{line}\n" for line in [*earlier, result.line()]))
    return kept


def show(results: Iterable[Result]) -> list[Result]:
    """Print each result as it comes, and keep none."""
    shown: list[Result] = []
    for result in results:
        shown.append(result)
        print(result.line(), flush=True)
    return shown


def _identity(line: Mapping[str, object]) -> tuple[object, object]:
    return line["benchmark"], line["figure"]


@cache
def environment() -> dict[str, object]:
    """Return what a reader must know about the machine and the software to judge the figures."""
    cpu = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "")
    memory_kb = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kb / (1 << 20), 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "java": _output("java", "-version").partition("\n")[0],
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD").strip(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout or done.stderr


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
