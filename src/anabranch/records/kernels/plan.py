"""Before records are decoded: the table of batches, the rows of it that are wanted, and room for the columns.

    count_batches -> read_headers -> choose_batches -> next_batches -> lay_out -> (`decode`)

The constants are the fields of the arrays that callers and kernels hand to each other. A field of a table is a column,
one row for each batch; a field of a plan, a message or an answer is a position in an array of one dimension.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anabranch.records.batch import CONTROL, HEADER_SIZE, LENGTH_END, MAGIC
from anabranch.records.compression import COMPRESSION_MASK
from anabranch.records.kernels.compiled import kernel
from anabranch.records.kernels.memory import ALIGNMENT, INT64_MAX, MASK_32, SLACK, be16, be32, be64, u8

RECORD_SIZE_MIN = 7
"""The fewest bytes of a record: six fields of one byte and the attributes."""
MALFORMED = -1
"""Returned by a kernel that met malformed bytes."""
CORRUPT = -2
"""Returned by a kernel that met bytes that do not fit their checksum."""

# Columns of the table of batches, one row each: where its records lie in memory, and its header.
START, END, LIMIT, BASE_OFFSET, LAST_OFFSET_DELTA, LEADER_EPOCH, ATTRIBUTES = 0, 1, 2, 3, 4, 5, 6
BASE_TIMESTAMP, MAX_TIMESTAMP, PRODUCER_ID, RECORD_COUNT, POSITION, SIZE, CRC = 7, 8, 9, 10, 11, 12, 13
BATCH_FIELDS = 14

# The plan of `decode_records`: bounds, and the address of every column that it fills (0: not wanted).
FROM_OFFSET, TO_OFFSET, RANGED, RANGE_START, RANGE_END = 0, 1, 2, 3, 4
TO_OFFSETS, TO_TIMESTAMPS, TO_TIMESTAMP_TYPES, TO_LEADER_EPOCHS, TO_HASHES = 5, 6, 7, 8, 9
TO_KEY_ENDS, TO_KEY_DATA, TO_KEY_VALIDITY, TO_VALUE_ENDS, TO_VALUE_DATA, TO_VALUE_VALIDITY = 10, 11, 12, 13, 14, 15
TO_HEADERS_AT, CHECKED_BY, RECORDS_MAX, INITIAL, KEYLESS_START, KEYLESS_MASK = 16, 17, 18, 19, 20, 21
DECODE_FIELDS = 22

# A row of a layout, one for each buffer: the field of the plan, bits for each record, bytes beside, and whether the
# buffer is the data of values, of a size that only the records tell.
BUFFER_FIELD, RECORD_BITS, BYTES_BESIDE, IS_DATA = 0, 1, 2, 3

# The message in front of the buffers (`arrow.ipc`), for `decode_records`: the address of a copy, the size, and the
# positions of the numbers in it.
MESSAGE_AT, MESSAGE_SIZE, BODY_SIZE_AT, ROWS_AT, NODES_AT, BUFFERS_AT = 0, 1, 2, 3, 4, 5
MESSAGE_FIELDS = 6

# Behind that for each column: the fields of the plan that its buffers have (0: none), the bytes of data for each record
# (0: it is the data of values), and the fields of the answer that tell its nulls and its size.
COLUMN_VALIDITY, COLUMN_ENDS, COLUMN_DATA, RECORD_SIZE, NULLS_AT, SIZE_AT = 0, 1, 2, 3, 4, 5
MESSAGE_COLUMN_FIELDS = 6

# The answer of `decode_records`, an array that the caller owns.
ROWS, KEY_SIZE, KEY_NULLS, VALUE_SIZE, VALUE_NULLS, HEADER_COUNT, HEADER_SIZES, AT_BATCH = 0, 1, 2, 3, 4, 5, 6, 7
DECODED_FIELDS = 8
BLOCK = 128
"""Records that are scanned before they are moved."""
DECODED_SIZE = DECODED_FIELDS + 6 * BLOCK
"""Numbers that the answer has room for: behind its fields lies what is known of a block of records."""
_CODEC_MAX = 4
PLANE = 8 * BLOCK
"""Of a block, the lengths of keys, then, so many bytes further, where they are; the same of values; then the deltas of
offsets, and those of timestamps, zigzag."""


@kernel
def count_batches(address: int, size: int) -> int:
    """Count the whole batches in `size` bytes; a length that cannot be counts as one, for `read_headers` to find."""
    position = 0
    count = 0
    while size - position >= LENGTH_END:
        batch_size = be32(address + position + 8) + LENGTH_END
        if batch_size < HEADER_SIZE:
            return count + 1
        if batch_size > size - position:
            break
        position += batch_size
        count += 1
    return count


@kernel
def read_headers(address: int, size: int, table: NDArray[np.int64]) -> int:
    """Fill the table of batches; returns how many are sound, fewer than the table's rows if one is not."""
    position = 0
    limit = address + size
    for row in range(len(table)):
        if size - position < HEADER_SIZE:
            return row
        at = address + position
        batch_size = be32(at + 8) + LENGTH_END
        attributes = be16(at + 21)
        last_offset_delta = be32(at + 23)
        base_offset = be64(at)
        count = be32(at + 57)
        if (
            batch_size < HEADER_SIZE
            or batch_size > size - position
            or u8(at + 16) != MAGIC
            or attributes & COMPRESSION_MASK > _CODEC_MAX
            or base_offset < 0
            or last_offset_delta < 0
            or base_offset > INT64_MAX - last_offset_delta
            or count < 0
            or count > last_offset_delta + 1
        ):
            return row
        table[row, START] = at + HEADER_SIZE
        table[row, END] = at + batch_size
        table[row, LIMIT] = limit
        table[row, BASE_OFFSET] = base_offset
        table[row, LAST_OFFSET_DELTA] = last_offset_delta
        table[row, LEADER_EPOCH] = be32(at + 12)
        table[row, ATTRIBUTES] = attributes
        table[row, BASE_TIMESTAMP] = be64(at + 27)
        table[row, MAX_TIMESTAMP] = be64(at + 35)
        table[row, PRODUCER_ID] = be64(at + 43)
        table[row, RECORD_COUNT] = count
        table[row, POSITION] = position
        table[row, SIZE] = batch_size
        table[row, CRC] = be32(at + 17) & MASK_32
        position += batch_size
    return len(table)


