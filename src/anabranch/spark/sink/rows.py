"""From the rows of a query to records: the columns that a topic takes, and where each row goes.

The columns are those of Spark's Kafka sink, and `timestamp`. A row names its topic, unless the option does, and may
name its partition; otherwise its key decides, through every resize. The partition in a frame of the source is that of
the topic that was read, and decides nothing. Nothing here runs once per row.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VarcharType,
)

from anabranch.base.errors import AnabranchError
from anabranch.records.arrow.encode import hash_keys
from anabranch.spark.options import OptionError
from anabranch.spark.sink.decision import Digest

TEXT_OR_BYTES: tuple[type[DataType], ...] = (BinaryType, StringType, VarcharType)
HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
TYPES: dict[str, tuple[str, tuple[type[DataType], ...]]] = {
    "key": ("binary or string", TEXT_OR_BYTES),
    "value": ("binary or string", TEXT_OR_BYTES),
    "topic": ("string", (StringType, VarcharType)),
    "partition": ("int", (IntegerType,)),
    "timestamp": ("timestamp, or bigint of milliseconds", (TimestampType, LongType)),
    "headers": (HEADERS.simpleString(), (ArrayType,)),
}
"""The columns of a write: the types in words, and as Spark's."""
PASSED_OVER = ("offset", "timestampType", "sequence")
"""Columns of the source that mean nothing to the topic that is written: a query can read and write without a select."""
OF_A_SOURCE = frozenset({"offset", "sequence"})
"""Beside one of these the column partition means nothing to it either."""


class RowError(AnabranchError, ValueError):
    """A row that no topic can take."""


def check(schema: StructType, topic: str | None) -> tuple[str, ...]:
    """Return the columns that are written. Raises `OptionError` for a schema that cannot be."""
    double = sorted(name for name, count in Counter(schema.names).items() if count > 1)
    if double:
        raise OptionError(f"There are several columns '{double[0]}'; drop all but one, or rename them.")
    for field in schema.fields:
        if field.name in PASSED_OVER:
            continue
        known = TYPES.get(field.name)
        if known is None:
            raise OptionError(
                f"There is no column '{field.name}' in a record; there are {', '.join(TYPES)}. Select these, for "
                "example with to_json(struct(*)) AS value."
            )
        words, kinds = known
        if not isinstance(field.dataType, kinds) or (field.name == "headers" and not _are_headers(field.dataType)):
            raise OptionError(f"Column {field.name} is {field.dataType.simpleString()}; it must be {words}: cast it.")
    if "value" not in schema.names:
        raise OptionError("A record needs a column value; it may be null in a compacted topic, to delete the key.")
    if topic is None and "topic" not in schema.names:
        raise OptionError("Name the topic with the option topic, or in a column topic of every row.")
    others = {*([] if topic is None else ["topic"]), *(["partition"] if _is_read(schema) else [])}
    return tuple(name for name in schema.names if name in TYPES and name not in others)


def _is_read(schema: StructType) -> bool:
    """Whether the rows still have the places from where a source has read them."""
    return not OF_A_SOURCE.isdisjoint(schema.names)


def _are_headers(kind: DataType) -> bool:
    element = kind.elementType if isinstance(kind, ArrayType) else None
    if not isinstance(element, StructType) or [field.name for field in element.fields] != ["key", "value"]:
        return False
    return isinstance(element["key"].dataType, StringType) and isinstance(element["value"].dataType, BinaryType)


def parts(
    rows: pa.RecordBatch, names: tuple[str, ...], topic: str | None
) -> Iterator[tuple[str, int | None, pa.RecordBatch]]:
    """Yield the rows by topic and partition (None: as the keys say), each in the order of `rows`."""
    columns = {name: rows.column(name) for name in names if name not in ("topic", "partition")}
    if "timestamp" in columns:
        columns["timestamp"] = _with_times(columns["timestamp"])
    records = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    for name, of_topic in _split(rows.column("topic") if topic is None else None):
        if topic is None and name is None:
            raise RowError("the column topic of a row is null: name a topic in every row, or set the option topic")
        chosen = _taken(records, of_topic)
        numbers = _taken(rows.column("partition"), of_topic) if "partition" in names else None
        for partition, of_partition in _split(numbers):
            yield topic or str(name), partition, _taken(chosen, of_partition)


def digest_of(rows: pa.RecordBatch, names: tuple[str, ...]) -> Digest:
    """Return the digest of rows, which does not depend on their order."""
    return Digest(rows.num_rows, int(hash_keys(rows.column("key")).sum(dtype=np.int64)) if "key" in names else 0)


def _split(column: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each value of a column with the rows that have it; None for all of them."""
    if column is None:
        yield None, None
        return
    values = pc.unique(column)
    if len(values) < 2:
        yield from ((value, None) for value in values.to_pylist())
        return
    places = pc.index_in(column, values).to_numpy(zero_copy_only=False)
    for number, value in enumerate(values.to_pylist()):
        yield value, pa.array(np.flatnonzero(places == number))


def _taken(data: Any, rows: Any) -> Any:
    return data if rows is None else data.take(rows)


def _with_times(column: Any) -> Any:
    """The column with the present time where it has none."""
    if not column.null_count:
        return column
    now: Any = pa.scalar(int(time.time() * 1000), pa.int64())
    if pa.types.is_timestamp(column.type):
        now = now.cast(pa.timestamp("ms", "UTC"))
    return pc.fill_null(column, now.cast(column.type))
