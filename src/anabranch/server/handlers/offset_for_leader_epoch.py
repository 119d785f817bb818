"""OffsetForLeaderEpoch (API 23): where a leader epoch ended in a partition's log (KIP-101, KIP-279, KIP-320)."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.leadership import refuse_read
from anabranch.protocol.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopicResult,
)
from anabranch.server.context import BrokerContext, RequestContext


def handle_offset_for_leader_epoch(
    broker: BrokerContext, request: OffsetForLeaderEpochRequest, call: RequestContext
) -> OffsetForLeaderEpochResponse:
    """Answer for each partition."""
    return OffsetForLeaderEpochResponse(
        topics=[
            OffsetForLeaderTopicResult(
                topic=topic.topic, partitions=[_answer(broker, topic.topic, asked) for asked in topic.partitions]
            )
            for topic in request.topics
        ]
    )


def _answer(broker: BrokerContext, topic: str, asked: OffsetForLeaderPartition) -> EpochEndOffset:
    partition = broker.replicas.get(topic, asked.partition)
    if partition is None:
        return _error(asked, broker.replicas.missing(topic, asked.partition))
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
