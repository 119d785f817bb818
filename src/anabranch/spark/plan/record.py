"""The plan of a batch as one line of JSON, for the log and for `verify`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.machines.lineage import BEYOND
from anabranch.spark.plan.offsets import TopicSnapshot
from anabranch.spark.plan.tasks import Task

PLAN_VERSION = 3


def plan_to_json(
    snapshots: Mapping[str, TopicSnapshot],
    start: Mapping[str, Mapping[int, int]],
    end: Mapping[str, Mapping[int, int]],
    tasks: Sequence[Task],
    *,
    by_key: bool,
    whole: bool = False,
) -> str:
    """Write a batch's plan as one line: the snapshots, the offset ranges, and the closed gates with their reasons."""
    topics: dict[str, Any] = {}
    for topic, snapshot in sorted(snapshots.items()):
        begin, finish = start.get(topic, {}), end.get(topic, {})
        read = sorted(snapshot.starts.keys() & finish.keys())
        positions = {p: max(snapshot.starts[p], begin.get(p, snapshot.starts[p])) for p in read}
        high = snapshot.high_watermarks or {}
        topics[topic] = {
            "id": snapshot.topic_id,
            "ordered": snapshot.ordered,
            "initial": snapshot.lineage.initial,
            "counts": snapshot.lineage.counts,
            "first": snapshot.lineage.first,
            "cuts": {str(p): list(zip(*cuts, strict=True)) for p, cuts in sorted(snapshot.lineage.cuts.items())},
            "log_start": {str(p): snapshot.starts[p] for p in sorted(snapshot.starts)},
            "log_end": {str(p): max(snapshot.ends[p], high.get(p, 0)) for p in sorted(snapshot.ends)},
            "start": {str(p): offset for p, offset in positions.items()},
            "end": {str(p): max(offset, finish[p]) for p, offset in positions.items()},
            **({"cleanup": sorted(snapshot.cleanup)} if "compact" in snapshot.cleanup else {}),
            "closed": {} if whole else _closed_gates(snapshot, positions),
        }
    plan = {
        "version": PLAN_VERSION,
        "kind": "batch" if whole else "micro-batch",
        "split": "key" if by_key else "offset",
        "topics": topics,
        "tasks": [
            {"keys": task.key_range, "reads": [(r.topic, r.partition, r.start, r.end) for r in task.reads]}
            for task in tasks
        ],
    }
    return json.dumps(plan, separators=(",", ":"))


def _closed_gates(snapshot: TopicSnapshot, positions: Mapping[int, int]) -> dict[str, Any]:
    if not snapshot.ordered:
        return {}
    gates = snapshot.lineage.gates({partition: positions.get(partition, BEYOND) for partition in snapshot.starts})
    closed = ((partition, gates.limit(partition), gates.waits(partition)) for partition in positions)
    return {str(partition): {"at": at, "waits": waits} for partition, at, waits in closed if at is not None}
