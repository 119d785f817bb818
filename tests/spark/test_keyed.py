"""Keyed state in a real Spark, on a real broker: results as of a plain pass, through resizes, a restart and repeats."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pytest

from anabranch.client.sync import Admin, Producer
from anabranch.spark.keyed import KeyedError, KeyState, Timeout, keyed
from anabranch.spark.keyed.bucket import Settings, Times
from anabranch.spark.keyed.operator import _Operator
from anabranch.spark.keyed.rows import Columns
from anabranch.spark.keyed.schema import maker, to_arrow
from tests.support.examples import python_examples
from tests.support.thorough import THOROUGH

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KEYS = 40
LONG = pytest.mark.skipif(not THOROUGH, reason="make conformance; tests/properties/test_keyed.py has the rules")


class Digest(NamedTuple):
    """Depends on every value and on their order."""

    count: int
    digest: int

    def with_value(self, value: int) -> Digest:
        return Digest(self.count + 1, (self.digest * 31 + value) % 1_000_003)


def follow(key: str, rows: pa.RecordBatch, state: KeyState[Digest]) -> tuple[Any, ...]:
    digest = state.value or Digest(0, 0)
    for value in rows.column("value").to_pylist():
        digest = digest.with_value(value)
    state.update(digest)
    return key, *digest, rows.column("timestamp")[-1].as_py()


def plain_pass(count: int) -> dict[str, Digest]:
    found: dict[str, Digest] = {}
    for number in range(count):
        key = f"key-{number % KEYS}"
        found[key] = found.get(key, Digest(0, 0)).with_value(number)
    return found


FOLLOW = keyed(follow, state=Digest, output="key string, count long, digest long, last timestamp", buckets=4)


def selected(df: DataFrame) -> DataFrame:
    return df.selectExpr(
        "1 bucket",
        "cast(key as string) key",
        "topic",
        "partition",
        "sequence",
        "cast(cast(value as string) as long) value",
        "timestamp",
    )


class Flow:
    """A topic with numbered records of `KEYS` keys."""

    def __init__(self, address: str, topic: str) -> None:
        self.address, self.topic, self.sent = address, topic, 0
        with Admin(address) as admin:
            admin.create_topics(topic, partitions=2)

    def send(self, count: int) -> None:
        numbers = range(self.sent, self.sent + count)
        with Producer(self.address) as producer:
            keys = pa.array([f"key-{number % KEYS}" for number in numbers])
            values = pa.array([str(number) for number in numbers])
            producer.send_arrow(self.topic, pa.table({"key": keys, "value": values}))
        self.sent += count

    def resize(self, count: int) -> None:
        with Admin(self.address) as admin:
            admin.resize(self.topic, count)

    def options(self, **more: str) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.address, "subscribe": self.topic, **more}


class Followed:
    """A query over a topic: the last result of each key, and its micro-batches."""

    def __init__(self, spark: SparkSession, flow: Flow, checkpoint: str, *, twice: bool) -> None:
        self.spark, self.flow, self.checkpoint, self.twice = spark, flow, checkpoint, twice
        self.found: dict[str, tuple[int, int]] = {}
        self.batches: list[int] = []

    def _take(self, batch: DataFrame, batch_id: int) -> None:
        self.batches.append(batch_id)
        for row in batch.collect():
            assert self.found.get(row.key, (0,))[0] < row["count"], "a row was applied twice"
            assert abs((datetime.now(UTC) - row["last"].astimezone(UTC)).total_seconds()) < 600
            self.found[row.key] = row["count"], row.digest

    def start(self) -> StreamingQuery:
        reader = self.spark.readStream.format("anabranch").options(**self.flow.options(startingOffsets="earliest"))
        rows = selected(reader.option("maxOffsetsPerTrigger", "900").load())
        if self.twice:
            rows = rows.union(selected(reader.option("maxOffsetsPerTrigger", "500").load()))
        writer = rows.transform(FOLLOW).writeStream.foreachBatch(self._take)
        return writer.option("checkpointLocation", self.checkpoint).start()

    def stop(self, query: StreamingQuery) -> None:
        query.processAllAvailable()
        query.stop()
        assert self.found == plain_pass(self.flow.sent)


@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=LONG)])
def test_a_keyed_query_gives_what_a_plain_pass_gives(
    spark: SparkSession, address: str, checkpoint: str, twice: bool
) -> None:
    """The topic is resized under the query, which is stopped and started again; `twice`: each record comes twice."""
    flow = Flow(address, f"followed-{twice}")
    followed = Followed(spark, flow, checkpoint, twice=twice)
    flow.send(600)
    query = followed.start()
    flow.resize(5)
    flow.send(600)
    followed.stop(query)
    flow.resize(3)
    query = followed.start()
    flow.send(600)
    followed.stop(query)
    assert len(followed.batches) >= 3
    zone = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    once = selected(spark.read.format("anabranch").options(**flow.options()).load()).transform(FOLLOW).collect()
    spark.conf.set("spark.sql.session.timeZone", zone)
    assert {row.key: (row["count"], row.digest) for row in once} == followed.found
    assert all(abs((datetime.now(UTC) - row["last"].astimezone(UTC)).total_seconds()) < 600 for row in once)


def wait(key: str, rows: pa.RecordBatch, state: KeyState[Digest]) -> tuple[str, int] | None:
    """Count a key's rows, and give the count when none has come for a while."""
    count = (state.value.count if state.value else 0) + rows.num_rows
    if state.timed_out:
        state.remove()
        return key, count
    state.update(Digest(count, 0))
    if rows.column("by_event")[0].as_py():
        state.set_timeout_at(rows.column("timestamp")[-1].value // 1000 + 1000)
    else:
        state.set_timeout(1000)
    return None


@LONG
@pytest.mark.parametrize("by_event", [False, True])
def test_timeouts_fire_by_either_clock(spark: SparkSession, address: str, checkpoint: str, by_event: bool) -> None:
    flow = Flow(address, f"waited-{by_event}")
    found: list[tuple[str, int]] = []
    times: dict[str, Any] = {"timeout": Timeout.PROCESSING_TIME}
    if by_event:
        times = {"timeout": Timeout.EVENT_TIME, "event_time": "timestamp", "watermark": "1 second"}
    waiting = keyed(wait, state=Digest, output="key string, count long", buckets=2, **times)
    rows = selected(spark.readStream.format("anabranch").options(**flow.options(startingOffsets="earliest")).load())
    query = (
        rows.selectExpr("*", f"{str(by_event).lower()} by_event")
        .transform(waiting)
        .writeStream.foreachBatch(lambda batch, _: found.extend((row.key, row["count"]) for row in batch.collect()))
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime="3 seconds")
        .start()
    )
    flow.send(80)
    deadline = time.monotonic() + 240
    while len(found) < KEYS and time.monotonic() < deadline:
        time.sleep(4)
        if by_event:  # The watermark follows the records: a later one of another key lets it pass the timeouts.
            with Producer(address) as producer:
                producer.send(flow.topic, b"0", key=b"other")
    query.stop()
    assert sorted(each for each in found if each[0] != "other") == sorted((f"key-{k}", 2) for k in range(KEYS))


