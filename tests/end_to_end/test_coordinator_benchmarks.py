"""The coordinator's benchmarks run: small, as they do when they are large; `test_broker_benchmarks` has heartbeats."""

from __future__ import annotations

from benchmarks.coordinator import load
from benchmarks.gates import resize_gates
from benchmarks.harness import Scale


def test_a_small_run_gives_figures() -> None:
    results = load(Scale(rounds=1, small=True))
    assert results
    assert all(result.small and min(result.medians.values()) >= 0 for result in results)


def test_a_small_run_opens_the_gates_of_all_kinds_of_members() -> None:
    ours, classic, stock = (result.medians["anabranch"] for result in resize_gates(Scale(rounds=1, small=True)))
    assert 0 < ours < stock and 0 < classic < stock
