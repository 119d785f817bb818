"""Two attempts of one task of the sink, on a real broker: whichever Spark takes, every row is there once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.client.sync import Admin
from anabranch.spark.sink.decision import Names
from anabranch.spark.sink.options import parse
from anabranch.spark.sink.task import Attempt, SinkError, Written, write
from anabranch.spark.sink.writer import StreamWriter, TaskWritten
from tests.spark.test_sink import committed

BATCH_ID = 4
NAMES = ("key", "value")
SCHEMA = StructType([StructField(name, BinaryType()) for name in NAMES])
Half: TypeAlias = Callable[[], None]


class Killed(Exception):  # noqa: N818
    """Spark has had enough of an attempt."""


class Twice:
    """A task of a micro-batch with ten rows, each of a key of its own, and the driver."""

    def __init__(self, address: str, topic: str) -> None:
        self.address, self.topic = address, topic
        self.writer = StreamWriter(parse({"kafka.bootstrap.servers": address, "topic": topic}), SCHEMA)
        self.admin = Admin(address)
        self.admin.create_topics(topic, partitions=2)

    def attempt(self, half_way: Half = lambda: None) -> Written:
        """Run an attempt of the task; `half_way` is called when five of its rows are sent."""

        def rows() -> Iterator[pa.RecordBatch]:
            for numbers in (range(5), range(5, 10)):
                texts = pa.array([b"%d" % number for number in numbers], pa.binary())
                yield pa.record_batch([texts, texts], NAMES)
                if not numbers.start:
                    half_way()

        return write(self.writer.options, NAMES, Attempt(self.topic, BATCH_ID, 0), rows())

    def take(self, written: Written) -> None:
        """End the micro-batch as the driver does, with what one attempt has returned."""
        self.writer.finish(self.admin, [TaskWritten(written)], BATCH_ID)

    def rows(self) -> list[int]:
        """What readers see."""
        return sorted(int(value) for values in committed(self.address, self.topic).values() for value in values)


class ByColumn:
    """Micro-batches of one task and one row, with the column `topic`."""

    def __init__(self, address: str, topic: str, admin: Admin) -> None:
        schema = StructType([StructField("topic", StringType()), StructField("value", BinaryType())])
        self.topic, self.admin = topic, admin
        self.writer = StreamWriter(parse({"kafka.bootstrap.servers": address}), schema)

    def run(self, batch_id: int) -> None:
        """Run a micro-batch."""
        names = ("topic", "value")
        row = pa.record_batch([pa.array([self.topic]), pa.array([b"%d" % batch_id], pa.binary())], names)
        written = write(self.writer.options, names, Attempt(self.topic, batch_id, 0), iter([row]))
        self.writer.finish(self.admin, [TaskWritten(written)], batch_id)


@pytest.fixture
def twice(address: str, request: pytest.FixtureRequest) -> Iterator[Twice]:
    task = Twice(address, request.node.name.replace("[", "-").replace("]", ""))
    yield task
    task.admin.close()


def test_an_attempt_that_goes_on_while_a_second_one_writes_is_fenced(twice: Twice) -> None:
    taken: list[Written] = []
    with pytest.raises(AnabranchError, match=r"fenced|epoch"):
        twice.attempt(lambda: taken.append(twice.attempt()))
    assert twice.rows() == []
    twice.take(taken[0])
    assert twice.rows() == [*range(10)]


@pytest.mark.parametrize("second", ["killed", "ends"])
def test_a_second_attempt_that_begins_when_the_first_is_prepared_has_the_micro_batch_written_again(
    twice: Twice, second: str
) -> None:
    """Spark takes the first, whose transaction the second has aborted: so the query has to be started again."""
    first = twice.attempt()
    if second == "ends":
        twice.attempt()
    else:

        def kill() -> None:
            raise Killed

        with pytest.raises(Killed):
            twice.attempt(kill)
    with pytest.raises(SinkError, match=r"by a second attempt of a task \(spark.speculation\). Start the query again"):
        twice.take(first)
    assert twice.rows() == []
    twice.take(twice.attempt())
    assert twice.rows() == [*range(10)]
    twice.take(twice.attempt())
    assert twice.rows() == [*range(10)], "a replay of a micro-batch that is there wrote it again"


def test_an_offset_that_a_resize_gave_the_group_of_a_task_is_no_mark(address: str) -> None:
    """With the column `topic`: the group has the log start of a partition that was made again."""
    topic = "shrunk-and-grown"
    with Admin(address) as admin:
        admin.create_topics(topic, partitions=2)
        query = ByColumn(address, topic, admin)
        query.run(0)
        mark = Names(query.writer.options.prefix, topic, None).task(0)
        assert admin.list_group_offsets(mark).keys() == {TopicPartition(topic, 0)}
        admin.alter_group_offsets(mark, {(topic, 1): 117})
        query.run(1)
    assert sorted(committed(address, topic)[None]) == [b"0", b"1"]  # type: ignore[index]
