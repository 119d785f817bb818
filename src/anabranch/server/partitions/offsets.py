"""The offsets of a partition that clients ask for (ListOffsets) and move (DeleteRecords).

Which record of a batch has a time is found in a thread (`checks.RequestSearches`): a batch may hold, or expand to, more
records than the loop has time for.
"""

from __future__ import annotations

from typing import NamedTuple

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID
from anabranch.machines.controller.leadership import refuse_read
from anabranch.records.timestamps import first_at_or_after, first_of_max
from anabranch.runtime.mapped import read_in
from anabranch.server.partitions.checks import RequestSearches
from anabranch.server.partitions.partition import Partition
from anabranch.storage.interface import OfflineLogError, OffsetOutOfRangeError, fetched

LATEST, EARLIEST, MAX_TIMESTAMP = -1, -2, -3
EARLIEST_LOCAL = -4
"""The first offset on this broker's disk; lower numbers refer to offsets in tiered storage."""
TO_HIGH_WATERMARK = -1


class ListedOffset(NamedTuple):
    """An offset of a log, with the timestamp of its record where it was found by time."""

    timestamp: int
    offset: int
    leader_epoch: int


NOT_FOUND = ListedOffset(-1, -1, -1)


def list_at_once(
    partition: Partition, timestamp: int, leader_epoch: int, *, committed: bool
) -> ListedOffset | ErrorCode | None:
    """As `list_offset`, where nothing has to be searched for; else None.

    Spark's own source asks for both ends of a partition with every 500 records.
    """
    role = partition.leadership
    if role is None or partition.offline_reason is not None:
        return partition.unavailable()
    error = refuse_read(role, COUNT_NOT_SAID, leader_epoch)
    if error is not ErrorCode.NONE:
        return error
    log, epoch = partition.log, role.leader_epoch
    if timestamp == LATEST:
        return ListedOffset(-1, partition.last_stable_offset if committed else log.high_watermark, epoch)
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        first_epoch = max(log.epochs.epoch_at(log.log_start), -1) if log.log_start < log.end else epoch
        return ListedOffset(-1, log.log_start, first_epoch)
    return NOT_FOUND if timestamp < 0 and timestamp != MAX_TIMESTAMP else None


async def list_offset(
    partition: Partition, timestamp: int, leader_epoch: int, searches: RequestSearches, *, committed: bool
) -> ListedOffset | ErrorCode:
    """Find the first record of `timestamp` or later, or the offset for a special timestamp.

    `leader_epoch`: the reader's, or NO_LEADER_EPOCH. `committed`: the log ends at the last stable offset.
    OFFSET_NOT_AVAILABLE where a search is needed and the request has had its share: its client asks again.
    """
    found = list_at_once(partition, timestamp, leader_epoch, committed=committed)
    if found is not None:
        return found
    if searches.are_spent:
        return ErrorCode.OFFSET_NOT_AVAILABLE
    try:
        return await _find(partition, timestamp, searches, committed=committed)
    except (OSError, OfflineLogError, DecodeError) as failure:
        partition.failed("timestamps not read", failure)
        return ErrorCode.KAFKA_STORAGE_ERROR


async def _find(partition: Partition, timestamp: int, searches: RequestSearches, *, committed: bool) -> ListedOffset:
    log = partition.log
    end = partition.last_stable_offset if committed else log.high_watermark
    largest = timestamp == MAX_TIMESTAMP
    batch = await fetched(log.batch_of_max_timestamp() if largest else log.batch_for_timestamp(timestamp))
    if batch is None:
        return NOT_FOUND
    view, start = batch.view(), log.log_start
    if largest:
        found = await searches.look(lambda search: first_of_max(read_in(view), start, search))
    else:
        found = await searches.look(lambda search: first_at_or_after(read_in(view), timestamp, start, search))
    if found is None or found.offset >= end:
        return NOT_FOUND
    return ListedOffset(found.timestamp, found.offset, found.leader_epoch)


async def next_record(partition: Partition, offset: int) -> int | None:
    """Find the first offset not below `offset` of a record that a reader can still be given, or the log end.

    Records of aborted transactions are skipped, those of open ones are not: they may yet be committed. None where the
    log cannot be read now, and where it was deleted at `offset`: nobody knows any more what a reader has fetched there.
    """
    if partition.unavailable() is not ErrorCode.NONE:
        return None
    try:
        found = await fetched(partition.log.next_record(offset, partition.table.aborted.is_void))
        return None if offset < partition.log.log_start else found
    except (OSError, OfflineLogError, DecodeError) as failure:
        partition.failed("next record not found", failure)
        return None


async def delete_records(partition: Partition, before: int) -> int | ErrorCode:
    """Delete the records below offset `before`, or TO_HIGH_WATERMARK, durably; the log start from then on."""
    error = partition.unavailable()
    if error is not ErrorCode.NONE:
        return error
    log = partition.log
    offset = log.high_watermark if before == TO_HIGH_WATERMARK else before
    if offset < 0:
        return ErrorCode.OFFSET_OUT_OF_RANGE
    if offset <= log.log_start:
        return log.log_start
    try:
        await partition.prepare_delete(offset)
        error = partition.unavailable()  # The replica may have been stopped meanwhile.
        if error is not ErrorCode.NONE:
            return error
        deleted = log.delete_before(max(offset, log.log_start))
        if deleted is not None:
            await deleted
    except OffsetOutOfRangeError:
        return ErrorCode.OFFSET_OUT_OF_RANGE
    except OSError as failure:
        partition.storage_failed(failure)
        return ErrorCode.KAFKA_STORAGE_ERROR
    partition.deleted()
    await log.remove_dropped()
    return log.log_start
