"""The records of batches gathered into columns, whose memory `plan` has laid out.

A block of records is taken at a time. Plain records that are all wanted are scanned and moved at once (`_take_plain`).
Of other records one tight loop finds all parts, then one loop for each column moves them while the block is in the
nearest cache. Numbers are found eight bytes at a time: most records look like the one before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anabranch.records.batch import HEADER_SIZE, LOG_APPEND_TIME
from anabranch.records.compression import COMPRESSION_MASK
from anabranch.records.kernels.compiled import called, inlined, kernel
from anabranch.records.kernels.crc32c import CRC_FROM, take_crc
from anabranch.records.kernels.hashing import mixed, murmur2, spread
from anabranch.records.kernels.memory import (
    COPIED_INLINE,
    SLACK,
    clear_bit,
    copy,
    copy_32,
    copy_64,
    copy_bytes,
    count_ones,
    from_zigzag,
    i64,
    prefetch_to_read_later,
    prefetch_to_write,
    put8,
    put32,
    put64,
    read_varint,
    squeeze,
    to_zigzag,
    u8,
)
from anabranch.records.kernels.plan import (
    AT_BATCH,
    ATTRIBUTES,
    BASE_OFFSET,
    BASE_TIMESTAMP,
    BLOCK,
    BODY_SIZE_AT,
    BUFFERS_AT,
    CHECKED_BY,
    COLUMN_DATA,
    COLUMN_ENDS,
    COLUMN_VALIDITY,
    CORRUPT,
    CRC,
    DECODED_FIELDS,
    END,
    FROM_OFFSET,
    HEADER_COUNT,
    HEADER_SIZES,
    INITIAL,
    KEY_NULLS,
    KEY_SIZE,
    KEYLESS_MASK,
    KEYLESS_START,
    LAST_OFFSET_DELTA,
    LEADER_EPOCH,
    LIMIT,
    MALFORMED,
    MAX_TIMESTAMP,
    MESSAGE_AT,
    MESSAGE_COLUMN_FIELDS,
    MESSAGE_FIELDS,
    MESSAGE_SIZE,
    NODES_AT,
    NULLS_AT,
    PLANE,
    RANGE_END,
    RANGE_START,
    RANGED,
    RECORD_COUNT,
    RECORD_SIZE,
    RECORD_SIZE_MIN,
    RECORDS_MAX,
    ROWS,
    ROWS_AT,
    SIZE_AT,
    START,
    TO_HASHES,
    TO_HEADERS_AT,
    TO_KEY_DATA,
    TO_KEY_ENDS,
    TO_KEY_VALIDITY,
    TO_LEADER_EPOCHS,
    TO_OFFSET,
    TO_OFFSETS,
    TO_TIMESTAMP_TYPES,
    TO_TIMESTAMPS,
    TO_VALUE_DATA,
    TO_VALUE_ENDS,
    TO_VALUE_VALIDITY,
    VALUE_NULLS,
    VALUE_SIZE,
)

_READ_AHEAD = 16 * 1024
"""How far behind what is copied memory is brought near: about a batch, as producers make them."""
_WORD = 8
_CONTINUED = 0x8080_8080_8080_8080 - (1 << 64)
"""The bit of every byte that says that a number goes on in the next one."""
_CARRIED = 0x7F7F_7F7F_7F7F_7F7F
"""The bits of every byte that are part of a number."""


@inlined
def _front(word: int) -> tuple[int, int, int, int, int, int, int]:
    """Find the numbers in the first eight bytes of a record: its size, attributes, the deltas of timestamp and offset.

    Returns how far behind the record's start the key's length comes, 0 if the numbers do not fit or are negative; the
    width of the size; what `word` shares with all words that are laid out alike, and in which bits; and the bits that
    hold the size, the zigzag delta of the timestamp, and the delta of the offset.
    """
    # A number ends at the first byte that does not go on, so all ends are known before any number is.
    ends = ~word & _CONTINUED
    to_size = ends ^ (ends - 1)
    ends &= ends - 1
    to_attributes = ends ^ (ends - 1)
    ends &= ends - 1
    to_timestamp = ends ^ (ends - 1)
    ends &= ends - 1
    to_offset = ends ^ (ends - 1)
    offset_bits = to_offset & ~to_timestamp & _CARRIED
    signs = 1 | (offset_bits & -offset_bits)
    fits = ends != 0 and to_attributes == to_size << 8 | 0xFF and word & signs == 0
    mask = (to_offset & _CONTINUED) | signs
    return (
        count_ones(to_offset) >> 3 if fits else 0,
        count_ones(to_size) >> 3,
        word & mask,
        mask,
        to_size & _CARRIED & ~1,
        to_timestamp & ~to_attributes & _CARRIED,
        offset_bits & ~signs,
    )


@inlined
def _length(word: int) -> tuple[int, int, int, int, int]:
    """Find the length of a key or a value in the eight bytes where it begins.

    Returns its width, 0 if it is longer or less than -1; what `word` shares with all words that are laid out alike,
    and in which bits; the bits that hold the length; and whether it is -1, with none of them.
    """
    ends = ~word & _CONTINUED
    to_end = ends ^ (ends - 1)
    if word & 1:
        return 1 if word & 0xFF == 1 else 0, 1, 0xFF, 0, 1
    mask = (to_end & _CONTINUED) | 1
    return count_ones(to_end) >> 3 if ends else 0, word & mask, mask, to_end & _CARRIED & ~1, 0


@inlined
def _prepare(validity: int, ends: int, rows: int) -> None:
    """Make a column of variable-length values start at 0 with nothing null; 7 bytes too many are set."""
    if validity:
        for place in range(0, (rows + 7) >> 3, 8):
            put64(validity + place, -1)
    if ends:
        put32(ends, 0)


@called
def _gather(
    lengths: int, rows: int, row: int, data: int, size: int, ends: int, validity: int, limit: int
) -> tuple[int, int]:
    """Move a block of one column, behind the `size` bytes that are there; returns the new size and the nulls."""
    nulls = 0
    ends += 4 * row + 4
    for place in range(rows):
        length = i64(lengths + 8 * place)
        if length >= 0:
            if data:
                if length > 32:
                    prefetch_to_write(data + size + 1024)
                    prefetch_to_write(data + size + 1088)
                copy(data + size, i64(lengths + PLANE + 8 * place), length, limit)
                size += length
        else:
            nulls += 1
            clear_bit(validity, row + place)
        if data:
            put32(ends + 4 * place, size)
    return size, nulls


@called
def _take_plain(
    at: int,
    safe_end: int,
    rows_max: int,
    previous: int,
    deltas: int,
    row: int,
    key_data: int,
    key_size: int,
    key_ends: int,
    value_data: int,
    value_size: int,
    value_ends: int,
) -> tuple[int, int, int, int, int]:
    """Scan and move at once the records of a block, as long as they are plain.

    They have a key, a value of at most 2 KiB and no headers, numbers of few bytes, and end so far before the end of
    memory that whole words can be read and copied: the processor copies one while it finds the next, where two
    loops would each wait for themselves. Columns whose data is at 0 are not wanted. Returns how many
    records were taken, the address behind them, the offset delta of the last one, and the sizes of keys and values.
    """
    key_ends += 4 * row + 4
    value_ends += 4 * row + 4
    rows = 0
    taken = -1
    while taken != rows and rows < rows_max and at < safe_end:
        taken = rows
        # What the next record is like holds for those that follow, as a rule: the inner loop has no other case.
        key_size_after, size_width, shape, shape_mask, size_mask, timestamp_mask, offset_mask = _front(i64(at))
        key_word = i64(at + key_size_after)
        key_width, key_shape, key_shape_mask, key_mask, is_null = _length(key_word)
        key_after = key_size_after + key_width
        value_size_at = at + key_after + squeeze(key_word, key_mask)
        if key_size_after == 0 or key_width == 0 or is_null or value_size_at >= safe_end:
            break
        value_width, value_shape, value_shape_mask, value_mask, is_null = _length(i64(value_size_at))
        if value_width == 0 or is_null:
            break
        while rows < rows_max and at < safe_end:
            word = i64(at)
            key_word = i64(at + key_size_after)
            record_end = at + size_width + squeeze(word, size_mask)
            if (word ^ shape) & shape_mask != 0 or (key_word ^ key_shape) & key_shape_mask != 0:
                break
            key_at = at + key_after
            key_length = squeeze(key_word, key_mask)
            value_size_at = key_at + key_length
            if record_end > safe_end or value_size_at >= record_end:
                break
            value_word = i64(value_size_at)
            value_at = value_size_at + value_width
            value_length = squeeze(value_word, value_mask)
            if (value_word ^ value_shape) & value_shape_mask != 0 or value_length > COPIED_INLINE:
                break
            offset_delta = squeeze(word, offset_mask)
            if value_at + value_length + 1 != record_end or u8(record_end - 1) != 0 or offset_delta <= previous:
                break
            previous = offset_delta
            put64(deltas + 8 * rows, offset_delta)
            put64(deltas + PLANE + 8 * rows, squeeze(word, timestamp_mask))
            if key_data:
                target = key_data + key_size
                copy_32(target, key_at)
                moved = 32
                while moved < key_length:
                    copy_32(target + moved, key_at + moved)
                    moved += 32
                key_size += key_length
                put32(key_ends + 4 * rows, key_size)
            if value_data:
                target = value_data + value_size
                prefetch_to_write(target + 1024)
                prefetch_to_write(target + 1088)
                prefetch_to_read_later(value_at + _READ_AHEAD)
                copy_64(target, value_at)
                if value_length > 64:
                    prefetch_to_read_later(value_at + _READ_AHEAD + 64)
                    copy_64(target + 64, value_at + 64)
                    if value_length > 128:
                        moved = 128
                        while moved < value_length:
                            copy_64(target + moved, value_at + moved)
                            moved += 64
                value_size += value_length
                put32(value_ends + 4 * rows, value_size)
            at = record_end
            rows += 1
    return rows, at, previous, key_size, value_size


@inlined
def _seal(
    base: int, size: int, rows: int, plan: NDArray[np.int64], message: NDArray[np.int64], answer: NDArray[np.int64]
) -> None:
    """Write the message in front of the buffers, which end `size` bytes behind `base`, and its numbers."""
    start = base - message[MESSAGE_SIZE]
    copy_bytes(start, message[MESSAGE_AT], message[MESSAGE_SIZE])
    put64(start + message[BODY_SIZE_AT], size)
    put64(start + message[ROWS_AT], rows)
    node = start + message[NODES_AT]
    buffer = start + message[BUFFERS_AT]
    for column in range(MESSAGE_FIELDS, len(message), MESSAGE_COLUMN_FIELDS):
        validity = message[column + COLUMN_VALIDITY]
        ends = message[column + COLUMN_ENDS]
        nulls = answer[message[column + NULLS_AT]] if validity else 0
        record_size = message[column + RECORD_SIZE]
        put64(node, rows)
        put64(node + 8, nulls)
        node += 16
        put64(buffer, plan[validity] - base if nulls else 0)
        put64(buffer + 8, (rows + 7) >> 3 if nulls else 0)
        buffer += 16
        if ends:
            put64(buffer, plan[ends] - base)
            put64(buffer + 8, 4 * rows + 4)
            buffer += 16
        put64(buffer, plan[message[column + COLUMN_DATA]] - base)
        put64(buffer + 8, record_size * rows if record_size else answer[message[column + SIZE_AT]])
        buffer += 16


@kernel
def decode_records(
    table: NDArray[np.int64],
    first: int,
    end_row: int,
    plan: NDArray[np.int64],
    base: int,
    body_size: int,
    message: NDArray[np.int64],
    answer: NDArray[np.int64],
) -> int:
    """Read the records of some rows of the table, keep those within the bounds, and gather them into columns.

    The plan is that of `lay_out` and the bounds; its places are counted from `base`, and `body_size` is where they end.
    Records are taken a block at a time. As long as they are plain and all wanted, they are scanned and moved at once
    (`_take_plain`); of others one tight loop finds out where everything is, then one for each column moves it while
    the block is in the nearest cache. A message, if any, is written in front of `base`.
    """
    for field in range(TO_OFFSETS, TO_HEADERS_AT + 1):
        if plan[field]:
            plan[field] += base
    from_offset = plan[FROM_OFFSET]
    to_offset = plan[TO_OFFSET]
    ranged = plan[RANGED] != 0
    range_start = plan[RANGE_START]
    range_end = plan[RANGE_END]
    initial = max(plan[INITIAL], 1)
    keyless_start = plan[KEYLESS_START]
    keyless_mask = plan[KEYLESS_MASK]
    to_offsets = plan[TO_OFFSETS]
    to_timestamps = plan[TO_TIMESTAMPS]
    to_headers_at = plan[TO_HEADERS_AT]
    _prepare(plan[TO_KEY_VALIDITY], plan[TO_KEY_ENDS], plan[RECORDS_MAX])
    _prepare(plan[TO_VALUE_VALIDITY], plan[TO_VALUE_ENDS], plan[RECORDS_MAX])
    # The caller's memory: an array of one's own would go with its last mention, before the addresses are used.
    keys = answer.ctypes.data + 8 * DECODED_FIELDS
    values = keys + 2 * PLANE
    deltas = keys + 4 * PLANE
    row = 0
    key_size = 0
    key_nulls = 0
    value_size = 0
    value_nulls = 0
    header_count = 0
    header_sizes = 0
    # What the last record was like: where its numbers end, and which bits hold them.
    key_size_after, size_width, shape, shape_mask, size_mask, timestamp_mask, offset_mask = _front(0)
    key_width, key_shape, key_shape_mask, key_mask, key_is_null = _length(0)
    value_width, value_shape, value_shape_mask, value_mask, value_is_null = _length(0)
    for batch in range(first, end_row):
        answer[AT_BATCH] = batch
        at = table[batch, START]
        end = table[batch, END]
        limit = table[batch, LIMIT]
        base_offset = table[batch, BASE_OFFSET]
        last_delta = table[batch, LAST_OFFSET_DELTA]
        least_delta = from_offset - base_offset
        most_delta = to_offset - base_offset - 1
        base_timestamp = table[batch, BASE_TIMESTAMP]
        append_time = table[batch, ATTRIBUTES] & LOG_APPEND_TIME != 0
        delta_bits = -1
        if append_time:
            base_timestamp = table[batch, MAX_TIMESTAMP]
            delta_bits = 0
        filtered = ranged or least_delta > 0 or most_delta < last_delta
        left = table[batch, RECORD_COUNT]
        previous = -1
        safe_end = limit - 2 * _WORD
        plain = not filtered and plan[TO_HASHES] == 0
        plain_end = min(end, limit - SLACK)
        # The checksum of expanded batches was of other bytes, and has been looked at.
        checked = plan[CHECKED_BY] != 0 and table[batch, ATTRIBUTES] & COMPRESSION_MASK == 0
        if checked and take_crc(at - HEADER_SIZE + CRC_FROM, end, plan[CHECKED_BY]) != table[batch, CRC]:
            return CORRUPT
        while left > 0:
            rows = 0
            if plain:
                rows, at, previous, key_size, value_size = _take_plain(
                    at,
                    plain_end,
                    min(left, BLOCK),
                    previous,
                    deltas,
                    row,
                    plan[TO_KEY_DATA],
                    key_size,
                    plan[TO_KEY_ENDS],
                    plan[TO_VALUE_DATA],
                    value_size,
                    plan[TO_VALUE_ENDS],
                )
            taken = rows
            scanned = 0 if taken else min(left, BLOCK)
            left -= taken + scanned
            for place in range(row, row + taken if to_headers_at else row):
                # They have none, which is what the last byte of any of them says.
                put64(to_headers_at + 24 * place, at - 1)
                put64(to_headers_at + 24 * place + 8, at)
                put64(to_headers_at + 24 * place + 16, limit)
            for _ in range(scanned):
                fits = False
                headers = 0
                if at <= safe_end:
                    word = i64(at)
                    alike = (word ^ shape) & shape_mask == 0
                    if not alike:
                        front = _front(word)
                        alike = front[0] != 0
                        if alike:
                            key_size_after, size_width, shape, shape_mask = front[:4]
                            size_mask, timestamp_mask, offset_mask = front[4:]
                    if alike:
                        record_end = at + size_width + squeeze(word, size_mask)
                        timestamp_delta = squeeze(word, timestamp_mask)
                        offset_delta = squeeze(word, offset_mask)
                        key_size_at = at + key_size_after
                        word = i64(key_size_at)
                        alike = (word ^ key_shape) & key_shape_mask == 0
                        if not alike:
                            found = _length(word)
                            alike = found[0] != 0
                            if alike:
                                key_width, key_shape, key_shape_mask, key_mask, key_is_null = found
                        key_length = squeeze(word, key_mask)
                        key_at = key_size_at + key_width
                        value_size_at = key_at + key_length
                        key_length -= key_is_null
                        if alike and value_size_at <= safe_end:
                            word = i64(value_size_at)
                            alike = (word ^ value_shape) & value_shape_mask == 0
                            if not alike:
                                found = _length(word)
                                alike = found[0] != 0
                                if alike:
                                    value_width, value_shape, value_shape_mask, value_mask, value_is_null = found
                            value_length = squeeze(word, value_mask)
                            value_at = value_size_at + value_width
                            headers_at = value_at + value_length
                            value_length -= value_is_null
                            rest = record_end - headers_at - 1
                            if alike and rest >= 0 and record_end <= end:
                                headers = u8(headers_at)
                                if headers == 0:
                                    fits = rest == 0
                                else:
                                    fits = headers & 0x81 == 0 and headers <= rest
                                    headers >>= 1
                if not fits:
                    size, at = read_varint(at, end)
                    if size < RECORD_SIZE_MIN - 1 or size > end - at:
                        return MALFORMED
                    record_end = at + size
                    timestamp_at = at + 1
                    timestamp_delta, offset_at = read_varint(timestamp_at, record_end)
                    timestamp_delta = to_zigzag(timestamp_delta)
                    offset_delta, key_size_at = read_varint(offset_at, record_end)
                    key_length, key_at = read_varint(key_size_at, record_end)
                    if key_at > record_end or key_length < -1 or key_length > record_end - key_at:
                        return MALFORMED
                    value_size_at = key_at + max(key_length, 0)
                    value_length, value_at = read_varint(value_size_at, record_end)
                    if value_at > record_end or value_length < -1 or value_length > record_end - value_at:
                        return MALFORMED
                    headers_at = value_at + max(value_length, 0)
                    headers, at = read_varint(headers_at, record_end)
                    if at > record_end or headers < 0 or headers > (record_end - at) >> 1:
                        return MALFORMED
                    if headers == 0 and at != record_end:
                        return MALFORMED
                at = record_end
                if offset_delta <= previous:
                    return MALFORMED
                previous = offset_delta
                if filtered:
                    if offset_delta < least_delta or offset_delta > most_delta:
                        continue
                    if ranged:
                        if key_length >= 0:
                            place = spread(murmur2(key_at, key_length), initial, range_start, range_end)
                        else:
                            place = keyless_start + (mixed(base_offset + offset_delta) & keyless_mask)
                        if place < range_start or place > range_end:
                            continue
                put64(keys + 8 * rows, key_length)
                put64(keys + PLANE + 8 * rows, key_at)
                put64(values + 8 * rows, value_length)
                put64(values + PLANE + 8 * rows, value_at)
                put64(deltas + 8 * rows, offset_delta)
                put64(deltas + PLANE + 8 * rows, timestamp_delta)
                if to_headers_at:
                    put64(to_headers_at + 24 * (row + rows), headers_at)
                    put64(to_headers_at + 24 * (row + rows) + 8, record_end)
                    put64(to_headers_at + 24 * (row + rows) + 16, limit)
                    header_count += headers
                    header_sizes += record_end - headers_at
                rows += 1
            if to_offsets:
                for place in range(rows):
                    put64(to_offsets + 8 * (row + place), base_offset + i64(deltas + 8 * place))
            if to_timestamps:
                for place in range(rows):
                    delta = from_zigzag(i64(deltas + PLANE + 8 * place)) & delta_bits
                    put64(to_timestamps + 8 * (row + place), base_timestamp + delta)
            if plan[TO_KEY_VALIDITY] and not taken:
                key_size, nulls = _gather(
                    keys, rows, row, plan[TO_KEY_DATA], key_size, plan[TO_KEY_ENDS], plan[TO_KEY_VALIDITY], limit
                )
                key_nulls += nulls
            if plan[TO_VALUE_VALIDITY] and not taken:
                value_size, nulls = _gather(
                    values,
                    rows,
                    row,
                    plan[TO_VALUE_DATA],
                    value_size,
                    plan[TO_VALUE_ENDS],
                    plan[TO_VALUE_VALIDITY],
                    limit,
                )
                value_nulls += nulls
            if plan[TO_HASHES]:
                for place in range(rows):
                    length = i64(keys + 8 * place)
                    key_hash = murmur2(i64(keys + PLANE + 8 * place), length) & 0x7FFF_FFFF if length >= 0 else -1
                    put32(plan[TO_HASHES] + 4 * (row + place), key_hash)
            if plan[TO_TIMESTAMP_TYPES]:
                for place in range(rows):
                    put8(plan[TO_TIMESTAMP_TYPES] + row + place, 1 if append_time else 0)
            if plan[TO_LEADER_EPOCHS]:
                for place in range(rows):
                    put32(plan[TO_LEADER_EPOCHS] + 4 * (row + place), table[batch, LEADER_EPOCH])
            row += rows
        if at != end or previous > last_delta:
            return MALFORMED
    answer[ROWS] = row
    answer[KEY_SIZE] = key_size
    answer[KEY_NULLS] = key_nulls
    answer[VALUE_SIZE] = value_size
    answer[VALUE_NULLS] = value_nulls
    answer[HEADER_COUNT] = header_count
    answer[HEADER_SIZES] = header_sizes
    if len(message):
        _seal(base, body_size, row, plan, message, answer)
    return row


@kernel
def decode_headers(
    headers_at: int,
    rows: int,
    list_ends: int,
    key_ends: int,
    key_data: int,
    value_ends: int,
    value_data: int,
    value_validity: int,
    answer: NDArray[np.int64],
) -> int:
    """Gather the headers of the records that `decode_records` kept, from where it found them."""
    count = 0
    key_size = 0
    value_size = 0
    nulls = 0
    for row in range(rows):
        at = i64(headers_at + 24 * row)
        end = i64(headers_at + 24 * row + 8)
        limit = i64(headers_at + 24 * row + 16)
        headers, at = read_varint(at, end)
        for _ in range(headers):
            length, at = read_varint(at, end)
            if at > end or length < 0 or length > end - at:
                return MALFORMED
            copy(key_data + key_size, at, length, limit)
            key_size += length
            at += length
            length, at = read_varint(at, end)
            if at > end or length < -1 or length > end - at:
                return MALFORMED
            if length >= 0:
                copy(value_data + value_size, at, length, limit)
                value_size += length
                at += length
            else:
                nulls += 1
                clear_bit(value_validity, count)
            put32(key_ends + 4 * count, key_size)
            put32(value_ends + 4 * count, value_size)
            count += 1
        if at != end:
            return MALFORMED
        put32(list_ends + 4 * row, count)
    answer[KEY_SIZE] = key_size
    answer[VALUE_SIZE] = value_size
    answer[VALUE_NULLS] = nulls
    return count
