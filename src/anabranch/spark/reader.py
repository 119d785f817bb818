"""Executor side: read the offsets of a task, and yield Arrow record batches in Spark's schema.

A `RangeReader` of the client fetches, always one fetch ahead of the data being decoded. No code here runs per record:
the kernels of `records` turn bytes into columns, and constant columns are slices of a cached array. One reader per
worker process serves all tasks of that process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.base.errors import DecodeError
from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.range_reader import (
    FetchedRange,
    OffsetRange,
    OffsetsGoneError,
    RangeReader,
    RangeReaderSettings,
    decode_range,
    next_offset_of,
)
from anabranch.machines.lineage import sequence_base
from anabranch.machines.partition.sharing import KEYS_MAX, KEYS_SIZE_MAX, Asked
from anabranch.records.arrow.memory import as_column, as_numbers
from anabranch.records.shares import KeyShare
from anabranch.spark.options import Options
from anabranch.spark.plan import WHOLE, DataLossError, KeyRange, Loss, Read, Task, keys_within
from anabranch.spark.snapshot import connection_settings
from anabranch.spark.workers import set_imports_aside

ARROW_TYPES: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestampType": pa.int32(),
    "sequence": pa.int64(),
    "headers": pa.list_(pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))),
}
"""The columns of the source and the Arrow types Spark expects."""
DECODED_NAMES = {"timestampType": "timestamp_type", "sequence": "offset"}
"""The kernel's column for each column whose name differs."""

DECODED_SIZE_MAX = 7 * 1024 * 1024
"""Bytes of records after which a record batch is yielded: a slab holds both keys and values of so many."""

log = logging.getLogger("anabranch.spark")


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """A task's settings, besides its offset ranges."""

    options: Options
    columns: tuple[str, ...]
    """In the order of the schema."""
    keys: frozenset[bytes] | None = None
    """The keys wanted; None: all, and records without a key."""


def read_task(task: Task, settings: ReadSettings) -> Iterator[pa.RecordBatch]:
    """Yield a task's records, every key of its range in order, in batches of about `DECODED_SIZE_MAX` bytes.

    Where only some keys are wanted, brokers filter if the topic allows that, and what they send is looked at again.
    """
    wanted = None if settings.keys is None else keys_within(task, settings.keys)
    if wanted == ():
        return
    make = _Columns(settings.columns, with_keys=wanted is not None)
    options = settings.options
    check_crc = bool(options.client.get("kafka.check.crcs", True))
    values = None if wanted is None else pa.array(wanted, pa.binary())
    for fetched in _reader(options).read(task.reads, asked_for(task.key_range, wanted or ())):
        read = fetched.range
        tp = TopicPartition(read.topic, read.partition)
        try:
            for start, end, share in _shares(task.key_range, fetched):
                for records in decode_range(
                    tp,
                    fetched.data,
                    start,
                    end,
                    columns=make.decoded,
                    share=share,
                    aborted=fetched.aborted,
                    check_crc=check_crc,
                    decoded_size_max=DECODED_SIZE_MAX,
                ):
                    some = records if values is None else _with_keys(records, values)
                    if some.num_rows:
                        yield make.batch(some, read)
        except DecodeError as error:
            raise DecodeError(f"{tp}: {error}") from error
    set_imports_aside()  # Here, because the kernels are loaded when the first records are decoded.


def asked_for(key_range: KeyRange, keys: Sequence[bytes]) -> Asked | None:
    """Return what to ask of brokers; None for all records. More keys than a fetch may name are left to the reader."""
    if len(keys) > KEYS_MAX or sum(map(len, keys)) > KEYS_SIZE_MAX:
        keys = ()
    return None if key_range == WHOLE and not keys else Asked((key_range,), tuple(keys))


def _with_keys(records: pa.RecordBatch, keys: pa.Array) -> pa.RecordBatch:
    """Return the records with one of `keys`."""
    column = records.column("key")
    return records.filter(pc.equal(column, keys[0]) if len(keys) == 1 else pc.is_in(column, value_set=keys))


def _shares(keys: KeyRange, fetched: FetchedRange[Read]) -> Iterator[tuple[int, int, KeyShare | None]]:
    """The fetched offsets with the records wanted of them: all, or those of a key range, layout after layout.

    All that was fetched is wanted where brokers have filtered it.
    """
    read = fetched.range
    if keys == WHOLE or fetched.filtered:
        yield fetched.start, read.end, None
        return
    fetched_end = next_offset_of(fetched.data) if len(read.layouts) > 1 else None
    for low, high, _, held in read.spans():
        if high > fetched.start and (fetched_end is None or low < fetched_end):
            yield max(low, fetched.start), high, KeyShare(keys, read.initial, held)


# -- columns -----------------------------------------------------------------------------------------------------------


