"""Record batches for tests: sound headers and CRCs around a payload that nobody looks into."""

from __future__ import annotations

import struct

import crc32c

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
    """Make one batch of `records` records, its offset and leader epoch not yet stamped."""
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
