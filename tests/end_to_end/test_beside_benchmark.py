"""The benchmark of an honest client beside hostile ones runs, small."""

from __future__ import annotations

from benchmarks.beside import pipelining
from benchmarks.harness import Scale


def test_an_honest_client_is_measured_beside_hostile_ones_and_without() -> None:
    found = pipelining(Scale(rounds=1, small=True))
    assert {result.benchmark for result in found} == {"beside.pipelining", "beside.pipelining_limit"}
    assert all(figure > 0 for result in found for figure in result.medians.values())
