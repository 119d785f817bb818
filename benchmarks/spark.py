"""The Spark source against the ceiling of its interface, and against Spark's own Kafka source, in local[2].

The ceiling is a Python data source that yields one ready batch repeatedly. Both hand the same columns of the same
number of records with 100-byte values to Spark's `noop` sink. Spark's Kafka source reads the same topic of the same
broker in the same session; it is of the newest release before PySpark's own that has been published.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from anabranch.client.sync import Admin, Producer
from anabranch.demo.session import local_session
from anabranch.spark import register
from benchmarks.harness import Bar, Result, Round, Scale, compare
from benchmarks.peers.anabranch import Anabranch
from benchmarks.peers.artifacts import fetch

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = "key binary, value binary, partition int, offset long, timestamp timestamp"
BATCH_SIZE = 7 * 1024 * 1024
"""Bytes of keys and values of a ready batch: as many as the source yields at a time."""
TASKS = 2
CONNECTOR = Path(__file__).parent / "peers" / "spark_kafka.lock"
KAFKA_SOURCE = "kafka source"
KEYS = 10_000
WANTED = 100
"""Of the keys a hundredth."""


class ReadyBatches(DataSource):
    """Yields one prebuilt Arrow batch until `rows` have been given, of values of `value_size` bytes."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        return COLUMNS

    def reader(self, schema: Any) -> DataSourceReader:
        return ReadyReader(int(self.options["rows"]), int(self.options["value_size"]), schema.names)


class ReadyReader(DataSourceReader):
    """Two tasks, each with half of the rows."""

    def __init__(self, rows: int, value_size: int, names: list[str]) -> None:
        self._rows = rows
        self._value_size = value_size
        self._names = names

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(TASKS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        count = BATCH_SIZE // (10 + self._value_size)
        batch = records(count, self._value_size).append_column("topic", pa.array(["rows"] * count))
        batch = batch.append_column("timestampType", pa.array([0] * count, pa.int32())).select(self._names)
        left = self._rows // TASKS
        while left > 0:
            yield batch.slice(0, min(left, count))
            left -= count


def ready_batches(spark: SparkSession, rows: int, schema: str = COLUMNS, value_size: int = 100) -> DataFrame:
    """Return a frame of so many rows that cost nothing to make: what it takes is PySpark's own."""
    spark.dataSource.register(ReadyBatches)
    return spark.read.format("ready").schema(schema).options(rows=rows, value_size=value_size).load()


def records(count: int, value_size: int = 100) -> pa.RecordBatch:
    """Records as a reader of the topic gets them: 10-byte keys, values of `value_size` bytes."""
    keys = pa.array([b"key-%06d" % (number % 1_000_000) for number in range(count)], pa.binary())
    values = pa.array([b"%0*d" % (value_size, number) for number in range(count)], pa.binary())
    when = pa.array([1_700_000_000_000_000] * count, pa.timestamp("us", "UTC"))
    return pa.record_batch(
        {
            "key": keys,
            "value": values,
            "partition": pa.array([0] * count, pa.int32()),
            "offset": pa.array(range(count), pa.int64()),
            "timestamp": when,
        }
    )


def drained(df: DataFrame, rows: int) -> Round:
    """Measure rows a second of a frame, of so many rows, into Spark's `noop` sink."""

    def once() -> Mapping[str, float]:
        began = time.perf_counter()
        df.write.format("noop").mode("overwrite").save()
        return {"rows_per_s": rows / (time.perf_counter() - began)}

    return once


@contextmanager
def session() -> Iterator[SparkSession]:
    """A session that has our source and sink, and Spark's own for Kafka."""
    use_this_checkout()
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {','.join(map(str, fetch(CONNECTOR)))} pyspark-shell"
    spark: SparkSession = local_session("benchmark")
    try:
        register(spark)
        yield spark
    finally:
        spark.stop()


def fill(address: str, topic: str, rows: int, batch: pa.RecordBatch, **settings: Any) -> None:
    """Create a topic and write the keys and values of a batch to it until it has so many records."""
    with Admin(bootstrap_servers=address) as admin, Producer(bootstrap_servers=address) as producer:
        admin.create_topics(topic, **{"partitions": TASKS, **settings})
        ready = pa.Table.from_batches([batch.select(["key", "value"])])
        for first in range(0, rows, batch.num_rows):
            producer.send_arrow(topic, ready.slice(0, rows - first))


def source(scale: Scale) -> list[Result]:
    """Rows a second of 100-byte values into Spark's noop sink, against one ready batch over and over."""
    rows = scale.choose(6_000_000, 100_000)
    with Anabranch(settings={"durability": "os"}) as broker, session() as spark:
        fill(broker.address, "rows", rows, records(100_000))
        ours = spark.read.format("anabranch").options(
            **{"kafka.bootstrap.servers": broker.address, "subscribe": "rows"}
        )
        columns = [column.split()[0] for column in COLUMNS.split(", ")]
        return compare(
            "spark.source",
            what=f"{rows} records of 10-byte keys, 100-byte values, {TASKS} partitions, batch read, local[2], "
            f"columns {', '.join(columns)} into noop",
            sides={
                "anabranch": drained(ours.load().select(*columns), rows),
                "ready batches": drained(ready_batches(spark, rows), rows),
            },
            bars=[Bar("rows_per_s", "rows/s", "more", 0.7)],
            scale=scale,
        )


def keys(scale: Scale) -> list[Result]:
    """Rows a second of a topic of which a filter on keys keeps a hundredth, against Spark's own Kafka source."""
    rows = scale.choose(3_000_000, 100_000)
    with Anabranch(settings={"durability": "os"}) as broker, session() as spark:
        some = [b"key-%06d" % (number % KEYS) for number in range(100_000)]
        ready = records(100_000).set_column(0, "key", pa.array(some, pa.binary()))
        fill(broker.address, "rows", rows, ready, configs={"accept.range.fetch": "true"})
        wanted = ", ".join(f"'key-{number * KEYS // WANTED:06d}'" for number in range(WANTED))

        def filtered(format_: str) -> DataFrame:
            options = {"kafka.bootstrap.servers": broker.address, "subscribe": "rows"}
            read = spark.read.format(format_).options(**options).load()
            return read.select("key", "value").where(f"key in ({wanted})")

        assert filtered("anabranch").count() == filtered("kafka").count() == rows * WANTED // KEYS
        return compare(
            "spark.keys",
            what=f"{rows} records of 10-byte keys, 100-byte values, {TASKS} partitions, batch read, local[2], "
            f"key in ({WANTED} of {KEYS} keys), columns key, value into noop; rows of the topic",
            sides={
                "anabranch": drained(filtered("anabranch"), rows),
                KAFKA_SOURCE: drained(filtered("kafka"), rows),
            },
            bars=[Bar("rows_per_s", "rows/s", "more", 5.0)],
            scale=scale,
        )


def use_this_checkout() -> None:
    """Have Spark's Python workers run this interpreter and this checkout."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.environ["PYSPARK_PYTHON"] = sys.executable


BENCHMARKS = {"source": source, "keys": keys}
