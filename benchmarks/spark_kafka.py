"""The Spark source and sink against Spark's own for Kafka: the same broker, topic, session and query, in local[2].

A query moves over by its format, so both sides run the same one; where only key and value are read, ours names them in
its schema, as docs/spark.md says. The connector is of the newest release before PySpark's own that has been published.
A third side of scans is the ceiling of PySpark's interface: ready Arrow batches of the same columns, as in
`benchmarks.spark`. It bounds what any source in Python can reach against one in the JVM.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from anabranch.client.sync import Admin
from benchmarks.harness import Bar, Result, Round, Scale, compare
from benchmarks.peers.anabranch import Anabranch
from benchmarks.spark import KAFKA_SOURCE, TASKS, drained, fill, ready_batches, records, session

COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
SCHEMA = "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int"
KEY_VALUE = "key binary, value binary"
CEILING = "ready batches"
PER_S = "rows_per_s"
BATCHES = 3
AT_LEAST_ONCE = {"delivery": "at-least-once"}
_topics = count()


def _read(spark: SparkSession, address: str, format_: str, schema: str | None = None) -> DataFrame:
    options = {"kafka.bootstrap.servers": address, "subscribe": "rows"}
    reader = spark.read.format(format_).options(**options)
    return (reader.schema(schema) if schema else reader).load()


def _scanned(name: str, value_size: int, rows: int, scale: Scale) -> list[Result]:
    with Anabranch(settings={"durability": "os"}) as broker, session() as spark:
        fill(broker.address, "rows", rows, records(min(rows, 50_000), value_size))
        return compare(
            name,
            what=f"{rows} records of 10-byte keys, {value_size}-byte values, {TASKS} partitions, batch read, local[2], "
            "every column of the Kafka source into noop",
            sides={
                "anabranch": drained(_read(spark, broker.address, "anabranch").select(*COLUMNS), rows),
                KAFKA_SOURCE: drained(_read(spark, broker.address, "kafka").select(*COLUMNS), rows),
                CEILING: drained(ready_batches(spark, rows, SCHEMA, value_size), rows),
            },
            bars=[Bar(PER_S, "rows/s", "more", 3.0)],
            scale=scale,
        )


def scan_100(scale: Scale) -> list[Result]:
    """Rows a second of 100-byte values into Spark's noop sink."""
    return _scanned("spark_kafka.scan_100", 100, scale.choose(6_000_000, 20_000), scale)


def scan_1024(scale: Scale) -> list[Result]:
    """Rows a second of 1 KiB values into Spark's noop sink."""
    return _scanned("spark_kafka.scan_1024", 1024, scale.choose(1_500_000, 5_000), scale)


def queries(scale: Scale) -> Iterator[Result]:
    """Rows a second of 100-byte values: key and value only; counted by key behind a shuffle."""
    rows = scale.choose(4_000_000, 20_000)
    with Anabranch(settings={"durability": "os"}) as broker, session() as spark:
        fill(broker.address, "rows", rows, records(min(rows, 50_000)))
        ours = partial(_read, spark, broker.address, "anabranch")
        theirs = _read(spark, broker.address, "kafka")
        what = f"{rows} records of 10-byte keys, 100-byte values, {TASKS} partitions, batch read, local[2], "
        yield from compare(
            "spark_kafka.key_value",
            what=what + "key and value into noop",
            sides={
                "anabranch": drained(ours(KEY_VALUE), rows),
                KAFKA_SOURCE: drained(theirs.select("key", "value"), rows),
                CEILING: drained(ready_batches(spark, rows, KEY_VALUE), rows),
            },
            bars=[Bar(PER_S, "rows/s", "more", 4.0)],
            scale=scale,
        )
        yield from compare(
            "spark_kafka.count",
            what=what + "shuffled by key and counted into noop; 50,000 keys; ours reads the key alone",
            sides={
                "anabranch": drained(ours("key binary").repartition(TASKS, "key").groupBy("key").count(), rows),
                KAFKA_SOURCE: drained(theirs.select("key").repartition(TASKS, "key").groupBy("key").count(), rows),
            },
            bars=[Bar(PER_S, "rows/s", "more", 2.0)],
            scale=scale,
        )


