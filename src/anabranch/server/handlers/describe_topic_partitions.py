"""DescribeTopicPartitions (API 75): topics page by page, for tools (KIP-966)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.views import TopicView
from anabranch.protocol.messages.describe_topic_partitions import (
    Cursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from anabranch.server.cluster.view import TopicSnapshot
from anabranch.server.context import PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext
from anabranch.server.handlers.authorized import NOT_SAID, ON_TOPIC
from anabranch.server.handlers.in_parts import gather_in_steps

PARTITIONS_MAX = 2_000
"""The largest page; a limit of the endpoint."""


def handle_describe_topic_partitions(
    broker: BrokerContext, request: DescribeTopicPartitionsRequest, call: RequestContext
) -> DescribeTopicPartitionsResponse | Large | Awaitable[Large]:
    """Describe the topics that are asked for, or all, in the order of their names, from the cursor on."""
    if len(request.topics) >= PARTITIONS_AT_A_TIME:
        return _describe_in_steps(broker, request)
    cursor, limit = request.cursor, max(1, request.response_partition_limit)
    begin = "" if cursor is None else cursor.topic_name
    topics: list[tuple[str, TopicSnapshot | None]]
    if request.topics:
        names = sorted({topic.name for topic in request.topics if topic.name >= begin})
        topics = [(name, broker.view.topic(name)) for name in names]
    else:
        everything = broker.view.topics(begin)
        if len(everything) >= PARTITIONS_AT_A_TIME:
            return Large(lambda: _page(((topic.name, topic) for topic in everything), cursor, limit))
        topics = [(topic.name, topic) for topic in everything]
    count = sum(len(topic.nodes) for _, topic in topics if topic is not None)
    if min(count, limit) + len(topics) < PARTITIONS_AT_A_TIME:
        return _page(topics, cursor, limit)
    return Large(lambda: _page(topics, cursor, limit))


async def _describe_in_steps(broker: BrokerContext, request: DescribeTopicPartitionsRequest) -> Large:
    """As the handler, for so many names that other work must have its turn meanwhile."""
    cursor, limit = request.cursor, max(1, request.response_partition_limit)

    def named() -> list[str]:
        begin = "" if cursor is None else cursor.topic_name
        return sorted({topic.name for topic in request.topics if topic.name >= begin})

    names = await asyncio.get_running_loop().run_in_executor(None, named)
    found = await gather_in_steps((name, broker.view.topic(name)) for name in names)
    return Large(lambda: _page(found, cursor, limit))


def _page(
    topics: Iterable[tuple[str, TopicSnapshot | None]], cursor: Cursor | None, left: int
) -> DescribeTopicPartitionsResponse:
    """Describe `left` partitions of these topics, from the cursor on."""
    begin = 0 if cursor is None else max(0, cursor.partition_index)
    found: list[DescribeTopicPartitionsResponseTopic] = []
    for name, topic in topics:
        if not left:
            return DescribeTopicPartitionsResponse(topics=found, next_cursor=Cursor(topic_name=name, partition_index=0))
        if topic is None:
            found.append(
                DescribeTopicPartitionsResponseTopic(
                    error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    name=name,
                    topic_authorized_operations=NOT_SAID,
                )
            )
            continue
        view = topic.view
        first = begin if cursor is not None and name == cursor.topic_name else 0
        end = min(first + left, len(view.partitions))
        found.append(_described(view, first, end))
        left -= max(0, end - first)
        if end < len(view.partitions):
            return DescribeTopicPartitionsResponse(
                topics=found, next_cursor=Cursor(topic_name=name, partition_index=end)
            )
    return DescribeTopicPartitionsResponse(topics=found, next_cursor=None)


def _described(view: TopicView, first: int, end: int) -> DescribeTopicPartitionsResponseTopic:
    return DescribeTopicPartitionsResponseTopic(
        name=view.name,
        topic_id=view.topic_id,
        is_internal=view.internal,
        partitions=[
            DescribeTopicPartitionsResponsePartition(
                error_code=ErrorCode.NONE if it.leader >= 0 else ErrorCode.LEADER_NOT_AVAILABLE,
                partition_index=it.partition,
                leader_id=it.leader,
                leader_epoch=it.leader_epoch,
                replica_nodes=list(it.replicas),
                isr_nodes=list(it.isr),
                eligible_leader_replicas=[],  # Java's admin client takes null for a list all the same
                last_known_elr=[],
                offline_replicas=list(it.offline_replicas),
            )
            for it in view.partitions[first:end]
        ],
        topic_authorized_operations=ON_TOPIC,
    )
