"""The group coordinator's benchmarks run."""

from __future__ import annotations

import pytest

from benchmarks import groups
from benchmarks.harness import Scale


@pytest.mark.parametrize("name", groups.BENCHMARKS)
def test_a_small_run_gives_figures(name: str) -> None:
    results = groups.BENCHMARKS[name](Scale(rounds=1, small=True))
    assert results
    assert all(result.ratio and result.ratio > 0 for result in results)
