"""DeleteRecords (API 21): move a partition's log start forward."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import INTERNAL_TOPICS
from anabranch.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from anabranch.server.context import BrokerContext, RequestContext
from anabranch.server.partitions.offsets import delete_records


async def handle_delete_records(
    broker: BrokerContext, request: DeleteRecordsRequest, call: RequestContext
) -> DeleteRecordsResponse:
    """Delete the records below each offset; a retiring partition that becomes empty is removed soon after."""
    async with broker.replicas.room.taken():
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
    partition = broker.replicas.get(topic, asked.partition_index)
    if topic in INTERNAL_TOPICS:
        deleted: int | ErrorCode = ErrorCode.INVALID_TOPIC_EXCEPTION
    elif partition is None:
        deleted = broker.replicas.missing(topic, asked.partition_index)
    elif not partition.settings.log.delete:
        deleted = ErrorCode.POLICY_VIOLATION  # What is compacted only keeps the last record of every key.
    else:
        deleted = await delete_records(partition, asked.offset)
    result = DeleteRecordsPartitionResult(partition_index=asked.partition_index, low_watermark=-1)
    if isinstance(deleted, ErrorCode):
        result.error_code = deleted
    else:
        result.low_watermark = deleted
    return result
