from __future__ import annotations

import pytest

from benchmarks.client import BENCHMARKS
from benchmarks.harness import Scale


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_the_clients_are_measured_side_by_side(name: str) -> None:
    results = list(BENCHMARKS[name](Scale(rounds=1, small=True)))
    assert results and all(result.ratio is not None and result.ratio > 0 for result in results)
