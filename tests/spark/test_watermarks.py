"""Watermarks over a backlog of a topic that was resized: no record is late because its partition had to wait."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pytest

from anabranch.client.sync import Admin, Producer
from anabranch.spark.keyed import KeyState, Timeout, keyed
from anabranch.spark.plan import verify_history
from tests.support.broker import BrokerProcess
from tests.support.thorough import THOROUGH

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROWS = 10_000
BEGIN_MS = 1_780_000_000_000
DELAY = "10 minutes"
"""Of records that are a second apart."""


class Count(NamedTuple):
    """Rows of a key."""

    rows: int


def count(key: str, rows: pa.RecordBatch, state: KeyState[Count]) -> tuple[str, int]:
    state.update(Count((state.value.rows if state.value else 0) + rows.num_rows))
    return key, rows.num_rows


@pytest.fixture(scope="module")
def backlog(broker: BrokerProcess) -> tuple[str, str]:
    """A topic with a record a second, resized from 1 partition to 2 and to 4 meanwhile; its broker's address."""
    address, topic = f"127.0.0.1:{broker.port}", "watermarks"
    with Admin(address) as admin, Producer(address) as producer:
        admin.create_topics(topic, partitions=1)
        for partitions, first, end in ((1, 0, 1_000), (2, 1_000, 5_500), (4, 5_500, ROWS)):
            if first:
                admin.resize(topic, partitions)
            numbers = range(first, end)
            table = {"key": [f"k{n % 40}" for n in numbers], "value": [str(n) for n in numbers]}
            times = pa.array([BEGIN_MS + n * 1000 for n in numbers], pa.int64())
            producer.send_arrow(topic, pa.table({**table, "ts": times}), timestamp="ts")
            producer.flush()
    return address, topic


def stream(spark: SparkSession, backlog: tuple[str, str], plans: Path) -> DataFrame:
    address, topic = backlog
    reader = spark.readStream.format("anabranch").option("kafka.bootstrap.servers", address)
    return reader.options(subscribe=topic, startingOffsets="earliest", planLog=str(plans)).load()


def run(df: DataFrame, table: str, mode: str, checkpoint: str) -> StreamingQuery:
    writer = df.writeStream.format("memory").queryName(table).outputMode(mode)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination(120)
    dropped = [op.numRowsDroppedByWatermark for each in query.recentProgress for op in each.stateOperators]
    assert sum(dropped) == 0
    return query


def test_an_aggregation_with_a_watermark_counts_every_row_of_a_backlog(
    spark: SparkSession, backlog: tuple[str, str], checkpoint: str, tmp_path: Path
) -> None:
    rows = stream(spark, backlog, tmp_path / "plans").withWatermark("timestamp", DELAY)
    query = run(rows.groupBy("timestamp", "key").count(), "watermarked", "update", checkpoint)
    assert spark.sql("select sum(count) rows from watermarked").collect()[0].rows == ROWS
    read = [each.numInputRows for each in query.recentProgress if each.numInputRows]
    assert read == [1_000, 4_500, 4_500]
    assert verify_history((tmp_path / "plans").read_text().splitlines()).problems == ()


@pytest.mark.skipif(not THOROUGH, reason="make conformance; tests/properties/test_keyed.py has the rules")
def test_a_keyed_query_with_event_time_applies_every_row_of_a_backlog(
    spark: SparkSession, backlog: tuple[str, str], checkpoint: str, tmp_path: Path
) -> None:
    rows = stream(spark, backlog, tmp_path / "plans")
    counts = rows.selectExpr("cast(key as string) key", "topic", "partition", "sequence", "timestamp").transform(
        keyed(
            count,
            state=Count,
            output="key string, rows long",
            timeout=Timeout.EVENT_TIME,
            event_time="timestamp",
            watermark=DELAY,
            buckets=4,
        )
    )
    run(counts, "counted", "append", checkpoint)
    assert spark.sql("select sum(rows) rows from counted").collect()[0].rows == ROWS
