"""Record batches decoded into Arrow columns.

Many batches become one Arrow record batch in one pass of a compiled kernel; compressed ones are expanded first, once,
within a bound. The memory of the columns comes from slabs (`slabs`): touching fresh memory costs more than decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.base.errors import DecodeError
from anabranch.base.limits import DECOMPRESSION_RATIO_MAX, MESSAGE_SIZE_MAX
from anabranch.records.arrow.ipc import Envelope
from anabranch.records.arrow.memory import address_of
from anabranch.records.arrow.slabs import shelf
from anabranch.records.batch import (
    CONTROL,
    HEADER_SIZE,
    OFFSET_MAX,
    TRANSACTIONAL,
    ChecksumError,
    parse_end_transaction_marker,
    parse_header,
)
from anabranch.records.checksum import crc32c
from anabranch.records.compression import (
    COMPRESSION_MASK,
    Bytes,
    Compression,
    OutputTooSmallError,
    decompress_into,
    grown,
    size_hint,
)
from anabranch.records.kernels import crc32c as checksums
from anabranch.records.kernels import plan as fields
from anabranch.records.kernels.decode import decode_headers, decode_records
from anabranch.records.kernels.memory import ALIGNMENT, SLACK
from anabranch.records.kernels.plan import (
    CORRUPT,
    MALFORMED,
    choose_batches,
    count_batches,
    lay_out,
    next_batches,
    read_headers,
)
from anabranch.records.shares import KeyShare

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
"""The columns of `decode`: timestamps in ms, their type (0 create time, 1 log append time), the placement hash."""
COLUMNS_DEFAULT = ("offset", "timestamp", "key", "value", "headers")
EXPANDED_SIZE_MAX = MESSAGE_SIZE_MAX * DECOMPRESSION_RATIO_MAX
"""Default bound of one batch's records while they are not compressed."""
DECODED_SIZE_MAX = 3 * 512 * 1024
"""Bytes of records after which `decode` stops at the end of a batch."""
_INT32_MAX = (1 << 31) - 1
_CHECK_FIELDS = [fields.POSITION, fields.SIZE, fields.CRC, fields.ATTRIBUTES]
_SCRATCH_SIZE_MIN = 1024 * 1024
_TABLES_AT = address_of(checksums.CRC_TABLES)
_NEVER_NULL = frozenset({"offset", "timestamp", "timestamp_type", "leader_epoch"})


class Decoded(NamedTuple):
    """The records of some batches, as columns."""

    records: pa.RecordBatch
    next_offset: int
    """The offset to go on from: everything before it is decoded or left out."""
    complete: bool
    """Whether all of the buffer's batches were; if not, decode the same buffer again from `next_offset`."""


