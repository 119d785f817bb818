"""From Arrow tables to columns of records: choose each role's column, check its type, cut the table into slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from anabranch.client.producer.rows import ColumnNames, Columns
from anabranch.records.batch import RECORD_OVERHEAD_MAX

HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def columns_of(
    table: pa.Table | pa.RecordBatch,
    wanted: ColumnNames,
    *,
    partition: int | None,
    delivery: Any,
    now_ms: int,
    size_max: int,
) -> Iterator[tuple[Columns, int]]:
    """Yield the rows of `table` as columns of records, in order, each slice with its size of about `size_max` bytes.

    Raises `TypeError` or `ValueError`, before the first slice, for a missing column or one of another type.
    """
    key = None if wanted.key == "key" and "key" not in table.schema.names else wanted.key
    projected = {
        "key": _bytes_column(table, key, "key"),
        "value": _bytes_column(table, wanted.value, "value"),
        "headers": _headers_column(table, wanted.headers),
        "timestamp": _timestamp_column(table, wanted.timestamp),
    }
    present = {name: column for name, column in projected.items() if column is not None}
    count = table.num_rows
    if not present:
        present = {"value": pa.nulls(count, pa.binary())}
    return _slices(pa.table(present), partition, delivery, now_ms, size_max)


def _slices(
    records: pa.Table, partition: int | None, delivery: Any, now_ms: int, size_max: int
) -> Iterator[tuple[Columns, int]]:
    names = records.schema.names
    for whole in records.to_batches():
        row_size = max(1, whole.nbytes // max(1, whole.num_rows)) + RECORD_OVERHEAD_MAX
        step = max(1, size_max // row_size)
        for first in range(0, whole.num_rows, step):
            batch = whole.slice(first, step)
            count = batch.num_rows
            timestamps = batch.column("timestamp").to_numpy(zero_copy_only=False) if "timestamp" in names else now_ms
            columns = Columns(
                batch.column("key") if "key" in names else None,
                batch.column("value") if "value" in names else pa.nulls(count, pa.binary()),
                timestamps,
                batch.column("headers") if "headers" in names else None,
                partition,
                delivery,
            )
            yield columns, row_size * count


def _column(table: pa.Table | pa.RecordBatch, name: str, role: str) -> Any:
    if name not in table.schema.names:
        has = ", ".join(table.schema.names) or "none"
        raise ValueError(f"there is no column '{name}' to take the {role} from; the table has {has}")
    return table.column(name)


def _bytes_column(table: pa.Table | pa.RecordBatch, name: str | None, role: str) -> Any:
    if name is None:
        return None
    column = _column(table, name, role)
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = kind.value_type
    if pa.types.is_binary(kind):
        return column
    if pa.types.is_null(kind) or pa.types.is_string(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    if any(is_kind(kind) for is_kind in (pa.types.is_large_string, pa.types.is_large_binary)) or str(kind) in (
        "string_view",
        "binary_view",
    ):
        return column.cast(pa.binary())
    raise TypeError(f"column '{name}' is {kind}; a {role} is binary or text: cast or serialise it first")


def _headers_column(table: pa.Table | pa.RecordBatch, name: str | None) -> Any:
    if name is None:
        return None
    column = _column(table, name, "headers")
    try:
        return column.cast(HEADERS_TYPE)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        text = f"column '{name}' is {column.type}; headers are lists of structs of key: string and value: binary"
        raise TypeError(text) from None


def _timestamp_column(table: pa.Table | pa.RecordBatch, name: str | None) -> Any:
    if name is None:
        return None
    column = _column(table, name, "timestamp")
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
    elif pa.types.is_integer(column.type):
        column = column.cast(pa.int64())
    else:
        raise TypeError(f"column '{name}' is {column.type}; a timestamp is an Arrow timestamp or int64 ms since 1970")
    if column.null_count:
        raise ValueError(f"column '{name}' has {column.null_count} nulls; every record needs a timestamp")
    return column
