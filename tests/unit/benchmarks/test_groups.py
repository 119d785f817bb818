"""The group coordinator's benchmarks run; those with a broker are run by the end-to-end tests."""

from __future__ import annotations

import pytest

from benchmarks import groups
from benchmarks.harness import Scale


@pytest.mark.parametrize("name", sorted(groups.BENCHMARKS.keys() - {"resize_gates"}))
def test_a_small_run_gives_figures(name: str) -> None:
    results = groups.BENCHMARKS[name](Scale(rounds=1, small=True))
    assert results
    assert all(result.ratio and result.ratio > 0 for result in results)
