"""Committed offsets of groups: OffsetCommit (8), OffsetFetch (9), OffsetDelete (47)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from anabranch.protocol.messages.offset_delete import OffsetDeleteRequest, OffsetDeleteResponse
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from anabranch.server.context import BrokerContext, RequestContext
from anabranch.server.handlers.groups import caller_of, submit

SEVERAL_GROUPS_SINCE = 8
GROUP_ERROR_SINCE = 2


def handle_offset_commit(
    broker: BrokerContext, request: OffsetCommitRequest, call: RequestContext
) -> OffsetCommitResponse | Awaitable[OffsetCommitResponse]:
    """Commit offsets of a group, durably."""

    def refuse(code: ErrorCode, message: str) -> OffsetCommitResponse:
        return OffsetCommitResponse(
            topics=[
                OffsetCommitResponseTopic(
                    name=topic.name,
                    topic_id=topic.topic_id,
                    partitions=[
                        OffsetCommitResponsePartition(partition_index=it.partition_index, error_code=code)
                        for it in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    caller = caller_of(broker, call, request.member_id or "-")
    return submit(
        broker, request.group_id, lambda groups, now_ms: groups.offset_commit(request, caller, now_ms), refuse
    )


def handle_offset_fetch(
    broker: BrokerContext, request: OffsetFetchRequest, call: RequestContext
) -> OffsetFetchResponse | Awaitable[OffsetFetchResponse]:
    """Answer the committed offsets of groups: of several from version 8, of one before."""
    if call.api_version >= SEVERAL_GROUPS_SINCE:
        groups = list(request.groups)
    else:
        topics = None
        if request.topics is not None:
            topics = [
                OffsetFetchRequestTopics(name=it.name, partition_indexes=it.partition_indexes) for it in request.topics
            ]
        groups = [OffsetFetchRequestGroup(group_id=request.group_id, topics=topics)]
    answers = [_fetched(broker, group, request, call) for group in groups]
    if any(isinstance(answer, asyncio.Future) for answer in answers):
        return _when_durable(groups, answers, call)
    return _response(answers, call)


def _fetched(
    broker: BrokerContext, group: OffsetFetchRequestGroup, request: OffsetFetchRequest, call: RequestContext
) -> Any:
    try:
        return broker.groups.shard_of(group.group_id).read(
            lambda groups, now_ms: groups.offset_fetch(group, request.require_stable, call.api_version, now_ms)
        )
    except ApiError as error:
        return _refused(group, error)


def _refused(group: OffsetFetchRequestGroup, error: ApiError) -> OffsetFetchResponseGroup:
    return OffsetFetchResponseGroup(
        group_id=group.group_id,
        topics=[
            OffsetFetchResponseTopics(
                name=topic.name,
                topic_id=topic.topic_id,
                partitions=[
                    OffsetFetchResponsePartitions(
                        partition_index=number, committed_offset=-1, metadata="", error_code=error.code
                    )
                    for number in topic.partition_indexes
                ],
            )
            for topic in group.topics or ()
        ],
        error_code=error.code,
    )


async def _when_durable(
    groups: list[OffsetFetchRequestGroup], answers: list[Any], call: RequestContext
) -> OffsetFetchResponse:
    found = []
    for group, answer in zip(groups, answers, strict=True):
        try:
            found.append(await answer if isinstance(answer, asyncio.Future) else answer)
        except ApiError as error:
            found.append(_refused(group, error))
    return _response(found, call)


def _response(answers: list[OffsetFetchResponseGroup], call: RequestContext) -> OffsetFetchResponse:
    if call.api_version >= SEVERAL_GROUPS_SINCE:
        return OffsetFetchResponse(groups=answers)
    (group,) = answers
    spread = call.api_version < GROUP_ERROR_SINCE
    return OffsetFetchResponse(
        topics=[
            OffsetFetchResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetFetchResponsePartition(
                        partition_index=it.partition_index,
                        committed_offset=it.committed_offset,
                        committed_leader_epoch=it.committed_leader_epoch,
                        metadata=it.metadata,
                        error_code=(spread and group.error_code) or it.error_code,
                        committed_range_offsets=it.committed_range_offsets,
                    )
                    for it in topic.partitions
                ],
            )
            for topic in group.topics
        ],
        error_code=group.error_code,
    )


def handle_offset_delete(
    broker: BrokerContext, request: OffsetDeleteRequest, call: RequestContext
) -> OffsetDeleteResponse | Awaitable[OffsetDeleteResponse]:
    """Delete a group's committed offsets of topics that it does not subscribe to."""
    return submit(
        broker,
        request.group_id,
        lambda groups, now_ms: groups.offset_delete(request, now_ms),
        lambda code, message: OffsetDeleteResponse(error_code=code),
    )
