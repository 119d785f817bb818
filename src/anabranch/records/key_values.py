"""Batches of keys and values, written and read record by record in plain Python: the logs of the coordinators.

A coordinator writes a handful of records at a time, and a broker should not have to load NumPy for that. Headers are
never written, and skipped when read; larger batches are for `columns`.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.base.errors import DecodeError
from anabranch.base.ids import NO_PRODUCER_EPOCH, NO_PRODUCER_ID
from anabranch.records.batch import TRANSACTIONAL, BatchHeader, build, expanded
from anabranch.records.rows import iterate
from anabranch.records.varint import encode_varint

Pair = tuple[bytes | None, bytes | None]
_NULL = b"\x01"
"""The length -1."""
_NO_HEADERS = b"\x00"


def encode_pairs(
    pairs: Sequence[Pair],
    timestamp_ms: int,
    *,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
) -> bytearray:
    """Make one batch of `pairs`, each at `timestamp_ms`; with a producer, part of the producer's transaction."""
    records = bytearray()
    for index, (key, value) in enumerate(pairs):
        # Attributes and the timestamp's delta are 0.
        body = b"".join((b"\0\0", encode_varint(index), *_sized(key), *_sized(value), _NO_HEADERS))
        records += encode_varint(len(body))
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
    records = bytes(expanded(batch, header))
    found: list[Pair] = []
    end = 0
    spans = iterate(records, header.record_count, header.base_offset)
    for _, end, _, _, key_start, key_end, value_start, value_end in spans:  # noqa: B007
        key = None if key_end < 0 else records[key_start:key_end]
        found.append((key, None if value_end < 0 else records[value_start:value_end]))
    if end != len(records):
        raise DecodeError(f"the batch at offset {header.base_offset} has {len(records) - end} bytes behind its records")
    return found


def _sized(data: bytes | None) -> tuple[bytes, ...]:
    return (_NULL,) if data is None else (encode_varint(len(data)), data)
