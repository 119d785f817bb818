"""The state of a bucket: a value, a timeout and the applied sequences of each of its keys, as Arrow columns.

    keys      key, value (struct, null without one), timeout (ms, -1 none), updated (ms)
    applied   row (of `keys`), topic (in the names of the schema's metadata), partition, sequence
    watermark (ms, in the metadata, too) of the last micro-batch in which the bucket was worked on; -1 none

It is stored as version, number of buckets, and the two as Arrow streams. A state of an unknown version or of another
number of buckets is refused, for its keys would be looked for in other buckets. Fields that a later query adds to the
value are null. Version 1 had no partitions: what it says of a key and a topic holds for every partition of which
nothing was applied since (`ANY_PARTITION`).

`applied` keeps every partition of a key: a path of the query that lags behind may still repeat rows of a layout long
ended. By linear hashing a key moves to one more partition with each doubling of the count, so there are few.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.records.arrow.memory import as_column, as_numbers
from anabranch.spark.keyed.errors import KeyedError
from anabranch.spark.keyed.rows import NOTHING_APPLIED, Numbers

VERSION = 2
VERSION_WITHOUT_PARTITIONS = 1
ANY_PARTITION = -1
NEVER = -1
Stored = tuple[int, int, bytes, bytes]
"""Version, number of buckets, keys, applied."""
STORED_SCHEMA = "version int, buckets int, keys binary, applied binary"
Value = tuple[Any, ...]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Applied:
    """The last applied sequence of keys in partitions of topics, each triple once."""

    rows: Numbers
    topics: Numbers
    partitions: Numbers
    sequences: Numbers
    names: tuple[str, ...] = ()
    """The topics, which `topics` numbers."""

    def of(self, rows: Numbers, topics: Sequence[str], topic_of: Numbers, partitions: Numbers) -> Numbers:
        """Return the sequence applied of each row of `keys` (below 0: none), index in `topics`, and partition."""
        number = {name: index for index, name in enumerate(self.names)}
        known = np.asarray([number.get(name, -1) for name in topics], np.int64)[topic_of]
        found = np.full(len(rows), NOTHING_APPLIED, np.int64)
        if not len(self.rows):
            return found
        width = int(max(self.partitions.max(), partitions.max(initial=0))) + 2
        triples = (self.rows * len(self.names) + self.topics) * width + self.partitions + 1
        order = np.argsort(triples, kind="stable")
        triples, sequences = triples[order], self.sequences[order]
        base = (rows * len(self.names) + known) * width
        asked = [partitions]
        if self.partitions.min() == ANY_PARTITION:
            asked.insert(0, np.full(len(rows), ANY_PARTITION, np.int64))
        for each in asked:  # What is known of the partition itself counts.
            wanted = base + each + 1
            at = np.minimum(np.searchsorted(triples, wanted), len(triples) - 1)
            hit = (rows >= 0) & (known >= 0) & (triples[at] == wanted)
            found[hit] = sequences[at][hit]
        return found

    def moved(self, places: Numbers) -> Applied:
        """Return what stays if row i becomes `places[i]`, or goes where that is below 0."""
        rows = places[self.rows]
        stays = rows >= 0
        return Applied(rows[stays], self.topics[stays], self.partitions[stays], self.sequences[stays], self.names)

    def with_last(
        self, rows: Numbers, topics: Sequence[str], topic_of: Numbers, partitions: Numbers, sequences: Numbers
    ) -> Applied:
        """Add rows that were applied: the highest sequence of each key, topic and partition counts."""
        names = tuple(dict.fromkeys([*self.names, *topics]))
        number = {name: index for index, name in enumerate(names)}
        renamed = np.asarray([number[name] for name in topics], np.int64)[topic_of]
        all_rows = np.concatenate((self.rows, rows))
        all_topics = np.concatenate((self.topics, renamed))
        all_partitions = np.concatenate((self.partitions, partitions))
        all_sequences = np.concatenate((self.sequences, sequences))
        order = np.lexsort((all_sequences, all_partitions, all_topics, all_rows))
        last = np.ones(len(order), np.bool_)
        last[:-1] = np.any([np.diff(each[order]) != 0 for each in (all_rows, all_topics, all_partitions)], axis=0)
        kept = order[last]
        return Applied(all_rows[kept], all_topics[kept], all_partitions[kept], all_sequences[kept], names)


def _none() -> Numbers:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class BucketState:
    """The keys of a bucket with what is known of each."""

    keys: pa.Array
    values: pa.StructArray
    timeouts: Numbers
    updated: Numbers
    applied: Applied
    watermark_ms: int = NEVER
    """Of the last micro-batch in which the bucket was worked on."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def is_blank(self) -> bool:
        """Whether nothing need be kept: a watermark is kept without keys, too, since rows are late by it."""
        return not len(self) and self.watermark_ms == NEVER

    def find(self, keys: pa.Array) -> Numbers:
        """Return the row of each key, or -1."""
        found = pc.index_in(keys, value_set=self.keys)
        return _int64(pc.fill_null(found, -1))

    def values_at(self, rows: Numbers) -> list[Value | None]:
        """Return the values of rows as tuples; None for a row below 0 and a key without a value."""
        return to_tuples(self.values.take(pa.array(rows, mask=rows < 0)))

    def keep(self, stays: Flags) -> BucketState:
        """Return the state with the rows only of which `stays` is true."""
        if bool(stays.all()):
            return self
        mask = pa.array(stays)
        places = np.where(stays, np.cumsum(stays) - 1, -1)
        return BucketState(
            self.keys.filter(mask),
            self.values.filter(mask),
            self.timeouts[stays],
            self.updated[stays],
            self.applied.moved(places),
            self.watermark_ms,
        )


