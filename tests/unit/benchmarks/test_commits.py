"""The benchmarks of commits by ranges run."""

from __future__ import annotations

import pytest

from benchmarks import commits
from benchmarks.harness import Scale


@pytest.mark.parametrize("name", sorted(commits.BENCHMARKS))
def test_a_small_run_gives_figures(name: str) -> None:
    results = commits.BENCHMARKS[name](Scale(rounds=1, small=True))
    assert results
    assert all(result.ratio and result.ratio > 0 for result in results)