@pytest.mark.parametrize(
    ("columns", "arguments", "says"),
    [
        ("id as sequence, 'a' as key", {}, "There is no column topic; the frame has sequence, key"),
        (
            "cast(id as string) as sequence, 'a' as key, 't' as topic",
            {},
            "column sequence is string; it must be bigint",
        ),
        ("id as sequence, 'a' as key", {"topic": None}, "There is no column partition; the frame has sequence, key"),
        (
            "id as sequence, 'a' as key",
            {"topic": None, "partition": None, "state": list[int]},
            "Give fields as a NamedTuple class",
        ),
        ("id as sequence, 'a' as key", {"buckets": 0}, "buckets must be 1 to 65536"),
        ("id as sequence, 'a' as key", {"ttl_ms": 0}, "ttl_ms must be 1 or more"),
        ("id as sequence, 'a' as key", {"timeout": Timeout.EVENT_TIME}, "belong together"),
    ],
)
def test_wrong_arguments_are_sentences(spark: SparkSession, columns: str, arguments: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"state": Digest, "output": "key string", **arguments}
    with pytest.raises(KeyedError, match=says):
        spark.range(1).selectExpr(*columns.split(", ")).transform(keyed(follow, **given))


def test_the_example_of_the_guide_can_be_planned(spark: SparkSession, address: str) -> None:
    example = next(each for each in python_examples("docs/spark.md", address) if "KeyState[Balance]" in each)
    with Admin(address) as admin:
        admin.create_topics("bookings", partitions=2)
    names: dict[str, Any] = {"spark": spark}
    exec(compile(example, "docs/spark.md", "exec"), names)
    assert names["balances"].isStreaming and names["balances"].columns == ["account", "bookings", "amount"]
    state = KeyState(names["Balance"](1, 2.0), False, Times(0), names["balances"])
    rows = pa.record_batch({"amount": [1.0, 0.5]})
    assert names["book"]("ann", rows, state) == ("ann", 3, 3.5) and state.value == (3, 3.5)


def test_the_collections_between_tasks_pass_over_what_a_packing_worker_has_imported(spark: SparkSession) -> None:
    rows = spark.range(10).selectExpr(
        "0 bucket", "cast(id as string) key", "'t' topic", "0 partition", "id sequence", "id value"
    )
    schema = to_arrow(rows.drop("bucket").schema)
    settings = Settings(Columns(), schema, pa.struct(list(to_arrow(Digest))), maker(Digest), to_arrow("key string"))
    operator = _Operator(follow, settings, buckets=4)

    def packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        assert sum(batch.num_rows for batch in operator.pack(batches))
        yield pa.record_batch({"frozen": pa.array([gc.get_freeze_count()], pa.int64())})

    found = rows.coalesce(1).mapInArrow(packed, "frozen long").collect()
    assert len(found) == 1 and found[0].frozen > 10_000
