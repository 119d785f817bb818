"""Which columns of a frame are written, and where its rows go."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from anabranch.client.cluster.connection import ConnectError
from anabranch.spark.options import OptionError, UnreachableError
from anabranch.spark.sink.options import parse
from anabranch.spark.sink.rows import check, digest_of, parts
from anabranch.spark.sink.writer import StreamWriter
from anabranch.spark.source import full_schema


def schema_of(*names: str) -> StructType:
    return StructType([each for each in full_schema(headers=True).fields if each.name in names])


def test_the_partition_of_a_frame_of_the_source_places_nothing() -> None:
    names = check(full_schema(headers=True), "late")
    assert names == ("key", "value", "timestamp", "headers")
    rows = pa.RecordBatch.from_pydict({"key": [b"a", b"b"], "value": [b"1", b"2"], "partition": [5, 2]})
    assert [(topic, place, part.num_rows) for topic, place, part in parts(rows, names[:2], "late")] == [
        ("late", None, 2)
    ]


@pytest.mark.parametrize(
    ("columns", "placed"),
    [
        (("value", "partition"), True),
        (("value", "partition", "timestamp", "timestampType"), True),
        (("value", "partition", "offset"), False),
        (("value", "partition", "sequence"), False),
    ],
)
def test_a_column_partition_counts_where_it_is_not_that_of_a_source(columns: tuple[str, ...], placed: bool) -> None:
    assert ("partition" in check(schema_of(*columns), "late")) == placed


def test_a_digest_depends_on_rows_and_keys_alone_however_they_are_divided() -> None:
    rows = pa.RecordBatch.from_pydict({"key": [b"a", None, b"b"], "value": [b"1", b"2", b"3"]})
    names = ("key", "value")
    text = pa.RecordBatch.from_pydict({"value": ["9", "9", "9"], "key": ["b", "a", None]})
    whole = digest_of(rows, names)
    assert whole == digest_of(text, names) == digest_of(rows[:1], names) + digest_of(rows[1:], names)
    assert whole.rows == 3 and whole != digest_of(rows.take([0, 1, 1]), names)
    assert digest_of(rows, ("value",)) == digest_of(rows.take([1, 1, 1]), ("value",))


def test_columns_of_one_name_are_refused() -> None:
    double = StructType([*full_schema(headers=False).fields, *schema_of("key").fields])
    with pytest.raises(OptionError, match="There are several columns 'key'; drop all but one, or rename them"):
        check(double, "late")


def test_what_is_said_of_headers_to_a_source_may_be_said_to_a_write_and_retries_are_a_time() -> None:
    least = {"kafka.bootstrap.servers": "broker:9092", "topic": "t"}
    assert parse({**least, "includeHeaders": "true"}) == parse(least)
    with pytest.raises(OptionError, match=r"kafka.retries is not supported: .* set that"):
        parse({**least, "kafka.retries": "3"})


def test_brokers_that_were_reached_once_are_waited_for_in_later_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write is made anew for each: one that began while a broker was away for a moment ended the query."""
    away: list[str] = []

    def describe() -> None:
        if away:
            raise ConnectError(away[0])

    admin = contextlib.nullcontext(SimpleNamespace(describe_cluster=describe))
    monkeypatch.setattr(StreamWriter, "admin", lambda self: admin)
    StreamWriter(parse({"bootstrap.servers": "reached:1", "topic": "t"}), schema_of("key", "value"))
    away.append("refused")
    StreamWriter(parse({"bootstrap.servers": "reached:1", "topic": "t"}), schema_of("key", "value"))
    with pytest.raises(UnreachableError, match=r"bootstrap\.servers"):
        StreamWriter(parse({"bootstrap.servers": "never:1", "topic": "t"}), schema_of("key", "value"))
