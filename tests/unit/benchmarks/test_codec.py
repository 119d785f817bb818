"""The codec's benchmark still runs, and compares messages that are the same on the wire."""

from __future__ import annotations

import pytest

from benchmarks.codec import BENCHMARKS
from benchmarks.harness import Scale


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_benchmark_runs_small(name: str) -> None:
    results = BENCHMARKS[name](Scale(rounds=1, small=True))
    assert len(results) == 4
    assert all(result.ratio is not None for result in results)
