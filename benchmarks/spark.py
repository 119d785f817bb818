"""The Spark source against the ceiling of its interface: a Python data source that yields one ready batch repeatedly.

Both hand the same columns of the same number of records with 100-byte values to Spark's `noop` sink, in local[2].
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
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

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = "key binary, value binary, partition int, offset long, timestamp timestamp"
ROWS_PER_BATCH = 65_536
TASKS = 2


class ReadyBatches(DataSource):
    """Yields one prebuilt Arrow batch until `rows` have been given."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        return COLUMNS

    def reader(self, schema: Any) -> DataSourceReader:
        return ReadyReader(int(self.options["rows"]))


class ReadyReader(DataSourceReader):
    """Two tasks, each with half of the rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(TASKS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch = records(ROWS_PER_BATCH)
        left = self._rows // TASKS
        while left > 0:
            yield batch.slice(0, min(left, ROWS_PER_BATCH))
            left -= ROWS_PER_BATCH


def records(count: int) -> pa.RecordBatch:
    """Records as a reader of the topic gets them: 10-byte keys, 100-byte values."""
    keys = pa.array([b"key-%06d" % (number % 1_000_000) for number in range(count)], pa.binary())
    values = pa.array([b"%0100d" % number for number in range(count)], pa.binary())
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


def _drained(df: DataFrame, rows: int) -> Round:
    def once() -> Mapping[str, float]:
        began = time.perf_counter()
        df.write.format("noop").mode("overwrite").save()
        return {"rows_per_s": rows / (time.perf_counter() - began)}

    return once


def source(scale: Scale) -> list[Result]:
    """Rows a second of 100-byte values into Spark's noop sink, against one ready batch over and over."""
    rows = scale.choose(6_000_000, 100_000)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with Anabranch(settings={"durability": "os"}) as broker:
        with Admin(bootstrap_servers=broker.address) as admin, Producer(bootstrap_servers=broker.address) as producer:
            admin.create_topics("rows", partitions=TASKS)
            ready = pa.Table.from_batches([records(100_000)]).select(["key", "value"])
            for _ in range(rows // 100_000):
                producer.send_arrow("rows", ready)
        spark: SparkSession = local_session("benchmark")
        try:
            register(spark)
            spark.dataSource.register(ReadyBatches)
            ours = spark.read.format("anabranch").options(
                **{"kafka.bootstrap.servers": broker.address, "subscribe": "rows"}
            )
            columns = [column.split()[0] for column in COLUMNS.split(", ")]
            return compare(
                "spark.source",
                what=f"{rows} records of 10-byte keys, 100-byte values, {TASKS} partitions, batch read, local[2], "
                f"columns {', '.join(columns)} into noop",
                sides={
                    "anabranch": _drained(ours.load().select(*columns), rows),
                    "ready batches": _drained(spark.read.format("ready").option("rows", rows).load(), rows),
                },
                bars=[Bar("rows_per_s", "rows/s", "more", 0.7)],
                scale=scale,
            )
        finally:
            spark.stop()


BENCHMARKS = {"source": source}
