"""Gates at a real broker: from the end of a resize to the last gate of a group that has read everything.

Two members share a topic of four partitions, which becomes one of eight. Settings are the defaults: heartbeats and
automatic commits every five seconds; in small runs every two seconds, and members that join are not waited for as
long. A gate is open when its partition is a member's to read. A bound is a side that always takes as long.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter, sleep
from typing import Any

import confluent_kafka

from anabranch.client.sync import Admin, Consumer, Producer
from benchmarks.harness import Bar, Result, Scale, compare
from benchmarks.peers.anabranch import Anabranch

FIRST, GROWN = 4, 8
RECORDS = 2_000
MEMBERS = 2
INTERVAL_MS, INTERVAL_MS_SMALL = 5_000, 2_000
"""Of heartbeats and of automatic commits."""
JOIN_MS, JOIN_MS_SMALL = 3_000, 300
"""How long a group that is new waits for further members."""
TIMEOUT_S = 60
OURS_MS_MAX = 300.0
STOCK_MS_MAX = 10_000.0
"""One heartbeat interval and one commit interval."""

Owned = Callable[[], set[int]]
_numbers = itertools.count()


class _Reader(threading.Thread):
    """One member that polls all the time."""

    def __init__(self, poll: Callable[[], int], owned: Owned) -> None:
        super().__init__(daemon=True)
        self._poll = poll
        self._owned = owned
        self.owned: set[int] = set()
        self.count = 0
        self.over = False

    def run(self) -> None:
        while not self.over:
            self.count += self._poll()
            self.owned = self._owned()


@contextmanager
def _ours(address: str, protocol: str, topic: str) -> Iterator[_Reader]:
    with Consumer(address, group_id=topic, group_protocol=protocol, auto_offset_reset="earliest") as consumer:
        consumer.subscribe(topic)

        def owned() -> set[int]:
            waiting = {tp.partition for tp in consumer._inner._fetcher.awaiting()}
            return set() if consumer._inner._fetcher.needs() else _partitions(consumer.assignment()) - waiting

        yield from _read(_Reader(lambda: len(consumer.poll(0.02)), owned))


@contextmanager
def _stock(address: str, interval_ms: int, topic: str) -> Iterator[_Reader]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": topic,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": interval_ms,
        }
    )
    consumer.subscribe([topic])
    try:
        yield from _read(
            _Reader(lambda: len(consumer.consume(1_000, 0.02)), lambda: _partitions(consumer.assignment()))
        )
    finally:
        consumer.close()


def _read(reader: _Reader) -> Iterator[_Reader]:
    reader.start()
    try:
        yield reader
    finally:
        reader.over = True
        reader.join()


def _partitions(assignment: Any) -> set[int]:
    return {tp.partition for tp in assignment}


def _gates(address: str, member: Callable[[str], Any]) -> Mapping[str, float]:
    topic = f"resized-{next(_numbers)}"
    with ExitStack() as stack:
        admin = stack.enter_context(Admin(address))
        admin.create_topics(topic, partitions=FIRST)
        with Producer(address) as producer:
            for number in range(RECORDS):
                producer.send(topic, b"x", key=str(number))
        readers = [stack.enter_context(member(topic)) for _ in range(MEMBERS)]
        _until(lambda: sum(reader.count for reader in readers) >= RECORDS and _whole(readers, FIRST))
        admin.resize(topic, GROWN)
        began = perf_counter()
        _until(lambda: _whole(readers, GROWN))
        return {"milliseconds": (perf_counter() - began) * 1_000}


def _whole(readers: list[_Reader], count: int) -> bool:
    return all(reader.owned for reader in readers) and set().union(*(r.owned for r in readers)) == set(range(count))


def _until(holds: Callable[[], bool]) -> None:
    deadline = perf_counter() + TIMEOUT_S
    while not holds():
        if perf_counter() > deadline:
            raise TimeoutError("the gates stay closed")
        sleep(0.002)


def resize_gates(scale: Scale) -> Iterator[Result]:
    """Milliseconds until all eight partitions are read, of our members by either protocol and of librdkafka's."""
    interval_ms = scale.choose(INTERVAL_MS, INTERVAL_MS_SMALL)
    settings = {
        "durability": "os",
        "group.consumer.heartbeat.interval.ms": str(interval_ms),
        "group.consumer.min.heartbeat.interval.ms": str(interval_ms),
        "group.initial.rebalance.delay.ms": str(scale.choose(JOIN_MS, JOIN_MS_SMALL)),
    }
    with Anabranch(settings=settings) as broker:
        kinds: list[tuple[str, str, Callable[[str], Any], float]] = [
            ("ours", "ours, consumer protocol", partial(_ours, broker.address, "consumer"), OURS_MS_MAX),
            ("classic", "ours, classic protocol", partial(_ours, broker.address, "classic"), OURS_MS_MAX),
            ("stock", "stock, consumer protocol", partial(_stock, broker.address, interval_ms), STOCK_MS_MAX),
        ]
        for name, kind, member, allowed in kinds:
            yield from compare(
                f"groups.resize_gates_{name}",
                what=f"{MEMBERS} members ({kind}) that have read {RECORDS:,} records of {FIRST} "
                f"partitions; from the answer to a resize to {GROWN} until every partition is a member's to read",
                sides={
                    "anabranch": partial(_gates, broker.address, member),
                    "allowed": lambda allowed=allowed: {"milliseconds": allowed},  # type: ignore[misc]
                },
                bars=[Bar("milliseconds", "ms", "less", 1.0)],
                scale=scale,
            )
