"""The record of a batch with a given timestamp, or with the largest one, for ListOffsets; DecodeError from all.

A log may hold batches from before produced batches were checked: a timestamp beyond 64 bits is read as every other
reader reads it, wrapped around.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from anabranch.records.batch import BatchHeader, expanded, parse_header
from anabranch.records.rows import RecordSpan, iterate

_HALF = 1 << 63


class TimestampAndOffset(NamedTuple):
    """The place and the timestamp of a record."""

    offset: int
    timestamp: int
    leader_epoch: int


def timestamp_of(header: BatchHeader, record: RecordSpan) -> int:
    """The timestamp of a record, as all readers have it."""
    if header.log_append_time:
        return header.max_timestamp
    return (header.base_timestamp + record.timestamp_delta + _HALF) % (2 * _HALF) - _HALF


def first_at_or_after(batch: memoryview, timestamp: int, log_start: int) -> TimestampAndOffset | None:
    """The first record from `log_start` on whose timestamp is `timestamp` or later."""
    header = parse_header(batch)
    for offset, recorded_ms in _timestamps(batch, header):
        if recorded_ms >= timestamp and offset >= log_start:
            return TimestampAndOffset(offset, recorded_ms, header.leader_epoch)
    return None


def first_of_max(batch: memoryview, log_start: int) -> TimestampAndOffset | None:
    """The first record that has the largest timestamp of the batch."""
    header = parse_header(batch)
    best: TimestampAndOffset | None = None
    for offset, recorded_ms in _timestamps(batch, header):
        if offset >= log_start and (best is None or recorded_ms > best.timestamp):
            best = TimestampAndOffset(offset, recorded_ms, header.leader_epoch)
    return best


def _timestamps(batch: memoryview, header: BatchHeader) -> Iterator[tuple[int, int]]:
    """Offset and timestamp of each record."""
    if header.log_append_time:
        yield header.base_offset, header.max_timestamp
        return
    for record in iterate(expanded(batch, header), header.record_count, header.base_offset):
        yield header.base_offset + record.offset_delta, timestamp_of(header, record)
