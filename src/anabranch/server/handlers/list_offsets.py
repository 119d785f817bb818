"""ListOffsets (API 2): the offset of a time, or of an end of the log.

A consumer asks so where its reset makes it begin. The coordinators of groups that wait for partitions of the topic hear
of it, durably, before it is answered (`machines.groups.resets`).

A partition that a request names twice is refused, as by Kafka: a search may take long. What the searches of one request
take is bounded (`checks.SEARCH_S`); for the partitions behind them the answer is to ask again.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Sequence, Set
from dataclasses import dataclass
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from anabranch.server.context import BrokerContext, Large, RequestContext
from anabranch.server.handlers.groups import caller_of
from anabranch.server.handlers.in_parts import Parts, handle_in_parts
from anabranch.server.partitions.checks import RequestSearches
from anabranch.server.partitions.offsets import NOT_FOUND, ListedOffset, list_at_once, list_offset

READ_COMMITTED = 1
OFFSET_NOT_AVAILABLE_SINCE = 5
"""The first version whose clients know OFFSET_NOT_AVAILABLE; earlier ones are answered LEADER_NOT_AVAILABLE."""
PARTS = Parts("topics", "topics", "partitions", "partitions")


@dataclass(slots=True)
class _Asked:
    """What all parts of one request have in common."""

    broker: BrokerContext
    call: RequestContext
    committed: bool
    twice: Set[tuple[str, int]]
    """The partitions that it names more than once."""
    searches: RequestSearches

    def handle(
        self, broker: BrokerContext, request: ListOffsetsRequest, call: RequestContext
    ) -> ListOffsetsResponse | Awaitable[ListOffsetsResponse]:
        """Answer for each partition of a part."""
        heard = _tell_coordinators(self, request)
        if heard:
            return _answer_told(self, request, heard)
        found = _answer_at_once(self, request)
        return _answer(self, request) if found is None else found


def handle_list_offsets(
    broker: BrokerContext, request: ListOffsetsRequest, call: RequestContext
) -> ListOffsetsResponse | Awaitable[ListOffsetsResponse | Large]:
    """Answer for each partition: at once, where no coordinator has to hear of it and nothing is searched for."""
    if PARTS.long(request):
        return _answer_in_parts(broker, request, call)
    return _asked(broker, request, call, named_twice(request)).handle(broker, request, call)


async def _answer_in_parts(
    broker: BrokerContext, request: ListOffsetsRequest, call: RequestContext
) -> ListOffsetsResponse | Large:
    # Apart from the loop, where 200,000 partitions would take too long.
    twice = await asyncio.get_running_loop().run_in_executor(None, named_twice, request)
    asked = _asked(broker, request, call, twice)
    answer: ListOffsetsResponse | Large = await handle_in_parts(asked.handle, PARTS, broker, request, call)
    return answer


def _asked(
    broker: BrokerContext, request: ListOffsetsRequest, call: RequestContext, twice: Set[tuple[str, int]]
) -> _Asked:
    committed = request.isolation_level == READ_COMMITTED
    return _Asked(broker, call, committed, twice, broker.checks.searches(call.connection))


def named_twice(request: ListOffsetsRequest) -> Set[tuple[str, int]]:
    """Find the partitions that a request names more than once."""
    seen: set[tuple[str, int]] = set()
    twice: set[tuple[str, int]] = set()
    for topic in request.topics:
        for asked in topic.partitions:
            named = topic.name, asked.partition_index
            (twice if named in seen else seen).add(named)
    return twice


def _tell_coordinators(asked: _Asked, request: ListOffsetsRequest) -> Sequence[Future[None]]:
    """Have the coordinators hear of a request, which is to wait for the futures."""
    broker = asked.broker
    times: dict[UUID, dict[int, int]] = {}
    for topic in request.topics:
        found = broker.view.topic(topic.name)
        if found is None:
            continue
        for part in topic.partitions:
            if (topic.name, part.partition_index) not in asked.twice:
                times.setdefault(found.topic_id, {})[part.partition_index] = part.timestamp
    if not times:
        return ()
    caller = caller_of(broker, asked.call, "-")
    return broker.groups.reset_heard(times, caller.client_id, caller.client_host)


def _answer_at_once(asked: _Asked, request: ListOffsetsRequest) -> ListOffsetsResponse | None:
    """Answer for each partition; None where a time has to be searched for, or a transaction is open.

    That one may be committed already, and its marker be written in this turn of the loop: a task comes behind it.
    """
    replicas, committed = asked.broker.replicas, asked.committed
    topics: list[ListOffsetsTopicResponse] = []
    for topic in request.topics:
        partitions: list[ListOffsetsPartitionResponse] = []
        for part in topic.partitions:
            partition = replicas.get(topic.name, part.partition_index)
            listed: ListedOffset | ErrorCode | None
            if (topic.name, part.partition_index) in asked.twice:
                listed = ErrorCode.INVALID_REQUEST
            elif partition is None:
                listed = replicas.missing(topic.name, part.partition_index)
            else:
                online = partition.offline_reason is None
                if committed and online and partition.last_stable_offset < partition.log.high_watermark:
                    return None
                epoch = part.current_leader_epoch
                listed = list_at_once(partition, part.timestamp, epoch, committed=committed)
            if listed is None:
                return None
            partitions.append(_of_partition(part, listed))
        topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=partitions))
    return ListOffsetsResponse(topics=topics)


async def _answer_told(
    asked: _Asked, request: ListOffsetsRequest, heard: Sequence[Future[None]]
) -> ListOffsetsResponse:
    await asyncio.gather(*heard, return_exceptions=True)  # A coordinator that fails knows less, and does no harm.
    return await _answer(asked, request)


async def _answer(asked: _Asked, request: ListOffsetsRequest) -> ListOffsetsResponse:
    topics: list[ListOffsetsTopicResponse] = []
    for topic in request.topics:
        partitions = [_of_partition(part, await _listed(asked, topic.name, part)) for part in topic.partitions]
        topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=partitions))
    return ListOffsetsResponse(topics=topics)


async def _listed(asked: _Asked, topic: str, part: ListOffsetsPartition) -> ListedOffset | ErrorCode:
    if (topic, part.partition_index) in asked.twice:
        return ErrorCode.INVALID_REQUEST
    replicas = asked.broker.replicas
    partition = replicas.get(topic, part.partition_index)
    if partition is None:
        return replicas.missing(topic, part.partition_index)
    epoch = part.current_leader_epoch
    listed = await list_offset(partition, part.timestamp, epoch, asked.searches, committed=asked.committed)
    if listed is ErrorCode.OFFSET_NOT_AVAILABLE and asked.call.api_version < OFFSET_NOT_AVAILABLE_SINCE:
        return ErrorCode.LEADER_NOT_AVAILABLE
    return listed


def _of_partition(asked: ListOffsetsPartition, listed: ListedOffset | ErrorCode) -> ListOffsetsPartitionResponse:
    error, found = (listed, NOT_FOUND) if isinstance(listed, ErrorCode) else (ErrorCode.NONE, listed)
    return ListOffsetsPartitionResponse(
        partition_index=asked.partition_index,
        error_code=error,
        timestamp=found.timestamp,
        offset=found.offset,
        leader_epoch=found.leader_epoch,
    )
