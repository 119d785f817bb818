"""Record batches for tests, with valid headers and CRCs."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import crc32c

from anabranch.records.batch import TRANSACTIONAL, build, expanded, parse_header, recompressed
from anabranch.records.compression import Compression, compress

_HEADER = struct.Struct(">qiibIhiqqqhii")


def make_batch(
    records: int = 1,
    payload: bytes = b"payload",
    *,
    timestamp: int = 1_000,
    max_timestamp: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    attributes: int = 0,
) -> bytearray:
    """Make one batch around an opaque payload, for logs, which do not look inside."""
    rest = struct.pack(
        ">hiqqqhii",
        attributes,
        records - 1,
        timestamp,
        timestamp if max_timestamp is None else max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        records,
    )
    crc = crc32c.crc32c(rest + payload)
    head = struct.pack(">qiibI", 0, _HEADER.size - 12 + len(payload), -1, 2, crc)
    return bytearray(head + rest + payload)


def make_sound_batch(records: int = 1, payload: bytes = b"payload", **header: int) -> bytearray:
    """Make one batch of `records` records as producers send them; `header` as of `make_batch`.

    The first record has `payload` as its value, the others have no bytes in theirs; none has a key.
    """
    rows = bytearray()
    for index in range(records):
        body = b"\0\0" + _varint(index) + _sized(None) + _sized(b"" if index else payload) + _varint(0)
        rows += _varint(len(body)) + body
    return make_batch(records, bytes(rows), **header)


def make_keyed_batch(
    records: Sequence[tuple[bytes | None, bytes | None]],
    *,
    timestamp: int = 1_000,
    compression: Compression = Compression.NONE,
    producer_id: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
) -> bytearray:
    """Make one batch of (key, value) records, each a millisecond after the one before it."""
    data = bytearray()
    for index, (key, value) in enumerate(records):
        body = b"\0" + _varint(index) + _varint(index) + _sized(key) + _sized(value) + _varint(0)
        data += _varint(len(body)) + body
    return build(
        data if compression is Compression.NONE else compress(compression, data),
        record_count=len(records),
        base_timestamp=timestamp,
        max_timestamp=timestamp + len(records) - 1,
        attributes=compression | (TRANSACTIONAL if transactional else 0),
        producer_id=producer_id,
        producer_epoch=0 if producer_id >= 0 else -1,
        base_sequence=base_sequence,
    )


def recompress(batch: bytes | bytearray, codec: Compression, size_max: int) -> bytearray:
    """Copy one batch into another codec; `size_max` bounds its records while they are not compressed."""
    header = parse_header(batch)
    return recompressed(header, expanded(memoryview(batch), header, size_max), codec)


def _sized(data: bytes | None) -> bytes:
    return _varint(-1) if data is None else _varint(len(data)) + data


def _varint(value: int) -> bytes:
    zigzag = value << 1 ^ value >> 63
    out = bytearray()
    while zigzag >= 0x80:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)
