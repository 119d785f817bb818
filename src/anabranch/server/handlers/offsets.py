"""Committed offsets of groups: OffsetCommit (8), OffsetFetch (9), OffsetDelete (47)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from copy import copy
from typing import Any

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.machines.groups.offset_fetches import all_again
from anabranch.machines.groups.offsets import TOPIC_IDS_SINCE
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
from anabranch.runtime.freeing import free_one_by_one
from anabranch.server.context import PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext
from anabranch.server.handlers.groups import caller_of, submit
from anabranch.server.handlers.in_parts import Parts, gather_in_steps, work_of_name
from anabranch.server.handlers.in_ranges import in_ranges, ranges_of
from anabranch.server.handlers.unheld import Unheld

SEVERAL_GROUPS_SINCE = 8
GROUP_ERROR_SINCE = 2
NAMED_MAX = 20
"""Groups, topics and partitions together that are looked up before other work has its turn: each partition may have
100,000 ranges."""
UNSTABLE = ErrorCode.UNSTABLE_OFFSET_COMMIT
_TOPICS = Parts("topics", "topics", "partition_indexes", "partitions")
"""The topics of one group."""


def handle_offset_commit(
    broker: BrokerContext, request: OffsetCommitRequest, call: RequestContext
) -> OffsetCommitResponse | Awaitable[OffsetCommitResponse]:
    """Commit offsets of a group, durably."""
    caller = caller_of(broker, call, request.member_id or "-")

    def commit(part: OffsetCommitRequest) -> OffsetCommitResponse | Awaitable[OffsetCommitResponse]:
        unheld = Unheld(broker, part, _commit_refused)
        return submit(
            broker,
            part.group_id,
            lambda groups, now_ms: groups.offset_commit(unheld.rest, caller, now_ms),
            unheld.refused,
            whole=unheld.whole,
            look=unheld.look,
        )

    return in_ranges(broker, request, commit, _commit_refused)


def _commit_refused(request: OffsetCommitRequest, code: ErrorCode, message: str) -> OffsetCommitResponse:
    return OffsetCommitResponse(
        topics=[
            OffsetCommitResponseTopic(
                name=topic.name,
                topic_id=topic.topic_id,
                partitions=[
                    OffsetCommitResponsePartition(
                        partition_index=it.partition_index,
                        error_code=code,
                        error_message=message if ranges_of(it) else None,
                    )
                    for it in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


def handle_offset_fetch(
    broker: BrokerContext, request: OffsetFetchRequest, call: RequestContext
) -> OffsetFetchResponse | Large | Awaitable[OffsetFetchResponse | Large]:
    """Answer the committed offsets of groups: of several from version 8, of one before."""
    if _is_long(request, call):
        return _fetched_in_steps(broker, request, call)
    groups = _groups(request, call)
    answers = [_fetched(broker, group, request, call) for group in groups]
    if any(isinstance(answer, asyncio.Future) for answer in answers):
        return _answered(groups, answers, call)
    return _maybe_large(answers, call)


def _is_long(request: OffsetFetchRequest, call: RequestContext) -> bool:
    """Whether many partitions are asked for, or all of a group; looks at no more of them than that takes."""
    several = call.api_version >= SEVERAL_GROUPS_SINCE
    count = 0
    for group in request.groups[: NAMED_MAX + 1] if several else [request]:
        topics = group.topics
        if topics is None:
            return True
        count += work_of_name(group.group_id) + len(topics)
        count += sum(len(topic.partition_indexes) for topic in topics[:NAMED_MAX])
        if count > NAMED_MAX:
            return True
    return False


def _groups(request: OffsetFetchRequest, call: RequestContext) -> list[OffsetFetchRequestGroup]:
    """The groups of a request, each once."""
    if call.api_version >= SEVERAL_GROUPS_SINCE:
        return list({group.group_id: group for group in request.groups}.values())
    topics = None
    if request.topics is not None:
        topics = [
            OffsetFetchRequestTopics(name=it.name, partition_indexes=it.partition_indexes) for it in request.topics
        ]
    return [OffsetFetchRequestGroup(group_id=request.group_id, topics=topics)]


async def _answered(
    groups: list[OffsetFetchRequestGroup], answers: list[Any], call: RequestContext
) -> OffsetFetchResponse | Large:
    return _maybe_large(await _when_durable(groups, answers), call)


def _maybe_large(answers: list[OffsetFetchResponseGroup], call: RequestContext) -> OffsetFetchResponse | Large:
    """The response, which is encoded in a thread where it has many ranges."""
    parts = (part for group in answers for topic in group.topics for part in topic.partitions)
    ranges = sum(len(part.committed_range_offsets) + len(part.key_range_offsets) for part in parts)
    if ranges < PARTITIONS_AT_A_TIME:
        return _response(answers, call)
    return Large(lambda: _response(answers, call))


async def _fetched_in_steps(broker: BrokerContext, request: OffsetFetchRequest, call: RequestContext) -> Large:
    """As `handle_offset_fetch`, for so many partitions that other work must have its turn meanwhile."""
    spent: list[OffsetFetchRequestGroup] = []
    try:
        return await _fetched_of(broker, request, call, spent)
    finally:
        asyncio.get_running_loop().run_in_executor(None, free_one_by_one, spent)


async def _fetched_of(
    broker: BrokerContext, request: OffsetFetchRequest, call: RequestContext, spent: list[OffsetFetchRequestGroup]
) -> Large:
    """Fetch in steps; the questions that are made are put into `spent`."""
    spent += await asyncio.get_running_loop().run_in_executor(None, _groups, request, call)
    answers: list[OffsetFetchResponseGroup] = []
    for asked in [*spent]:
        everything = asked.topics is None
        try:
            group = await _all_of(broker, asked, call) if everything else asked
            spent.append(group)
        except ApiError as error:
            answers.append(_refused(asked, error))
            continue
        found: OffsetFetchResponseGroup | None = None
        topics = group.topics or ()
        is_large = len(topics) > NAMED_MAX or sum(len(it.partition_indexes) for it in topics) > NAMED_MAX
        for continued, part in _TOPICS.split(group, NAMED_MAX) if topics else ((False, group),):
            response = await _when_durable([part], [_fetched(broker, part, request, call, is_part=is_large)])
            if everything:
                _drop_missing(response[0])
            if found is None or response[0].error_code:
                found = response[0]
            else:
                _TOPICS.join(found, response[0], continued=continued)
            await asyncio.sleep(0)
            if found.error_code:  # Of the first versions only partitions have errors: each one that was asked for.
                refusal = ApiError(ErrorCode.of(found.error_code))
                found = await asyncio.get_running_loop().run_in_executor(None, _refused, group, refusal)
                break
        assert found is not None
        if is_large and not request.require_stable and not found.error_code:
            found = await asyncio.get_running_loop().run_in_executor(None, all_again, found)
        answers.append(found)
    return Large(lambda: _response(answers, call))


async def _all_of(
    broker: BrokerContext, group: OffsetFetchRequestGroup, call: RequestContext
) -> OffsetFetchRequestGroup:
    """A question for all that a group has committed as one that names it; by id only topics that exist."""
    committed = broker.groups.shard_of(group.group_id).read(
        lambda groups, now_ms: groups.committed(group.group_id),
        lambda groups: groups.weight_of_committed(group.group_id),
    )
    names = await committed if isinstance(committed, asyncio.Future) else committed

    def by_topic() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for topic, partition in sorted(names):
            found.setdefault(topic, []).append(partition)
        return found

    topics = await asyncio.get_running_loop().run_in_executor(None, by_topic)
    named = copy(group)
    ids = {name: topic.topic_id for name in topics if (topic := broker.view.find(name)) is not None}
    named.topics = await gather_in_steps(
        OffsetFetchRequestTopics(name=name, topic_id=ids.get(name, NO_TOPIC_ID), partition_indexes=partitions)
        for name, partitions in topics.items()
        if name in ids or call.api_version < TOPIC_IDS_SINCE
    )
    return named


def _drop_missing(answer: OffsetFetchResponseGroup) -> None:
    """Leave out what is not committed any more, or of a topic of before."""
    for topic in answer.topics:
        topic.partitions = [it for it in topic.partitions if it.committed_offset >= 0 or it.error_code == UNSTABLE]
    answer.topics = [topic for topic in answer.topics if topic.partitions]


def _fetched(
    broker: BrokerContext,
    group: OffsetFetchRequestGroup,
    request: OffsetFetchRequest,
    call: RequestContext,
    *,
    is_part: bool = False,
) -> Any:
    stable, version = request.require_stable, call.api_version
    try:
        return broker.groups.shard_of(group.group_id).read(
            lambda groups, now_ms: groups.offset_fetch(group, stable, version, now_ms, is_part=is_part),
            lambda groups: groups.weight_of_fetch(group, call.api_version),
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


async def _when_durable(groups: list[OffsetFetchRequestGroup], answers: list[Any]) -> list[OffsetFetchResponseGroup]:
    found = []
    for group, answer in zip(groups, answers, strict=True):
        try:
            found.append(await answer if isinstance(answer, asyncio.Future) else answer)
        except ApiError as error:
            found.append(_refused(group, error))
    return found


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
                        key_range_offsets=it.key_range_offsets,
                        passed_key_ranges=it.passed_key_ranges,
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
