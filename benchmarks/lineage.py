"""Looking at the lineage of a topic that was resized 1,000 times: how long it takes, and how long it holds up a broker.

The history is written into the data directory of a broker that has stopped: the topic node, the state nodes, and the
leader epochs of the logs, as 1,000 resizes leave them. The broker is a process of its own, in which a task that only
sleeps notes the longest time that the event loop kept it waiting, and the most processor time that was spent meanwhile:
on a machine that others use, too, the second is what the loop did.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_double, c_int
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from anabranch.client.cluster.connection import ConnectionSettings
from anabranch.client.cluster.metadata import Cluster
from anabranch.machines.controller.layouts import EndedEpochs, EpochRun, Layout
from anabranch.machines.controller.nodes import partition_path, put_topic, read_topic, topic_path
from anabranch.runtime.collector import Collector
from anabranch.server.broker import Broker
from anabranch.server.settings import Settings
from anabranch.storage.directory import METADATA_FILE
from anabranch.storage.log.epochs import FILE, LeaderEpochs
from anabranch.storage.metadata.table import read_tree
from benchmarks.harness import Bar, Result, Scale, compare
from tests.support.wire import WireClient, batch
from tests.support.written_metadata import write_nodes

TOPIC = "restless"
READ_MS_MAX = 100.0
GAP_MS_MAX = 10.0
START_TIMEOUT_S = 120.0
TICK_S = 0.001


class Sizes(NamedTuple):
    """A topic and its history."""

    partitions: int
    resizes: int
    holders: int
    """Partitions that hold a record of each ended layout; the others hold none of it."""


class Served(NamedTuple):
    """A broker in a process of its own."""

    port: int
    longest_gap_s: Any
    most_work_s: Any
    """Shared; set to 0 and -1 to begin anew."""


def _serve(data: str, port: Any, longest_gap_s: Any, most_work_s: Any, stop: Any) -> None:
    """Run a broker until `stop` is set; note how long its loop kept a sleeping task waiting."""

    collector = Collector()

    async def run() -> None:
        broker = Broker(Settings.of({"listeners": "127.0.0.1:0", "metrics.listener": "", "log.dirs": data}))
        await broker.start()
        collecting = asyncio.create_task(collector.run(lambda: False))
        port.value = broker.address.port
        last = time.perf_counter()
        while not stop.is_set():
            await asyncio.sleep(TICK_S)
            if most_work_s.value < 0:
                broker.loop_steps.forget()
            longest_gap_s.value = max(longest_gap_s.value, time.perf_counter() - last - TICK_S)
            most_work_s.value = broker.loop_steps.longest_processor.seconds
            last = time.perf_counter()
        collecting.cancel()
        assert await broker.stop()

    import uvloop

    with collector.installed(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@contextmanager
def _serving(data: Path) -> Iterator[Served]:
    context = multiprocessing.get_context("spawn")
    port, stop = context.Value(c_int, 0), context.Event()
    gap, work = context.Value(c_double, 0.0), context.Value(c_double, 0.0)
    process = context.Process(target=_serve, args=(str(data), port, gap, work, stop))
    process.start()
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not port.value:
            if not process.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the broker did not start")
            time.sleep(0.01)
        yield Served(port.value, gap, work)
    finally:
        stop.set()
        process.join(START_TIMEOUT_S)
    if process.exitcode:
        raise RuntimeError(f"the broker ended with {process.exitcode}")


def history(sizes: Sizes, chance: random.Random) -> tuple[tuple[Layout, ...], Mapping[int, list[int]]]:
    """Layouts between half of the partitions and all of them, and for each partition the layouts it has a record of."""
    half = sizes.partitions // 2
    counts = [chance.randint(half, sizes.partitions) for _ in range(sizes.resizes)]
    layouts = tuple(Layout(number, count) for number, count in enumerate([*counts, sizes.partitions]))
    held: dict[int, list[int]] = {partition: [] for partition in range(sizes.partitions)}
    for layout in layouts[:-1]:
        for partition in chance.sample(range(layout.count), min(sizes.holders, layout.count)):
            held[partition].append(layout.number)
    return layouts, held


def prepare(data: Path, sizes: Sizes) -> int:
    """Make a data directory with the topic and its history; return the number of cuts."""
    layouts, held = history(sizes, random.Random(1))
    with _serving(data) as served, WireClient(served.port) as client:
        client.create(TOPIC, sizes.partitions)
        for partition, numbers in held.items():
            client.produce(TOPIC, partition, batch([b""] * (len(numbers) + 1)))
    newest = layouts[-1].number
    found = read_tree(data / METADATA_FILE)
    assert found is not None
    topic = read_topic(TOPIC, found.sound[topic_path(TOPIC)].data)
    ended: EndedEpochs = dict.fromkeys(topic.partitions, (EpochRun(0, 0, newest),))
    raw = put_topic(topic.__class__(TOPIC, topic.topic_id, topic.partitions, 1, layouts, ended)).data
    changed = {topic_path(TOPIC): {**json.loads(raw), "initial_partition_count": sizes.partitions // 2}}
    for path in (partition_path(TOPIC, partition) for partition in held):
        changed[path] = {**json.loads(found.sound[path].data), "leader_epoch": newest}
    write_nodes(data / METADATA_FILE, {path: json.dumps(node).encode() for path, node in changed.items()})
    for partition, numbers in held.items():
        epochs = LeaderEpochs((number, offset) for offset, number in enumerate([*numbers, newest]))
        log = data / f"{TOPIC}-{partition}"
        log.mkdir(exist_ok=True)
        (log / FILE).write_bytes(epochs.to_bytes())
    return sum(map(len, held.values()))


async def _looks(port: int, times: int, cuts: int) -> list[float]:
    """How long each of `times` new clients takes to know the lineage of the topic."""
    took: list[float] = []
    for _ in range(times):
        cluster = Cluster(f"127.0.0.1:{port}", ConnectionSettings())
        await cluster.refresh()
        began = time.perf_counter()
        view = await cluster.view(TOPIC)
        took.append(time.perf_counter() - began)
        assert sum(len(found.ends) for found in view.lineage.cuts.values()) == cuts
        await cluster.close()
    return took


def _read(sizes: Sizes, times: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory)
        cuts = prepare(data, sizes)
        with _serving(data) as served:
            asyncio.run(_looks(served.port, 1, cuts))
            served.longest_gap_s.value, served.most_work_s.value = 0.0, -1.0
            took = asyncio.run(_looks(served.port, times, cuts))
            return {
                "read_ms": 1000 * statistics.median(took),
                "gap_ms": 1000 * served.longest_gap_s.value,
                "work_ms": 1000 * served.most_work_s.value,
            }


def _measured(name: str, sizes: Sizes, scale: Scale) -> list[Result]:
    return compare(
        f"lineage.{name}",
        what=f"a client of ours learns metadata and lineage of a topic of {sizes.partitions} partitions after "
        f"{sizes.resizes} resizes, {sizes.holders} partitions (or all) having a record of each layout: the median of "
        "20 clients; the longest time that the broker's loop kept a sleeping task waiting, and the most processor time "
        "that it spent between two turns of that task",
        sides={
            "anabranch": partial(_read, sizes, scale.choose(20, 2)),
            "allowed": lambda: {"read_ms": READ_MS_MAX, "gap_ms": GAP_MS_MAX, "work_ms": GAP_MS_MAX},
        },
        bars=[Bar("read_ms", "ms", "less", 1.0), Bar("gap_ms", "ms", "less"), Bar("work_ms", "ms", "less", 1.0)],
        scale=scale,
    )


def read(scale: Scale) -> list[Result]:
    """A lineage of 1,000 partitions and 1,000 resizes, 10 partitions having records of each layout."""
    return _measured("read", scale.choose(Sizes(1_000, 1_000, 10), Sizes(12, 20, 3)), scale)


def read_dense(scale: Scale) -> list[Result]:
    """The same with records of every layout in every partition: the most that a lineage of this size can be."""
    return _measured("read_dense", scale.choose(Sizes(1_000, 1_000, 1_000), Sizes(12, 20, 12)), scale)


BENCHMARKS = {"read": read, "read_dense": read_dense}
