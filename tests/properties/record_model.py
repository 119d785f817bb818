"""A second, slow and plain implementation of record batches, for the kernels to be compared with.

It shares nothing with the code that it tests, except for the checksum and the codecs, which are of other people.
"""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass, field, replace

import cramjam
import lz4.frame
from crc32c import crc32c

from anabranch.records.batch import stamp_crc

HEADER = struct.Struct(">qiibIhiqqqhii")


@dataclass(frozen=True)
class Row:
    """One record, where it is known which one of a log it is."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_type: int = 0
    leader_epoch: int = -1


@dataclass(frozen=True)
class Batch:
    """One batch; its rows may leave offsets out, as compaction does."""

    base_offset: int
    rows: tuple[Row, ...]
    codec: int = 0
    last_offset: int = -1
    leader_epoch: int = -1
    log_append_time: int | None = None
    producer_id: int = -1
    transactional: bool = False
    control: bool = False
    abort: bool = field(default=False)


def varint(value: int) -> bytes:
    """Write a zigzag number."""
    zigzag = (value << 1) ^ (value >> 63)
    zigzag &= (1 << 64) - 1
    out = bytearray()
    while zigzag > 0x7F:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


def sized(data: bytes | None) -> bytes:
    """Write a length and as many bytes."""
    return varint(-1) if data is None else varint(len(data)) + data


def pack(codec: int, data: bytes) -> bytes:
    """Compress with whatever is at hand."""
    if codec == 1:
        return gzip.compress(data)
    if codec == 2:
        return bytes(cramjam.snappy.compress_raw(data))
    if codec == 3:
        return lz4.frame.compress(data)
    return bytes(cramjam.zstd.compress(data)) if codec == 4 else data


def encode_record(row: Row, base_offset: int, base_timestamp: int) -> bytes:
    """Write one record."""
    body = b"\0" + varint(row.timestamp - base_timestamp) + varint(row.offset - base_offset)
    body += sized(row.key) + sized(row.value) + varint(len(row.headers))
    for key, value in row.headers:
        body += sized(key.encode()) + sized(value)
    return varint(len(body)) + body


def frame(batch: Batch, records: bytes, count: int, base_timestamp: int, max_timestamp: int) -> bytes:
    """Put the header before records."""
    last = batch.last_offset if batch.last_offset >= 0 else batch.rows[-1].offset
    attributes = batch.codec | (batch.log_append_time is not None) << 3 | batch.transactional << 4 | batch.control << 5
    packed = pack(batch.codec, records)
    tail = HEADER.pack(
        *(batch.base_offset, 49 + len(packed), batch.leader_epoch, 2, 0, attributes, last - batch.base_offset),
        *(base_timestamp, max_timestamp, batch.producer_id, -1, -1, count),
    )[21:]
    crc = crc32c(tail + packed)
    head = struct.pack(">qiibI", batch.base_offset, 49 + len(packed), batch.leader_epoch, 2, crc)
    return head + tail + packed


def restamped(data: bytearray) -> bytearray:
    """Damaged batches under right checksums, as far as they are whole: what is behind the checksum is to be met."""
    at = 0
    while at + 61 <= len(data):
        size = int.from_bytes(data[at + 8 : at + 12], "big", signed=True) + 12
        if not 61 <= size <= len(data) - at:
            break
        stamp_crc(data, at)
        at += size
    return data


def encode(batch: Batch) -> bytes:
    """Write one batch."""
    if batch.control:
        row = Row(batch.base_offset, 0, struct.pack(">hh", 0, not batch.abort), struct.pack(">hi", 0, 0))
        return frame(batch, encode_record(row, batch.base_offset, 0), 1, 0, 0)
    base_timestamp = batch.rows[0].timestamp if batch.rows else -1
    max_timestamp = max((row.timestamp for row in batch.rows), default=-1)
    if batch.log_append_time is not None:
        max_timestamp = batch.log_append_time
    records = b"".join(encode_record(row, batch.base_offset, base_timestamp) for row in batch.rows)
    return frame(batch, records, len(batch.rows), base_timestamp, max_timestamp)


def seen(batch: Batch) -> list[Row]:
    """The rows that a reader finds in a batch."""
    if batch.control:
        return []
    rows = [replace(row, leader_epoch=batch.leader_epoch) for row in batch.rows]
    if batch.log_append_time is None:
        return rows
    return [replace(row, timestamp=batch.log_append_time, timestamp_type=1) for row in rows]


def decode(data: bytes) -> list[tuple[int, list[Row]]]:
    """Read batches that are not compressed: size and rows of each."""
    batches = []
    at = 0
    while at < len(data):
        base_offset, length, epoch, magic, crc, attributes, delta, base, _, _, _, _, count = HEADER.unpack_from(
            data, at
        )
        end = at + 12 + length
        assert (magic, attributes, delta, crc) == (2, 0, count - 1, crc32c(data[at + 21 : end]))
        reader = Reader(data[at + 61 : end])
        rows = []
        for _ in range(count):
            size = reader.varint()
            stop = reader.at + size
            assert reader.take(1) == b"\0"
            timestamp, offset = base + reader.varint(), base_offset + reader.varint()
            key, value = reader.sized(), reader.sized()
            headers = []
            for _ in range(reader.varint()):
                name = reader.sized()
                assert name is not None
                headers.append((name.decode(), reader.sized()))
            assert reader.at == stop
            rows.append(Row(offset, timestamp, key, value, tuple(headers), 0, epoch))
        assert reader.at == len(reader.data)
        batches.append((end - at, rows))
        at = end
    return batches


class Reader:
    """Takes bytes apart."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        assert 0 <= size <= len(self.data) - self.at
        self.at += size
        return self.data[self.at - size : self.at]

    def varint(self) -> int:
        zigzag = shift = 0
        while True:
            byte = self.take(1)[0]
            zigzag |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return zigzag >> 1 ^ -(zigzag & 1)

    def sized(self) -> bytes | None:
        size = self.varint()
        return None if size == -1 else self.take(size)
