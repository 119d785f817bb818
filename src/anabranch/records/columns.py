"""Between record batches and Arrow: `decode` bytes into columns, `encode` columns into batches, a partition each.

Many batches become one Arrow record batch in one pass of a compiled kernel; compressed ones are expanded first, once,
within a bound. The memory of results comes from slabs that return to a shelf when the last Arrow buffer (or
memoryview) of theirs is gone: touching fresh memory costs more than decoding into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from struct import Struct
from sys import getrefcount
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from crc32c import crc32c
from numpy.typing import NDArray

from anabranch.base.errors import DecodeError
from anabranch.base.limits import DECOMPRESSION_RATIO_MAX, MESSAGE_SIZE_MAX
from anabranch.records import kernels
from anabranch.records.batch import (
    CONTROL,
    HEADER_SIZE,
    OFFSET_MAX,
    TRANSACTIONAL,
    ChecksumError,
    build,
    parse_end_transaction_marker,
    parse_header,
    stamp_crc,
)
from anabranch.records.compression import (
    COMPRESSION_MASK,
    Bytes,
    Compression,
    OutputTooSmallError,
    compress,
    decompress_into,
    grown,
    size_hint,
)
from anabranch.records.envelope import Envelope

Header: TypeAlias = tuple[str, bytes | None]
Record: TypeAlias = tuple[bytes | None, bytes | None, int, Sequence[Header]]
"""Key, value, timestamp in ms, headers."""

COLUMN_TYPES: dict[str, pa.DataType] = {
    "offset": pa.int64(),
    "timestamp": pa.int64(),
    "timestamp_type": pa.int8(),
    "key": pa.binary(),
    "value": pa.binary(),
    "headers": pa.list_(pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])),
    "key_hash": pa.int32(),
    "leader_epoch": pa.int32(),
}
"""What `decode` can answer: timestamps in ms, their type (0 create time, 1 log append time), the placement hash."""

COLUMNS_DEFAULT = ("offset", "timestamp", "key", "value", "headers")
EXPANDED_SIZE_MAX = MESSAGE_SIZE_MAX * DECOMPRESSION_RATIO_MAX
"""Default bound of one batch's records while they are not compressed."""
DECODED_SIZE_MAX = 3 * 512 * 1024
"""Bytes of records after which `decode` stops at the end of a batch."""

_INT32, _INT64 = Struct("<i"), Struct("<q")
_WIDE = {
    kind.id: wide
    for kind, wide in ((pa.binary(), False), (pa.string(), False), (pa.large_binary(), True), (pa.large_string(), True))
}
"""The types whose memory is offsets and bytes, and whether the offsets are of 64 bits."""
_INT32_MAX = (1 << 31) - 1
_ALIGNMENT = kernels.ALIGNMENT
_CHECK_FIELDS = [kernels.POSITION, kernels.SIZE, kernels.CRC, kernels.ATTRIBUTES]
_SLAB_SIZE_MIN = 64 * 1024
_SLAB_SIZE_MAX = 64 * 1024 * 1024
_SHELF_SIZE_MAX = 64 * 1024 * 1024
_SLABS_LOOKED_AT = 32
_SCRATCH_SIZE_MIN = 1024 * 1024
_NEVER_NULL = frozenset({"offset", "timestamp", "timestamp_type", "leader_epoch"})


class Decoded(NamedTuple):
    """The records of some batches, as columns."""

    records: pa.RecordBatch
    next_offset: int
    """Where to go on: everything before it was looked at."""
    complete: bool
    """Whether all of the buffer's batches were; if not, decode the same buffer again from `next_offset`."""


class EncodedBatch(NamedTuple):
    """One batch that is ready to send, but for its producer (`batch.stamp_producer`)."""

    partition: int
    data: memoryview
    """The whole batch with its checksum; writable."""
    record_count: int
    first_row: int
    """The row of the input that became the batch's first record."""


