"""The Spark sink in a real Spark, on a real broker: every row once, through resizes and kills between two steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import confluent_kafka
import confluent_kafka.admin
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from anabranch.client.sync import Admin, Consumer, Producer
from benchmarks.peers.kafka import ApacheKafka
from tests.spark.cluster import cluster
from tests.spark.sink_driver import STEPS, TASK_STEPS, TWICE_STEPS
from tests.support.broker import ROOT, running
from tests.support.thorough import THOROUGH

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KEYS = 20
TIME_LIMIT_S = 240.0


def committed(address: str, topic: str) -> dict[bytes, list[bytes]]:
    """What a `read_committed` reader sees: by key, the values in order."""
    found: dict[bytes, list[bytes]] = defaultdict(list)
    with Consumer(address, auto_offset_reset="earliest", isolation_level="read_committed") as consumer:
        consumer.assign(topic)
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 1.0:
            for record in consumer.poll(timeout_s=0.2):
                found[record.key].append(record.value)
                quiet_since = time.monotonic()
    return dict(found)


def committed_by_stock(address: str, topic: str) -> dict[bytes, list[bytes]]:
    """What librdkafka's `read_committed` reader sees: by key, the values in order."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "counting",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    found: dict[bytes, list[bytes]] = defaultdict(list)
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        beginning = confluent_kafka.OFFSET_BEGINNING
        consumer.assign([confluent_kafka.TopicPartition(topic, number, beginning) for number in partitions])
        left = set(partitions)
        while left:
            message = consumer.poll(30)
            assert message is not None, "the reader neither reads nor comes to an end"
            if message.error() is None:
                found[message.key()].append(message.value())
            else:
                assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF, message.error()
                left.discard(message.partition())
    finally:
        consumer.close()
    return dict(found)


def counted_by_stock(address: str, topic: str) -> dict[bytes, list[bytes]]:
    """As `committed_by_stock`, with the values sorted: keys that move to another partition lose their order there."""
    return {key: sorted(values, key=int) for key, values in committed_by_stock(address, topic).items()}


def add_partitions(address: str, topic: str, count: int) -> None:
    """Have a stock broker add partitions to a topic, until it has so many."""
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": address})
    for done in admin.create_partitions([confluent_kafka.admin.NewPartitions(topic, count)]).values():
        done.result(30)


def expected(count: int) -> dict[bytes, list[bytes]]:
    return {b"k%d" % key: [b"%d" % number for number in range(key, count, KEYS)] for key in range(KEYS)}


def send(address: str, topic: str, numbers: range) -> None:
    with Producer(address) as producer:
        keys = pa.array([f"k{number % KEYS}" for number in numbers])
        producer.send_arrow(topic, pa.table({"key": keys, "value": pa.array([str(number) for number in numbers])}))


def write(df: DataFrame, address: str, **options: str) -> None:
    df.write.format("anabranch").options(**{"kafka.bootstrap.servers": address}, **options).mode("append").save()


