"""The Spark source in a real Spark, on a real broker: every key in order and once, through resizes and restarts."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.types import StructType

from anabranch.client.sync import Admin, Producer
from anabranch.spark import register
from anabranch.spark.options import for_batch, parse
from anabranch.spark.progress import PartitionProgress, partitions_of
from anabranch.spark.source import AnabranchDataSource, BatchReader
from tests.spark.flow import KEYS, Flow
from tests.support.examples import python_examples

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def flow(address: str, request: pytest.FixtureRequest) -> Any:
    flow = Flow(address, request.node.name.replace("[", "-").replace("]", ""))
    yield flow
    flow.close()


class Seen:
    """Collects a query's micro-batches in the order its tasks yielded them."""

    def __init__(self) -> None:
        self.keys: dict[str, list[int]] = defaultdict(list)
        self.batches = 0

    def take(self, batch: DataFrame, batch_id: int) -> None:
        self.batches += 1
        for row in batch.selectExpr("cast(key as string) key", "cast(value as string) value").collect():
            self.keys[row.key].append(int(row.value))


class Listener(StreamingQueryListener):
    """Collects what a query reports of its partitions."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.reports: list[list[PartitionProgress]] = []

    def onQueryStarted(self, event: Any) -> None: ...  # noqa: N802

    def onQueryTerminated(self, event: Any) -> None: ...  # noqa: N802

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        found = [each for each in partitions_of(event.progress) if each.topic == self.topic]
        if found:
            self.reports.append(found)

    def until(self, holds: Callable[[list[PartitionProgress]], bool]) -> list[PartitionProgress]:
        """Wait for a report."""
        deadline = time.monotonic() + 60
        while not (found := next(filter(holds, self.reports), None)):
            assert time.monotonic() < deadline, self.reports
            time.sleep(0.1)
        return found


def stream(spark: SparkSession, address: str, topic: str, **options: str) -> DataFrame:
    reader = spark.readStream.format("anabranch").option("kafka.bootstrap.servers", address)
    return reader.options(subscribe=topic, startingOffsets="earliest", **options).load()


def start(df: DataFrame, seen: Seen, checkpoint: str) -> StreamingQuery:
    return df.writeStream.foreachBatch(seen.take).option("checkpointLocation", checkpoint).start()


def test_a_stream_keeps_every_key_in_order_through_resizes(
    spark: SparkSession, address: str, flow: Flow, checkpoint: str
) -> None:
    seen = Seen()
    flow.send(2_000)
    options = {"maxOffsetsPerTrigger": "1500", "kafka.group.id": flow.topic}
    query = start(stream(spark, address, flow.topic, **options), seen, checkpoint)
    for count in (6, 3, 8):
        flow.resize(count)
        flow.send(2_000)
    query.processAllAvailable()
    query.processAllAvailable()
    query.stop()
    assert seen.keys == flow.expected()
    assert seen.batches >= 4
    # What was done before the last micro-batch was committed to the group, for lag tools to see.
    committed = flow.admin.list_group_offsets(flow.topic)
    assert 0 < sum(position.offset for position in committed.values()) <= flow.sent


def test_a_query_that_is_stopped_in_the_middle_goes_on_where_it_was(
    spark: SparkSession, address: str, flow: Flow, checkpoint: str
) -> None:
    seen, plans = Seen(), f"{checkpoint}.plans"
    flow.send(1_000)
    flow.resize(5)
    flow.send(1_000)
    for count in (2, 7):
        df = stream(spark, address, flow.topic, maxOffsetsPerTrigger="700", planLog=plans)
        query = df.writeStream.foreachBatch(seen.take).option("checkpointLocation", checkpoint)
        running = query.trigger(availableNow=True).start()
        running.awaitTermination(120)
        assert seen.keys == flow.expected()
        flow.resize(count)
        flow.send(1_000)
    # As if Spark's own Kafka source had come so far.
    as_of_kafka_source(Path(checkpoint))
    convert = ("convert-checkpoint", checkpoint, f"{checkpoint}.new", "-b", address, "--json")
    code, told = command(*convert)
    assert (code, told["topics"], told["unfinished"], told["removed"]) == (0, [flow.topic], None, {})
    running = start(stream(spark, address, flow.topic, planLog=plans), seen, f"{checkpoint}.new")
    running.processAllAvailable()
    running.stop()
    assert seen.keys == flow.expected()
    lines = Path(plans).read_text().splitlines(keepends=True)
    assert len(lines) == seen.batches
    assert command("verify-plan", plans, "--json") == (0, {"plans": seen.batches, "problems": [], "torn": []})
    Path(plans).write_text("".join(lines[:2] + lines[3:]))
    code, found = command("verify-plan", plans, "--json")
    assert code == 1 and all("are read by no micro-batch" in each["problem"] for each in found["problems"])


def command(*arguments: str) -> tuple[int, Any]:
    """The exit code of a command, and its JSON."""
    line = [sys.executable, "-m", "anabranch.cli", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout)


def as_of_kafka_source(checkpoint: Path) -> None:
    """Write the offsets of a checkpoint as Spark's Kafka source does."""
    for file in (checkpoint / "offsets").glob("[0-9]*"):
        *header, line = file.read_text().split("\n")
        offsets = {topic: known["offsets"] for topic, known in json.loads(line).items()}
        file.write_text("\n".join([*header, json.dumps(offsets, separators=(",", ":"))]))


