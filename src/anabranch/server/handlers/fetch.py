"""Fetch (API 1): translates; `server.partitions.fetching` reads and waits."""

from __future__ import annotations

from collections.abc import Awaitable

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID
from anabranch.machines.partition.fetching import FetchBudget
from anabranch.protocol.messages.fetch import (
    AbortedTransaction,
    EpochEndOffset,
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    LeaderIdAndEpoch,
    PartitionData,
)
from anabranch.server.context import BrokerContext, RequestContext
from anabranch.server.partitions.fetch_sessions import Key, Target
from anabranch.server.partitions.fetching import Fetch, PartitionRead

READ_COMMITTED = 1
TOPIC_IDS_SINCE = 13


def handle_fetch(
    broker: BrokerContext, request: FetchRequest, call: RequestContext
) -> FetchResponse | Awaitable[FetchResponse]:
    """Answer a fetch at once, or when enough records are found."""
    uses_ids = call.api_version >= TOPIC_IDS_SINCE
    fetches = broker.fetches
    context = fetches.sessions.begin(
        request.session_id,
        request.session_epoch,
        _targets(request),
        _forgotten(request, uses_ids=uses_ids),
        uses_topic_ids=uses_ids,
        now_ms=broker.clock.now_ms(),
    )
    if isinstance(context, ErrorCode):
        return FetchResponse(error_code=context, session_id=0)
    budget = FetchBudget(request.min_bytes, request.max_bytes, fetches.size_max)
    fetch = Fetch(fetches, context, budget, committed=request.isolation_level == READ_COMMITTED)
    if fetch.complete or (request.max_wait_ms <= 0 and not fetch.coming):
        return _response(fetch, broker.settings.node_id)
    return _waited(fetch, request.max_wait_ms, broker.settings.node_id)


async def _waited(fetch: Fetch, wait_max_ms: int, node_id: int) -> FetchResponse:
    await fetch.wait(wait_max_ms)
    return _response(fetch, node_id)


def _targets(request: FetchRequest) -> list[Target]:
    return [
        Target(
            topic.topic,
            topic.topic_id,
            asked.partition,
            asked.fetch_offset,
            asked.partition_max_bytes,
            asked.current_leader_epoch,
            asked.last_fetched_epoch,
            topic.undeleted_partition_count,
        )
        for topic in request.topics
        for asked in topic.partitions
    ]


def _forgotten(request: FetchRequest, *, uses_ids: bool) -> list[Key]:
    return [
        (topic.topic_id if uses_ids else topic.topic, partition)
        for topic in request.forgotten_topics_data
        for partition in topic.partitions
    ]


def _response(fetch: Fetch, node_id: int) -> FetchResponse:
    topics: list[FetchableTopicResponse] = []
    for read in fetch.answer():
        target = read.target
        if not topics or topics[-1].topic != target.topic or topics[-1].topic_id != target.topic_id:
            partitions: list[PartitionData] = []
            topics.append(FetchableTopicResponse(topic=target.topic, topic_id=target.topic_id, partitions=partitions))
        partitions.append(_partition(read, node_id, committed=fetch.committed))
    return FetchResponse(session_id=fetch.context.session_id, responses=topics)


def _partition(read: PartitionRead, node_id: int, *, committed: bool) -> PartitionData:
    answer = PartitionData(
        partition_index=read.target.partition,
        error_code=read.error,
        high_watermark=read.high_watermark,
        last_stable_offset=read.last_stable_offset,
        log_start_offset=read.log_start,
        aborted_transactions=[
            AbortedTransaction(producer_id=line.producer_id, first_offset=line.first_offset) for line in read.aborted
        ]
        if committed
        else None,
        records=b"" if read.found is None else read.found.wire,
    )
    # Only readers that said a count: not every client skips tagged fields rightly.
    answer.folded = read.folded and read.target.undeleted_partition_count != COUNT_NOT_SAID
    if read.diverging is not None:
        answer.diverging_epoch = EpochEndOffset(epoch=read.diverging.epoch, end_offset=read.diverging.end_offset)
    if read.error is ErrorCode.FENCED_LEADER_EPOCH and read.partition is not None:
        answer.current_leader = LeaderIdAndEpoch(leader_id=node_id, leader_epoch=read.partition.leader_epoch)
    return answer
