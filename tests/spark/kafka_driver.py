"""A query that counts the records of each key, with Spark's own Kafka source or ours, to the end of the topic.

python -m tests.spark.kafka_driver ADDRESS TOPIC CHECKPOINT FORMAT RESULT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.demo.session import local_session
from anabranch.spark import register
from benchmarks.peers.artifacts import fetch
from benchmarks.spark import CONNECTOR
from tests.support.broker import ROOT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def main(address: str, topic: str, checkpoint: str, format_: str, result: str) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {','.join(map(str, fetch(CONNECTOR)))} pyspark-shell"
    spark = local_session("counts")
    register(spark)
    counts: dict[str, int] = {}

    def take(batch: DataFrame, batch_id: int) -> None:
        counts.update((row.key, row["count"]) for row in batch.collect())

    reader = spark.readStream.format(format_).option("kafka.bootstrap.servers", address)
    records = reader.options(subscribe=topic, startingOffsets="earliest").load()
    writer = records.groupBy(records.key.cast("string").alias("key")).count().writeStream.foreachBatch(take)
    query = writer.outputMode("update").option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    Path(result).write_text(json.dumps(counts))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
