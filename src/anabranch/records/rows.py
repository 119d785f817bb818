"""The records of one batch, one after another, in plain Python: the only loop over single records without NumPy.

    length | attributes 1 | timestamp delta | offset delta | key length | key | value length | value
    | header count | headers

All numbers but the attributes are of variable length (`varint`). Every length is checked here, so callers may slice
with the positions that they get. Headers are skipped, not checked. `kernels` do the same for columns of many records,
`bulk_scan` for many small batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.records.compression import Bytes
from anabranch.records.varint import encode_varint, read_varint


class RecordSpan(NamedTuple):
    """One record: its deltas, and the positions of its parts in the bytes that it was found in."""

    start: int
    """Of the record's length."""
    end: int
    timestamp_delta: int
    offset_delta: int
    key_start: int
    key_end: int
    """-1 says that the key is null."""
    value_start: int
    value_end: int
    """-1 says that the value is null."""


def iterate(records: Bytes, count: int, base_offset: int) -> Iterator[RecordSpan]:
    """Take `count` records apart that are not compressed; what follows the last of them is ignored.

    DecodeError, naming the `base_offset` of the batch, at the first record that is malformed.
    """
    new = tuple.__new__
    try:
        end, limit = 0, len(records)
        for _ in range(count):
            start = end
            # Most numbers have one byte, which costs less to read here than by a call: `at` is behind that byte.
            at = start + 1
            if (length := records[start]) < 0x80:
                length = length >> 1 ^ -(length & 1)
            else:
                length, at = read_varint(records, start)
            end = at + length
            if not at < end <= limit:
                raise DecodeError(f"a record of {length} bytes where {limit - at} are left")
            at += 2  # The attributes, and a first byte.
            if (timestamp_delta := records[at - 1]) < 0x80:
                timestamp_delta = timestamp_delta >> 1 ^ -(timestamp_delta & 1)
            else:
                timestamp_delta, at = read_varint(records, at - 1)
            at += 1
            if (offset_delta := records[at - 1]) < 0x80:
                offset_delta = offset_delta >> 1 ^ -(offset_delta & 1)
            else:
                offset_delta, at = read_varint(records, at - 1)
            at += 1
            if (key_size := records[at - 1]) < 0x80:
                key_size = key_size >> 1 ^ -(key_size & 1)
            else:
                key_size, at = read_varint(records, at - 1)
            key_start = at
            key_end = at = at + key_size
            if key_size < 0:
                key_end, at = -1, key_start
            at += 1
            if (value_size := records[at - 1]) < 0x80:
                value_size = value_size >> 1 ^ -(value_size & 1)
            else:
                value_size, at = read_varint(records, at - 1)
            value_start = at
            value_end = at = at + value_size
            if value_size < 0:
                value_end, at = -1, value_start
            if at >= end or key_size < -1 or value_size < -1:
                raise DecodeError(f"a key of {key_size} and a value of {value_size} bytes in a record of {length}")
            # As `RecordSpan(...)`, at half the cost.
            parts = (start, end, timestamp_delta, offset_delta, key_start, key_end, value_start, value_end)
            yield new(RecordSpan, parts)
    except (DecodeError, IndexError) as error:
        raise DecodeError(f"the record batch at offset {base_offset} has a record that is cut off: {error}") from None


def moved(record: Bytes, timestamp_delta: int, offset_delta: int) -> bytes:
    """Write one whole record, from its length on, with other deltas: for a batch with another base."""
    _, at = read_varint(record, 0)
    attributes = record[at : at + 1]
    _, behind = read_varint(record, at + 1)
    _, behind = read_varint(record, behind)
    deltas = encode_varint(timestamp_delta) + encode_varint(offset_delta)
    rest = record[behind:]
    return b"".join((encode_varint(1 + len(deltas) + len(rest)), attributes, deltas, rest))
