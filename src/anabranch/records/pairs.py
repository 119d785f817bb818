"""Batches of key and value, written and read record by record in plain Python: the coordinators' own logs.

A coordinator writes a handful of records at a time, and a broker should not have to load NumPy for that. Headers are
never written and skipped when read; for anything larger there are `columns`.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.base.errors import DecodeError
from anabranch.base.ids import NO_PRODUCER_EPOCH, NO_PRODUCER_ID
from anabranch.base.limits import DECOMPRESSION_RATIO_MAX, MESSAGE_SIZE_MAX
from anabranch.records.batch import HEADER_SIZE, TRANSACTIONAL, BatchHeader, build
from anabranch.records.compression import Compression, decompress

Pair = tuple[bytes | None, bytes | None]
_NULL = b"\x01"
"""The length -1."""
_NO_HEADERS = b"\x00"
_LENGTH_SHIFT_MAX = 28


def encode_pairs(
    pairs: Sequence[Pair],
    timestamp_ms: int,
    *,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
) -> bytearray:
    """Make one batch of `pairs`, each at `timestamp_ms`; with a producer it is part of a transaction of his."""
    records = bytearray()
    for index, (key, value) in enumerate(pairs):
        # Attributes and the timestamp's delta are 0.
        body = b"".join((b"\0\0", _varint(index), *_sized(key), *_sized(value), _NO_HEADERS))
        records += _varint(len(body))
        records += body
    return build(
        records,
        record_count=len(pairs),
        base_timestamp=timestamp_ms,
        max_timestamp=timestamp_ms,
        attributes=TRANSACTIONAL if producer_id >= 0 else 0,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )


def decode_pairs(batch: memoryview, header: BatchHeader) -> list[Pair]:
    """Read the keys and values of one batch, whose header is parsed; DecodeError where they are malformed."""
    records = bytes(batch[HEADER_SIZE : header.size])
    if header.compression is not Compression.NONE and header.record_count:
        size_max = max(len(records), MESSAGE_SIZE_MAX) * DECOMPRESSION_RATIO_MAX
        records = bytes(decompress(header.compression, records, size_max))
    found: list[Pair] = []
    at = 0
    try:
        for _ in range(header.record_count):
            length, at = _read_length(records, at)
            end = at + length
            at += 1
            for _ in range(2):  # The deltas of timestamp and offset.
                while records[at] >= 0x80:
                    at += 1
                at += 1
            size, at = _read_length(records, at)
            least = min(0, size)
            key = None if size < 0 else records[at : (at := at + size)]
            size, at = _read_length(records, at)
            value = None if size < 0 else records[at : (at := at + size)]
            if not at < end <= len(records) or min(least, size) < -1:
                raise DecodeError(f"the batch at offset {header.base_offset} has a record that is cut off")
            found.append((key, value))
            at = end
    except IndexError as error:
        raise DecodeError(f"the batch at offset {header.base_offset} has a record that is cut off") from error
    if at != len(records):
        raise DecodeError(f"the batch at offset {header.base_offset} has {len(records) - at} bytes behind its records")
    return found


def _sized(data: bytes | None) -> tuple[bytes, ...]:
    return (_NULL,) if data is None else (_varint(len(data)), data)


def _varint(value: int) -> bytes:
    """Write a number that is not negative, as zigzag."""
    value <<= 1
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_length(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < 0x80:
        return byte >> 1 ^ -(byte & 1), at
    value, shift = byte & 0x7F, 7
    while byte >= 0x80:
        if shift > _LENGTH_SHIFT_MAX:
            raise DecodeError("a length of more than 5 bytes")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
    return value >> 1 ^ -(value & 1), at
