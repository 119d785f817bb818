"""The coordinator's benchmarks run: small, as they do when they are large."""

from __future__ import annotations

import pytest

from benchmarks import coordinator
from benchmarks.harness import Scale


@pytest.mark.parametrize("name", coordinator.BENCHMARKS)
def test_a_small_run_gives_figures(name: str) -> None:
    results = coordinator.BENCHMARKS[name](Scale(rounds=1, small=True))
    assert results
    assert all(result.small and min(result.medians.values()) >= 0 for result in results)
