"""The lineage's benchmarks run, small."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.harness import Result, Scale
from benchmarks.lineage import read, read_dense


@pytest.mark.parametrize("benchmark", [read, read_dense])
def test_the_lineage_of_a_topic_that_was_resized_often_is_read(benchmark: Callable[[Scale], list[Result]]) -> None:
    found = {result.bar.figure: result.medians["anabranch"] for result in benchmark(Scale(rounds=1, small=True))}
    assert found["read_ms"] > 0
    assert found["gap_ms"] >= 0
