"""The benchmarks of shares run, small."""

from __future__ import annotations

import pytest

from benchmarks.harness import Scale
from benchmarks.sharing import BENCHMARKS


@pytest.mark.parametrize("name", ["kernel", "ranges"])
def test_the_benchmarks_of_the_kernel_run(name: str) -> None:
    results = BENCHMARKS[name](Scale(rounds=1, small=True))
    assert all(value > 0 for result in results for value in result.medians.values())