class Driver:
    """A driver with its JVM and workers, in a session of processes of their own."""

    def __init__(self, address: str, checkpoint: Path, step: str, target: str, *master: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        command = [sys.executable, "-m", "tests.spark.sink_driver", address, str(checkpoint), step, target, *master]
        self.log = checkpoint.with_suffix(f".{step}.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=ROOT
            )
        self.stops = Path(f"{checkpoint}.{step}")

    def kill_at_its_step(self) -> None:
        deadline = time.monotonic() + TIME_LIMIT_S
        while not self.stops.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        for process_id in self._members():
            os.kill(process_id, signal.SIGKILL)
        self.process.wait()

    def _members(self) -> list[int]:
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid:
                found.append(int(directory.name))
        return found

    def finish(self) -> None:
        assert self.process.wait(TIME_LIMIT_S) == 0, self.log.read_text()


@contextmanager
def pipeline(directory: Path, kind: str) -> Iterator[tuple[str, str]]:
    """Make topic `in` at a broker of ours, and `out` there or at a stock Apache Kafka; the addresses of both."""
    with ExitStack() as stack:
        broker = stack.enter_context(running(directory / "broker"))
        address = target = f"127.0.0.1:{broker.port}"
        if kind == "apache-kafka":
            target = stack.enter_context(ApacheKafka()).address
        for where, topic, partitions in ((address, "in", 3), (target, "out", 2)):
            with Admin(where) as admin:
                admin.create_topics(topic, partitions=partitions)
        yield address, target


@pytest.mark.skipif(not THOROUGH, reason="six drivers: make conformance; test_sink_decision.py has the rules")
@pytest.mark.parametrize("kind", ["anabranch", "apache-kafka"])
def test_a_killed_query_writes_every_row_once(tmp_path: Path, kind: str) -> None:
    """Killed in turn at each step; the topic it writes is resized meanwhile, and here its keys keep their order."""
    checkpoint, sent = tmp_path / "checkpoint", 0
    read = committed if kind == "anabranch" else counted_by_stock
    with pipeline(tmp_path, kind) as (address, target), Admin(target) as admin:
        for count, step in enumerate(STEPS, 3):
            send(address, "in", range(sent, sent + 400))
            sent += 400
            driver = Driver(address, checkpoint, step, target)
            driver.kill_at_its_step()
            seen = read(target, "out")
            is_prefix = all(values == expected(sent)[key][: len(values)] for key, values in seen.items())
            assert is_prefix, "rows are missing, or come twice, before the query was started again"
            if kind == "anabranch":
                admin.resize("out", count)
            else:
                add_partitions(target, "out", count)
        Driver(address, checkpoint, "none", target).finish()
        assert read(target, "out") == expected(sent)


@pytest.mark.skipif(not THOROUGH, reason="an Apache Kafka of its own: make conformance")
def test_rows_come_once_while_partitions_are_added_to_a_stock_topic(
    spark: SparkSession, tmp_path: Path, checkpoint: str
) -> None:
    with pipeline(tmp_path, "apache-kafka") as (address, target):
        send(address, "in", range(1200))
        rows = spark.readStream.format("anabranch").option("kafka.bootstrap.servers", address)
        rows = rows.options(subscribe="in", startingOffsets="earliest", maxOffsetsPerTrigger="120")
        writer = rows.load().select("key", "value").writeStream.format("anabranch").trigger(availableNow=True)
        query = writer.options(
            **{"kafka.bootstrap.servers": target}, topic="out", checkpointLocation=checkpoint
        ).start()
        for count in (3, 5, 8):
            batches = len(query.recentProgress) + 2
            while len(query.recentProgress) < batches:
                assert query.isActive, "the query ended before the partitions were added"
                time.sleep(0.02)
            add_partitions(target, "out", count)
        query.awaitTermination()
        assert counted_by_stock(target, "out") == expected(1200)
        with Admin(target) as admin:
            held = [partition for partition, span in admin.topic_offsets("out").items() if span.end > span.start]
        assert max(held) >= 5, "no row went to the partitions that were added last"


@pytest.mark.skipif(not THOROUGH, reason="a cluster: make conformance; test_sink_attempts.py has the short form")
@pytest.mark.parametrize("step", TWICE_STEPS)
@pytest.mark.parametrize("kind", ["anabranch", "apache-kafka"])
def test_a_task_that_is_run_twice_at_the_same_time_writes_its_rows_once(tmp_path: Path, kind: str, step: str) -> None:
    """With `spark.speculation` two attempts of a task have transactions open."""
    read = committed if kind == "anabranch" else committed_by_stock
    with pipeline(tmp_path, kind) as (address, target), cluster(tmp_path) as master:
        send(address, "in", range(600))
        driver = Driver(address, tmp_path / "checkpoint", step, target, master)
        driver.finish()
        assert read(target, "out") == expected(600)
        attempts = set(driver.stops.read_text().splitlines())
        assert any({f"{batch} 0", f"{batch} 1"} <= attempts for batch in range(3)), f"nothing was run twice: {attempts}"


@pytest.mark.skipif(not THOROUGH, reason="four drivers: make conformance; test_sink_decision.py has the rules")
@pytest.mark.parametrize("kind", ["anabranch", "apache-kafka"])
def test_a_task_whose_worker_is_killed_writes_its_rows_once(tmp_path: Path, kind: str) -> None:
    """In each micro-batch the first attempt of a task is killed: with nothing sent, with all sent, and prepared."""
    checkpoint, sent = tmp_path / "checkpoint", 0
    read = committed if kind == "anabranch" else committed_by_stock
    with pipeline(tmp_path, kind) as (address, target):
        for step in TASK_STEPS:
            send(address, "in", range(sent, sent + 600))
            sent += 600
            driver = Driver(address, checkpoint, step, target)
            driver.finish()
            assert len(driver.stops.read_text().split()) >= 2, "no worker was killed"
            assert read(target, "out") == expected(sent)


def test_rows_become_records_with_all_they_have(spark: SparkSession, address: str) -> None:
    with Admin(address) as admin:
        admin.create_topics("sunk-a", partitions=3)
        admin.create_topics("sunk-b", partitions=3)
    rows = spark.createDataFrame(
        [
            (b"k", "one", "sunk-a", None, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), [("h", b"x")]),
            (None, "two", "sunk-b", 2, None, None),
            (b"k", None, "sunk-a", None, datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC), []),
        ],
        "key binary, value string, topic string, partition int, timestamp timestamp, "
        "headers array<struct<key: string, value: binary>>",
    ).coalesce(1)
    write(rows, address)
    with Consumer(address, auto_offset_reset="earliest", isolation_level="read_committed") as consumer:
        consumer.assign(["sunk-a", "sunk-b"])
        found: list[Any] = []
        while len(found) < 3:
            found += consumer.poll(timeout_s=1.0)
    (one, gone), (two,) = ([each for each in found if each.topic == topic] for topic in ("sunk-a", "sunk-b"))
    assert (one.key, one.value, one.timestamp, list(one.headers)) == (b"k", b"one", 1767323045000, [("h", b"x")])
    assert (gone.value, gone.timestamp, one.partition) == (None, 1767323046000, gone.partition)
    assert (two.key, two.value, two.partition) == (None, b"two", 2) and abs(two.timestamp / 1000 - time.time()) < 120


