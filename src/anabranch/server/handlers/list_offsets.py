"""ListOffsets (API 2): the offset of a time, or of an end of the log."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from anabranch.server.context import BrokerContext, RequestContext
from anabranch.server.partitions.offsets import NOT_FOUND, list_offset

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
    listed = await list_offset(partition, asked.timestamp, asked.current_leader_epoch, committed=committed)
    error, found = (listed, NOT_FOUND) if isinstance(listed, ErrorCode) else (ErrorCode.NONE, listed)
    return ListOffsetsPartitionResponse(
        partition_index=asked.partition_index,
        error_code=error,
        timestamp=found.timestamp,
        offset=found.offset,
        leader_epoch=found.leader_epoch,
    )
