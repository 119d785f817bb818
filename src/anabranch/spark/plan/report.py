"""What a streaming query tells about itself: the log ends, how far it is behind, and what holds it back.

Spark shows it as `latestOffset` of the source in each progress report: the only thing that a Python source can tell
there (`metrics` of a source stay empty). Numbers of partitions are text, as JSON has it:

    {"flights": {"layouts": 2, "offsets": {"0": 90, "1": 40}, "lag": {"0": 0, "1": 40},
                 "gates": {"1": {"at": 0, "waits": {"0": 95}}}, "transactions": {"0": 5}}}

`offsets` is where reading can end now, `lag` the offsets between the end of the micro-batch and there. A gate holds
partition 1 back `at` an offset until partition 0 is read up to 95. `transactions`: offsets from an open transaction on.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest
from typing import Any

from anabranch.machines.lineage import BEYOND
from anabranch.spark.plan.offsets import Offsets, TopicSnapshot

GATES_MAX = 100
"""Partitions of a topic whose gates are looked at: those furthest behind."""


def report(
    snapshots: Mapping[str, TopicSnapshot], reached: Offsets, high_watermarks: Mapping[str, Mapping[int, int]]
) -> dict[str, Any]:
    """Report on a query whose micro-batch ends at `reached`; `high_watermarks` of topics where they are known."""
    return {
        topic: _report(snapshot, reached[topic].offsets, high_watermarks.get(topic, {}))
        for topic, snapshot in sorted(snapshots.items())
        if topic in reached
    }


def _report(snapshot: TopicSnapshot, reached: Mapping[int, int], high_watermarks: Mapping[int, int]) -> dict[str, Any]:
    positions = {p: reached[p] for p in sorted(snapshot.ends.keys() & reached.keys())}
    ends = {p: snapshot.ends[p] for p in positions}
    undecided = {p: high_watermarks.get(p, end) - end for p, end in ends.items()}
    return {
        "layouts": snapshot.lineage.current + 1,
        "offsets": _named(ends),
        "lag": _named({p: max(0, end - positions[p]) for p, end in ends.items()}),
        "gates": _gates(snapshot, positions),
        "transactions": _named({p: count for p, count in undecided.items() if count > 0}),
    }


def _gates(snapshot: TopicSnapshot, positions: Mapping[int, int]) -> dict[str, Any]:
    """The closed gates with records behind them, of the partitions that are furthest behind."""
    if not snapshot.ordered:
        return {}
    gates = snapshot.lineage.gates({p: positions.get(p, BEYOND) for p in snapshot.starts})
    found: dict[str, Any] = {}
    lag = {p: snapshot.ends[p] - position for p, position in positions.items() if position < snapshot.ends[p]}
    for partition in sorted(nlargest(GATES_MAX, lag, key=lag.__getitem__)):
        at = gates.limit(partition)
        if at is not None and at < snapshot.ends[partition]:
            waits: dict[int, int] = {}
            for wait in gates.waits(partition):
                waits[wait.partition] = max(wait.offset, waits.get(wait.partition, 0))
            found[str(partition)] = {"at": at, "waits": _named(waits)}
    return found


def _named(numbers: Mapping[int, int]) -> dict[str, int]:
    return {str(partition): number for partition, number in numbers.items()}
