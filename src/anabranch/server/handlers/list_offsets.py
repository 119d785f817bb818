"""ListOffsets (API 2): the offset of a time, or of an end of the log.

A consumer asks so where its reset makes it begin. The coordinators of groups that wait for partitions of the topic hear
of it, durably, before it is answered (`machines.groups.resets`).
"""

from __future__ import annotations

import asyncio

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
    ListOffsetsTopicResponse,
)
from anabranch.server.context import BrokerContext, RequestContext
from anabranch.server.handlers.groups import caller_of
from anabranch.server.partitions.offsets import NOT_FOUND, ListedOffset, list_offset

READ_COMMITTED = 1


async def handle_list_offsets(
    broker: BrokerContext, request: ListOffsetsRequest, call: RequestContext
) -> ListOffsetsResponse:
    """Answer for each partition."""
    committed = request.isolation_level == READ_COMMITTED
    for topic in request.topics:
        await _tell_coordinators(broker, topic, call)
    topics: list[ListOffsetsTopicResponse] = []
    for topic in request.topics:
        partitions = [await _answer(broker, topic.name, asked, committed=committed) for asked in topic.partitions]
        topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=partitions))
    return ListOffsetsResponse(topics=topics)


async def _tell_coordinators(broker: BrokerContext, topic: ListOffsetsTopic, call: RequestContext) -> None:
    found = broker.view.topic(topic.name)
    if found is None:
        return
    caller = caller_of(broker, call, "-")
    asked = {part.partition_index: part.timestamp for part in topic.partitions}
    heard = broker.groups.reset_heard(found.topic_id, asked, caller.client_id, caller.client_host)
    if heard:
        await asyncio.gather(*heard, return_exceptions=True)  # A coordinator that fails knows less, and does no harm.


async def _answer(
    broker: BrokerContext, topic: str, asked: ListOffsetsPartition, *, committed: bool
) -> ListOffsetsPartitionResponse:
    partition = broker.replicas.get(topic, asked.partition_index)
    listed: ListedOffset | ErrorCode
    if partition is None:
        listed = broker.replicas.missing(topic, asked.partition_index)
    else:
        listed = await list_offset(
            partition, asked.timestamp, asked.current_leader_epoch, broker.checks, committed=committed
        )
    error, found = (listed, NOT_FOUND) if isinstance(listed, ErrorCode) else (ErrorCode.NONE, listed)
    return ListOffsetsPartitionResponse(
        partition_index=asked.partition_index,
        error_code=error,
        timestamp=found.timestamp,
        offset=found.offset,
        leader_epoch=found.leader_epoch,
    )