def stateful(scale: Scale) -> list[Result]:
    """Rows a second through a streaming query that counts by key, with Spark's own state."""
    rows, keys = scale.choose((3_000_000, 50_000), (6_000, 500))
    with Anabranch(settings={"durability": "os"}) as broker, session() as spark:
        fill(broker.address, "rows", rows, records(keys))
        options = {"kafka.bootstrap.servers": broker.address, "subscribe": "rows", "startingOffsets": "earliest"}

        def counted(format_: str) -> DataFrame:
            limit = str(rows // BATCHES)
            read = spark.readStream.format(format_).options(**options, maxOffsetsPerTrigger=limit).load()
            return read.groupBy("key").agg(F.count("*"), F.max("offset"), F.max(F.length("value")))

        return compare(
            "spark_kafka.stateful",
            what=f"{rows} records of {keys} keys, 100-byte values, {TASKS} partitions, {BATCHES} micro-batches, "
            "local[2]: number, last offset and longest value of each key, update mode, into noop; "
            "by the query's progress after the first micro-batch",
            sides={"anabranch": _streamed(counted("anabranch")), KAFKA_SOURCE: _streamed(counted("kafka"))},
            bars=[Bar(PER_S, "rows/s", "more", 1.2)],
            scale=scale,
        )


def _streamed(df: DataFrame) -> Round:
    def once() -> Mapping[str, float]:
        with tempfile.TemporaryDirectory() as checkpoint:
            writer = df.writeStream.format("noop").outputMode("update").option("checkpointLocation", checkpoint)
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
        measured = [each for each in query.recentProgress if each.batchId and each.numInputRows]
        took_ms = sum(each.durationMs["triggerExecution"] for each in measured)
        return {PER_S: 1000 * sum(each.numInputRows for each in measured) / took_ms}

    return once


def sink(scale: Scale) -> Iterator[Result]:
    """Rows a second of a cached frame into a topic: at least once, and exactly once, against Spark's own Kafka sink."""
    rows = scale.choose(2_000_000, 10_000)
    with Anabranch(settings={"durability": "os"}) as broker, session() as spark:
        numbers = spark.range(0, rows, 1, TASKS)
        frame = numbers.selectExpr(
            "cast(lpad(id % 100000, 10, '0') as binary) key", "cast(lpad(id, 100, '0') as binary) value"
        ).cache()
        assert frame.count() == rows
        for name, delivery, bound in (("sink", AT_LEAST_ONCE, 2.0), ("sink_exactly_once", {}, 1.0)):
            yield from compare(
                f"spark_kafka.{name}",
                what=f"{rows} cached rows of 10-byte keys, 100-byte values in {TASKS} tasks, batch write, local[2], "
                f"{TASKS} partitions; ours {' '.join(delivery.values()) or 'exactly-once'}, the Kafka sink "
                "at-least-once as always",
                sides={
                    "anabranch": _written(frame, broker.address, "anabranch", delivery, rows),
                    "kafka sink": _written(frame, broker.address, "kafka", {}, rows),
                },
                bars=[Bar(PER_S, "rows/s", "more", bound)],
                scale=scale,
            )


def _written(frame: DataFrame, address: str, format_: str, options: Mapping[str, str], rows: int) -> Round:
    def once() -> Mapping[str, float]:
        topic = f"written-{next(_topics)}"
        with Admin(address) as admin:
            admin.create_topics(topic, partitions=TASKS)
            writer = frame.write.format(format_).option("kafka.bootstrap.servers", address).mode("append")
            began = time.perf_counter()
            writer.options(**options).option("topic", topic).save()
            took = time.perf_counter() - began
            # A transaction adds a marker to each partition.
            written = sum(span.end - span.start for span in admin.topic_offsets(topic).values())
            assert rows <= written <= rows + TASKS * TASKS, written
            admin.delete_topics(topic)
        return {PER_S: rows / took}

    return once


BENCHMARKS: dict[str, Callable[[Scale], Iterator[Result] | list[Result]]] = {
    "scan_100": scan_100,
    "scan_1024": scan_1024,
    "queries": queries,
    "stateful": stateful,
    "sink": sink,
}
