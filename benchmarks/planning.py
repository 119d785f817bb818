"""Planning a micro-batch of a Spark query: the driver's work between two batches, for a topic with a long history.

Histories: a topic that grows layout by layout, one that swings between two counts, one whose counts are random, and one
that began with a single partition, so that all partitions are of one family. Each is planned from the beginning of the
topic and from random positions, without a limit, as after a start: the lineage is new. A bound is a side that always
takes as long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from anabranch.machines.lineage import Lineage
from anabranch.runtime.collector import collector_paused
from anabranch.spark.plan import (
    Splitting,
    TopicOffsets,
    TopicSnapshot,
    extent,
    offsets_from_json,
    offsets_to_json,
    plan_tasks,
)
from benchmarks.harness import Bar, Result, Scale, compare

PLAN_MS_MAX = 200.0
TOPIC = "restless"
LAYOUTS = 50

Counts = Callable[[random.Random, int], list[int]]


def _growing(_: random.Random, partitions: int) -> list[int]:
    half = partitions // 2
    return [half + half * layout // (LAYOUTS - 1) for layout in range(LAYOUTS)]


def _swinging(_: random.Random, partitions: int) -> list[int]:
    return [partitions if layout % 2 else partitions // 2 for layout in range(LAYOUTS)]


def _random(low: int, chance: random.Random, partitions: int) -> list[int]:
    return [*(chance.randint(low, partitions) for _ in range(LAYOUTS - 1)), partitions]


HISTORIES: Mapping[str, tuple[int, Counts]] = {
    "growing": (0, _growing),
    "swinging": (10, _swinging),
    "random": (10, partial(_random, 0)),
    "one family": (1, partial(_random, 1)),
}
"""The partition count at creation (0: that of the first layout), and the counts of all layouts."""


def _topic(initial: int, counts: list[int], chance: random.Random) -> TopicSnapshot:
    """A topic whose partitions took up to three records in each layout, and five in the last."""
    written = dict.fromkeys(range(counts[-1]), 0)
    ended: list[dict[int, int]] = []
    for count in counts[:-1]:
        for partition in range(count):
            written[partition] += chance.randint(0, 3)
        ended.append({partition: written[partition] for partition in range(count)})
    lineage = Lineage.of_ends(initial or counts[0], counts, ended)
    ends = {partition: records + 5 for partition, records in written.items()}
    return TopicSnapshot(TOPIC, "id", lineage, dict.fromkeys(ends, 0), ends)


def _plan(snapshot: TopicSnapshot, positions: Mapping[int, int]) -> float:
    """Plan a micro-batch that begins at some positions, as a source that has just read the lineage; milliseconds."""
    of = snapshot.lineage
    fresh = replace(snapshot, lineage=Lineage(of.initial, of.counts, of.cuts, of.first, of.unknown))
    start = {TOPIC: TopicOffsets(positions, "id", LAYOUTS)}
    with collector_paused():
        began = time.process_time()
        reach = extent({TOPIC: fresh}, start)
        end = offsets_from_json(offsets_to_json(reach.end))
        tasks = plan_tasks({TOPIC: fresh}, {TOPIC: positions}, {TOPIC: end[TOPIC].offsets}, Splitting())
        taken = time.process_time() - began
    assert tasks and reach.advances
    return taken * 1000


def _plan_each(snapshot: TopicSnapshot, begins: Mapping[str, Mapping[int, int]]) -> dict[str, float]:
    return {f"{where}_ms": _plan(snapshot, positions) for where, positions in begins.items()}


def _bound(begins: tuple[str, ...]) -> dict[str, float]:
    return {f"{where}_ms": PLAN_MS_MAX for where in begins}


def micro_batch(scale: Scale) -> list[Result]:
    """Processor milliseconds for the plan of a micro-batch, of a topic of 10,000 partitions after 49 resizes."""
    partitions = scale.choose(10_000, 200)
    found: list[Result] = []
    for name, (initial, counts) in HISTORIES.items():
        chance = random.Random(7)
        at_least = max(initial, partitions // 2) if name == "random" else initial
        snapshot = _topic(initial, [max(at_least, count) for count in counts(chance, partitions)], chance)
        begins = {
            "beginning": dict.fromkeys(snapshot.ends, 0),
            "random": {partition: chance.randint(0, end) for partition, end in snapshot.ends.items()},
        }
        found += compare(
            "planning.micro_batch",
            what=f"{partitions} partitions, {LAYOUTS} layouts, history: {name}",
            sides={
                "anabranch": partial(_plan_each, snapshot, begins),
                "bound": partial(_bound, tuple(begins)),
            },
            bars=[Bar(f"{where}_ms", "ms", "less", 1.0) for where in begins],
            scale=scale,
        )
    return found


BENCHMARKS = {"micro_batch": micro_batch}
