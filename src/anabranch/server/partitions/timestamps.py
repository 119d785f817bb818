"""Which record of a batch has a time: the one place where the broker looks at single records, for ListOffsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.base.limits import DECOMPRESSION_RATIO_MAX
from anabranch.records.batch import HEADER_SIZE, BatchHeader, parse_header
from anabranch.records.compression import Compression, decompress

EXPANDED_SIZE_MIN = 1 << 20


class Found(NamedTuple):
    """A record, by its place and time."""

    offset: int
    timestamp: int
    leader_epoch: int


def first_at_or_after(batch: memoryview, timestamp: int, log_start: int) -> Found | None:
    """The first record from `log_start` on whose timestamp is `timestamp` or later."""
    header = parse_header(batch)
    for offset, when in _records(batch, header):
        if when >= timestamp and offset >= log_start:
            return Found(offset, when, header.leader_epoch)
    return None


def first_of_max(batch: memoryview, log_start: int) -> Found | None:
    """The first record that has the largest timestamp of the batch."""
    header = parse_header(batch)
    best: Found | None = None
    for offset, when in _records(batch, header):
        if offset >= log_start and (best is None or when > best.timestamp):
            best = Found(offset, when, header.leader_epoch)
    return best


def _records(batch: memoryview, header: BatchHeader) -> Iterator[tuple[int, int]]:
    """Offset and timestamp of each record."""
    if header.log_append_time:
        yield header.base_offset, header.max_timestamp
        return
    data = batch[HEADER_SIZE : header.size]
    if header.compression is not Compression.NONE:
        size_max = max(len(data), EXPANDED_SIZE_MIN) * DECOMPRESSION_RATIO_MAX
        data = memoryview(decompress(header.compression, data, size_max))
    position = 0
    for _ in range(header.record_count):
        length, position = _varint(data, position)
        following = position + length
        delta, position = _varint(data, position + 1)
        offset_delta, _ = _varint(data, position)
        yield header.base_offset + offset_delta, header.base_timestamp + delta
        position = following


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if not 0 <= position < len(data):
            raise DecodeError("a record is cut off")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), position
        shift += 7
    raise DecodeError("a variable-length number of more than 10 bytes")
