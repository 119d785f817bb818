"""ListOffsets (API 2): the offset of a time, or of an end of the log.

A consumer asks so where its reset makes it begin. The coordinators of groups that wait for partitions of the topic hear
of it, durably, before it is answered (`machines.groups.resets`).
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Sequence

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
from anabranch.server.partitions.offsets import NOT_FOUND, ListedOffset, list_at_once, list_offset

READ_COMMITTED = 1


def handle_list_offsets(
    broker: BrokerContext, request: ListOffsetsRequest, call: RequestContext
) -> ListOffsetsResponse | Awaitable[ListOffsetsResponse]:
    """Answer for each partition: at once, where no coordinator has to hear of it and nothing is searched for."""
    heard = [wait for topic in request.topics for wait in _tell_coordinators(broker, topic, call)]
    if heard:
        return _answer_told(broker, request, heard)
    found = _answer_at_once(broker, request)
    return _answer(broker, request) if found is None else found


def _tell_coordinators(broker: BrokerContext, topic: ListOffsetsTopic, call: RequestContext) -> Sequence[Future[None]]:
    """Have the coordinators hear of a topic's request, which is to wait for the futures."""
    found = broker.view.topic(topic.name)
    if found is None:
        return ()
    caller = caller_of(broker, call, "-")
    asked = {part.partition_index: part.timestamp for part in topic.partitions}
    return broker.groups.reset_heard(found.topic_id, asked, caller.client_id, caller.client_host)


def _answer_at_once(broker: BrokerContext, request: ListOffsetsRequest) -> ListOffsetsResponse | None:
    """Answer for each partition; None where a time has to be searched for, or a transaction is open.

    That one may be committed already, and its marker be written in this turn of the loop: a task comes behind it.
    """
    committed = request.isolation_level == READ_COMMITTED
    topics: list[ListOffsetsTopicResponse] = []
    for topic in request.topics:
        partitions: list[ListOffsetsPartitionResponse] = []
        for asked in topic.partitions:
            partition = broker.replicas.get(topic.name, asked.partition_index)
            listed: ListedOffset | ErrorCode | None
            if partition is None:
                listed = broker.replicas.missing(topic.name, asked.partition_index)
            else:
                online = partition.offline_reason is None
                if committed and online and partition.last_stable_offset < partition.log.high_watermark:
                    return None
                epoch = asked.current_leader_epoch
                listed = list_at_once(partition, asked.timestamp, epoch, committed=committed)
            if listed is None:
                return None
            partitions.append(_of_partition(asked, listed))
        topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=partitions))
    return ListOffsetsResponse(topics=topics)


async def _answer_told(
    broker: BrokerContext, request: ListOffsetsRequest, heard: Sequence[Future[None]]
) -> ListOffsetsResponse:
    await asyncio.gather(*heard, return_exceptions=True)  # A coordinator that fails knows less, and does no harm.
    return await _answer(broker, request)


async def _answer(broker: BrokerContext, request: ListOffsetsRequest) -> ListOffsetsResponse:
    committed = request.isolation_level == READ_COMMITTED
    topics: list[ListOffsetsTopicResponse] = []
    for topic in request.topics:
        partitions: list[ListOffsetsPartitionResponse] = []
        for asked in topic.partitions:
            partition = broker.replicas.get(topic.name, asked.partition_index)
            listed: ListedOffset | ErrorCode
            if partition is None:
                listed = broker.replicas.missing(topic.name, asked.partition_index)
            else:
                epoch = asked.current_leader_epoch
                listed = await list_offset(partition, asked.timestamp, epoch, broker.checks, committed=committed)
            partitions.append(_of_partition(asked, listed))
        topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=partitions))
    return ListOffsetsResponse(topics=topics)


def _of_partition(asked: ListOffsetsPartition, listed: ListedOffset | ErrorCode) -> ListOffsetsPartitionResponse:
    error, found = (listed, NOT_FOUND) if isinstance(listed, ErrorCode) else (ErrorCode.NONE, listed)
    return ListOffsetsPartitionResponse(
        partition_index=asked.partition_index,
        error_code=error,
        timestamp=found.timestamp,
        offset=found.offset,
        leader_epoch=found.leader_epoch,
    )
