"""A driver on a Spark standalone cluster: reads a topic, keeps state per key, and writes another topic.

    python -m tests.spark.cluster_driver MASTER ADDRESS CHECKPOINT

Prints one line of JSON: the records of topic `cluster-sums`, by key in order, and which executor's tasks read what.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession

from anabranch.spark import register
from anabranch.spark.keyed import KeyState, keyed

READ = "key binary, value binary, topic string, partition int, offset long, sequence long"


class Sum(NamedTuple):
    """The sum of a key's values, and the executors whose tasks have read them from the topic."""

    total: int
    executors: list[str]


def add(key: str, rows: pa.RecordBatch, state: KeyState[Sum]) -> tuple[str, str]:
    """Add a key's new values."""
    before = state.value or Sum(0, [])
    seen = sorted({*before.executors, *rows.column("executor").to_pylist()})
    after = Sum(before.total + sum(rows.column("value").to_pylist()), seen)
    state.update(after)
    return key, json.dumps(after)


def mark(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add the executor that runs the task: a standalone worker gives each a working directory of its own.

    Without a shuffle between, this runs in the task that reads the topic.
    """
    for batch in batches:
        yield batch.append_column("executor", pa.array([os.getcwd()] * batch.num_rows, pa.string()))


def main(master: str, address: str, checkpoint: str) -> None:
    """Run the query over all there is in topic `cluster-numbers`."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(master).appName("anabranch").config("spark.ui.enabled", "false")
    small = {"spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.sql.shuffle.partitions": "4"}
    local = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.log.level": "ERROR"}
    spark = builder.config(map={**small, **local}).getOrCreate()
    register(spark)
    options = {"kafka.bootstrap.servers": address}
    stream = spark.readStream.format("anabranch").options(
        **options, subscribe="cluster-numbers", maxOffsetsPerTrigger="150"
    )
    marked = (
        stream.option("startingOffsets", "earliest").schema(READ).load().mapInArrow(mark, f"{READ}, executor string")
    )
    rows = marked.selectExpr(
        "cast(key as string) key",
        "topic",
        "partition",
        "sequence",
        "executor",
        "cast(cast(value as string) as long) value",
    )
    query = (
        rows.transform(keyed(add, state=Sum, output="key string, value string", buckets=4))
        .writeStream.format("anabranch")
        .options(**options, topic="cluster-sums", checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    batches = len([report for report in query.recentProgress if report.numInputRows])
    found = spark.read.format("anabranch").options(**options, subscribe="cluster-sums").load()
    sums: dict[str, list[tuple[int, list[str]]]] = {}
    for row in found.orderBy("sequence").selectExpr("cast(key as string) key", "cast(value as string) value").collect():
        sums.setdefault(row.key, []).append(json.loads(row.value))
    print(json.dumps({"sums": sums, "batches": batches}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