class _Columns:
    """Turns decoded records into the columns of a schema."""

    def __init__(self, names: Sequence[str], *, with_keys: bool = False) -> None:
        self._names = tuple(names)
        self._schema = pa.schema([pa.field(name, ARROW_TYPES[name]) for name in names])
        needed = (DECODED_NAMES.get(name, name) for name in names if name not in ("topic", "partition"))
        self.decoded = tuple(dict.fromkeys((*needed, *(["key"] if with_keys else [])))) or ("offset",)

    def batch(self, records: pa.RecordBatch, read: Read) -> pa.RecordBatch:
        """Build the record batch for Spark."""
        return pa.RecordBatch.from_arrays(
            [self._column(name, records, read) for name in self._names], schema=self._schema
        )

    def _column(self, name: str, records: pa.RecordBatch, read: Read) -> pa.Array:
        match name:
            case "topic":
                return _repeated_text(read.topic, _rounded(len(records))).slice(0, len(records))
            case "partition":
                return _repeated_int(read.partition, _rounded(len(records))).slice(0, len(records))
            case "sequence":
                return _sequence(records.column("offset"), read)
            case "timestamp":
                return as_column(as_numbers(records.column("timestamp")) * 1000).view(ARROW_TYPES[name])
            case "timestampType":
                return records.column("timestamp_type").cast(ARROW_TYPES[name])
            case "headers":
                headers = records.column("headers").cast(ARROW_TYPES[name])
                return pc.if_else(pc.equal(pc.list_value_length(headers), 0), pa.scalar(None, headers.type), headers)
        return records.column(name)


def _rounded(count: int) -> int:
    return 1 << (count - 1).bit_length()


@lru_cache(maxsize=16)
def _repeated_text(text: str, count: int) -> pa.Array:
    data = text.encode()
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(data * count))


@lru_cache(maxsize=64)
def _repeated_int(number: int, count: int) -> pa.Array:
    return as_column(np.full(count, number, np.int32))


def _sequence(offsets: pa.Array, read: Read) -> pa.Array:
    """Return what `Lineage.sequence` defines for one record."""
    if len(read.layouts) == 1:
        (layout,) = read.layouts
        return offsets if layout == 0 else as_column(as_numbers(offsets) + sequence_base(layout))
    numbers = as_numbers(offsets)
    at = np.searchsorted(np.asarray(read.cuts, np.int64), numbers, side="right")
    return as_column(np.asarray([*map(sequence_base, read.layouts)], np.int64)[at] + numbers)


# -- fetching ----------------------------------------------------------------------------------------------------------

_readers: dict[tuple[Any, ...], RangeReader] = {}


def _reader(options: Options) -> RangeReader:
    key = (
        os.getpid(),
        options.servers,
        tuple(sorted(options.client.items())),
        options.poll_timeout_ms,
        options.fail_on_data_loss,
    )
    reader = _readers.get(key)
    if reader is None:
        reader = _readers[key] = RangeReader(
            options.servers,
            connection_settings(options),
            range_settings(options),
            _fail if options.fail_on_data_loss else _pass_over,
        )
    return reader


def range_settings(options: Options) -> RangeReaderSettings:
    """Return the fetch settings of a query, from its `kafka.` options."""
    names = {name.removeprefix("kafka.").replace(".", "_"): value for name, value in options.client.items()}
    fields = RangeReaderSettings.__dataclass_fields__
    given: dict[str, Any] = {name: value for name, value in names.items() if name in fields}
    return RangeReaderSettings(
        **given,
        retry_timeout_ms=options.poll_timeout_ms,
        retry_timeout_name="kafkaConsumer.pollTimeoutMs",
        read_committed=options.committed,
    )


def _fail(wanted: OffsetRange, gone: OffsetsGoneError) -> None:
    """Fail for lost records."""
    loss = loss_of(wanted, gone)
    if loss is not None:
        raise DataLossError([loss]) from gone


def _pass_over(wanted: OffsetRange, gone: OffsetsGoneError) -> None:
    """Log lost records and skip their offsets: `failOnDataLoss` is false."""
    loss = loss_of(wanted, gone)
    if loss is not None:
        log.warning("Records were lost before this query read them: %s", loss)


def loss_of(wanted: OffsetRange, gone: OffsetsGoneError) -> Loss | None:
    """Return the loss that offsets which are gone are; None if the query reads their records elsewhere.

    It does where a log was emptied from its start on, or removed then; not where its end was cut off.
    """
    emptied = not gone.is_of_another_topic and (gone.available is None or gone.available > gone.offset)
    if emptied and isinstance(wanted, Read) and (wanted.folds_back or (wanted.may_fold_back and gone.has_retired)):
        return None
    return Loss(wanted.topic, wanted.partition, gone.offset, gone.available, gone.why)
