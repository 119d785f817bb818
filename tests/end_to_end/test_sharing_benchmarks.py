"""The benchmarks of consumers that share a partition run, small."""

from __future__ import annotations

from benchmarks.harness import Scale
from benchmarks.sharing import consumers


def test_consumers_of_shares_and_those_that_drop_read_the_same() -> None:
    found = {result.bar.figure: result.medians for result in consumers(Scale(rounds=1, small=True))}
    assert all(value > 0 for value in found["records"].values())