class _Shelf:
    """Slabs of memory, each lent again as soon as nobody refers to it or a view of it any more.

    Those that were lent last are looked at first: they are in a cache, if any is. A slab that is looked at is not on
    the shelf, so that two threads never look at the same one.
    """

    def __init__(self) -> None:
        self._slabs: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Lend at least `size` bytes, of any content, for as long as someone refers to the array or a view of it."""
        if size > _SLAB_SIZE_MAX:
            return np.empty(size, np.uint8)
        shelf_size = max(_SLAB_SIZE_MIN, 1 << (size - 1).bit_length())
        slab = self._found(shelf_size)
        if slab is None:
            self._make_room(shelf_size)
            slab = np.empty(shelf_size, np.uint8)
        self._slabs.append(slab)
        return slab

    def _found(self, shelf_size: int) -> NDArray[np.uint8] | None:
        lent: list[NDArray[np.uint8]] = []
        try:
            while len(lent) < _SLABS_LOOKED_AT:
                slab = self._slabs.pop()
                # The variable, and the argument.
                if len(slab) == shelf_size and getrefcount(slab) == 2:
                    return slab
                lent.append(slab)
        except IndexError:
            pass
        finally:
            lent.reverse()
            self._slabs += lent
        return None

    def _make_room(self, size: int) -> None:
        held = size + sum(map(len, tuple(self._slabs)))
        while held > _SHELF_SIZE_MAX and self._slabs:
            held -= len(self._slabs.pop(0))


def _address(array: NDArray[Any]) -> int:
    return int(pa.py_buffer(array).address)


_shelf = _Shelf()

_CRC_TABLES_AT = _address(kernels.CRC_TABLES)


# --- decode


def decode(
    buffer: Bytes,
    *,
    columns: Sequence[str] = COLUMNS_DEFAULT,
    start_offset: int = 0,
    end_offset: int | None = None,
    key_range: tuple[int, int] | None = None,
    aborted: Sequence[tuple[int, int]] = (),
    check_crc: bool = True,
    size_max: int = EXPANDED_SIZE_MAX,
    decoded_size_max: int = DECODED_SIZE_MAX,
) -> Decoded:
    """Turn concatenated batches into one Arrow record batch with the `columns` asked for, in their order.

    Kept are records with `start_offset <= offset < end_offset` whose place in the key range (wire.md, section 4) lies
    in `key_range`, both ends included. An incomplete last batch is ignored, control batches are passed over. With
    `aborted` (producer id and first offset of every aborted transaction, as a fetch answers them) so are the records
    of those. `size_max` bounds each batch's records while they are not compressed. Anything malformed in what is
    looked at raises DecodeError naming the offset of its batch.
    """
    return next(
        _pieces(
            buffer,
            columns=columns,
            start_offset=start_offset,
            end_offset=end_offset,
            key_range=key_range,
            aborted=aborted,
            check_crc=check_crc,
            size_max=size_max,
            decoded_size_max=decoded_size_max,
        )
    )


def decode_all(
    buffer: Bytes,
    *,
    columns: Sequence[str] = COLUMNS_DEFAULT,
    start_offset: int = 0,
    end_offset: int | None = None,
    key_range: tuple[int, int] | None = None,
    aborted: Sequence[tuple[int, int]] = (),
    check_crc: bool = True,
    size_max: int = EXPANDED_SIZE_MAX,
    decoded_size_max: int = DECODED_SIZE_MAX,
) -> Iterator[Decoded]:
    """Decode all of a buffer, however large, as `decode` does, in pieces; at least one comes, perhaps without rows.

    Who drops a piece before he takes the next but one keeps the memory of all of them small and warm.
    """
    return _pieces(
        buffer,
        columns=columns,
        start_offset=start_offset,
        end_offset=end_offset,
        key_range=key_range,
        aborted=aborted,
        check_crc=check_crc,
        size_max=size_max,
        decoded_size_max=decoded_size_max,
    )


def _pieces(
    buffer: Bytes,
    *,
    columns: Sequence[str],
    start_offset: int,
    end_offset: int | None,
    key_range: tuple[int, int] | None,
    aborted: Sequence[tuple[int, int]],
    check_crc: bool,
    size_max: int,
    decoded_size_max: int,
) -> Iterator[Decoded]:
    assert decoded_size_max <= _INT32_MAX
    size_max = min(size_max, _INT32_MAX - kernels.SLACK)
    end = OFFSET_MAX if end_offset is None else end_offset
    shape = _shape(tuple(columns))
    checks = check_crc and kernels.CHECKS_CRC
    table = _read_table(buffer, pa.py_buffer(buffer))
    if aborted:
        _pass_over_aborted(buffer, table, aborted)
    count, highest = kernels.choose_batches(table, start_offset, end)
    first = 0
    while True:
        ready, compressed = kernels.next_batches(table, first, count, decoded_size_max)
        scratch: list[NDArray[np.uint8]] = []
        if check_crc and (compressed or not kernels.CHECKS_CRC):
            _check(memoryview(buffer).cast("B"), table[first:ready])
        if compressed:
            view = memoryview(buffer).cast("B")
            ready = first + _expand(view, table[first:ready], scratch, size_max, decoded_size_max)
        complete = ready == count
        following = max(start_offset, min(highest + 1, end)) if complete else int(table[ready, kernels.BASE_OFFSET])
        if not complete and following <= start_offset:
            raise DecodeError(f"the record batch at offset {following} comes after one with offset {start_offset}")
        # Not kept in a variable: while the next piece is made, this one must be able to go.
        yield Decoded(
            _gather(table, first, ready, shape, (start_offset, end), key_range, check_crc=checks), following, complete
        )
        if complete:
            return
        first = ready


def _read_table(buffer: Bytes, source: pa.Buffer) -> NDArray[np.int64]:
    count = kernels.count_batches(source.address, source.size)
    table = np.empty((count, kernels.BATCH_FIELDS), np.int64)
    sound = kernels.read_headers(source.address, source.size, table)
    if sound < count:
        position = int(table[sound - 1, kernels.POSITION] + table[sound - 1, kernels.SIZE]) if sound else 0
        parse_header(buffer, position)
        raise AssertionError("the kernel refuses a header that parse_header accepts")
    return table


def _check(view: memoryview, table: NDArray[np.int64]) -> None:
    """Compare with their checksums all batches that no kernel will: it does so for those that are not compressed."""
    for position, size, crc, attributes in table[:, _CHECK_FIELDS].tolist():
        if kernels.CHECKS_CRC and not attributes & COMPRESSION_MASK:
            continue
        if crc32c(view[position + 21 : position + size]) != crc:
            raise _checksum_error(parse_header(view, position).base_offset)


def _checksum_error(base_offset: int) -> ChecksumError:
    return ChecksumError(f"the record batch at offset {base_offset} is not what its checksum was made of")


def _pass_over_aborted(buffer: Bytes, table: NDArray[np.int64], aborted: Sequence[tuple[int, int]]) -> None:
    """Mark the batches of aborted transactions, as consumers that read what is committed tell them (KIP-98).

    A mark is the attribute of control batches, in the table alone: both are passed over.
    """
    starts = sorted((first_offset, producer_id) for producer_id, first_offset in aborted)
    begun = 0
    active: set[int] = set()
    for row in np.flatnonzero(table[:, kernels.ATTRIBUTES] & TRANSACTIONAL).tolist():
        last = table[row, kernels.BASE_OFFSET] + table[row, kernels.LAST_OFFSET_DELTA]
        while begun < len(starts) and starts[begun][0] <= last:
            active.add(starts[begun][1])
            begun += 1
        producer_id = int(table[row, kernels.PRODUCER_ID])
        if producer_id not in active:
            continue
        if table[row, kernels.ATTRIBUTES] & CONTROL:
            marker = parse_end_transaction_marker(buffer, int(table[row, kernels.POSITION]))
            if marker is not None and not marker.commit:
                active.remove(producer_id)
        else:
            table[row, kernels.ATTRIBUTES] |= CONTROL


def _expand(
    view: memoryview, table: NDArray[np.int64], scratch: list[NDArray[np.uint8]], size_max: int, stop: int
) -> int:
    """Expand compressed batches into scratch memory until `stop` bytes are out; answers how many rows are ready."""
    total = 0
    room: NDArray[np.uint8] = np.empty(0, np.uint8)
    used = 0
    for row, (position, size, attributes) in enumerate(
        table[:, [kernels.POSITION, kernels.SIZE, kernels.ATTRIBUTES]].tolist()
    ):
        codec = Compression(attributes & COMPRESSION_MASK)
        records = view[position + HEADER_SIZE : position + size]
        if codec is Compression.NONE:
            expanded = len(records)
        else:
            needed = min(size_hint(codec, records), size_max)
            while True:
                if used + needed + kernels.SLACK > len(room):
                    room = _shelf.take(max(needed + kernels.SLACK, _SCRATCH_SIZE_MIN))
                    used = 0
                    scratch.append(room)
                # All the room that is left, so that a hint too low costs nothing as long as there is some.
                allowed = min(len(room) - kernels.SLACK - used, size_max)
                try:
                    expanded = decompress_into(codec, records, room[used : used + allowed])
                    break
                except OutputTooSmallError:
                    base_offset = table[row, kernels.BASE_OFFSET]
                    if allowed == size_max:
                        raise DecodeError(
                            f"the record batch at offset {base_offset} expands to more than {size_max} bytes"
                        ) from None
                    needed = grown(max(needed, allowed), size_max)
                except DecodeError as error:
                    raise DecodeError(
                        f"the record batch at offset {table[row, kernels.BASE_OFFSET]} has {error}"
                    ) from None
            start = _address(room) + used
            table[row, kernels.START] = start
            table[row, kernels.END] = start + expanded
            table[row, kernels.LIMIT] = start + expanded + kernels.SLACK
            used += expanded
        total += expanded
        if total > stop:
            return max(row, 1)
    return len(table)


class _Buffer(NamedTuple):
    """Memory that a column needs: the kernel's name for it, bits for each record, bytes beside, and data or not."""

    field: int
    record_bits: int
    extra: int = 0
    is_data: bool = False


