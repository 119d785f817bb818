"""Arrow columns encoded as record batches, a partition each; and keys hashed for placement.

Rows are written by a compiled kernel in one pass, each where the present batch of its partition ends; compression comes
afterwards. The memory of the batches comes from slabs (`slabs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.base.limits import MESSAGE_SIZE_MAX
from anabranch.records.arrow.memory import address_of
from anabranch.records.arrow.slabs import shelf
from anabranch.records.batch import HEADER_SIZE, build, parse_header, stamp_crc
from anabranch.records.compression import Compression, compress
from anabranch.records.kernels import crc32c as checksums
from anabranch.records.kernels import encode as kernels
from anabranch.records.kernels.encode import HEADER_OVERHEAD_MAX, encode_batches, share_rows
from anabranch.records.kernels.hashing import hash_keys as hash_column
from anabranch.records.kernels.memory import COLUMN_FIELDS

Header: TypeAlias = tuple[str, bytes | None]
RecordTuple: TypeAlias = tuple[bytes | None, bytes | None, int, Sequence[Header]]
"""Key, value, timestamp in ms, headers."""
_INT32, _INT64 = Struct("<i"), Struct("<q")
_WIDE = {
    kind.id: wide
    for kind, wide in ((pa.binary(), False), (pa.string(), False), (pa.large_binary(), True), (pa.large_string(), True))
}
"""The types whose memory is offsets and bytes, and whether the offsets are of 64 bits."""


_INT32_MAX = (1 << 31) - 1
_TABLES_AT = address_of(checksums.CRC_TABLES)


class EncodedBatch(NamedTuple):
    """One batch that is ready to send, but for its producer (`batch.stamp_producer`)."""

    partition: int
    data: memoryview
    """The whole batch with its checksum; writable."""
    record_count: int
    first_row: int
    """The row of the input that became the batch's first record."""


def hash_keys(keys: pa.Array | pa.ChunkedArray) -> NDArray[np.int32]:
    """Hash a column of keys for placement: `murmur2 & 0x7fffffff`, and -1 for a null key."""
    column = _Values.of(keys, "keys")
    hashes = np.empty(column.rows, np.int32)
    if column.fields is None:
        hashes.fill(-1)
    else:
        hash_column(column.fields, column.rows, address_of(hashes))
    return hashes


def encode_partitioned(
    keys: pa.Array | pa.ChunkedArray | None,
    values: pa.Array | pa.ChunkedArray,
    timestamps: NDArray[np.int64] | int,
    headers: pa.Array | pa.ChunkedArray | None = None,
    partitions: NDArray[np.int32] | int = 0,
    *,
    compression: Compression = Compression.NONE,
    compression_level: int | None = None,
    batch_size_max: int = MESSAGE_SIZE_MAX,
) -> list[EncodedBatch]:
    """Turn rows into record batches for their partitions, partition by partition, keeping the rows' order in each.

    Keys and values are of a binary or string type, or null; headers are lists of structs of key and value;
    timestamps are ms, one for all or one each; partitions likewise. No batch grows over `batch_size_max` bytes
    before compression, but a record that is larger by itself makes a batch alone.
    """
    columns = np.zeros((4, COLUMN_FIELDS), np.int64)
    key_column, value_column = _Values.of(keys, "keys"), _Values.of(values, "values")
    rows = value_column.rows
    if keys is not None and key_column.rows != rows:
        raise ValueError(f"{key_column.rows} keys for {rows} values")
    size = 0
    for place, column in ((kernels.KEYS, key_column), (kernels.VALUES, value_column)):
        if column.fields is not None:
            columns[place] = column.fields
            size += column.data_size
    plan = np.zeros(kernels.ENCODE_FIELDS, np.int64)
    held: list[Any] = [key_column, value_column]
    if headers is not None:
        size += _plan_headers(headers, rows, columns, plan, held)
    if isinstance(timestamps, int):
        plan[kernels.TIMESTAMP] = timestamps
    else:
        times = np.ascontiguousarray(timestamps, np.int64)
        if times.shape != (rows,):
            raise ValueError(f"{times.size} timestamps for {rows} values")
        held.append(times)
        plan[kernels.TIMESTAMPS_AT] = address_of(times)
    plan[kernels.ROWS] = rows
    plan[kernels.SIZE_IN_ALL] = size
    plan[kernels.BATCH_SIZE_MAX] = batch_size_max
    wanted, first_partition, partition_count = _partitions(partitions, rows)
    if wanted is not None:
        held.append(wanted)
        plan[kernels.PARTITIONS_AT] = address_of(wanted)
    shares = np.zeros((partition_count, kernels.SHARE_FIELDS), np.int64)
    plan[kernels.SHARES_AT] = address_of(shares)
    room, batches_max = share_rows(columns, plan, partition_count)
    table = np.empty((batches_max, kernels.ENCODED_FIELDS), np.int64)
    view, plan[kernels.TARGET] = shelf.take_view(room)
    if checksums.CHECKS_CRC and compression is Compression.NONE:
        plan[kernels.STAMPED_BY] = _TABLES_AT
    count = encode_batches(columns, plan, partition_count, table)
    table = table[:count]
    if partition_count > 1:
        table = table[np.argsort(table[:, kernels.AT])]
    starts, sizes, numbers, first_rows, record_counts = table.T.tolist()
    data = [view[at : at + length] for at, length in zip(starts, sizes, strict=True)]
    if first_partition:
        numbers = [first_partition + number for number in numbers]
    batches = list(map(EncodedBatch._make, zip(numbers, data, record_counts, first_rows, strict=True)))
    if compression is not Compression.NONE:
        return [batch._replace(data=_compressed(batch.data, compression, compression_level)) for batch in batches]
    if not checksums.CHECKS_CRC:
        for batch in batches:
            stamp_crc(batch.data)
    return batches


