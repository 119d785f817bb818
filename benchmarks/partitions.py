"""A broker with 100,000 partitions: what making them costs everybody else, what they weigh, and a start after a kill.

The partitions are those of one topic, made by one request, and every fiftieth has a record. Meanwhile a client beside
asks for ApiVersions again and again: its longest wait is how long the broker served nobody. On a machine that others
use, too, the broker's own figure tells more: the most processor time of a step of its loop. The bars are the limits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.request import urlopen

from anabranch.protocol.messages.api_versions import ApiVersionsRequest
from anabranch.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from benchmarks.harness import Bar, Result, Scale, compare
from benchmarks.peers.anabranch import Anabranch
from benchmarks.peers.process import HOST, free_port
from tests.support.wire import WireClient, batch

TOPIC = "many"
PARTITIONS, PARTITIONS_SMALL = 100_000, 2_000
EVERY = 50
"""Of so many partitions one has a record."""
TIMEOUT_S = 900.0
BEAT_S = 0.002
START_S_MAX, STALL_MS_MAX, SIZE_KB_MAX = 20.0, 100.0, 8.0
LONGEST_STEP = "anabranch_loop_step_processor_seconds_max"


@contextmanager
def _asking_beside(port: int, waits: list[float]) -> Iterator[None]:
    """Ask for ApiVersions again and again, and note how long each answer took."""
    done = threading.Event()

    def ask() -> None:
        with WireClient(port, TIMEOUT_S) as client:
            while not done.wait(BEAT_S):
                began = time.monotonic()
                client.call(ApiVersionsRequest(client_software_name="beside", client_software_version="1"))
                waits.append(time.monotonic() - began)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        done.set()
        asking.join()


def _longest_step_s(metrics_port: int) -> float:
    with urlopen(f"http://{HOST}:{metrics_port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return max(float(line.rpartition(" ")[2]) for line in lines if line.startswith(LONGEST_STEP))


def _once(partitions: int) -> Mapping[str, float]:
    port = free_port()
    settings = {"metrics.listener": f"{HOST}:{port}", "durability": "os"}
    with Anabranch(settings=settings) as broker, WireClient(broker.port, TIMEOUT_S) as client:
        broker.start_timeout_s = TIMEOUT_S
        empty = broker.usage()
        waits: list[float] = []
        topic = CreatableTopic(name=TOPIC, num_partitions=partitions, replication_factor=1)
        began = time.monotonic()
        with _asking_beside(broker.port, waits):
            client.call(CreateTopicsRequest(topics=[topic], timeout_ms=int(TIMEOUT_S * 1000)))
        made, cpu_s = time.monotonic() - began, broker.usage().cpu_s - empty.cpu_s
        step_s, resident = _longest_step_s(port), broker.usage().resident_bytes
        for number in range(0, partitions, EVERY):
            assert client.produce(TOPIC, number, batch([b"%d" % number])).error_code == 0
        broker.kill()
        broker.start()
        started_cpu_s = broker.usage().cpu_s
        with WireClient(broker.port, TIMEOUT_S) as again:
            last = (partitions - 1) // EVERY * EVERY
            assert again.read_all(TOPIC, last) == [(0, b"%d" % last)]
            began = time.monotonic()
            doomed = DeleteTopicsRequest(topics=[DeleteTopicState(name=TOPIC)], timeout_ms=int(TIMEOUT_S * 1000))
            assert again.call(doomed).responses[0].error_code == 0
            deleted = time.monotonic() - began
        return {
            "made_s": made,
            "made_cpu_s": cpu_s,
            "stall_ms": 1000 * max(waits, default=0.0),
            "step_ms": 1000 * step_s,
            "size_kb": (resident - empty.resident_bytes) / partitions / 1000,
            "start_s": broker.started_in_s,
            "start_cpu_s": started_cpu_s,
            "deleted_s": deleted,
        }


def many(scale: Scale) -> list[Result]:
    """100,000 partitions: made, weighed, there again after a kill, deleted."""
    partitions = scale.choose(PARTITIONS, PARTITIONS_SMALL)
    limits = {"stall_ms": STALL_MS_MAX, "step_ms": STALL_MS_MAX, "size_kb": SIZE_KB_MAX}
    limits |= {"start_s": START_S_MAX, "start_cpu_s": START_S_MAX}
    limits |= dict.fromkeys(("made_s", "made_cpu_s", "deleted_s"), 0.0)
    return compare(
        "partitions.many",
        what=f"one topic of {partitions} partitions made by one request, one in {EVERY} with a record, durability=os",
        sides={"anabranch": lambda: _once(partitions), "limit": lambda: limits},
        bars=(
            Bar("stall_ms", "ms", "less", 1.0),
            Bar("step_ms", "ms", "less", 1.0),
            Bar("size_kb", "kB", "less", 1.0),
            Bar("start_s", "s", "less", 1.0),
            Bar("start_cpu_s", "s", "less", 1.0),
            Bar("made_s", "s", "less"),
            Bar("made_cpu_s", "s", "less"),
            Bar("deleted_s", "s", "less"),
        ),
        scale=scale,
    )


BENCHMARKS = {"many": many}
