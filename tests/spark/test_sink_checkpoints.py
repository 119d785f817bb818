"""Checkpoints that are older than the topic, or copies: no row is lost without an error, on a real broker."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import BinaryType, StructField, StructType

from anabranch.client import OffsetAndMetadata
from anabranch.client.sync import Admin, Producer
from anabranch.spark.sink import decision
from anabranch.spark.sink.decision import MicroBatch, next_decision
from anabranch.spark.sink.options import parse
from anabranch.spark.sink.planned import planned_ms
from anabranch.spark.sink.task import Attempt, SinkError, Written, decided_in, is_written, write
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
PLANNED_MS = 1_795_761_854_373
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

    def plan(self, batch_id: int, planned_ms: int) -> None:
        """Note in the checkpoint that a micro-batch was planned, as Spark does before its tasks."""
        assert self.writer.options.checkpoint is not None
        offsets = Path(self.writer.options.checkpoint) / "offsets"
        offsets.mkdir(exist_ok=True)
        offsets.with_name("metadata").write_text(f'{{"id":"{self.name}"}}')
        (offsets / str(batch_id)).write_text(f'v1\n{{"batchTimestampMs":{planned_ms}}}\n{{}}')

    def decide(self, batch_id: int, *numbers: Sequence[int], commits: Sequence[int] = ()) -> list[Written]:
        """Run a micro-batch to its decision, and commit some of its tasks before the driver dies."""
        written = self.tasks(batch_id, *numbers)
        prepared = {each.attempt.task: each.prepared for each in written if each.prepared is not None}
        planned = planned_ms(self.writer.options.checkpoint, self.name, batch_id)
        batch = MicroBatch(batch_id, {each.attempt.task: each.digest for each in written}, planned)
        names = written[0].attempt.names(self.writer.options)
        before = decided_in(self.admin, names)
        self.writer.decide(self.admin, names, self.topic, next_decision(before, batch, prepared)[0])
        for task in commits:
            assert self.writer.end(self.admin, prepared[task], commit=True)
        return written

    def time_out(self, *tasks: int) -> None:
        """Have the open transactions of tasks aborted, as by their timeout."""
        for task in tasks:
            name = Attempt(self.name, 0, task).names(self.writer.options).task(task)
            with Producer(self.address, transactional_id=name) as producer:
                producer.init_transactions()

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
def query(address: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Query]:
    name = re.sub(r"[^\w.-]", "-", request.node.name)
    made = Query(address, name, name, checkpointLocation=str(tmp_path))
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


@pytest.mark.parametrize("planned", [[[2, 3]], [[], [12]], [[], []], [[2], [], [3]], [[7, 8], [9], [10]]])
def test_a_replay_of_a_source_that_has_lost_rows_ends_what_was_decided(
    query: Query, planned: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint says that it was planned once: so the rows of the first attempt stand, whatever they are now."""
    query.plan(2, PLANNED_MS)
    query.run(2, [2, 3], [12])
    query.run(2, *planned)
    assert query.rows() == [2, 3, 12] and query.open_transactions() == []
    count = sum(map(len, planned))
    assert f"Micro-batch 2 was decided with 3 rows, and its replay has {count}, or others:" in caplog.text
    query.plan(3, PLANNED_MS + 1)
    query.run(3, [4])
    assert query.rows() == [2, 3, 4, 12]


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("planned", [[[20, 21, 22]], [[2], [3]], [[]]])
def test_a_micro_batch_that_is_planned_anew_with_fewer_rows_is_refused(
    query: Query, planned: list[list[int]], is_known: bool
) -> None:
    """Also where they are a part of what was decided: the next micro-batch would write the rest again."""
    if is_known:
        query.plan(2, PLANNED_MS)
    query.run(2, [2, 3], [12, 13])
    if is_known:
        query.plan(2, PLANNED_MS + 7)
    says = (
        r"planned at 2026-11-27 \d\d:44:14.373 UTC, and this one is of 2026-11-27 \d\d:44:14.380 UTC: Spark has planned"
    )
    lost = f"with 4 rows, and now it has {sum(map(len, planned))}: .* or these have lost rows, as compacted topics do"
    with pytest.raises(SinkError, match=f"holds micro-batch 2 of this query already, {says if is_known else lost}"):
        query.run(2, *planned)
    assert query.rows() == [2, 3, 12, 13] and query.open_transactions() == []