def test_a_stream_reads_what_is_committed_and_waits_for_a_transaction_that_a_resize_found_open(
    spark: SparkSession, address: str, flow: Flow, checkpoint: str
) -> None:
    seen, listener = Seen(), Listener(flow.topic)
    flow.send(400)
    spark.streams.addListener(listener)
    query = start(stream(spark, address, flow.topic), seen, checkpoint)
    with (
        Producer(address, transactional_id=f"{flow.topic}-1") as lasting,
        Producer(address, transactional_id=f"{flow.topic}-2") as failing,
    ):
        for producer in (lasting, failing):
            producer.init_transactions()
            producer.begin_transaction()
        failing.send_arrow(flow.topic, pa.table({"key": ["key-1"] * 50, "value": ["-1"] * 50}))
        failing.flush()
        flow.send(400, lasting)
        before = {key: values[: 400 // KEYS] for key, values in flow.expected().items()}
        flow.resize(5)
        flow.send(400)
        query.processAllAvailable()
        assert seen.keys == before, "only what lies before the transactions"
        waiting = listener.until(lambda found: any(each.gate is not None for each in found))
        assert sum(each.end for each in waiting if each.partition < 2) == 400
        assert sum(each.undecided for each in waiting) > 400
        assert sum(each.lag for each in waiting if each.gate is not None) > 0
        failing.abort_transaction()
        lasting.commit_transaction()
    query.processAllAvailable()
    query.processAllAvailable()
    listener.until(
        lambda found: len(found) == 5 and all((it.lag, it.gate, it.undecided) == (0, None, 0) for it in found)
    )
    query.stop()
    spark.streams.removeListener(listener)
    assert seen.keys == flow.expected()


@pytest.mark.parametrize(("split", "filtered"), [("key", False), ("key", True), ("offset", False)])
def test_a_batch_read_has_every_record_once_and_sequence_orders_it(
    spark: SparkSession, address: str, flow: Flow, split: str, filtered: bool
) -> None:
    if filtered:
        flow.admin.alter_configs("topic", flow.topic, {"accept.range.fetch": "true"})
    flow.send(1_000)
    flow.resize(6)
    flow.send(1_000)
    flow.resize(2)
    flow.send(1_000)
    reader = spark.read.format("anabranch").option("kafka.bootstrap.servers", address)
    df = reader.options(subscribe=flow.topic, split=split, minPartitions="6").load()
    rows = (
        df.orderBy("sequence")
        .selectExpr("cast(key as string) key", "cast(cast(value as string) as int) value")
        .collect()
    )
    found: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        found[row.key].append(row.value)
    assert found == flow.expected()


def test_a_task_yields_each_key_in_order(spark: SparkSession, address: str, flow: Flow) -> None:
    flow.send(2_000)
    flow.resize(7)
    flow.send(2_000)
    reader = spark.read.format("anabranch").option("kafka.bootstrap.servers", address)
    df = reader.options(subscribe=flow.topic, minPartitions="5").load().select("key", "value")

    def disorder(batches: Any) -> Any:
        last: dict[bytes, int] = {}
        wrong = 0
        for batch in batches:
            for key, value in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True):
                wrong += int(value) < last.get(key, -1)
                last[key] = int(value)
        yield pa.record_batch({"wrong": pa.array([wrong])})

    assert df.mapInArrow(disorder, "wrong long").agg({"wrong": "sum"}).collect()[0][0] == 0


def test_the_example_of_the_readme_reads_the_topic(spark: SparkSession, address: str, checkpoint: str) -> None:
    with Admin(bootstrap_servers=address) as admin:
        admin.create_topics("flights")
    with Producer(bootstrap_servers=address) as producer:
        producer.send("flights", b"departed", key=b"N14228")
    *_, example = python_examples("README.md", address)
    names: dict[str, Any] = {"spark": spark}
    exec(compile(example, "README.md", "exec"), names)
    values: list[bytes] = []
    query = names["flights"].writeStream.foreachBatch(
        lambda batch, _: values.extend(bytes(r.value) for r in batch.collect())
    )
    running = query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    running.awaitTermination(120)
    assert values == [b"departed"]


def test_columns_headers_and_filters(spark: SparkSession, address: str, flow: Flow) -> None:
    flow.producer.send(flow.topic, b"v", key=b"k", headers=[("a", b"1")], timestamp=1_700_000_000_123).result(30)
    flow.send(100)
    reader = spark.read.format("anabranch").option("kafka.bootstrap.servers", address)
    df = reader.options(subscribe=flow.topic, includeHeaders="true").load()
    names = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert df.columns[: len(names)] == names
    row = df.where("cast(key as string) = 'k'").collect()[0]
    assert df.where("key = 'k'").collect() == [row]
    some = df.where("key in ('key-3', 'k', 'nobody') and offset >= 0")
    assert sorted(bytes(each.key) for each in some.collect()) == [b"k", *[b"key-3"] * 3]
    plan = some._jdf.queryExecution().executedPlan().toString()  # type: ignore[operator]
    assert "Filter (" not in plan, plan
    assert [(header.key, bytes(header.value)) for header in row.headers] == [("a", b"1")]
    assert df.where("headers is null").count() == 100, "as in Spark's own source"
    assert (row.timestamp.microsecond, row.timestampType, row.topic) == (123_000, 0, flow.topic)
    counts = {number: df.where(f"partition = {number} and offset >= 10").count() for number in (0, 1)}
    spans = flow.admin.topic_offsets(flow.topic)
    assert counts == {number: max(0, span.end - 10) for number, span in spans.items()}


def test_records_that_are_gone_fail_the_query_and_say_which(
    spark: SparkSession, address: str, flow: Flow, checkpoint: str
) -> None:
    flow.send(500)
    seen = Seen()
    df = stream(spark, address, flow.topic, maxOffsetsPerTrigger="100")
    query = df.writeStream.foreachBatch(seen.take).option("checkpointLocation", checkpoint)
    running = query.start()
    running.processAllAvailable()
    running.stop()
    flow.send(500)
    flow.admin.delete_records({(flow.topic, number): span.end for number, span in _spans(flow).items()})
    flow.send(10)
    failing = start(stream(spark, address, flow.topic), seen, checkpoint)
    with pytest.raises(PySparkException, match="lost") as failure:
        failing.processAllAvailable()
    assert flow.topic in str(failure.value)


def _spans(flow: Flow) -> Any:
    return flow.admin.topic_offsets(flow.topic)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "subscribe"),
        ({"subscribe": "t", "startingOffset": "earliest"}, "startingOffsets"),
        ({"subscribe": "t", "ordering": "sideways"}, "ordering"),
        ({"subscribe": "t", "startingOffsets": "{"}, "startingOffsets must be earliest, latest, or JSON as in"),
        ({"subscribe": "no-such-topic"}, "subscribe names topic 'no-such-topic', which does not exist"),
        (
            {"subscribe": "t", "kafka.bootstrap.servers": "127.0.0.1:1"},
            r"kafka.bootstrap.servers is 127.0.0.1:1: no conn",
        ),
    ],
)
def test_wrong_options_are_sentences(spark: SparkSession, address: str, options: dict[str, str], says: str) -> None:
    reader = spark.read.format("anabranch").option("kafka.bootstrap.servers", address).options(**options)
    with pytest.raises(PySparkException, match=says):
        reader.load().count()


