"""OffsetForLeaderEpoch (API 23): where a leader epoch ended in a partition's log (KIP-101, KIP-279, KIP-320)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.leadership import refuse_read
from anabranch.protocol.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopicResult,
)
from anabranch.server.context import PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext


def handle_offset_for_leader_epoch(
    broker: BrokerContext, request: OffsetForLeaderEpochRequest, call: RequestContext
) -> OffsetForLeaderEpochResponse | Awaitable[Large]:
    """Answer for each partition."""
    if sum(len(topic.partitions) for topic in request.topics) >= PARTITIONS_AT_A_TIME:
        return _answer_in_steps(broker, request)
    return OffsetForLeaderEpochResponse(
        topics=[
            OffsetForLeaderTopicResult(
                topic=topic.topic, partitions=[_answer(broker, topic.topic, asked) for asked in topic.partitions]
            )
            for topic in request.topics
        ]
    )


async def _answer_in_steps(broker: BrokerContext, request: OffsetForLeaderEpochRequest) -> Large:
    topics: list[OffsetForLeaderTopicResult] = []
    for topic in request.topics:
        answered: list[EpochEndOffset] = []
        topics.append(OffsetForLeaderTopicResult(topic=topic.topic, partitions=answered))
        for place, asked in enumerate(topic.partitions, 1):
            answered.append(_answer(broker, topic.topic, asked))
            if place % PARTITIONS_AT_A_TIME == 0:
                await asyncio.sleep(0)
    return Large(lambda: OffsetForLeaderEpochResponse(topics=topics))


def _answer(broker: BrokerContext, topic: str, asked: OffsetForLeaderPartition) -> EpochEndOffset:
    partition = broker.replicas.get(topic, asked.partition)
    if partition is None:
        return _error(asked, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    role = partition.leadership
    if role is None or partition.offline_reason is not None:
        return _error(asked, partition.unavailable())
    error = refuse_read(role, -1, asked.current_leader_epoch)
    if error is not ErrorCode.NONE:
        return _error(asked, error)
    epoch, end = partition.log.end_offset_for_epoch(asked.leader_epoch)
    return EpochEndOffset(partition=asked.partition, leader_epoch=epoch, end_offset=end)


def _error(asked: OffsetForLeaderPartition, error: ErrorCode) -> EpochEndOffset:
    return EpochEndOffset(error_code=error, partition=asked.partition, leader_epoch=-1, end_offset=-1)
