"""The record of a batch with a given timestamp, or with the largest one, for ListOffsets; DecodeError from all.

A log may hold batches from before produced batches were checked. Whatever their headers claim, a search ends with their
bytes; a timestamp beyond 64 bits is read as every other reader reads it, wrapped around. Like the examination of
records, a search is done by machine code where there is some (`kernels.search`). In plain Python it takes a microsecond
a record, and PLAIN_RECORDS_MAX records at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.base.limits import RECORDS_PER_BATCH_MAX
from anabranch.records.batch import BatchHeader, expanded, parse_header
from anabranch.records.compression import Bytes
from anabranch.records.rows import RecordSpan, iterate

PLAIN_RECORDS_MAX = RECORDS_PER_BATCH_MAX
_HALF = 1 << 63


class TimestampAndOffset(NamedTuple):
    """The place and the timestamp of a record."""

    offset: int
    timestamp: int
    leader_epoch: int


Search = Callable[[Bytes, BatchHeader, int, int | None], tuple[int, int] | None]
"""Searches the records of a batch, which are not compressed, for the first one from an offset delta on with a timestamp
or a later one; with None for the first one with the largest. Returns its offset delta and timestamp. DecodeError."""


def timestamp_of(header: BatchHeader, record: RecordSpan) -> int:
    """The timestamp of a record, as all readers have it."""
    if header.log_append_time:
        return header.max_timestamp
    return (header.base_timestamp + record.timestamp_delta + _HALF) % (2 * _HALF) - _HALF


def search(records: Bytes, header: BatchHeader, least_delta: int, timestamp: int | None) -> tuple[int, int] | None:
    """Search in plain Python (`Search`)."""
    if header.record_count > PLAIN_RECORDS_MAX:
        raise DecodeError(f"the batch at offset {header.base_offset} claims {header.record_count} records, too many")
    best: tuple[int, int] | None = None
    for record in iterate(records, header.record_count, header.base_offset):
        if record.offset_delta < least_delta:
            continue
        recorded_ms = timestamp_of(header, record)
        if timestamp is not None:
            if recorded_ms >= timestamp:
                return record.offset_delta, recorded_ms
        elif best is None or recorded_ms > best[1]:
            best = record.offset_delta, recorded_ms
    return best


def first_at_or_after(
    batch: memoryview, timestamp: int, log_start: int, search: Search = search
) -> TimestampAndOffset | None:
    """The first record from `log_start` on whose timestamp is `timestamp` or later."""
    return _first(batch, timestamp, log_start, search)


def first_of_max(batch: memoryview, log_start: int, search: Search = search) -> TimestampAndOffset | None:
    """The first record that has the largest timestamp of the batch."""
    return _first(batch, None, log_start, search)


def _first(batch: memoryview, timestamp: int | None, log_start: int, search: Search) -> TimestampAndOffset | None:
    header = parse_header(batch)
    if header.log_append_time:
        found = header.base_offset >= log_start and (timestamp is None or header.max_timestamp >= timestamp)
        return TimestampAndOffset(header.base_offset, header.max_timestamp, header.leader_epoch) if found else None
    place = search(expanded(batch, header), header, log_start - header.base_offset, timestamp)
    if place is None:
        return None
    delta, recorded_ms = place
    if not 0 <= delta <= header.last_offset_delta:
        raise DecodeError(f"the batch at offset {header.base_offset} has a record with offset delta {delta}")
    return TimestampAndOffset(header.base_offset + delta, recorded_ms, header.leader_epoch)
