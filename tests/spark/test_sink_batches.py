"""A batch write becomes visible whole, or not at all; what is left to clean up fails nothing. On a real broker."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from anabranch.client import PreparedTransaction
from anabranch.client.sync import Admin, Producer
from anabranch.spark.options import UnreachableError
from anabranch.spark.sink import decision
from anabranch.spark.sink.options import parse
from anabranch.spark.sink.task import Attempt, SinkError, write
from anabranch.spark.sink.writer import BatchWriter, TaskWritten
from tests.spark.test_sink import committed
from tests.support.broker import running

NAMES = ("key", "value")
SCHEMA = StructType([StructField(name, BinaryType()) for name in NAMES])
TASKS = 4
ALL = [*range(TASKS * 10)]


def write_one(address: str, topic: str | None, column: str | None = None, **options: str) -> None:
    """Write a row to a topic that the option names, or the column."""
    given = {"kafka.bootstrap.servers": address, "kafka.max.block.ms": "500", "kafka.delivery.timeout.ms": "31000"}
    given |= {"topic": topic} if topic else {}
    names = NAMES if column is None else (*NAMES, "topic")
    row = pa.record_batch([pa.array([b"x"]), pa.array([b"x"]), pa.array([column], pa.string())], (*NAMES, "topic"))
    write(parse({**given, **options}), names, Attempt("one", 0, 0), iter([row]))


class OneBatch:
    """A batch write of four tasks with ten rows each."""

    def __init__(self, address: str, topic: str, make_admin: Callable[..., Admin] = Admin) -> None:
        class Writer(BatchWriter):
            def admin(self) -> Admin:
                return make_admin(address)

        self.address, self.topic = address, topic
        self.writer = Writer(parse({"kafka.bootstrap.servers": address, "topic": topic}), SCHEMA)
        self.messages = [TaskWritten(self._task(task)) for task in range(TASKS)]

    def _task(self, task: int) -> object:
        texts = pa.array([b"%d" % number for number in ALL[10 * task : 10 * task + 10]], pa.binary())
        rows = iter([pa.record_batch([texts, texts], NAMES)])
        return write(self.writer.options, NAMES, Attempt(self.writer.id, 0, task), rows)

    def commit(self) -> None:
        """End the write as Spark does."""
        try:
            self.writer.commit([*self.messages])
        except Exception:
            self.writer.abort([*self.messages])
            raise

    def prepared(self, task: int) -> PreparedTransaction:
        found: PreparedTransaction = self.messages[task].written.prepared
        return found

    def lose(self, task: int) -> None:
        """Have a transaction aborted, as by its timeout."""
        with Producer(self.address, transactional_id=self.prepared(task).transactional_id) as producer:
            producer.init_transactions()

    def rows(self) -> list[int]:
        """What readers see."""
        return sorted(int(value) for values in committed(self.address, self.topic).values() for value in values)

    def groups(self) -> list[str]:
        """The groups of the write that exist."""
        with Admin(self.address) as admin:
            return [each.group_id for each in admin.list_groups() if self.writer.id in each.group_id]


@pytest.fixture
def topic(address: str, request: pytest.FixtureRequest) -> Iterator[str]:
    name = re.sub(r"[^\w.-]", "-", request.node.name)
    with Admin(address) as admin:
        admin.create_topics(name, partitions=2)
        yield name


def test_a_write_of_which_a_transaction_is_lost_leaves_nothing_and_can_be_written_again(
    address: str, topic: str
) -> None:
    batch = OneBatch(address, topic)
    batch.lose(1)
    says = r"Nothing was written: of 4 transactions 1 were no longer open.*-1:.*transaction.timeout.ms \(now 600000\)"
    with pytest.raises(SinkError, match=says):
        batch.commit()
    assert batch.rows() == [] and batch.groups() == []
    with Admin(address) as admin:
        found = admin.describe_transactions([batch.prepared(task).transactional_id for task in range(TASKS)])
    assert "Ongoing" not in {each.state for each in found.values()}
    OneBatch(address, topic).commit()
    assert batch.rows() == ALL


def test_a_write_that_is_lost_in_part_behind_its_decision_says_that_writing_again_doubles_rows(
    address: str, topic: str
) -> None:
    class Late(Admin):
        def alter_group_offsets(self, *args: object) -> None:  # type: ignore[override]
            super().alter_group_offsets(*args)  # type: ignore[arg-type]
            batch.lose(2)

    batch = OneBatch(address, topic, Late)
    with pytest.raises(SinkError, match=r"rows of 1 of 4 tasks are missing.*the other 3 tasks are in the topic"):
        batch.commit()
    assert batch.rows() == [*range(20), *range(30, 40)]


class AskedTwice(Admin):
    """An admin whose requests to delete are sent again, for their answers were lost."""

    def delete_groups(self, groups: str | Iterable[str]) -> None:
        super().delete_groups(groups)
        super().delete_groups(groups)


class Away(Admin):
    """An admin of a cluster whose coordinators of groups go away."""

    def delete_groups(self, groups: str | Iterable[str]) -> None:
        raise ConnectionError(f"no answer about {groups}")


def test_groups_that_are_gone_already_fail_no_write(address: str, topic: str) -> None:
    batch = OneBatch(address, topic, AskedTwice)
    batch.commit()
    assert batch.rows() == ALL and batch.groups() == []


def test_groups_that_cannot_be_deleted_fail_no_write(
    address: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch = OneBatch(address, topic, Away)
    with caplog.at_level(logging.WARNING, "anabranch.spark.sink"):
        batch.commit()
    assert batch.rows() == ALL and len(batch.groups()) == TASKS + 1
    assert "5 groups of a write that is complete were not deleted" in caplog.text


def test_all_pieces_of_a_long_decision_are_deleted(address: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "METADATA_MAX", 80)
    made: list[int] = []
    batch = OneBatch(address, topic)
    write_it = batch.writer.decide
    monkeypatch.setattr(batch.writer, "decide", lambda *args: (write_it(*args), made.append(len(batch.groups()))))
    batch.commit()
    assert made[0] >= 3, "the decision was not long"
    assert batch.rows() == ALL and batch.groups() == []


def test_commits_that_can_no_longer_succeed_are_not_tried_one_after_the_other(address: str, topic: str) -> None:
    class Gone(Admin):
        def end_transaction(self, prepared: PreparedTransaction, *, commit: bool) -> None:
            asked.append(prepared)
            batch.writer.commits_end = 0.0
            raise ConnectionError("no coordinator")

    asked: list[PreparedTransaction] = []
    batch = OneBatch(address, topic, Gone)
    with Gone(address) as admin:
        ended = [batch.writer.end(admin, batch.prepared(task), commit=True) for task in range(TASKS)]
    assert ended == [False] * TASKS and len(asked) == 1


DELIVERIES = ({"delivery": "exactly-once"}, {"delivery": "at-least-once"})


@pytest.mark.parametrize("options", DELIVERIES, ids=str)
def test_a_write_without_a_broker_names_the_option_and_the_address(options: dict[str, str]) -> None:
    with pytest.raises(
        (UnreachableError, SinkError), match=r"^kafka.bootstrap.servers is 127.0.0.1:1\b.* no connection"
    ):
        write_one("127.0.0.1:1", "t", **options)


@pytest.mark.parametrize("options", DELIVERIES, ids=str)
@pytest.mark.parametrize(
    ("topic", "column", "named"),
    [
        ("nowhere", None, "topic is 'nowhere'"),
        (None, "nowhere", "the column topic names the topics"),
    ],
)
def test_a_write_to_a_topic_that_does_not_exist_names_it_and_who_names_it(
    address: str, topic: str | None, column: str | None, named: str, options: dict[str, str]
) -> None:
    says = f"^kafka.bootstrap.servers is {address}, {named}: .*there is no topic 'nowhere'; create it first"
    with pytest.raises(SinkError, match=says):
        write_one(address, topic, column, **options, **{"kafka.allow.auto.create.topics": "false"})


def test_a_commit_without_a_broker_names_the_option_and_the_address(tmp_path: Path) -> None:
    with running(tmp_path / "own") as own:
        with Admin(own.address) as admin:
            admin.create_topics("stopped", partitions=2)
        batch = OneBatch(own.address, "stopped", lambda address: Admin(address, default_api_timeout_ms=500))
        own.stop()
        with pytest.raises(UnreachableError, match=f"^kafka.bootstrap.servers is {own.address}: no connection"):
            batch.writer.commit([*batch.messages])
