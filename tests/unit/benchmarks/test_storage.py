"""The storage benchmarks run, and measure what they say."""

from __future__ import annotations

import pytest

from benchmarks import storage
from benchmarks.harness import Scale


@pytest.mark.parametrize("name", storage.BENCHMARKS)
def test_a_small_run_gives_figures_of_both_sides(name: str) -> None:
    results = list(storage.BENCHMARKS[name](Scale(rounds=1, small=True)))
    assert results
    for result in results:
        assert len(result.sides) == 2
        assert result.ratio is None or result.ratio > 0
