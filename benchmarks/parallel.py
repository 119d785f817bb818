"""The parallel handler: work of 1 ms on each record of one partition, many records at a time, each key in order.

The work is a sleep, as of a handler that waits for a service. Against Confluent Parallel Consumer in key mode, with as
many threads as the handler has workers, on the same broker (ours, durability=os); and beside asyncio alone, whose
workers take the same records without order and without commits. The order of each key is checked on every side.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter, process_time

import pyarrow as pa
import uvloop

from anabranch.client import Consumer
from anabranch.client.consumer.record import Record
from anabranch.client.sync import Admin, Producer
from benchmarks.harness import Bar, Result, Scale, compare
from benchmarks.peers import parallel_consumer
from benchmarks.peers.anabranch import Anabranch

TOPIC = "parallel"
PARALLEL = 256
WORK_MS = 1
WORK_S = WORK_MS / 1_000
REQUIRED = 25_000
VALUE = b"v" * 92
KEYS = 20_000
PER_S = "records_per_second"
CPU_US = "client_cpu_us_per_record"
_groups = itertools.count()


@contextmanager
def filled(records: int) -> Iterator[str]:
    """The address of a broker with a topic of one partition and so many records; each key comes again and again."""
    keys = [b"key%05d" % (number * 7919 % KEYS) for number in range(records)]
    with Anabranch(settings={"durability": "os"}) as broker:
        with Admin(broker.address) as admin:
            admin.create_topics(TOPIC, partitions=1)
        with Producer(broker.address) as producer:
            table = pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array([VALUE] * records, pa.binary())})
            producer.send_arrow(TOPIC, table).result(60)
        yield broker.address


def handled(address: str, count: int) -> Mapping[str, float]:
    """`Consumer.run`, in a group, with automatic commits."""
    return uvloop.run(_handled(address, count))


async def _handled(address: str, count: int) -> Mapping[str, float]:
    last: dict[bytes | None, int] = {}
    done = 0
    began: list[float] = []
    consumer = Consumer(address, group_id=f"{TOPIC}-{next(_groups)}", auto_offset_reset="earliest")

    async def handle(record: Record) -> None:
        nonlocal done
        if not began:
            began[:] = perf_counter(), process_time()
        assert last.get(record.key, -1) < record.offset
        last[record.key] = record.offset
        await asyncio.sleep(WORK_S)
        assert last[record.key] == record.offset
        done += 1
        if done == count:
            began.extend((perf_counter(), process_time()))
            consumer.stop()

    consumer.subscribe(TOPIC)
    async with consumer:
        await consumer.run(handle, parallel=PARALLEL)
        committed = (await consumer.committed((TOPIC, 0))).popitem()[1]
        assert committed is not None and committed.offset == count
    return {PER_S: count / (began[2] - began[0]), CPU_US: (began[3] - began[1]) / count * 1e6}


def unordered(address: str, count: int) -> Mapping[str, float]:
    """asyncio alone: the records are polled before, workers take them in any order."""
    return uvloop.run(_unordered(address, count))


async def _unordered(address: str, count: int) -> Mapping[str, float]:
    records: list[Record] = []
    async with Consumer(address, auto_offset_reset="earliest", max_poll_records=10_000) as consumer:
        consumer.assign(TOPIC)
        while len(records) < count:
            records += await consumer.poll(10)
    left = iter(records)

    async def work() -> None:
        for _ in left:
            await asyncio.sleep(WORK_S)

    began, worked = perf_counter(), process_time()
    await asyncio.gather(*[work() for _ in range(PARALLEL)])
    return {PER_S: count / (perf_counter() - began), CPU_US: (process_time() - worked) / count * 1e6}


def confluent(address: str, count: int) -> Mapping[str, float]:
    group = f"{TOPIC}-{next(_groups)}"
    seconds, worked = parallel_consumer.run(
        address, group, TOPIC, count, concurrency=PARALLEL, sleep_ms=round(WORK_S * 1_000)
    )
    return {PER_S: count / seconds, CPU_US: worked / count * 1e6}


def handler(scale: Scale) -> Iterator[Result]:
    """`Consumer.run` against Confluent Parallel Consumer in key mode, and against the rate that is required."""
    records = scale.choose(100_000, 2_000)
    what = f"{records} records of one partition with {KEYS} keys, 1 ms of sleep for each, {PARALLEL} at a time"
    with filled(records) as address:
        yield from compare(
            "parallel.handler",
            what=f"{what}; by key, in a group",
            sides={
                "anabranch": lambda: handled(address, records),
                "confluent parallel consumer": lambda: confluent(address, records),
            },
            bars=[Bar(PER_S, "records/s", "more", 1), Bar(CPU_US, "us/record", "less")],
            scale=scale,
        )
        yield from compare(
            "parallel.required",
            what=f"{what}; the rate that is required on two cores",
            sides={"anabranch": lambda: handled(address, records), "required": lambda: {PER_S: REQUIRED}},
            bars=[Bar(PER_S, "records/s", "more", 1)],
            scale=scale,
        )
        yield from compare(
            "parallel.unordered",
            what=f"{what}; asyncio alone takes them without order",
            sides={"anabranch": lambda: handled(address, records), "asyncio": lambda: unordered(address, records)},
            bars=[Bar(PER_S, "records/s", "more"), Bar(CPU_US, "us/record", "less")],
            scale=scale,
        )


BENCHMARKS = {"handler": handler}
