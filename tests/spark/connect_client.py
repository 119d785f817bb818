"""A Spark Connect session that reads a topic, keeps state per key, and writes another topic.

    python -m tests.spark.connect_client ADDRESS CHECKPOINT

Prints one line of JSON: the class of the session, and the rows of topic `counted` by key.
"""

from __future__ import annotations

import json
import os
import sys
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession

from anabranch.spark import register
from anabranch.spark.keyed import KeyState, keyed


class Sum(NamedTuple):
    """The sum of a key's values."""

    total: int


def add(key: str, rows: pa.RecordBatch, state: KeyState[Sum]) -> tuple[str, str]:
    """Add a key's new values."""
    state.update(Sum((state.value.total if state.value else 0) + sum(rows.column("value").to_pylist())))
    assert state.value is not None
    return key, str(state.value.total)


def main(address: str, checkpoint: str) -> None:
    """Run a batch query, a streaming query with state and sink, and a batch write."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.shuffle.partitions", "2").config("spark.log.level", "ERROR").getOrCreate()
    register(spark)
    options = {"kafka.bootstrap.servers": address}
    numbers = spark.read.format("anabranch").options(**options, subscribe="numbers").load()
    filtered = numbers.where("partition = 0 and offset >= 10").count()
    stream = spark.readStream.format("anabranch").options(**options, subscribe="numbers", startingOffsets="earliest")
    rows = stream.load().selectExpr(
        "cast(key as string) key", "topic", "partition", "sequence", "cast(cast(value as string) as long) value"
    )
    sums = rows.transform(keyed(add, state=Sum, output="key string, value string", buckets=4))
    query = (
        sums.writeStream.format("anabranch")
        .options(**options, topic="sums", checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    more = spark.createDataFrame([("more", "1")], "key string, value string")
    more.write.format("anabranch").options(**options, topic="sums").mode("append").save()
    found = spark.read.format("anabranch").options(**options, subscribe="sums").load()
    texts = found.orderBy("sequence").selectExpr("cast(key as string) key", "cast(value as string) value").collect()
    last = {row.key: row.value for row in texts}
    print(json.dumps({"session": type(spark).__module__, "filtered": filtered, "sums": last}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
