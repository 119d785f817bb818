"""The benchmark of the Spark source's planner runs."""

from __future__ import annotations

from benchmarks.harness import Scale
from benchmarks.planning import HISTORIES, micro_batch


def test_a_small_run_plans_every_history() -> None:
    results = micro_batch(Scale(rounds=1, small=True))
    assert len(results) == 2 * len(HISTORIES)
    assert all(result.ratio and result.ratio > 0 for result in results)