_KEY_VALIDITY = _Buffer(kernels.TO_KEY_VALIDITY, 1)
_BUFFERS: dict[str, tuple[_Buffer, ...]] = {
    "offset": (_Buffer(kernels.TO_OFFSETS, 64),),
    "timestamp": (_Buffer(kernels.TO_TIMESTAMPS, 64),),
    "timestamp_type": (_Buffer(kernels.TO_TIMESTAMP_TYPES, 8),),
    "leader_epoch": (_Buffer(kernels.TO_LEADER_EPOCHS, 32),),
    "key_hash": (_KEY_VALIDITY, _Buffer(kernels.TO_HASHES, 32)),
    "headers": (_Buffer(kernels.TO_HEADERS_AT, 3 * 64),),
    "key": (_KEY_VALIDITY, _Buffer(kernels.TO_KEY_ENDS, 32, 4), _Buffer(kernels.TO_KEY_DATA, 0, is_data=True)),
    "value": (
        _Buffer(kernels.TO_VALUE_VALIDITY, 1),
        _Buffer(kernels.TO_VALUE_ENDS, 32, 4),
        _Buffer(kernels.TO_VALUE_DATA, 0, is_data=True),
    ),
}


def _message_column(name: str) -> tuple[int, ...]:
    """What the kernel is told of a column to say where it is."""
    *before, data = _BUFFERS[name]
    validity = before[0].field if before else 0
    ends = before[1].field if len(before) > 1 else 0
    counts = (kernels.VALUE_NULLS, kernels.VALUE_SIZE) if name == "value" else (kernels.KEY_NULLS, kernels.KEY_SIZE)
    return validity, ends, data.field, data.record_bits >> 3, *counts