def encode_records(
    records: Sequence[RecordTuple],
    *,
    compression: Compression = Compression.NONE,
    compression_level: int | None = None,
) -> memoryview:
    """Turn records, at least one, into a single batch, whatever its size becomes; writable."""
    keys, values, timestamps, headers = zip(*records, strict=True)
    (batch,) = encode_partitioned(
        _joined(keys),
        _joined(values),
        np.array(timestamps, np.int64),
        _listed(headers) if any(headers) else None,
        compression=compression,
        compression_level=compression_level,
        batch_size_max=_INT32_MAX,
    )
    return batch.data


def _compressed(data: memoryview, codec: Compression, level: int | None) -> memoryview:
    header = parse_header(data)
    return memoryview(
        build(
            compress(codec, data[HEADER_SIZE:], level),
            record_count=header.record_count,
            base_timestamp=header.base_timestamp,
            max_timestamp=header.max_timestamp,
            attributes=header.attributes | codec,
        )
    )


class _Values(NamedTuple):
    """Variable-length values as the kernels read them; `fields` is None when all of them are null."""

    rows: int
    fields: NDArray[np.int64] | None
    data_size: int
    held: pa.Array | None

    @classmethod
    def of(cls, array: pa.Array | pa.ChunkedArray | None, name: str) -> _Values:
        if array is None:
            return cls(0, None, 0, None)
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
            if isinstance(array, pa.ChunkedArray):
                array = pa.concat_arrays([chunk.cast(pa.large_binary()) for chunk in array.chunks])
        kind = array.type
        if pa.types.is_null(kind):
            return cls(len(array), None, 0, None)
        wide = _WIDE.get(kind.id)
        if wide is None:
            try:
                array = array.cast(pa.large_binary())
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
                raise TypeError(f"{name} of type {kind}: expected binary or string") from None
            wide = True
        rows, first = len(array), array.offset
        if not rows:
            return cls(0, None, 0, None)
        validity, offsets, data = array.buffers()
        ends = _INT64 if wide else _INT32
        (start,), (end,) = (ends.unpack_from(offsets, (first + row) * ends.size) for row in (0, rows))
        address, size = (data.address, data.size) if data is not None else (0, 0)
        bitmap = validity.address if validity is not None and array.null_count else 0
        fields = (offsets.address + first * ends.size, wide, address, address + size, bitmap, first)
        return cls(rows, np.array(fields, np.int64), end - start, array)


