"""The broker's benchmarks run: small, without a bar."""

from __future__ import annotations

from benchmarks.broker import resize
from benchmarks.harness import Scale


def test_a_resize_under_load_loses_doubles_and_disorders_nothing() -> None:
    found = {result.bar.figure: result.medians["anabranch"] for result in resize(Scale(rounds=1, small=True))}
    assert found["longest_wait_ms"] > 0
    assert (found["lost"], found["doubled"], found["out_of_order"]) == (0, 0, 0)