class _Shape:
    """What `decode` is asked for, as the kernel is told it: the buffers of its columns, and the message about them."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        for name in columns:
            if name not in _BUFFERS:
                raise ValueError(f"there is no column {name!r}: choose from {', '.join(COLUMN_TYPES)}")
        # Data comes last: it is the largest, its size is known in the end only, and the rest is never touched.
        buffers = dict.fromkeys(buffer for name in columns for buffer in _BUFFERS[name])
        ordered = sorted(buffers, key=lambda buffer: (buffer.is_data, buffer.field))
        self.layout = np.array(ordered, np.int64).reshape(-1, len(_Buffer._fields))
        self.schema = pa.schema(
            [pa.field(name, COLUMN_TYPES[name], nullable=name not in _NEVER_NULL) for name in columns]
        )
        self.headers_at = [place for place, name in enumerate(columns) if name == "headers"]
        flat = [name for name in columns if name != "headers"]
        self.envelope = Envelope(pa.schema([self.schema.field(name) for name in flat])) if flat else None
        self.message = np.empty(0, np.int64)
        self.message_size = 0
        envelope = self.envelope
        if envelope is not None:
            self.message_size = envelope.size
            self._text = np.frombuffer(envelope.message, np.uint8)
            fields = [_address(self._text), envelope.size, envelope.body_size_at, envelope.rows_at]
            fields += [envelope.nodes_at, envelope.buffers_at]
            self.message = np.array([*fields, *(number for name in flat for number in _message_column(name))], np.int64)


_shape = lru_cache(maxsize=256)(_Shape)


def _gather(
    table: NDArray[np.int64],
    first: int,
    end: int,
    shape: _Shape,
    offsets: tuple[int, int],
    key_range: tuple[int, int] | None,
    *,
    check_crc: bool,
) -> pa.RecordBatch:
    """Decode the batches of some rows of the table, keeping the offsets from the first on, below the second."""
    plan = np.empty(kernels.DECODE_FIELDS, np.int64)
    answer = np.empty(kernels.DECODED_SIZE, np.int64)
    size = kernels.lay_out(table, first, end, shape.layout, plan)
    if size < 0:
        row = next(
            row
            for row in table[first:end]
            if row[kernels.RECORD_COUNT] * kernels.RECORD_SIZE_MIN > row[kernels.END] - row[kernels.START]
        )
        raise DecodeError(f"the record batch at offset {row[kernels.BASE_OFFSET]} is too small for its records")
    slab = _shelf.take(shape.message_size + _ALIGNMENT + size)
    memory = pa.py_buffer(slab)
    address = memory.address
    base = (address + shape.message_size + _ALIGNMENT - 1) & -_ALIGNMENT
    plan[kernels.CHECKED_BY] = _CRC_TABLES_AT if check_crc else 0
    plan[kernels.FROM_OFFSET], plan[kernels.TO_OFFSET] = offsets
    if key_range is not None:
        plan[kernels.RANGED] = 1
        plan[kernels.RANGE_START], plan[kernels.RANGE_END] = key_range
    rows = kernels.decode_records(table, first, end, plan, base, size, shape.message, answer)
    if rows < 0:
        offset = table[answer[kernels.AT_BATCH], kernels.BASE_OFFSET]
        if rows == kernels.CORRUPT:
            raise _checksum_error(int(offset))
        raise DecodeError(f"the record batch at offset {offset} holds a malformed record")
    envelope = shape.envelope
    records = None if envelope is None else envelope.read(memory, base - envelope.size - address)
    if records is None or shape.headers_at:
        found = answer[: kernels.DECODED_FIELDS].tolist()
        arrays = [] if records is None else records.columns
        for place in shape.headers_at:
            arrays.insert(place, _gather_headers(table[first:end], rows, int(plan[kernels.TO_HEADERS_AT]), found))
        records = pa.RecordBatch.from_arrays(arrays, schema=shape.schema)
    return records


def _gather_headers(table: NDArray[np.int64], rows: int, headers_at: int, found: list[int]) -> pa.Array:
    count, size = found[kernels.HEADER_COUNT], found[kernels.HEADER_SIZES]
    kind = COLUMN_TYPES["headers"]
    list_offsets = np.zeros(rows + 1, np.int32)
    key_offsets = np.zeros(count + 1, np.int32)
    value_offsets = np.zeros(count + 1, np.int32)
    validity = np.full((count + 7) // 8, 0xFF, np.uint8)
    nulls = 0
    keys, values = np.empty(0, np.uint8), np.empty(0, np.uint8)
    if count:
        sizes = np.zeros(kernels.DECODED_FIELDS, np.int64)
        keys = np.empty(size + kernels.SLACK, np.uint8)
        values = np.empty(size + kernels.SLACK, np.uint8)
        written = kernels.decode_headers(
            headers_at,
            rows,
            _address(list_offsets) + 4,
            _address(key_offsets) + 4,
            _address(keys),
            _address(value_offsets) + 4,
            _address(values),
            _address(validity),
            sizes,
        )
        if written == kernels.MALFORMED:
            raise DecodeError(f"the record batches from offset {table[0, kernels.BASE_OFFSET]} hold a malformed header")
        nulls = int(sizes[kernels.VALUE_NULLS])
        keys, values = keys[: sizes[kernels.KEY_SIZE]], values[: sizes[kernels.VALUE_SIZE]]
    key_array = _text(pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(key_offsets), pa.py_buffer(keys)]))
    value_array = pa.Array.from_buffers(
        pa.binary(),
        count,
        [pa.py_buffer(validity) if nulls else None, pa.py_buffer(value_offsets), pa.py_buffer(values)],
        nulls,
    )
    entries = pa.StructArray.from_arrays([key_array, value_array], fields=list(kind.value_type))
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(list_offsets)], 0, 0, [entries])


def _text(keys: pa.StringArray) -> pa.StringArray:
    """Header keys are text; bytes of a peer that are none are replaced as Java's client does."""
    try:
        keys.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array([key.decode(errors="replace") for key in keys.view(pa.binary()).to_pylist()], pa.string())
    return keys