class FrozenReader(BatchReader):
    """Reads as ever, and then yields one row: how many objects the collections of its worker pass over."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield that row."""
        assert sum(batch.num_rows for batch in super().read(partition))
        yield pa.record_batch({"offset": pa.array([gc.get_freeze_count()], pa.int64())})


class FrozenSource(AnabranchDataSource):
    """The data source with that reader."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return "anabranch-frozen"

    def reader(self, schema: StructType) -> BatchReader:
        """Return the reader."""
        return FrozenReader(for_batch(parse(self.options)), schema)


def test_the_collections_between_tasks_pass_over_what_a_worker_has_imported(
    spark: SparkSession, address: str, flow: Flow
) -> None:
    flow.send(100)
    spark.dataSource.register(FrozenSource)
    options = {"kafka.bootstrap.servers": address, "subscribe": flow.topic}
    found = spark.read.format("anabranch-frozen").options(**options).schema("offset long").load().collect()
    assert len(found) == 2 and min(row.offset for row in found) > 40_000


def test_a_session_whose_workers_lack_the_package_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    with pytest.raises(PySparkException, match="PYSPARK_PYTHON: the Python workers of this session run"):
        register(spark)


@pytest.fixture
def bare_executors(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have a Python run the tasks that has all packages but ours and uvloop; planning goes on with the driver's."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in map(Path, {entry for entry in sys.path if entry.endswith("site-packages")}):
        for entry in path.iterdir():
            if "anabranch" not in entry.name and "uvloop" not in entry.name and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    python = tmp_path / "python3"
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *"pyspark.daemon pyspark.worker") PYTHONPATH={packages} exec {sys.executable} -S "$@";; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(spark.sparkContext, "pythonExec", str(python))
        register(spark)
        yield packages
    register(spark)


def test_executors_that_lack_the_package_say_so_and_what_would_be_right(
    spark: SparkSession, address: str, flow: Flow, bare_executors: Path
) -> None:
    flow.send(10)
    says = r"PYSPARK_PYTHON: the Python workers on \S+ run \S+ \(3\..*\), which cannot import .*: No module named '{}'"
    options = {"kafka.bootstrap.servers": address}
    reader = spark.read.format("anabranch").options(**options, subscribe=flow.topic)
    with pytest.raises(PySparkException, match=says.format("anabranch")):
        reader.load().count()
    rows = spark.range(2).selectExpr("cast(id as string) value")
    with pytest.raises(PySparkException, match=says.format("anabranch")):
        rows.write.format("anabranch").options(**options, topic=flow.topic).mode("append").save()
    (bare_executors / "anabranch").symlink_to(Path(register.__code__.co_filename).parents[1])
    with pytest.raises(PySparkException, match=says.format("uvloop")):
        reader.load().count()
