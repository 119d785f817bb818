"""The Spark source where Spark's own cannot be compared: a resize under a query, a partition read by four tasks."""

from __future__ import annotations

import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from anabranch.client.sync import Admin, Producer
from benchmarks.harness import Bar, Result, Round, Scale, compare
from benchmarks.peers.anabranch import Anabranch
from benchmarks.peers.process import HOST, free_port
from benchmarks.spark import fill, records, session

TRIGGER_S = 1.0
BEYOND_TRIGGER_S = 1.0
PAUSE_S = 0.05
WAIT_S = 60
FOUND_BYTES = "anabranch_filter_found_bytes_total"


def first_batch(scale: Scale) -> list[Result]:
    """Seconds from the end of a resize to the first micro-batch that reads a new partition: to its begin, its end."""
    with Anabranch(settings={"durability": "os"}) as broker, session() as spark, tempfile.TemporaryDirectory() as kept:
        fill(broker.address, "rows", 1_000, records(1_000))
        seen = _Partitions()
        options = {"kafka.bootstrap.servers": broker.address, "subscribe": "rows"}
        writer = spark.readStream.format("anabranch").options(**options).load().writeStream.foreachBatch(seen.take)
        trigger = f"{TRIGGER_S} seconds"
        query = writer.option("checkpointLocation", kept).trigger(processingTime=trigger).start()
        stop = threading.Event()
        sender = threading.Thread(target=_send, args=(broker.address, stop))
        sender.start()
        try:
            with Admin(broker.address) as admin:
                seen.wait_for(0)
                return compare(
                    "spark_elastic.first_batch",
                    what=f"2,000 records a second, a trigger every {TRIGGER_S:g} s, one partition added; until "
                    "foreachBatch is called with records of it, and until it has collected them; the limit is a "
                    "trigger and a second",
                    sides={
                        "anabranch": lambda: _resized(admin, seen, query),
                        "limit": lambda: dict.fromkeys(("s", "done_s"), TRIGGER_S + BEYOND_TRIGGER_S),
                    },
                    bars=[Bar("s", "s", "less", 1.0), Bar("done_s", "s", "less")],
                    scale=scale,
                )
        finally:
            stop.set()
            sender.join()
            query.stop()


class _Partitions:
    """The partitions of which a query has read records, and when the first micro-batch to do so began and ended."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[float, float]] = {}
        self._news = threading.Condition()

    def take(self, batch: DataFrame, _: int) -> None:
        began = time.monotonic()
        found = [row.partition for row in batch.select("partition").distinct().collect()]
        with self._news:
            for partition in found:
                self._first.setdefault(partition, (began, time.monotonic()))
            self._news.notify_all()

    def wait_for(self, partition: int) -> tuple[float, float]:
        """Wait for a record of a partition; return when its micro-batch was handed over, and when it was done."""
        with self._news:
            assert self._news.wait_for(lambda: partition in self._first, WAIT_S), f"no record of partition {partition}"
            return self._first[partition]


def _send(address: str, stop: threading.Event) -> None:
    ready = pa.Table.from_batches([records(100).select(["key", "value"])])
    with Producer(address) as producer:
        while not stop.wait(PAUSE_S):
            producer.send_arrow("rows", ready)


def _resized(admin: Admin, seen: _Partitions, query: Any) -> Mapping[str, float]:
    assert query.exception() is None
    added = len(admin.topic_offsets("rows"))
    admin.resize("rows", added + 1)
    ended = time.monotonic()
    began, done = seen.wait_for(added)
    return {"s": max(0.0, began - ended), "done_s": max(0.0, done - ended)}


def split(scale: Scale) -> list[Result]:
    """A partition read by four tasks of a key range each: seconds, and bytes from the broker, against one task."""
    rows = scale.choose(950_000, 5_000)
    metrics = f"{HOST}:{free_port()}"
    settings = {"durability": "os", "metrics.listener": metrics}
    with Anabranch(settings=settings) as broker, session() as spark:
        configs = {"accept.range.fetch": "true", "reserve.message.value.range.fetch": "true"}
        fill(broker.address, "rows", rows, records(min(rows, 50_000), 1024), partitions=1, configs=configs)
        size = sum(path.stat().st_size for path in broker.data.glob("rows-*/*.log"))
        assert size > rows * 1024
        return compare(
            "spark_elastic.split",
            what=f"{rows} records with 1 KiB values, {size / 1e9:.2f} GB in one partition, batch read of all columns "
            "into noop, local[2]: minPartitions=4, of which the broker filters the key ranges, and keeps what it finds "
            "for the others, against one task, which reads the partition's bytes",
            sides={
                "four tasks": _split(spark, broker.address, metrics, 4, size),
                "one task": _split(spark, broker.address, metrics, 1, size),
            },
            bars=[Bar("s", "s", "less", 0.6), Bar("bytes", "bytes", "less", 1.2)],
            scale=scale,
        )


def _split(spark: SparkSession, address: str, metrics: str, tasks: int, size: int) -> Round:
    options = {"kafka.bootstrap.servers": address, "subscribe": "rows", "minPartitions": str(tasks)}
    frame = spark.read.format("anabranch").options(**options).load()

    def once() -> Mapping[str, float]:
        before, began = _found(metrics), time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        took = time.perf_counter() - began
        found = _found(metrics) - before
        assert (found > 0) is (tasks > 1)
        return {"s": took, "bytes": found or size}

    return once


def _found(metrics: str) -> float:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(FOUND_BYTES))


BENCHMARKS: dict[str, Callable[[Scale], list[Result]]] = {"first_batch": first_batch, "split": split}
