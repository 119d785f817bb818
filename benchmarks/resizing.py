"""Producers at a given rate, and a topic that grows under them: how long any of them waits for an acknowledgment.

Every producer sends a table of records at fixed times, whatever became of the earlier ones, so that a pause of the
topic is seen by all tables that were due in it. The wait of a table is from the time it was due to its acknowledgment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from benchmarks.peers.process import ServerProcess

TOPIC = "grown"
KEYS = 997
RECORD_SIZE = 1024


@dataclass
class Load:
    """The rate, and what was measured."""

    producers: int
    bytes_per_s: float
    interval_s: float
    waits: list[tuple[float, float]] = field(default_factory=list)
    """(when it was due, how long it took) of every table."""
    size: int = 0

    def done(self, due: float, loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[Any]) -> None:
        """Note that the table that was due then is acknowledged."""
        self.waits.append((due, loop.time() - due))

    def tables(self) -> list[pa.Table]:
        """Some tables of the size that a producer sends at a time, with different keys."""
        rows = max(1, round(self.bytes_per_s * self.interval_s / self.producers / RECORD_SIZE))
        values = [b"x" * (RECORD_SIZE - 20)] * rows
        return [
            pa.table({"key": [b"%d" % ((n * rows + row) % KEYS) for row in range(rows)], "value": values})
            for n in range(16)
        ]


def grow_under_load(server: ServerProcess, load: Load, before: int, after: int, seconds: float) -> Mapping[str, float]:
    """Grow a topic in the middle of `seconds` of load; the longest waits, without and with the growth."""
    return asyncio.run(_grow(server, load, before, after, seconds))


async def _grow(server: ServerProcess, load: Load, before: int, after: int, seconds: float) -> Mapping[str, float]:
    from anabranch.client import Admin, Producer

    barrier = asyncio.Barrier(load.producers + 1)

    async def send(number: int) -> None:
        tables = load.tables()
        loop = asyncio.get_running_loop()
        outcomes: list[asyncio.Future[Any]] = []
        async with Producer(server.address, linger_ms=0) as producer:
            await (await producer.send_arrow(TOPIC, tables[0]))
            load.size += tables[0].num_rows * RECORD_SIZE
            await barrier.wait()  # Every producer has loaded its kernels and its metadata.
            due = loop.time() + load.interval_s * number / load.producers
            until, sent = due + seconds, 0
            while due < until:
                if (pause := due - loop.time()) > 0:
                    await asyncio.sleep(pause)
                table = tables[sent % len(tables)]
                outcome = await producer.send_arrow(TOPIC, table)
                outcome.add_done_callback(partial(load.done, due, loop))
                outcomes.append(outcome)
                load.size += table.num_rows * RECORD_SIZE
                sent += 1
                due += load.interval_s
            await asyncio.gather(*outcomes)

    async with Admin(server.address) as admin:
        await admin.create_topics(TOPIC, partitions=before)
        sending = [asyncio.create_task(send(number)) for number in range(load.producers)]
        await barrier.wait()
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds / 2)
        resized_at, clock = asyncio.get_running_loop().time(), time.perf_counter()
        await admin.resize(TOPIC, after)
        resize_ms = (time.perf_counter() - clock) * 1000
        await asyncio.gather(*sending)
        ends = await admin.topic_offsets(TOPIC)
    calm = [took for due, took in load.waits if began < due < resized_at - 0.5]
    around = [took for due, took in load.waits if resized_at - 0.5 < due < resized_at + 2]
    return {
        "longest_wait_ms": max(around) * 1000,
        "longest_calm_wait_ms": max(calm, default=0.0) * 1000,
        "resize_ms": resize_ms,
        "bytes_per_s": load.size / (max(due for due, _ in load.waits) - min(due for due, _ in load.waits)),
        "lost": load.size // RECORD_SIZE - sum(span.end for span in ends.values()),
    }
