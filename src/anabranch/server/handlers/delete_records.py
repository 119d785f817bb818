"""DeleteRecords (API 21): move a partition's log start forward."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.topics import INTERNAL_TOPICS
from anabranch.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from anabranch.server.context import BrokerContext, RequestContext
from anabranch.storage.interface import OffsetOutOfRangeError

TO_HIGH_WATERMARK = -1


async def handle_delete_records(
    broker: BrokerContext, request: DeleteRecordsRequest, call: RequestContext
) -> DeleteRecordsResponse:
    """Delete what lies before each offset; a retiring partition that is empty now is removed soon after."""
    topics = [
        DeleteRecordsTopicResult(
            name=topic.name, partitions=[await _delete(broker, topic.name, asked) for asked in topic.partitions]
        )
        for topic in request.topics
    ]
    for topic in request.topics:
        broker.commands.inspect_retiring(topic.name)
    return DeleteRecordsResponse(topics=topics)


async def _delete(broker: BrokerContext, topic: str, asked: DeleteRecordsPartition) -> DeleteRecordsPartitionResult:
    if topic in INTERNAL_TOPICS:
        return DeleteRecordsPartitionResult(
            partition_index=asked.partition_index,
            low_watermark=-1,
            error_code=ErrorCode.INVALID_TOPIC_EXCEPTION,
        )
    partition = broker.replicas.get(topic, asked.partition_index)
    error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if partition is None else partition.unavailable()
    if partition is None or error is not ErrorCode.NONE:
        return DeleteRecordsPartitionResult(partition_index=asked.partition_index, low_watermark=-1, error_code=error)
    log = partition.log
    offset = log.high_watermark if asked.offset == TO_HIGH_WATERMARK else asked.offset
    try:
        if offset > log.log_start:
            deleted = log.delete_before(offset)
            if deleted is not None:
                await deleted
            partition.changed()
        elif offset < 0:
            raise OffsetOutOfRangeError(f"Offset {offset} is below 0.")
    except OffsetOutOfRangeError:
        return DeleteRecordsPartitionResult(
            partition_index=asked.partition_index, low_watermark=-1, error_code=ErrorCode.OFFSET_OUT_OF_RANGE
        )
    except OSError as failure:
        partition.storage_failed(failure)
        return DeleteRecordsPartitionResult(
            partition_index=asked.partition_index, low_watermark=-1, error_code=ErrorCode.KAFKA_STORAGE_ERROR
        )
    return DeleteRecordsPartitionResult(partition_index=asked.partition_index, low_watermark=log.log_start)