def _plan_headers(
    headers: pa.Array | pa.ChunkedArray,
    rows: int,
    columns: NDArray[np.int64],
    plan: NDArray[np.int64],
    held: list[Any],
) -> int:
    """Describe the headers to the kernel; returns how many bytes they may take."""
    if isinstance(headers, pa.ChunkedArray):
        headers = headers.combine_chunks() if headers.num_chunks != 1 else headers.chunk(0)
    kind = headers.type
    if len(headers) != rows:
        raise ValueError(f"headers of {len(headers)} records for {rows} values")
    if pa.types.is_null(kind) or not rows:
        return 0
    entries = headers.values if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    if entries is None or not pa.types.is_struct(entries.type) or entries.type.num_fields != 2:
        raise TypeError(f"headers of type {kind}: expected list<struct<key: string, value: binary>>")
    wide = pa.types.is_large_list(kind)
    validity, offsets = headers.buffers()[:2]
    # `field` takes the struct's own slice into account; a struct that is null itself is no header at all.
    keys = _Values.of(entries.field(0), "header keys")
    values = _Values.of(entries.field(1), "header values")
    if entries.null_count or (keys.held is not None and keys.held.null_count):
        raise ValueError("a header without a key: expected list<struct<key: string not null, value: binary>>")
    if keys.fields is None:
        if entries.null_count != len(entries) and len(entries):
            raise ValueError("a header without a key: expected list<struct<key: string not null, value: binary>>")
        return 0
    columns[kernels.HEADER_KEYS] = keys.fields
    if values.fields is not None:
        columns[kernels.HEADER_VALUES] = values.fields
    held += [headers, keys, values]
    plan[kernels.LISTS_AT] = offsets.address + headers.offset * (8 if wide else 4)
    plan[kernels.LISTS_WIDE] = wide
    plan[kernels.LISTS_VALIDITY] = validity.address if validity is not None and headers.null_count else 0
    plan[kernels.LISTS_FIRST] = headers.offset
    return keys.data_size + values.data_size + HEADER_OVERHEAD_MAX * len(entries)


def _partitions(partitions: NDArray[np.int32] | int, rows: int) -> tuple[NDArray[np.int32] | None, int, int]:
    """The partition of each row (None: the same one), counted from a first one, and how many there are from there."""
    if isinstance(partitions, int):
        return None, partitions, 1
    wanted = np.ascontiguousarray(partitions, np.int32)
    if wanted.shape != (rows,):
        raise ValueError(f"{wanted.size} partitions for {rows} values")
    if not rows:
        return None, 0, 1
    lowest, highest = int(wanted.min()), int(wanted.max())
    if lowest < 0:
        raise ValueError(f"partition {lowest}: expected none below 0")
    return (None, lowest, 1) if lowest == highest else (wanted, 0, highest + 1)


def _joined(items: Sequence[bytes | None]) -> pa.Array:
    """Lay bytes of Python side by side as a column."""
    validity = None
    nulls = 0
    if None in items:
        present = np.fromiter((item is not None for item in items), np.bool_, len(items))
        nulls = len(items) - int(present.sum())
        validity = pa.py_buffer(np.packbits(present, bitorder="little"))
        items = [item or b"" for item in items]
    offsets = np.zeros(len(items) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, items), np.int64, len(items)), out=offsets[1:])  # type: ignore[arg-type]
    data = b"".join(items)  # type: ignore[arg-type]
    return pa.Array.from_buffers(
        pa.large_binary(), len(items), [validity, pa.py_buffer(offsets), pa.py_buffer(data)], nulls
    )


def _listed(headers: Sequence[Sequence[Header]]) -> pa.Array:
    offsets = np.zeros(len(headers) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, headers), np.int32, len(headers)), out=offsets[1:])
    entries = [entry for entry_list in headers for entry in entry_list]
    keys = _joined([key.encode() for key, _ in entries])
    values = _joined([value for _, value in entries])
    structs = pa.StructArray.from_arrays([keys, values], ["key", "value"])
    return pa.Array.from_buffers(pa.list_(structs.type), len(headers), [None, pa.py_buffer(offsets)], 0, 0, [structs])
