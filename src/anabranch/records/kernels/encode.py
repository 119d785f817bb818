"""Columns written as record batches of their partitions, each with its header and checksum.

share_rows (the room of each partition) -> encode_batches
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anabranch.records.batch import HEADER_SIZE, LENGTH_END, MAGIC, RECORD_OVERHEAD_MAX
from anabranch.records.kernels.compiled import called, inlined, kernel
from anabranch.records.kernels.crc32c import CRC_FROM, take_crc
from anabranch.records.kernels.memory import (
    DATA_AT,
    DATA_END,
    INT64_MAX,
    OFFSETS_AT,
    OFFSETS_WIDE,
    SLACK,
    VALIDITY_AT,
    VALIDITY_FIRST,
    bounds,
    copy,
    i32,
    i64,
    is_valid,
    leading_zeros,
    put8,
    put16,
    put64,
    put_be16,
    put_be32,
    put_be64,
    to_zigzag,
)

HEADER_OVERHEAD_MAX = 10
"""A record header's bytes beside its key and value, at most."""

# The plan of `encode_batches`, beside the columns (keys, values, header keys, header values).
ROWS, PARTITIONS_AT, SHARES_AT, TIMESTAMPS_AT, TIMESTAMP, TARGET, BATCH_SIZE_MAX, STAMPED_BY = 0, 1, 2, 3, 4, 5, 6, 7
LISTS_AT, LISTS_WIDE, LISTS_VALIDITY, LISTS_FIRST, SIZE_IN_ALL = 8, 9, 10, 11, 12
ENCODE_FIELDS = 13
KEYS, VALUES, HEADER_KEYS, HEADER_VALUES = 0, 1, 2, 3

# A partition while rows are encoded: the bytes and rows that are its share, and its present batch.
SHARE, SHARE_ROWS, WRITTEN_TO, BATCH_AT, BATCH_ROWS, BATCH_FIRST, BATCH_BASE, BATCH_MAX = 0, 1, 2, 3, 4, 5, 6, 7
SHARE_FIELDS = 8

# Columns of the table of batches that `encode_batches` fills.
AT, BYTES, PARTITION, FIRST, COUNT = 0, 1, 2, 3, 4
ENCODED_FIELDS = 5
_SMALL = 1 << 14
"""Numbers below this have one byte or two."""