def empty(key_type: pa.DataType, value_type: pa.StructType) -> BucketState:
    """Return the state of a bucket that has no keys."""
    nothing = Applied(_none(), _none(), _none(), _none())
    return BucketState(pa.array([], key_type), pa.array([], value_type), _none(), _none(), nothing)


# -- values ------------------------------------------------------------------------------------------------------------


def to_tuples(values: pa.StructArray) -> list[Value | None]:
    """Return the values of a struct column as tuples."""
    if not values.type.num_fields:
        return [() if there else None for there in values.is_valid().to_pylist()]
    tuples: list[Value | None] = list(zip(*(field.to_pylist() for field in values.flatten()), strict=True))
    if values.null_count:
        return [value if there else None for value, there in zip(tuples, values.is_valid().to_pylist(), strict=True)]
    return tuples


def from_tuples(values: Sequence[Value | None], kind: pa.StructType, what: str) -> pa.StructArray:
    """Return tuples as a struct column. Raises `KeyedError`, which begins with `what`, for a value of another type."""
    fields = list(kind)
    blank = (None,) * len(fields)
    filled = [blank if value is None else value for value in values]
    if not all(isinstance(value, tuple | list) for value in filled):
        wrong = next(value for value in filled if not isinstance(value, tuple | list))
        raise KeyedError(f"{what} is {wrong!r}; it must be a tuple with the fields {_names(kind)}.")
    if any(len(value) != len(fields) for value in filled):
        wrong = next(value for value in filled if len(value) != len(fields))
        raise KeyedError(f"{what} has {len(wrong)} fields, {wrong!r}; there are {len(fields)}: {_names(kind)}.")
    columns = list(zip(*filled, strict=True)) or [()] * len(fields)
    arrays = []
    for field, column in zip(fields, columns, strict=True):
        try:
            arrays.append(pa.array(column, field.type))
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise KeyedError(f"{what}: the field {field.name} must be {field.type}: {error}") from error
    mask = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=mask)


def _names(kind: pa.StructType) -> str:
    return ", ".join(field.name for field in kind)


# -- the stored form ---------------------------------------------------------------------------------------------------


def encode(state: BucketState, buckets: int) -> Stored:
    """Return the stored form of a state."""
    keys = pa.record_batch(
        {
            "key": state.keys,
            "value": state.values,
            "timeout": as_column(state.timeouts),
            "updated": as_column(state.updated),
        }
    )
    applied = pa.record_batch(
        {
            "row": as_column(state.applied.rows.astype(np.int32)),
            "topic": as_column(state.applied.topics.astype(np.int32)),
            "partition": as_column(state.applied.partitions.astype(np.int32)),
            "sequence": as_column(state.applied.sequences),
        }
    ).replace_schema_metadata({"topics": json.dumps(state.applied.names), "watermark": str(state.watermark_ms)})
    return VERSION, buckets, _to_bytes(keys), _to_bytes(applied)


def decode(stored: Stored, buckets: int, key_type: pa.DataType, value_type: pa.StructType) -> BucketState:
    """Return the state of a stored form. Raises `KeyedError` if this query cannot go on with it."""
    version, made_with, keys_data, applied_data = stored
    if version not in (VERSION, VERSION_WITHOUT_PARTITIONS):
        raise KeyedError(f"The state has version {version}, this is version {VERSION}: start from a new checkpoint.")
    if made_with != buckets:
        raise KeyedError(f"The state was made with buckets={made_with}: set that, or start from a new checkpoint.")
    keys, applied = _from_bytes(keys_data), _from_bytes(applied_data)
    if keys.column("key").type != key_type:
        raise KeyedError(f"The state has keys of type {keys.column('key').type}; the rows have {key_type}.")
    sequences = _int64(applied.column("sequence"))
    partitions = np.full(len(sequences), ANY_PARTITION, np.int64)
    if version != VERSION_WITHOUT_PARTITIONS:
        partitions = _int64(applied.column("partition"))
    return BucketState(
        keys.column("key"),
        _adapted(keys.column("value"), value_type),
        _int64(keys.column("timeout")),
        _int64(keys.column("updated")),
        Applied(
            _int64(applied.column("row")),
            _int64(applied.column("topic")),
            partitions,
            sequences,
            tuple(json.loads(applied.schema.metadata[b"topics"])),
        ),
        int(applied.schema.metadata.get(b"watermark", NEVER)),
    )


def _adapted(values: pa.StructArray, kind: pa.StructType) -> pa.StructArray:
    """Return values with the fields of `kind`: those that were not there are null."""
    if values.type == kind:
        return values
    had = {field.name: field.type for field in values.type}
    gone = [name for name in had if kind.get_field_index(name) < 0]
    if gone:
        raise KeyedError(
            f"The stored state has a field {gone[0]}, which this query's state lacks: fields may be added only."
        )
    flat = dict(zip(had, values.flatten(), strict=True))
    arrays = []
    for field in kind:
        if field.name in had and had[field.name] != field.type:
            raise KeyedError(f"The field {field.name} of the stored state is {had[field.name]}, not {field.type}.")
        arrays.append(flat[field.name] if field.name in had else pa.nulls(len(values), field.type))
    return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=values.is_null())


def _int64(column: pa.Array) -> Numbers:
    return as_numbers(column.cast(pa.int64()))


def _to_bytes(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _from_bytes(data: bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()
