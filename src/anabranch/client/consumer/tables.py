"""Fetched record batches as Arrow tables and as records; the kernels of `records` do the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.range_reader import decode_range
from anabranch.client.consumer.record import Record
from anabranch.machines.clients.fetching import Deliverable
from anabranch.machines.clients.fetching.places import place_of
from anabranch.machines.lineage import Lineage, sequence_base, sequence_cuts
from anabranch.records.arrow.decode import COLUMN_TYPES
from anabranch.records.arrow.memory import as_column, as_numbers
from anabranch.records.shares import KeyShare

TYPES = {
    "topic": pa.dictionary(pa.int32(), pa.string()),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("ms", "UTC"),
    "timestamp_type": pa.int8(),
    "key": pa.binary(),
    "value": pa.binary(),
    "headers": COLUMN_TYPES["headers"],
    "key_hash": pa.int32(),
    "leader_epoch": pa.int32(),
    "sequence": pa.int64(),
}
NO_SKIPS: Mapping[TopicPartition, Sequence[tuple[int, int]]] = {}
RECORD_COLUMNS = ("offset", "timestamp", "timestamp_type", "key", "value", "headers")


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """Return the schema of a table of these columns."""
    unknown = [column for column in columns if column not in TYPES]
    if unknown:
        raise ValueError(f"there is no column {', '.join(unknown)}; there are {', '.join(TYPES)}")
    return pa.schema([pa.field(column, TYPES[column]) for column in columns])


def table_of(
    parts: Sequence[Deliverable],
    columns: Sequence[str],
    key_range: tuple[int, int] | None,
    lineages: Mapping[str, Lineage],
    skips: Mapping[TopicPartition, Sequence[tuple[int, int]]] = NO_SKIPS,
    *,
    check_crcs: bool,
) -> pa.Table:
    """Decode parts into one table, with at least one chunk per part; `skips`: ranges of offsets to leave out."""
    schema = schema_of(columns)
    batches: list[pa.RecordBatch] = []
    for part in parts:
        wanted = [column for column in columns if column not in ("topic", "partition", "sequence")]
        skipped = skips.get(TopicPartition(part.topic, part.partition))
        if "sequence" in columns or not wanted or skipped:
            wanted.append("offset")
        if part.floor:
            wanted += ["key", "offset"]
        for records in _decoded(part, tuple(dict.fromkeys(wanted)), key_range, lineages, check_crcs):
            if part.floor:
                records = _sifted(records, part, lineages[part.topic])
            if skipped:
                records = without(records, skipped)
            count = records.num_rows
            if count:
                arrays = [_column(name, part, records, count, lineages) for name in columns]
                batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return pa.Table.from_batches(batches, schema)


def _decoded(
    part: Deliverable,
    columns: tuple[str, ...],
    key_range: tuple[int, int] | None,
    lineages: Mapping[str, Lineage],
    check_crc: bool,
) -> Iterator[pa.RecordBatch]:
    """The records of a part, or those of a key range."""
    tp, fetched = TopicPartition(part.topic, part.partition), part.fetched
    for start, end, share in _shares(part, key_range, lineages):
        yield from decode_range(
            tp, fetched.data, start, end, columns=columns, share=share, aborted=fetched.aborted, check_crc=check_crc
        )


def _sifted(records: pa.RecordBatch, part: Deliverable, lineage: Lineage) -> pa.RecordBatch:
    """Leave out the records below the floor of their keys: what a broker does that gives parts of records."""
    offsets = as_numbers(records.column("offset"))
    places = np.fromiter(
        (
            place_of(lineage, part.partition, key, offset)
            for key, offset in zip(records.column("key").to_pylist(), offsets.tolist(), strict=True)
        ),
        np.int64,
        len(offsets),
    )
    starts, _, floors = zip(*part.floor, strict=True)
    step = np.searchsorted(np.array(starts, np.int64), places, side="right") - 1
    kept = offsets >= np.array(floors, np.int64)[step]
    return records if kept.all() else records.filter(pa.array(kept))


def _shares(
    part: Deliverable, key_range: tuple[int, int] | None, lineages: Mapping[str, Lineage]
) -> Iterator[tuple[int, int, KeyShare | None]]:
    """The offsets of a part with the records wanted of them: all, or those of a key range, layout after layout."""
    if key_range is None:
        yield part.start, part.end, None
        return
    lineage = lineages[part.topic]
    for segment in lineage.segments(part.partition, part.start):
        if segment.start >= part.end:
            return
        end = part.end if segment.end is None else min(part.end, segment.end)
        share = KeyShare(key_range, lineage.initial, lineage.held(part.partition, segment.layout))
        yield segment.start, end, share


def _column(name: str, part: Deliverable, decoded: Any, count: int, lineages: Mapping[str, Lineage]) -> Any:
    made = _MADE.get(name)
    return _read(name, decoded) if made is None else made(part, decoded, count, lineages)


def _read(name: str, decoded: Any) -> Any:
    column = decoded.column(name)
    wanted = TYPES[name]
    return column if column.type == wanted else column.view(wanted) if name == "timestamp" else column.cast(wanted)


def _topic(part: Deliverable, _decoded: Any, count: int, _lineages: Mapping[str, Lineage]) -> Any:
    name = part.topic.encode()
    names = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, len(name)], np.int32)), pa.py_buffer(name))
    return pa.DictionaryArray.from_arrays(as_column(np.zeros(count, np.int32)), names)


def _partition(part: Deliverable, _decoded: Any, count: int, _lineages: Mapping[str, Lineage]) -> Any:
    return as_column(np.full(count, part.partition, np.int32))


def _sequence(part: Deliverable, decoded: Any, _count: int, lineages: Mapping[str, Lineage]) -> Any:
    """Return what `Lineage.sequence` defines for one record."""
    ends, layouts = sequence_cuts(lineages[part.topic], part.partition)
    offsets = as_numbers(decoded.column("offset"))
    at = np.searchsorted(np.asarray(ends, np.int64), offsets, side="right")
    return as_column(np.asarray([*map(sequence_base, layouts)], np.int64)[at] + offsets)


_MADE: dict[str, Callable[[Deliverable, Any, int, Mapping[str, Lineage]], Any]] = {
    "topic": _topic,
    "partition": _partition,
    "sequence": _sequence,
}


def records_of(part: Deliverable, rows: pa.Table, leases: Iterator[int] | None = None) -> list[Record]:
    """Build records from some rows of a part, given in `RECORD_COLUMNS`; each with a lease, if there are some."""
    count = rows.num_rows
    headers = rows.column("headers")
    entries: Iterable[tuple[tuple[str, bytes | None], ...]] = repeat((), count)
    if any(len(chunk.flatten()) for chunk in headers.chunks):
        entries = (tuple((entry["key"], entry["value"]) for entry in row) for row in headers.to_pylist())
    return list(
        map(
            Record,
            repeat(part.topic, count),
            repeat(part.partition, count),
            rows.column("offset").to_pylist(),
            rows.column("timestamp").cast(pa.int64()).to_pylist(),
            rows.column("timestamp_type").to_pylist(),
            rows.column("key").to_pylist(),
            rows.column("value").to_pylist(),
            entries,
            *(() if leases is None else (repeat(1, count), leases)),
        )
    )


def fitting(rows: pa.Table, size: int, end: int) -> int:
    """Return how many of the first rows lie before offset `end`, while the keys and values before have below `size`."""
    count = int(np.searchsorted(_numbers(rows.column("offset")), end))
    sizes = sum(_sizes(rows.column(name)) for name in ("key", "value"))
    before = np.cumsum(sizes) - sizes
    return min(count, int(np.searchsorted(before, size)))


def _sizes(column: Any) -> Any:
    return _numbers(pc.fill_null(pc.binary_length(column), 0).cast(pa.int64()))


def _numbers(column: pa.ChunkedArray) -> Any:
    found = [as_numbers(chunk) for chunk in column.chunks if len(chunk)]
    return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.int64), *found])


def without(records: pa.RecordBatch, ranges: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    """Leave out the records in ranges of offsets: disjoint, ascending, both bounds inclusive."""
    offsets = as_numbers(records.column("offset"))
    bounds = np.asarray(ranges, np.int64)
    at = np.searchsorted(bounds[:, 0], offsets, side="right") - 1
    inside = (at >= 0) & (offsets <= bounds[at, 1])
    return records.filter(pa.array(~inside)) if inside.any() else records