def decode(
    buffer: Bytes,
    *,
    columns: Sequence[str] = COLUMNS_DEFAULT,
    start_offset: int = 0,
    end_offset: int | None = None,
    share: KeyShare | None = None,
    aborted: Sequence[tuple[int, int]] = (),
    check_crc: bool = True,
    size_max: int = EXPANDED_SIZE_MAX,
    decoded_size_max: int = DECODED_SIZE_MAX,
) -> Decoded:
    """Turn concatenated batches into one Arrow record batch with the `columns` asked for, in their order.

    Kept are records with `start_offset <= offset < end_offset` of the `share`; None keeps those of all keys. An
    incomplete last batch is ignored, control batches are passed over. With
    `aborted` (producer id and first offset of every aborted transaction, as in a fetch response) so are the records
    of those. `size_max` bounds each batch's records while they are not compressed. Anything malformed in what is
    looked at raises DecodeError naming the offset of its batch.
    """
    return next(
        decode_all(
            buffer,
            columns=columns,
            start_offset=start_offset,
            end_offset=end_offset,
            share=share,
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
    share: KeyShare | None = None,
    aborted: Sequence[tuple[int, int]] = (),
    check_crc: bool = True,
    size_max: int = EXPANDED_SIZE_MAX,
    decoded_size_max: int = DECODED_SIZE_MAX,
) -> Iterator[Decoded]:
    """Decode all of a buffer, however large, as `decode` does, in pieces; at least one comes, perhaps without rows.

    The memory of all pieces stays small and warm if each is dropped before the next but one is taken.
    """
    assert decoded_size_max <= _INT32_MAX
    size_max = min(size_max, _INT32_MAX - SLACK)
    end = OFFSET_MAX if end_offset is None else end_offset
    shape = _shape(tuple(columns))
    checks = check_crc and checksums.CHECKS_CRC
    table = _read_table(buffer, pa.py_buffer(buffer))
    if aborted:
        _pass_over_aborted(buffer, table, aborted)
    count, highest = choose_batches(table, start_offset, end)
    first = 0
    while True:
        ready, compressed = next_batches(table, first, count, decoded_size_max)
        scratch: list[memoryview] = []
        if check_crc and (compressed or not checksums.CHECKS_CRC):
            _check(memoryview(buffer).cast("B"), table[first:ready])
        if compressed:
            view = memoryview(buffer).cast("B")
            ready = first + _expand(view, table[first:ready], scratch, size_max, decoded_size_max)
        complete = ready == count
        following = max(start_offset, min(highest + 1, end)) if complete else int(table[ready, fields.BASE_OFFSET])
        if not complete and following <= start_offset:
            raise DecodeError(f"the record batch at offset {following} comes after one with offset {start_offset}")
        # Not kept in a variable: while the next piece is made, this one must be able to go.
        yield Decoded(
            _gather(table, first, ready, shape, (start_offset, end), share, check_crc=checks), following, complete
        )
        if complete:
            return
        first = ready


def _read_table(buffer: Bytes, source: pa.Buffer) -> NDArray[np.int64]:
    count = count_batches(source.address, source.size)
    table = np.empty((count, fields.BATCH_FIELDS), np.int64)
    sound = read_headers(source.address, source.size, table)
    if sound < count:
        position = int(table[sound - 1, fields.POSITION] + table[sound - 1, fields.SIZE]) if sound else 0
        parse_header(buffer, position)
        raise AssertionError("the kernel refuses a header that parse_header accepts")
    return table


def _check(view: memoryview, table: NDArray[np.int64]) -> None:
    """Compare with their checksums all batches that no kernel will: it does so for those that are not compressed."""
    for position, size, crc, attributes in table[:, _CHECK_FIELDS].tolist():
        if checksums.CHECKS_CRC and not attributes & COMPRESSION_MASK:
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
    for row in np.flatnonzero(table[:, fields.ATTRIBUTES] & TRANSACTIONAL).tolist():
        last = table[row, fields.BASE_OFFSET] + table[row, fields.LAST_OFFSET_DELTA]
        while begun < len(starts) and starts[begun][0] <= last:
            active.add(starts[begun][1])
            begun += 1
        producer_id = int(table[row, fields.PRODUCER_ID])
        if producer_id not in active:
            continue
        if table[row, fields.ATTRIBUTES] & CONTROL:
            marker = parse_end_transaction_marker(buffer, int(table[row, fields.POSITION]))
            if marker is not None and not marker.commit:
                active.remove(producer_id)
        else:
            table[row, fields.ATTRIBUTES] |= CONTROL


def _expand(view: memoryview, table: NDArray[np.int64], scratch: list[memoryview], size_max: int, stop: int) -> int:
    """Expand compressed batches into scratch memory until `stop` bytes are out; returns how many rows are ready."""
    total = 0
    room = memoryview(b"")
    address = used = 0
    for row, (position, size, attributes) in enumerate(
        table[:, [fields.POSITION, fields.SIZE, fields.ATTRIBUTES]].tolist()
    ):
        codec = Compression(attributes & COMPRESSION_MASK)
        records = view[position + HEADER_SIZE : position + size]
        if codec is Compression.NONE:
            expanded = len(records)
        else:
            needed = min(size_hint(codec, records), size_max)
            while True:
                if used + needed + SLACK > len(room):
                    room, address = shelf.take_view(max(needed + SLACK, _SCRATCH_SIZE_MIN))
                    used = 0
                    scratch.append(room)
                # All the room that is left, so that a hint too low costs nothing as long as there is some.
                allowed = min(len(room) - SLACK - used, size_max)
                try:
                    expanded = decompress_into(codec, records, room[used : used + allowed])
                    break
                except OutputTooSmallError:
                    base_offset = table[row, fields.BASE_OFFSET]
                    if allowed == size_max:
                        raise DecodeError(
                            f"the record batch at offset {base_offset} expands to more than {size_max} bytes"
                        ) from None
                    needed = grown(max(needed, allowed), size_max)
                except DecodeError as error:
                    raise DecodeError(
                        f"the record batch at offset {table[row, fields.BASE_OFFSET]} has {error}"
                    ) from None
            start = address + used
            table[row, fields.START] = start
            table[row, fields.END] = start + expanded
            table[row, fields.LIMIT] = start + expanded + SLACK
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


_KEY_VALIDITY = _Buffer(fields.TO_KEY_VALIDITY, 1)
_BUFFERS: dict[str, tuple[_Buffer, ...]] = {
    "offset": (_Buffer(fields.TO_OFFSETS, 64),),
    "timestamp": (_Buffer(fields.TO_TIMESTAMPS, 64),),
    "timestamp_type": (_Buffer(fields.TO_TIMESTAMP_TYPES, 8),),
    "leader_epoch": (_Buffer(fields.TO_LEADER_EPOCHS, 32),),
    "key_hash": (_KEY_VALIDITY, _Buffer(fields.TO_HASHES, 32)),
    "headers": (_Buffer(fields.TO_HEADERS_AT, 3 * 64),),
    "key": (_KEY_VALIDITY, _Buffer(fields.TO_KEY_ENDS, 32, 4), _Buffer(fields.TO_KEY_DATA, 0, is_data=True)),
    "value": (
        _Buffer(fields.TO_VALUE_VALIDITY, 1),
        _Buffer(fields.TO_VALUE_ENDS, 32, 4),
        _Buffer(fields.TO_VALUE_DATA, 0, is_data=True),
    ),
}


def _message_column(name: str) -> tuple[int, ...]:
    """Describe a column to the kernel that writes the message: the fields of `plan` from COLUMN_VALIDITY on."""
    *before, data = _BUFFERS[name]
    validity = before[0].field if before else 0
    ends = before[1].field if len(before) > 1 else 0
    counts = (fields.VALUE_NULLS, fields.VALUE_SIZE) if name == "value" else (fields.KEY_NULLS, fields.KEY_SIZE)
    return validity, ends, data.field, data.record_bits >> 3, *counts


class _Shape:
    """The columns that `decode` shall give, as the kernels read them: their buffers, and the message about these."""

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
            head = [address_of(self._text), envelope.size, envelope.body_size_at, envelope.rows_at]
            head += [envelope.nodes_at, envelope.buffers_at]
            self.message = np.array([*head, *(number for name in flat for number in _message_column(name))], np.int64)


_shape = lru_cache(maxsize=256)(_Shape)


def _gather(
    table: NDArray[np.int64],
    first: int,
    end: int,
    shape: _Shape,
    offsets: tuple[int, int],
    share: KeyShare | None,
    *,
    check_crc: bool,
) -> pa.RecordBatch:
    """Decode the batches of some rows of the table, keeping the offsets from the first on, below the second."""
    plan = np.empty(fields.DECODE_FIELDS, np.int64)
    answer = np.empty(fields.DECODED_SIZE, np.int64)
    size = lay_out(table, first, end, shape.layout, plan)
    if size < 0:
        row = next(
            row
            for row in table[first:end]
            if row[fields.RECORD_COUNT] * fields.RECORD_SIZE_MIN > row[fields.END] - row[fields.START]
        )
        raise DecodeError(f"the record batch at offset {row[fields.BASE_OFFSET]} is too small for its records")
    slab = shelf.take(shape.message_size + ALIGNMENT + size)
    base = (slab.address + shape.message_size + ALIGNMENT - 1) & -ALIGNMENT
    plan[fields.CHECKED_BY] = _TABLES_AT if check_crc else 0
    plan[fields.FROM_OFFSET], plan[fields.TO_OFFSET] = offsets
    if share is not None:
        plan[fields.RANGED] = 1
        plan[fields.RANGE_START], plan[fields.RANGE_END] = share.keys
        plan[fields.INITIAL] = share.initial
        plan[fields.KEYLESS_START], plan[fields.KEYLESS_MASK] = share.held[0], share.held[1] - share.held[0]
    rows = decode_records(table, first, end, plan, base, size, shape.message, answer)
    if rows < 0:
        offset = table[answer[fields.AT_BATCH], fields.BASE_OFFSET]
        if rows == CORRUPT:
            raise _checksum_error(int(offset))
        raise DecodeError(f"the record batch at offset {offset} holds a malformed record")
    envelope = shape.envelope
    records = None if envelope is None else envelope.read(slab.buffer, base - envelope.size - slab.address)
    if records is None or shape.headers_at:
        found = answer[: fields.DECODED_FIELDS].tolist()
        arrays = [] if records is None else records.columns
        for place in shape.headers_at:
            arrays.insert(place, _gather_headers(table[first:end], rows, int(plan[fields.TO_HEADERS_AT]), found))
        records = pa.RecordBatch.from_arrays(arrays, schema=shape.schema)
    return records


def _gather_headers(table: NDArray[np.int64], rows: int, headers_at: int, found: list[int]) -> pa.Array:
    count, size = found[fields.HEADER_COUNT], found[fields.HEADER_SIZES]
    kind = COLUMN_TYPES["headers"]
    list_offsets = np.zeros(rows + 1, np.int32)
    key_offsets = np.zeros(count + 1, np.int32)
    value_offsets = np.zeros(count + 1, np.int32)
    validity = np.full((count + 7) // 8, 0xFF, np.uint8)
    nulls = 0
    keys, values = np.empty(0, np.uint8), np.empty(0, np.uint8)
    if count:
        sizes = np.zeros(fields.DECODED_FIELDS, np.int64)
        keys = np.empty(size + SLACK, np.uint8)
        values = np.empty(size + SLACK, np.uint8)
        written = decode_headers(
            headers_at,
            rows,
            address_of(list_offsets) + 4,
            address_of(key_offsets) + 4,
            address_of(keys),
            address_of(value_offsets) + 4,
            address_of(values),
            address_of(validity),
            sizes,
        )
        if written == MALFORMED:
            raise DecodeError(f"the record batches from offset {table[0, fields.BASE_OFFSET]} hold a malformed header")
        nulls = int(sizes[fields.VALUE_NULLS])
        keys, values = keys[: sizes[fields.KEY_SIZE]], values[: sizes[fields.VALUE_SIZE]]
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
