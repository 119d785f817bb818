"""Checkpoints that are older than the topic, or copies: no row is lost without an error, on a real broker."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from anabranch.client.sync import Admin
from anabranch.spark.sink.decision import next_decision
from anabranch.spark.sink.options import parse
from anabranch.spark.sink.task import Attempt, SinkError, Written, write
from anabranch.spark.sink.writer import StreamWriter, TaskWritten
from tests.spark.flow import Flow
from tests.spark.test_sink import committed
from tests.support.thorough import THOROUGH

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NAMES = ("key", "value")
SCHEMA = StructType([StructField(name, BinaryType()) for name in NAMES])


class Query:
    """A query as Spark runs it on a checkpoint: its micro-batches, and what readers see of them."""

    def __init__(self, address: str, name: str, topic: str, **options: str) -> None:
        self.address, self.name, self.topic = address, name, topic
        self.writer = StreamWriter(parse({"kafka.bootstrap.servers": address, "topic": topic, **options}), SCHEMA)
        self.admin = Admin(address)

    def tasks(self, batch_id: int, *numbers: Sequence[int]) -> list[Written]:
        """Run the tasks of a micro-batch, each with its rows."""
        found = []
        for task, mine in enumerate(numbers):
            texts = pa.array([b"%d" % number for number in mine], pa.binary())
            rows = iter([pa.record_batch([texts, texts], NAMES)])
            found.append(write(self.writer.options, NAMES, Attempt(self.name, batch_id, task), rows))
        return found

    def run(self, batch_id: int, *numbers: Sequence[int]) -> None:
        """Run a micro-batch, and end it as Spark does."""
        messages = [TaskWritten(written) for written in self.tasks(batch_id, *numbers)]
        try:
            self.writer.finish(self.admin, messages, batch_id)
        except SinkError:
            self.writer.give_up(self.admin, messages, batch_id)
            raise

    def open_transactions(self) -> list[str]:
        """The ids of the first ten tasks whose transactions are open."""
        names = [Attempt(self.name, 0, task).names(self.writer.options).task(task) for task in range(10)]
        return [name for name, each in self.admin.describe_transactions(names).items() if each.state == "Ongoing"]

    def rows(self) -> list[int]:
        """What readers see."""
        return sorted(int(value) for values in committed(self.address, self.topic).values() for value in values)


@pytest.fixture
def query(address: str, request: pytest.FixtureRequest) -> Iterator[Query]:
    name = re.sub(r"[^\w.-]", "-", request.node.name)
    made = Query(address, name, name)
    made.admin.create_topics(made.topic, partitions=2)
    yield made
    made.admin.close()


def test_a_checkpoint_that_is_older_than_the_topic_is_refused_before_anything_is_written(query: Query) -> None:
    for batch_id in range(3):
        query.run(batch_id, [batch_id], [10 + batch_id])
    says = f"Topic {query.topic} holds micro-batch 2 of this query already, and this is micro-batch 1: .*Nothing was"
    for tasks in ([[1, 2, 3], [11]], [[], [], [5]]):
        with pytest.raises(SinkError, match=says):
            query.run(1, *tasks)
    assert query.rows() == [0, 1, 2, 10, 11, 12] and query.open_transactions() == []
    query.run(3, [3], [13], [23])
    assert query.rows() == [0, 1, 2, 3, 10, 11, 12, 13, 23]


@pytest.mark.parametrize("planned", [[[2, 3], [12]], [[7], [12]], [[2], [12], [13]]])
def test_a_micro_batch_that_is_planned_anew_with_other_rows_is_refused(query: Query, planned: list[list[int]]) -> None:
    query.run(2, [2], [12])
    says = r"holds micro-batch 2 of this query already, with 2 rows(, and now it has 3:| of other keys:)"
    with pytest.raises(SinkError, match=says):
        query.run(2, *planned)
    assert query.rows() == [2, 12] and query.open_transactions() == []


@pytest.mark.parametrize("planned", [[[2, 3]], [[], [12]], [[], []], [[2], [], [3]]])
def test_a_replay_of_a_source_that_has_lost_rows_ends_what_was_decided(
    query: Query, planned: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    query.run(2, [2, 3], [12])
    query.run(2, *planned)
    assert query.rows() == [2, 3, 12] and query.open_transactions() == []
    count = sum(map(len, planned))
    assert f"Micro-batch 2 was decided with 3 rows, and its replay has {count}:" in caplog.text
    query.run(3, [4])
    assert query.rows() == [2, 3, 4, 12]


@pytest.mark.parametrize("planned", [[[7, 8, 9]], [[2]]])
def test_what_was_decided_is_visible_whole_before_a_replay_is_refused_or_taken(
    query: Query, planned: list[list[int]]
) -> None:
    """The driver dies after the decision; the next attempt has one task, and other rows or fewer."""
    written = query.tasks(2, [2], [12])
    prepared = {each.attempt.task: each.prepared for each in written if each.prepared is not None}
    names, digest = written[0].attempt.names(query.writer.options), written[0].digest + written[1].digest
    query.writer.decide(query.admin, names, query.topic, next_decision(None, 2, prepared, digest)[0])
    with pytest.raises(SinkError, match="and now it has 3") if len(planned[0]) > 1 else nullcontext():
        query.run(2, *planned)
    assert query.rows() == [2, 12] and query.open_transactions() == []


def test_a_replay_that_is_divided_in_another_way_has_the_same_rows(query: Query) -> None:
    query.run(2, [2, 3, 4], [12])
    query.run(2, [12, 2], [4], [3])
    query.run(2, [4, 3, 2, 12])
    assert query.rows() == [2, 3, 4, 12]


def test_another_prefix_writes_on_from_an_older_checkpoint(query: Query) -> None:
    for batch_id in range(3):
        query.run(batch_id, [batch_id])
    again = Query(query.address, query.name, query.topic, transactionalIdPrefix="restored")
    again.run(1, [1, 2, 3, 4])
    again.admin.close()
    assert query.rows() == [0, 1, 1, 2, 2, 3, 4]


def test_a_copy_of_a_checkpoint_that_writes_to_another_topic_is_another_query(query: Query) -> None:
    for batch_id in range(3):
        query.run(batch_id, [batch_id])
    copy = Query(query.address, query.name, f"{query.topic}-1")
    copy.admin.create_topics(copy.topic, partitions=2)
    prepared = query.tasks(3, [3])
    copy.run(1, [1, 2])
    copy.run(2, [3])
    query.writer.finish(query.admin, [TaskWritten(each) for each in prepared], 3)
    assert query.rows() == [0, 1, 2, 3] and copy.rows() == [1, 2, 3]
    copy.admin.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "lost",
    [
        "three micro-batches",
        pytest.param(
            "one micro-batch", marks=pytest.mark.skipif(not THOROUGH, reason="above it is shown without Spark")
        ),
    ],
)
def test_a_query_on_an_older_checkpoint_ends_with_an_error(
    spark: SparkSession, address: str, tmp_path: Path, lost: str
) -> None:
    flow = Flow(address, f"{lost.split()[0]}-older")
    flow.admin.create_topics(f"{flow.topic}-out", partitions=2)
    checkpoint = tmp_path / "checkpoint"

    def run(limit: int) -> None:
        options = {"kafka.bootstrap.servers": address, "startingOffsets": "earliest"}
        rows = spark.readStream.format("anabranch").options(**options, maxOffsetsPerTrigger=str(limit))
        writer = rows.option("subscribe", flow.topic).load().select("key", "value").writeStream.format("anabranch")
        writer = writer.option("kafka.bootstrap.servers", address).option("topic", f"{flow.topic}-out")
        writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()

    flow.send(10)
    run(10)
    shutil.copytree(checkpoint, tmp_path / "backup")
    flow.send(30 if lost == "three micro-batches" else 10)
    run(10)
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "backup", checkpoint)
    sent = flow.sent
    flow.send(60)
    with pytest.raises(Exception, match=f"Topic {flow.topic}-out holds micro-batch [1-3] of this query already"):
        run(1_000)
    seen = [int(value) for values in committed(address, f"{flow.topic}-out").values() for value in values]
    assert sorted(seen) == list(range(sent))
    flow.close()