@pytest.mark.parametrize("planned", [[[7, 8, 9]], [[2]]])
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_what_was_decided_is_visible_whole_before_a_replay_is_refused_or_taken(
    query: Query, planned: list[list[int]], is_known: bool
) -> None:
    """The driver dies after the decision; the next attempt has one task, and other rows or fewer."""
    if is_known:
        query.plan(2, PLANNED_MS)
    query.decide(2, [2], [12])
    says = f"with 2 rows, and now it has {len(planned[0])}"
    with nullcontext() if is_known else pytest.raises(SinkError, match=says):
        query.run(2, *planned)
    assert query.rows() == [2, 12] and query.open_transactions() == []


FOUR = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
TWO = [FOUR[0] + FOUR[1], FOUR[2] + FOUR[3]]
EIGHT = [each[at : at + 2] for each in FOUR for at in (0, 2)]
SHIFTED = [FOUR[1], FOUR[2], FOUR[3]]


@pytest.mark.parametrize("planned", [TWO, EIGHT, SHIFTED, [FOUR[1], FOUR[0], *FOUR[2:]]])
def test_a_decided_micro_batch_of_which_transactions_timed_out_is_written_again_if_it_is_divided_as_before(
    query: Query, planned: list[list[int]]
) -> None:
    query.plan(2, PLANNED_MS)
    query.decide(2, *FOUR, commits=[0, 1])
    query.time_out(2, 3)
    for _ in range(2):
        with pytest.raises(
            SinkError, match=r"Micro-batch 2 of this query was decided, but 2 of its 4 transactions.* as it was \(minP"
        ):
            query.run(2, *planned)
        assert query.rows() == [*range(8)] and query.open_transactions() == []
    query.run(2, *FOUR)
    query.run(2, *TWO)
    assert query.rows() == [*range(16)] and query.open_transactions() == []


def test_a_task_of_which_rows_are_there_without_a_decision_is_refused(query: Query) -> None:
    query.run(2, [2], [12])
    query.admin.delete_groups(Attempt(query.name, 2, 0).names(query.writer.options).decision())
    with pytest.raises(
        SinkError, match="rows of micro-batch 2 of this query already, and what was decided of it is gone"
    ):
        query.run(2, [2, 12])
    assert query.rows() == [2, 12] and query.open_transactions() == []


def test_a_mark_is_read_when_the_transaction_that_holds_it_has_ended(query: Query) -> None:
    (written,) = query.tasks(2, [2])
    assert written.prepared is not None
    names, prepared = written.attempt.names(query.writer.options), written.prepared
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(is_written, query.admin, names, prepared, 2)
        assert wait([found], timeout=0.5).not_done
        assert query.writer.end(query.admin, prepared, commit=True)
        assert found.result(20)


