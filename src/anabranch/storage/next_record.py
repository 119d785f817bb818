"""The next record of a log that a reader can still be given, for logs of any kind (ordering.md, section 6.1).

A log is read piece by piece. A thread looks for candidates: batches without control records, and in each the first
record not below the offset, as compaction leaves holes. The loop then asks which of the transactional ones are void.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from anabranch.records.batch import HEADER_SIZE, BatchHeader, expanded, headers
from anabranch.records.rows import iterate
from anabranch.runtime.mapped import read_in
from anabranch.runtime.turns import in_turns
from anabranch.storage.interface import IsVoid, OffsetOutOfRangeError, PartitionLog, Slice, fetched

PIECE_SIZE = 256 << 10
"""Bytes read at a time, but at least one batch."""
SCAN_MAX = 16 << 20
"""Bytes that one answer may look at."""
CANDIDATES_MAX = 256
"""Transactional batches that are judged before the log is read on."""
JUDGED_AT_A_TIME = 8
"""Of them before other work has its turn: 50 µs each, and 1 µs for each ten aborted transactions open beside it."""


class Candidate(NamedTuple):
    """A record that a reader may be given."""

    offset: int
    producer_id: int
    """Of a transactional record; -1 where the record is not transactional."""


class Scanned(NamedTuple):
    """The candidates of a piece of a log, up to the first that is not transactional."""

    candidates: list[Candidate]
    end: int
    """The offset up to which there is no other."""
    size: int
    """Bytes looked at."""


def near_next_record(header: BatchHeader | None, offset: int, end: int) -> int | None:
    """Answer by the header of the batch that holds `offset` alone: plain records, or one marker at the log end.

    None where more must be read.
    """
    if header is None:
        return None
    if header.is_control:
        return end if header.next_offset == end else None
    if header.is_transactional or header.record_count != header.last_offset_delta + 1:
        return None
    return max(offset, header.base_offset)


async def find_next_record(log: PartitionLog, offset: int, is_void: IsVoid) -> int:
    """Answer `PartitionLog.next_record`. OSError, OfflineLogError, DecodeError."""
    left = SCAN_MAX
    while left > 0:
        offset, end = max(offset, log.log_start), log.end
        if offset >= end:
            return offset
        try:
            found = await fetched(log.read(offset, PIECE_SIZE, end=end))
        except OffsetOutOfRangeError:  # Deleted, or cut, meanwhile.
            continue
        if found is None:
            return end
        scanned = await asyncio.get_running_loop().run_in_executor(None, scan, found, offset)
        async for candidate in in_turns(scanned.candidates, JUDGED_AT_A_TIME):
            if candidate.producer_id < 0 or not is_void(candidate.producer_id, candidate.offset):
                return candidate.offset
        offset = max(offset, scanned.end)
        left -= max(scanned.size, HEADER_SIZE)
    return offset


def scan(piece: Slice, offset: int) -> Scanned:
    """Find the candidates of a piece that are not below `offset`. Blocks; OSError, DecodeError."""
    candidates: list[Candidate] = []
    view, end, position = read_in(piece.view()), offset, 0
    for at, header in headers(view):
        position = at + header.size
        end = header.next_offset
        if header.is_control or end <= offset:
            continue
        first = first_record(view[at:position], header, offset)
        if first is None:
            continue
        candidates.append(Candidate(first, header.producer_id if header.is_transactional else -1))
        if not header.is_transactional or len(candidates) == CANDIDATES_MAX:
            break
    return Scanned(candidates, max(end, offset), position)


def first_record(batch: memoryview, header: BatchHeader, offset: int) -> int | None:
    """The offset of the first record of a batch that is not below `offset`; None without one. DecodeError."""
    if header.record_count == 0:
        return None
    if header.record_count == header.last_offset_delta + 1:
        return max(offset, header.base_offset)
    for record in iterate(expanded(batch, header), header.record_count, header.base_offset):
        if header.base_offset + record.offset_delta >= offset:
            return header.base_offset + record.offset_delta
    return None
