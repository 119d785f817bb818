from __future__ import annotations

import pytest

from benchmarks.harness import Scale
from benchmarks.parallel import BENCHMARKS


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_the_parallel_handler_is_measured_beside_its_peer(name: str) -> None:
    results = list(BENCHMARKS[name](Scale(rounds=1, small=True)))
    assert results and all(result.ratio is not None and result.ratio > 0 for result in results)
