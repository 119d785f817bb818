"""ListOffsets (API 2): the offset of a time, or of an end of the log."""

from __future__ import annotations

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.machines.controller.leadership import refuse_read
from anabranch.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from anabranch.records.timestamps import first_at_or_after, first_of_max
from anabranch.runtime.events import EventLogger
from anabranch.server.context import BrokerContext, RequestContext
from anabranch.server.partitions.partition import Partition
from anabranch.storage.interface import OfflineLogError, fetched

events = EventLogger("list_offsets")
LATEST, EARLIEST, MAX_TIMESTAMP = -1, -2, -3
EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING_UPLOAD = -4, -5, -6
READ_COMMITTED = 1


async def handle_list_offsets(
    broker: BrokerContext, request: ListOffsetsRequest, call: RequestContext
) -> ListOffsetsResponse:
    """Answer for each partition."""
    committed = request.isolation_level == READ_COMMITTED
    return ListOffsetsResponse(
        topics=[
            ListOffsetsTopicResponse(
                name=topic.name,
                partitions=[
                    await _answer(broker, topic.name, asked, committed=committed) for asked in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


async def _answer(
    broker: BrokerContext, topic: str, asked: ListOffsetsPartition, *, committed: bool
) -> ListOffsetsPartitionResponse:
    partition = broker.replicas.get(topic, asked.partition_index)
    if partition is None:
        return _error(asked, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    role = partition.leadership
    if role is None or partition.offline_reason is not None:
        return _error(asked, partition.unavailable())
    error = refuse_read(role, -1, asked.current_leader_epoch)
    if error is not ErrorCode.NONE:
        return _error(asked, error)
    try:
        timestamp, offset, epoch = await _find(partition, asked.timestamp, committed=committed)
    except (OSError, OfflineLogError, DecodeError) as error:
        events.error("timestamps not read", partition=partition.name, reason=error)
        return _error(asked, ErrorCode.KAFKA_STORAGE_ERROR)
    return ListOffsetsPartitionResponse(
        partition_index=asked.partition_index, timestamp=timestamp, offset=offset, leader_epoch=epoch
    )


async def _find(partition: Partition, timestamp: int, *, committed: bool) -> tuple[int, int, int]:
    """Timestamp, offset and leader epoch of what is asked for."""
    log = partition.log
    end = partition.last_stable_offset if committed else log.high_watermark
    epoch = partition.leader_epoch
    if timestamp == LATEST:
        return -1, end, epoch
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return -1, log.log_start, max(log.epochs.epoch_at(log.log_start), -1) if log.log_start < log.end else epoch
    if timestamp == MAX_TIMESTAMP:
        newest = await fetched(log.batch_of_max_timestamp())
        found = None if newest is None else first_of_max(newest.view(), log.log_start)
    elif timestamp < 0:
        return -1, -1, -1
    else:
        batch = await fetched(log.batch_for_timestamp(timestamp))
        found = None if batch is None else first_at_or_after(batch.view(), timestamp, log.log_start)
    if found is None or found.offset >= end:
        return -1, -1, -1
    return found.timestamp, found.offset, found.leader_epoch


def _error(asked: ListOffsetsPartition, error: ErrorCode) -> ListOffsetsPartitionResponse:
    return ListOffsetsPartitionResponse(
        partition_index=asked.partition_index, error_code=error, timestamp=-1, offset=-1, leader_epoch=-1
    )
