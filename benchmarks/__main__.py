"""Run benchmarks: `python -m benchmarks NAME... [--rounds 3] [--small] [--check]`; without a name, list them.

NAME is a module of this package (`broker`) or one benchmark in it (`broker.produce`). A module offers its benchmarks
as `BENCHMARKS`, functions by name that take a Scale and give Results; their first docstring lines are what is listed.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import benchmarks
from benchmarks.against import against
from benchmarks.harness import Result, Scale, record, show

Benchmark = Callable[[Scale], Iterable[Result]]


def modules() -> dict[str, Mapping[str, Benchmark]]:
    """Return the benchmarks of every module that has some."""
    names = sorted(info.name for info in pkgutil.iter_modules(benchmarks.__path__) if not info.name.startswith("_"))
    found = {name: importlib.import_module(f"benchmarks.{name}") for name in names}
    return {name: module.BENCHMARKS for name, module in found.items() if hasattr(module, "BENCHMARKS")}


def chosen(module: str, only: str, scale: Scale) -> Iterator[Result]:
    """Run the benchmarks of a module, or only the one that is named."""
    for name, benchmark in modules()[module].items():
        if only in ("", name):
            yield from benchmark(scale)


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; with --check, fail when a bar does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a module (broker) or a benchmark (broker.produce)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side (3)")
    parser.add_argument("--small", action="store_true", help="little work: shows that it runs, not how fast")
    parser.add_argument("--alone", action="store_true", help="measure our own side only, keep no result")
    parser.add_argument("--against", type=Path, metavar="DIR", help="measure this checkout against the one in DIR")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar does not hold")
    options = parser.parse_args(arguments)
    there = modules()
    if not options.names:
        for module, each in there.items():
            for name, benchmark in each.items():
                print(f"{module}.{name:20} {(benchmark.__doc__ or '').partition(chr(10))[0]}")
        return 0
    for asked in options.names:
        module, _, only = asked.partition(".")
        if module not in there or (only and only not in there[module]):
            parser.error(f"there is no benchmark {asked!r}; run without a name to see which there are")
    if options.against is not None:
        for line in against(options.names, options.against, rounds=options.rounds, small=options.small):
            print(line, flush=True)
        return 0
    scale = Scale(rounds=options.rounds, small=options.small, alone=options.alone)
    results: list[Result] = []
    for asked in options.names:
        module, _, only = asked.partition(".")
        found = chosen(module, only, scale)
        results += show(found) if options.alone else record(module, found)
    return 1 if options.check and any(result.holds is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
