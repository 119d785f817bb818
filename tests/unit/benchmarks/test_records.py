"""The kernels' benchmarks run."""

from __future__ import annotations

import pytest

from benchmarks import records
from benchmarks.harness import Scale


@pytest.mark.parametrize("name", records.BENCHMARKS)
def test_a_small_run_gives_figures_of_both_sides(name: str) -> None:
    results = records.BENCHMARKS[name](Scale(rounds=1, small=True))
    assert [len(result.sides) for result in results] == [2, 2]
    assert all(result.ratio and result.ratio > 0 for result in results)