@kernel
def share_rows(columns: NDArray[np.int64], plan: NDArray[np.int64], partition_count: int) -> tuple[int, int]:
    """Find out which room each partition's batches need at most, and where in the target it begins, as WRITTEN_TO.

    Returns the room and the number of batches in all.
    """
    shares_at = plan[SHARES_AT]
    if plan[PARTITIONS_AT]:
        _sum_shares(columns, plan)
    else:
        put64(shares_at, plan[SIZE_IN_ALL])
        put64(shares_at + 8 * SHARE_ROWS, plan[ROWS])
    batch_size_max = plan[BATCH_SIZE_MAX]
    room = 0
    batches = 0
    for partition in range(partition_count):
        share = shares_at + 8 * SHARE_FIELDS * partition
        rows = i64(share + 8 * SHARE_ROWS)
        size = i64(share) + RECORD_OVERHEAD_MAX * rows
        count = rows
        if batch_size_max >= 1024:
            # Two that follow each other are larger than one may be; their headers are less than a sixth of that.
            count = min(rows, ((2 * size // batch_size_max + 1) * 6) // 5 + 2)
        put64(share + 8 * WRITTEN_TO, room)
        if rows:
            room += size + HEADER_SIZE * count + SLACK
        batches += count
    return room, batches


@inlined
def _sum_shares(columns: NDArray[np.int64], plan: NDArray[np.int64]) -> None:
    """Sum up the bytes of keys, values and headers, and the rows, of each partition."""
    key_offsets, value_offsets, lists_at = columns[KEYS, OFFSETS_AT], columns[VALUES, OFFSETS_AT], plan[LISTS_AT]
    key_wide, value_wide = columns[KEYS, OFFSETS_WIDE], columns[VALUES, OFFSETS_WIDE]
    partitions = plan[PARTITIONS_AT]
    shares_at = plan[SHARES_AT]
    for row in range(plan[ROWS]):
        share = shares_at + 8 * SHARE_FIELDS * i32(partitions + 4 * row)
        size = i64(share)
        if key_offsets:
            start, end = bounds(key_offsets, key_wide, row)
            size += end - start
        if value_offsets:
            start, end = bounds(value_offsets, value_wide, row)
            size += end - start
        if lists_at:
            first, last = bounds(lists_at, plan[LISTS_WIDE], row)
            for header in range(first, last):
                size += _field(columns, HEADER_KEYS, header)[2] + _field(columns, HEADER_VALUES, header)[2]
            size += HEADER_OVERHEAD_MAX * (last - first)
        put64(share, size)
        put64(share + 8 * SHARE_ROWS, i64(share + 8 * SHARE_ROWS) + 1)


@inlined
def _varint_size(zigzag: int) -> int:
    return ((64 - leading_zeros(zigzag | 1)) * 9 + 64) >> 6


@inlined
def _put_varint(at: int, zigzag: int) -> int:
    """Write a number that is zigzag already; returns the address behind it."""
    while zigzag & ~0x7F:
        put8(at, (zigzag & 0x7F) | 0x80)
        zigzag = (zigzag >> 7) & (INT64_MAX >> 6)
        at += 1
    put8(at, zigzag)
    return at + 1


@inlined
def _small_size(number: int) -> int:
    """As `_varint_size`, of a number below `_SMALL`."""
    return 1 + (number > 0x7F)


@inlined
def _put_small(at: int, number: int) -> int:
    """As `_put_varint`, of a number below `_SMALL`, without a branch; a byte too many is written."""
    more = number > 0x7F
    put16(at, (number & 0x7F) | (more << 7) | ((number & 0x3F80) << 1))
    return at + 1 + more


@inlined
def _put_bytes(at: int, present: bool, source: int, size: int, limit: int) -> int:
    """Write a length and that many bytes, or the length -1; returns the address behind them."""
    if not present:
        put8(at, 1)
        return at + 1
    at = _put_varint(at, size << 1)
    copy(at, source, size, limit)
    return at + size


@kernel
def encode_batches(
    columns: NDArray[np.int64], plan: NDArray[np.int64], partition_count: int, table: NDArray[np.int64]
) -> int:
    """Write rows as batches of their partitions, each at most BATCH_SIZE_MAX bytes unless one record is more.

    Rows are read in their order, and each is written where its partition's present batch ends: memory that is read
    here and there is waited for, memory that is written here and there is not. Every batch gets its header, with the
    checksum if there are tables for it. WRITTEN_TO of a partition's share says where its batches begin; there must be
    room for the sum of all its bytes, the overheads and the slack. The table has a row for every batch that
    can come out. Returns how many did.
    """
    timestamps_at = plan[TIMESTAMPS_AT]
    partitions = plan[PARTITIONS_AT]
    lists_at = plan[LISTS_AT]
    batch_size_max = plan[BATCH_SIZE_MAX]
    key_offsets, key_wide, key_data = columns[KEYS, OFFSETS_AT], columns[KEYS, OFFSETS_WIDE], columns[KEYS, DATA_AT]
    key_limit, key_bitmap = columns[KEYS, DATA_END], columns[KEYS, VALIDITY_AT]
    key_first = columns[KEYS, VALIDITY_FIRST]
    value_offsets, value_wide = columns[VALUES, OFFSETS_AT], columns[VALUES, OFFSETS_WIDE]
    value_data, value_limit = columns[VALUES, DATA_AT], columns[VALUES, DATA_END]
    value_bitmap, value_first = columns[VALUES, VALIDITY_AT], columns[VALUES, VALIDITY_FIRST]
    timestamp = plan[TIMESTAMP]
    # No headers, nothing null, offsets of 32 bits: so it is mostly, and then much need not be asked of each row.
    plain = (
        lists_at | key_wide | value_wide | key_bitmap | value_bitmap == 0 and key_offsets != 0 and value_offsets != 0
    )
    shares_at = plan[SHARES_AT]
    for partition in range(partition_count):
        share = shares_at + 8 * SHARE_FIELDS * partition
        put64(share + 8 * WRITTEN_TO, i64(share + 8 * WRITTEN_TO) + plan[TARGET])
    share = shares_at
    batches = 0
    for row in range(plan[ROWS]):
        if partitions:
            share = shares_at + 8 * SHARE_FIELDS * i32(partitions + 4 * row)
        at = i64(share + 8 * WRITTEN_TO)
        count = i64(share + 8 * BATCH_ROWS)
        if timestamps_at:
            timestamp = i64(timestamps_at + 8 * row)
        if plain and count:
            key_start, key_end = bounds(key_offsets, 0, row)
            value_start, value_end = bounds(value_offsets, 0, row)
            key_size, value_size = key_end - key_start, value_end - value_start
            delta = to_zigzag(timestamp - i64(share + 8 * BATCH_BASE))
            numbers = delta | count << 1 | key_size << 1 | value_size << 1
            size = 2 + _small_size(delta) + _small_size(count << 1) + _small_size(key_size << 1) + key_size
            size += _small_size(value_size << 1) + value_size
            end = at + _small_size(size << 1) + size
            if 0 <= numbers | size << 1 < _SMALL and end - i64(share + 8 * BATCH_AT) <= batch_size_max:
                at = _put_small(at, size << 1)
                put8(at, 0)
                at = _put_small(at + 1, delta)
                at = _put_small(at, count << 1)
                at = _put_small(at, key_size << 1)
                copy(at, key_data + key_start, key_size, key_limit)
                at = _put_small(at + key_size, value_size << 1)
                copy(at, value_data + value_start, value_size, value_limit)
                put8(at + value_size, 0)
                put64(share + 8 * WRITTEN_TO, end)
                put64(share + 8 * BATCH_ROWS, count + 1)
                if timestamp > i64(share + 8 * BATCH_MAX):
                    put64(share + 8 * BATCH_MAX, timestamp)
                continue
        has_key = key_offsets != 0 and is_valid(key_bitmap, key_first + row)
        has_value = value_offsets != 0 and is_valid(value_bitmap, value_first + row)
        key_start, key_size = 0, 0
        if has_key:
            key_start, key_end = bounds(key_offsets, key_wide, row)
            key_size = key_end - key_start
        value_start, value_size = 0, 0
        if has_value:
            value_start, value_end = bounds(value_offsets, value_wide, row)
            value_size = value_end - value_start
        payload = (_varint_size(key_size << 1) + key_size if has_key else 1) + (
            _varint_size(value_size << 1) + value_size if has_value else 1
        )
        header_first, header_last = 0, 0
        if lists_at and is_valid(plan[LISTS_VALIDITY], plan[LISTS_FIRST] + row):
            header_first, header_last = bounds(lists_at, plan[LISTS_WIDE], row)
        payload += _varint_size((header_last - header_first) << 1)
        for header in range(header_first, header_last):
            payload += _field_size(columns, HEADER_KEYS, header) + _field_size(columns, HEADER_VALUES, header)
        delta = to_zigzag(timestamp - i64(share + 8 * BATCH_BASE))
        size = 1 + _varint_size(delta) + _varint_size(count << 1) + payload
        if count and at - i64(share + 8 * BATCH_AT) + _varint_size(size << 1) + size > batch_size_max:
            batches = _end_batch(table, batches, plan, share)
            count = 0
        if count == 0:
            put64(share + 8 * BATCH_AT, at)
            put64(share + 8 * BATCH_FIRST, row)
            put64(share + 8 * BATCH_BASE, timestamp)
            put64(share + 8 * BATCH_MAX, timestamp)
            at += HEADER_SIZE
            delta = 0
            size = 3 + payload
        at = _put_varint(at, size << 1)
        put8(at, 0)
        at = _put_varint(at + 1, delta)
        at = _put_varint(at, count << 1)
        at = _put_bytes(at, has_key, key_data + key_start, key_size, key_limit)
        at = _put_bytes(at, has_value, value_data + value_start, value_size, value_limit)
        at = _put_varint(at, (header_last - header_first) << 1)
        for header in range(header_first, header_last):
            at = _put_field(at, columns, HEADER_KEYS, header)
            at = _put_field(at, columns, HEADER_VALUES, header)
        put64(share + 8 * WRITTEN_TO, at)
        put64(share + 8 * BATCH_ROWS, count + 1)
        if timestamp > i64(share + 8 * BATCH_MAX):
            put64(share + 8 * BATCH_MAX, timestamp)
    for partition in range(partition_count):
        share = shares_at + 8 * SHARE_FIELDS * partition
        if i64(share + 8 * BATCH_ROWS):
            batches = _end_batch(table, batches, plan, share)
    return batches


@called
def _end_batch(table: NDArray[np.int64], row: int, plan: NDArray[np.int64], share: int) -> int:
    """Give a partition's present batch its header, and enter it in the table; returns the next row of that."""
    at, end, count = i64(share + 8 * BATCH_AT), i64(share + 8 * WRITTEN_TO), i64(share + 8 * BATCH_ROWS)
    base_timestamp, max_timestamp = i64(share + 8 * BATCH_BASE), i64(share + 8 * BATCH_MAX)
    _put_header(at, end, count, base_timestamp, max_timestamp, plan[STAMPED_BY])
    table[row, AT] = at - plan[TARGET]
    table[row, BYTES] = end - at
    table[row, PARTITION] = (share - plan[SHARES_AT]) // (8 * SHARE_FIELDS)
    table[row, FIRST] = i64(share + 8 * BATCH_FIRST)
    table[row, COUNT] = count
    return row + 1


@inlined
def _field(columns: NDArray[np.int64], field: int, row: int) -> tuple[bool, int, int]:
    """Find one value of a column: whether it is there, its start and its size; no offsets say that all are null."""
    if columns[field, OFFSETS_AT] and is_valid(columns[field, VALIDITY_AT], columns[field, VALIDITY_FIRST] + row):
        start, end = bounds(columns[field, OFFSETS_AT], columns[field, OFFSETS_WIDE], row)
        return True, start, end - start
    return False, 0, 0


@inlined
def _field_size(columns: NDArray[np.int64], field: int, row: int) -> int:
    present, _, size = _field(columns, field, row)
    return _varint_size(size << 1) + size if present else 1


@inlined
def _put_field(at: int, columns: NDArray[np.int64], field: int, row: int) -> int:
    present, start, size = _field(columns, field, row)
    return _put_bytes(at, present, columns[field, DATA_AT] + start, size, columns[field, DATA_END])


@inlined
def _put_header(at: int, end: int, count: int, base_timestamp: int, max_timestamp: int, crc_tables: int) -> None:
    """Write the header of the batch from `at` to `end`: no place in a log yet, and no producer."""
    put_be64(at, 0)
    put_be32(at + 8, end - at - LENGTH_END)
    put_be32(at + 12, -1)
    put8(at + 16, MAGIC)
    put_be32(at + 17, 0)
    put_be16(at + 21, 0)
    put_be32(at + 23, count - 1)
    put_be64(at + 27, base_timestamp)
    put_be64(at + 35, max_timestamp)
    put_be64(at + 43, -1)
    put_be16(at + 51, -1)
    put_be32(at + 53, -1)
    put_be32(at + 57, count)
    if crc_tables:
        put_be32(at + 17, take_crc(at + CRC_FROM, end, crc_tables))