def test_a_frame_of_the_source_is_written_as_it_is_and_placed_by_key(spark: SparkSession, address: str) -> None:
    with Admin(address) as admin:
        admin.create_topics("wide-in", partitions=2)
        admin.create_topics("narrow-out", partitions=2)
        send(address, "wide-in", range(100))
        admin.resize("wide-in", 6)
        send(address, "wide-in", range(100, 200))
    source = spark.read.format("anabranch").options(**{"kafka.bootstrap.servers": address}, subscribe="wide-in")
    write(source.load(), address, topic="narrow-out")
    assert committed(address, "narrow-out") == expected(200)


def test_a_failed_write_leaves_nothing(spark: SparkSession, address: str) -> None:
    with Admin(address) as admin:
        admin.create_topics("unsunk", partitions=2)
        rows = spark.range(0, 1000, 1, 2).selectExpr(
            "cast(id as string) as value", "if(id = 900, raise_error('no more'), cast(null as string)) as key"
        )
        with pytest.raises(PySparkException, match="no more"):
            write(rows, address, topic="unsunk")
        assert committed(address, "unsunk") == {}
        nowhere = spark.range(1).selectExpr("cast(id as string) value", "cast(null as string) topic")
        with pytest.raises(PySparkException, match="the column topic of a row is null"):
            write(nowhere, address)
        assert not [group for group in admin.list_groups() if group.group_id.startswith("spark-sink")]


def test_a_broker_and_a_topic_that_are_not_there_are_named(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(1).selectExpr("cast(id as string) as value")
    says = r"kafka.bootstrap.servers is 127.0.0.1:1: no connection to 127.0.0.1:1"
    began = time.monotonic()
    with pytest.raises(PySparkException, match=says):
        write(rows, "127.0.0.1:1", topic="t")
    stream = spark.readStream.format("rate").load().selectExpr("cast(value as string) as value").writeStream
    options = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t", "checkpointLocation": str(tmp_path / "noted")}
    query = stream.format("anabranch").options(**options).trigger(availableNow=True)
    with pytest.raises(PySparkException, match=says):
        query.start().awaitTermination(60)
    assert time.monotonic() - began < 50, "each took a minute, in every task"
    times = {"kafka.delivery.timeout.ms": "2000", "kafka.request.timeout.ms": "1000"}
    with running(tmp_path / "broker", auto_create_topics_enable="false") as broker:
        for frame, topic in ((rows, {"topic": "nowhere"}), (rows.selectExpr("value", "'nowhere' as topic"), {})):
            with pytest.raises(PySparkException, match="there is no topic 'nowhere'; create it first"):
                write(frame, broker.address, **topic, **times)


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        ("id as value", {"topic": "t"}, "Column value is bigint; it must be binary or string: cast it"),
        ("cast(id as string) as text", {"topic": "t"}, "There is no column 'text' in a record"),
        ("cast(id as string) as key", {"topic": "t"}, "A record needs a column value"),
        ("cast(id as string) as value", {}, "Name the topic with the option topic"),
        ("cast(id as string) as value", {"topic": "t", "delivry": "x"}, "Did you mean delivery?"),
        ("cast(id as string) as value", {"topic": "t", "delivery": "twice"}, "must be exactly-once or at-least-once"),
        ("cast(id as string) as value", {"topic": "t", "kafka.acks": "1"}, "transactional.id .* needs acks='all'"),
        ("cast(id as string) as value", {"topic": "t", "kafka.linger.ms": "soon"}, "must be a whole number"),
        ("cast(id as string) as value", {"topic": "t", "kafka.transactional.id": "x"}, "set transactionalIdPrefix"),
    ],
)
def test_wrong_writes_are_sentences(
    spark: SparkSession, address: str, columns: str, options: dict[str, str], says: str
) -> None:
    with pytest.raises(PySparkException, match=says):
        write(spark.range(1).selectExpr(columns), address, **options)
