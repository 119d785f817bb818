"""The benchmark of the record kernels still runs, on batches that decode to what was encoded."""

from __future__ import annotations

import pytest

from benchmarks.harness import Scale
from benchmarks.records import BENCHMARKS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_benchmark_runs_small(name: str) -> None:
    results = BENCHMARKS[name](Scale(rounds=1, small=True))
    assert len(results) >= 2
    assert all(side[0] > 0 for result in results for side in result.sides.values())