def test_a_decision_that_was_written_again_in_part_is_the_one_before(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver that replaces what timed out dies between the pieces of its decision."""
    monkeypatch.setattr(decision, "METADATA_MAX", 80)
    query.decide(2, *FOUR, commits=[0, 1])
    query.time_out(2, 3)

    class Dying(Admin):
        def alter_group_offsets(self, group: str, *args: object) -> None:  # type: ignore[override]
            if group == names.decision():
                raise KeyboardInterrupt
            asked.append(group)
            super().alter_group_offsets(group, *args)  # type: ignore[arg-type]

    names, asked = Attempt(query.name, 2, 0).names(query.writer.options), list[str]()
    messages = [TaskWritten(written) for written in query.tasks(2, *FOUR)]
    with Dying(query.address) as admin, pytest.raises(KeyboardInterrupt):
        query.writer.finish(admin, messages, 2)
    assert asked, "the decision has one piece"
    query.run(2, *FOUR)
    query.run(3, [16])
    assert query.rows() == [*range(17)] and query.open_transactions() == []


def test_the_newest_decision_counts_though_an_older_one_lies_under_another_topic(query: Query) -> None:
    """As with the column `topic`: what is decided again of a micro-batch may be of rows of other topics."""
    query.decide(2, [0], [1])
    query.time_out(0, 1)
    later = f"zz-{query.topic}"
    query.admin.create_topics(later, partitions=1)
    written = query.tasks(2, [0], [1])
    names = written[0].attempt.names(query.writer.options)
    before = decided_in(query.admin, names)
    prepared = {each.attempt.task: each.prepared for each in written if each.prepared is not None}
    made = next_decision(before, MicroBatch(2, {each.attempt.task: each.digest for each in written}), prepared)[0]
    query.writer.decide(query.admin, names, later, made)
    assert decided_in(query.admin, names) == made != before


def test_a_decision_that_cannot_be_read_stops_the_query_with_a_way_on(query: Query) -> None:
    group = Attempt(query.name, 2, 0).names(query.writer.options).decision()
    query.admin.alter_group_offsets(group, {(query.topic, 0): OffsetAndMetadata(3, metadata="4 2 0 1 x")})
    with pytest.raises(
        SinkError, match=r"is unknown: it is of version 4, and this is version 3. Nothing was written. Set"
    ):
        query.run(2, [2])
    assert query.rows() == []


def test_a_replay_that_is_divided_in_another_way_has_the_same_rows(query: Query) -> None:
    query.run(2, [2, 3, 4], [12])
    query.run(2, [12, 2], [4], [3])
    query.run(2, [4, 3, 2, 12])
    assert query.rows() == [2, 3, 4, 12]


def test_a_resize_of_the_topic_changes_nothing_that_was_decided(query: Query) -> None:
    query.run(2, [2, 3], [12])
    query.admin.resize(query.topic, 5)
    query.run(2, [2], [12, 3])
    query.run(3, [4])
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


def run_to_the_end(spark: SparkSession, flow: Flow, checkpoint: Path, limit: int) -> None:
    """Write all there is in a topic to the one beside it."""
    options = {"kafka.bootstrap.servers": flow.address, "startingOffsets": "earliest", "failOnDataLoss": "false"}
    rows = spark.readStream.format("anabranch").options(**options, maxOffsetsPerTrigger=str(limit))
    writer = rows.option("subscribe", flow.topic).load().select("key", "value").writeStream.format("anabranch")
    writer = writer.option("kafka.bootstrap.servers", flow.address).option("topic", f"{flow.topic}-out")
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


@pytest.mark.timeout(180)
def test_a_checkpoint_of_spark_tells_a_source_that_lost_rows_from_a_new_plan(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    flow = Flow(address, "told-apart")
    flow.admin.create_topics(f"{flow.topic}-out", partitions=2)
    checkpoint, whole = tmp_path / "checkpoint", 1_000

    def forget(*directories: str) -> None:
        for directory in directories:
            for name in ("0", ".0.crc"):
                (checkpoint / directory / name).unlink(missing_ok=True)

    def seen() -> list[int]:
        return sorted(int(value) for values in committed(address, f"{flow.topic}-out").values() for value in values)

    flow.send(20)
    run_to_the_end(spark, flow, checkpoint, whole)
    forget("commits")
    flow.admin.delete_records({(flow.topic, 0): 3})
    run_to_the_end(spark, flow, checkpoint, whole)
    assert seen() == [*range(20)], "a replay with fewer rows was written again"
    forget("commits", "offsets")
    with pytest.raises(
        Exception, match=f"Topic {flow.topic}-out holds micro-batch 0 of this query already, planned at "
    ):
        run_to_the_end(spark, flow, checkpoint, 6)
    assert seen() == [*range(20)]
    flow.close()


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

    flow.send(10)
    run_to_the_end(spark, flow, checkpoint, 10)
    shutil.copytree(checkpoint, tmp_path / "backup")
    flow.send(30 if lost == "three micro-batches" else 10)
    run_to_the_end(spark, flow, checkpoint, 10)
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "backup", checkpoint)
    sent = flow.sent
    flow.send(60)
    with pytest.raises(PySparkException, match=f"Topic {flow.topic}-out holds micro-batch [1-3] of this query already"):
        run_to_the_end(spark, flow, checkpoint, 1_000)
    seen = [int(value) for values in committed(address, f"{flow.topic}-out").values() for value in values]
    assert sorted(seen) == list(range(sent))
    flow.close()