@kernel
def choose_batches(table: NDArray[np.int64], from_offset: int, to_offset: int) -> tuple[int, int]:
    """Move the rows of batches to decode to the front of the table: all but control batches and those out of bounds.

    Returns how many they are, and the highest offset of all batches, -1 if there are none.
    """
    count = 0
    highest = -1
    for row in range(len(table)):
        last_offset = table[row, BASE_OFFSET] + table[row, LAST_OFFSET_DELTA]
        highest = max(highest, last_offset)
        if last_offset < from_offset or table[row, BASE_OFFSET] >= to_offset or table[row, ATTRIBUTES] & CONTROL:
            continue
        if row != count:
            for field in range(BATCH_FIELDS):
                table[count, field] = table[row, field]
        count += 1
    return count, highest


@kernel
def next_batches(table: NDArray[np.int64], first: int, count: int, size_max: int) -> tuple[int, int]:
    """Take rows from `first` on, below `count`: at most `size_max` bytes or one batch.

    Returns the first row that is not taken, and whether any that is taken is compressed.
    """
    size = 0
    compressed = 0
    for row in range(first, count):
        size += table[row, SIZE]
        if size > size_max and row > first:
            return row, compressed
        compressed |= table[row, ATTRIBUTES] & COMPRESSION_MASK
    return count, compressed


@kernel
def lay_out(table: NDArray[np.int64], first: int, end: int, layout: NDArray[np.int64], plan: NDArray[np.int64]) -> int:
    """Find room for all buffers of an answer, each aligned and followed by `SLACK`; returns where they end.

    Puts down in the plan where each buffer is, none at 0, and how many records the batches claim. MALFORMED if one of
    them claims more than its bytes can hold.
    """
    count = 0
    size = 0
    for row in range(first, end):
        claimed = table[row, RECORD_COUNT]
        held = table[row, END] - table[row, START]
        if claimed * RECORD_SIZE_MIN > held:
            return MALFORMED
        count += claimed
        size += held
    plan[:] = 0
    plan[RECORDS_MAX] = count
    place = ALIGNMENT
    for buffer in range(len(layout)):
        plan[layout[buffer, BUFFER_FIELD]] = place
        place += size if layout[buffer, IS_DATA] else (layout[buffer, RECORD_BITS] * count + 7) >> 3
        place = (place + layout[buffer, BYTES_BESIDE] + SLACK + ALIGNMENT - 1) & -ALIGNMENT
    return place
