"""Rows of a bucket as Arrow messages: how they cross Spark's shuffle and its state operator, whole and without pandas.

A message is an Arrow record batch without its schema, which both ends know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.records.arrow.memory import as_column, as_numbers
from anabranch.spark.keyed.rows import runs

PACKED_SIZE_MAX = 4 * 1024 * 1024
"""Bytes of rows that a task holds before it packs them: as many as stay in a processor's cache while being sorted."""
BUCKETS_MAX = 1 << 16
BUCKET = "bucket"
ROWS = "rows"
EVENT_TIME = "event_time"
EVENT_TIME_TYPE = pa.timestamp("us", "UTC")


def pack(
    batches: Iterable[pa.RecordBatch], rows: pa.Schema, event_time: str | None, size_max: int = PACKED_SIZE_MAX
) -> Iterator[pa.RecordBatch]:
    """Yield (bucket, message) of batches whose first column is the bucket; with `event_time` also its latest."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            size += batch.nbytes
        if size >= size_max:
            yield _packed(pa.concat_batches(held), rows, event_time)
            held, size = [], 0
    if held:
        yield _packed(pa.concat_batches(held), rows, event_time)


def _packed(batch: pa.RecordBatch, rows: pa.Schema, event_time: str | None) -> pa.RecordBatch:
    buckets = as_numbers(batch.column(0).cast(pa.int64()))
    order = np.argsort(buckets.astype(np.uint16), kind="stable")
    columns = [column.cast(field.type) for column, field in zip(batch.columns[1:], rows, strict=True)]
    ordered = pa.RecordBatch.from_arrays(columns, schema=rows).take(pa.array(order))
    bounds = runs(buckets[order]).tolist()
    parts = [ordered.slice(first, end - first) for first, end in pairwise(bounds)]
    packed = {
        BUCKET: as_column(buckets[order][bounds[:-1]].astype(np.int32)),
        ROWS: pa.array([to_message(part) for part in parts], pa.binary()),
    }
    if event_time is not None:
        latest = [pc.max(part.column(event_time)).cast(EVENT_TIME_TYPE).value for part in parts]
        packed[EVENT_TIME] = pa.array(latest, pa.int64()).cast(EVENT_TIME_TYPE)
    return pa.record_batch(packed)


def to_message(batch: pa.RecordBatch) -> bytes:
    """Return a batch as one message."""
    return bytes(batch.serialize())


def from_message(message: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch of a message."""
    return pa.ipc.read_record_batch(pa.py_buffer(message), schema)


def from_messages(messages: Iterable[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of several messages as one batch."""
    batches = [from_message(message, schema) for message in messages]
    return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema)
