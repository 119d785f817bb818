"""The benchmark of many partitions runs, small."""

from __future__ import annotations

from benchmarks.harness import Scale
from benchmarks.partitions import many


def test_many_partitions_are_made_found_again_and_deleted() -> None:
    found = {result.bar.figure: result.medians["anabranch"] for result in many(Scale(rounds=1, small=True))}
    assert all(figure >= 0 for figure in found.values())
    assert found["start_cpu_s"] > 0 and found["stall_ms"] > 0