def as_column(numbers: NDArray[Any]) -> pa.Array:
    """Numbers as a column over the same memory.

    As `pyarrow.array`, which imports pandas where that is installed: a third of a second before the first record.
    """
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, pa.py_buffer(numbers)])


def as_numbers(column: pa.Array) -> NDArray[np.int64]:
    """A column of 64-bit numbers without nulls, over the same memory; as `pyarrow.Array.to_numpy`, without pandas."""
    return np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)


# --- encode


def hash_keys(keys: pa.Array | pa.ChunkedArray) -> NDArray[np.int32]:
    """Hash a column of keys for placement: `murmur2 & 0x7fffffff`, and -1 where there is no key."""
    column = _Values.of(keys, "keys")
    hashes = np.empty(column.rows, np.int32)
    if column.fields is None:
        hashes.fill(-1)
    else:
        kernels.hash_keys(column.fields, column.rows, _address(hashes))
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
    columns = np.zeros((4, kernels.COLUMN_FIELDS), np.int64)
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
        plan[kernels.TIMESTAMPS_AT] = _address(times)
    plan[kernels.ROWS] = rows
    plan[kernels.SIZE_IN_ALL] = size
    plan[kernels.BATCH_SIZE_MAX] = batch_size_max
    wanted, first_partition, partition_count = _partitions(partitions, rows)
    if wanted is not None:
        held.append(wanted)
        plan[kernels.PARTITIONS_AT] = _address(wanted)
    shares = np.zeros((partition_count, kernels.SHARE_FIELDS), np.int64)
    plan[kernels.SHARES_AT] = _address(shares)
    room, batches_max = kernels.share_rows(columns, plan, partition_count)
    table = np.empty((batches_max, kernels.ENCODED_FIELDS), np.int64)
    slab = _shelf.take(room)
    plan[kernels.TARGET] = _address(slab)
    if kernels.CHECKS_CRC and compression is Compression.NONE:
        plan[kernels.STAMPED_BY] = _CRC_TABLES_AT
    count = kernels.encode_batches(columns, plan, partition_count, table)
    table = table[:count]
    if partition_count > 1:
        table = table[np.argsort(table[:, kernels.AT])]
    view = slab.data
    starts, sizes, numbers, first_rows, record_counts = table.T.tolist()
    data = [view[at : at + length] for at, length in zip(starts, sizes, strict=True)]
    named = [first_partition + number for number in numbers]
    batches = list(map(EncodedBatch._make, zip(named, data, record_counts, first_rows, strict=True)))
    if compression is not Compression.NONE:
        return [batch._replace(data=_compressed(batch.data, compression, compression_level)) for batch in batches]
    if not kernels.CHECKS_CRC:
        for batch in batches:
            stamp_crc(batch.data)
    return batches


def encode_records(
    records: Sequence[Record],
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
    """Describe the headers to the kernel; answers how many bytes they may take."""
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
    return keys.data_size + values.data_size + kernels.HEADER_OVERHEAD_MAX * len(entries)


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


def warm() -> None:
    """Load every kernel from the cache, or compile it, so that nobody waits for it later."""
    keys = pa.array([b"a", None])
    headers = pa.array([[{"key": "k", "value": b"v"}], []], COLUMN_TYPES["headers"])
    hash_keys(keys)
    batches = encode_partitioned(keys, keys, 0, headers, np.array((1, 0), np.int32))
    decode(batches[0].data, columns=tuple(COLUMN_TYPES), key_range=(0, OFFSET_MAX))
