"""Metadata (API 3): brokers, topics, partitions, and how a topic came to its partition count.

Half a layout is never shown (`views.topic_view`). A topic is described once for each snapshot of it. Snapshots do not
change, so that a thread can describe large ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, INTERNAL_TOPICS, NO_TOPIC_ID
from anabranch.base.limits import LAYOUTS_PER_TOPIC_MAX
from anabranch.machines.controller.topics import CreateTopic, is_topic_name
from anabranch.machines.controller.views import TopicView
from anabranch.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
    RemovedPartition,
    TopicLayout,
)
from anabranch.server.cluster.view import TopicSnapshot
from anabranch.server.context import PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext
from anabranch.server.handlers.authorized import NOT_SAID, ON_CLUSTER, ON_TOPIC

Answer = MetadataResponse | Large
AUTO_CREATE_TIMEOUT_MS = 5_000
TOPICS_CREATED_MAX = 100
"""Topics that one request creates; for the others it answers LEADER_NOT_AVAILABLE, at which clients ask again."""
NULL_NAMES_SINCE = 12
_Tried = dict[str, ErrorCode]
"""The topics that a request tried to create, each with the error of one that is missing after it."""


class _Wanted(NamedTuple):
    """What a request wants to be told. A topic's snapshot keeps its descriptions under the first two."""

    lineage: bool
    """The layouts; only on request, because some clients do not skip tagged fields rightly."""
    operations: bool
    """The authorized operations on each topic (KIP-430)."""
    cluster_operations: bool
    no_name: str | None
    """The name of a topic that is asked for by an id that no topic has: null where the version has nulls."""


def handle_metadata(
    broker: BrokerContext, request: MetadataRequest, call: RequestContext
) -> Answer | Awaitable[Answer]:
    """Describe the topics that are asked for, or all; create those that are missing where that is wanted."""
    wanted = _Wanted(
        request.include_lineage,
        request.include_topic_authorized_operations,
        request.include_cluster_authorized_operations,
        None if call.api_version >= NULL_NAMES_SINCE else "",
    )
    everything = request.topics is None or (call.api_version == 0 and not request.topics)
    if everything or request.topics is None:
        return _answered(broker, broker.view.topics(), wanted)
    if len(request.topics) >= PARTITIONS_AT_A_TIME:
        return _asked_in_steps(broker, request.topics, wanted, create=_creates(broker, request, call))
    asked = _each_once(request.topics)
    creates = _creates(broker, request, call)
    if creates and (missing := _missing(broker, asked)):
        return _create_and_answer(broker, asked, missing, wanted)
    tried: _Tried | None = {} if creates else None
    return _answered(broker, [_asked(broker, topic, wanted, tried) for topic in asked], wanted)


def _each_once(topics: Iterable[MetadataRequestTopic]) -> list[MetadataRequestTopic]:
    return list({_identity(topic): topic for topic in topics}.values())


def _put_each_once(topics: Iterable[MetadataRequestTopic], found: list[MetadataRequestTopic]) -> None:
    found += _each_once(topics)


def _identity(topic: MetadataRequestTopic) -> str | UUID | None:
    """Which topic a request names: where it has an id, its name says nothing."""
    return topic.name if topic.topic_id == NO_TOPIC_ID else topic.topic_id


def _missing(broker: BrokerContext, topics: Iterable[MetadataRequestTopic]) -> list[str]:
    """The names of topics that are not there and may be created."""
    names = (_identity(topic) for topic in topics)
    return [name for name in names if isinstance(name, str) and is_topic_name(name) and broker.view.find(name) is None]


def _creates(broker: BrokerContext, request: MetadataRequest, call: RequestContext) -> bool:
    return (request.allow_auto_topic_creation or call.api_version < 4) and broker.settings.auto_create_topics_enable


async def _asked_in_steps(
    broker: BrokerContext, topics: Sequence[MetadataRequestTopic], wanted: _Wanted, *, create: bool
) -> Answer:
    """Describe so many topics that other work must have its turn meanwhile.

    What has an entry for each of them is made and freed in a thread, also where the client hangs up: that takes
    several milliseconds.
    """
    asked: list[MetadataRequestTopic] = []
    await asyncio.get_running_loop().run_in_executor(None, _put_each_once, topics, asked)
    tried: _Tried | None = None
    if create:
        missing: list[str] = []
        for begin in range(0, len(asked), PARTITIONS_AT_A_TIME):
            if len(missing) >= TOPICS_CREATED_MAX:
                break
            missing += _missing(broker, asked[begin : begin + PARTITIONS_AT_A_TIME])
            await asyncio.sleep(0)
        tried = await _create(broker, missing)
    found: list[TopicSnapshot | MetadataResponseTopic] = []
    for begin in range(0, len(asked), PARTITIONS_AT_A_TIME):
        found += [_asked(broker, topic, wanted, tried) for topic in asked[begin : begin + PARTITIONS_AT_A_TIME]]
        await asyncio.sleep(0)
    return _answered(broker, found, wanted)


async def _create_and_answer(
    broker: BrokerContext, topics: Sequence[MetadataRequestTopic], missing: list[str], wanted: _Wanted
) -> Answer:
    tried = await _create(broker, missing)
    return _answered(broker, [_asked(broker, topic, wanted, tried) for topic in topics], wanted)


async def _create(broker: BrokerContext, missing: Sequence[str]) -> _Tried:
    """Create topics, the first TOPICS_CREATED_MAX; return how that ended for each of these."""
    tried: _Tried = dict.fromkeys(missing[:TOPICS_CREATED_MAX], ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)

    async def create(name: str) -> None:
        if name in INTERNAL_TOPICS:
            if name == broker.groups.topic:
                with contextlib.suppress(ApiError):
                    await broker.groups.ensure()
            return
        command = CreateTopic(name, broker.chance.uuid())
        try:
            await broker.commands.create_topic(command, AUTO_CREATE_TIMEOUT_MS)
        except ApiError as error:
            if error.code is ErrorCode.REQUEST_TIMED_OUT:
                tried[name] = ErrorCode.LEADER_NOT_AVAILABLE
            elif error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                tried[name] = error.code

    await asyncio.gather(*map(create, list(tried)))
    return tried


def _answered(
    broker: BrokerContext, topics: Sequence[TopicSnapshot | MetadataResponseTopic], wanted: _Wanted
) -> Answer:
    """Answer for topics that exist, and for those that do not; in a thread for many partitions."""
    view = broker.view
    response = MetadataResponse(
        brokers=[
            MetadataResponseBroker(node_id=node_id, host=host, port=port, rack=rack)
            for node_id, host, port, rack in view.brokers.values()
        ],
        cluster_id=broker.cluster_id,
        controller_id=view.controller_id,
        topics=(),
        cluster_authorized_operations=ON_CLUSTER if wanted.cluster_operations else NOT_SAID,
    )

    def make() -> MetadataResponse:
        response.topics = [_topic(it, wanted) if isinstance(it, TopicSnapshot) else it for it in topics]
        return response

    if len(topics) >= PARTITIONS_AT_A_TIME:
        return Large(make)
    cost = sum(len(it.nodes) + 1 if isinstance(it, TopicSnapshot) else 1 for it in topics)
    return make() if cost < PARTITIONS_AT_A_TIME else Large(make)


def _asked(
    broker: BrokerContext, asked: MetadataRequestTopic, wanted: _Wanted, tried: _Tried | None
) -> TopicSnapshot | MetadataResponseTopic:
    """What is answered for a topic; `tried` where the missing ones may be created."""
    if asked.topic_id != NO_TOPIC_ID:
        name = broker.view.name_of(asked.topic_id)
        found = None if name is None else broker.view.topic(name)
        if found is not None:
            return found
        return MetadataResponseTopic(
            error_code=ErrorCode.UNKNOWN_TOPIC_ID, name=wanted.no_name, topic_id=asked.topic_id
        )
    name = asked.name or ""
    found = broker.view.topic(name)
    if found is not None:
        return found
    return MetadataResponseTopic(error_code=_missing_error(broker, name, tried), name=name)


def _missing_error(broker: BrokerContext, name: str, tried: _Tried | None) -> ErrorCode:
    if tried is None or broker.view.find(name) is not None:  # One that is being deleted is not made anew.
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if not is_topic_name(name):
        return ErrorCode.INVALID_TOPIC_EXCEPTION
    return tried.get(name, ErrorCode.LEADER_NOT_AVAILABLE)


def _topic(topic: TopicSnapshot, wanted: _Wanted) -> MetadataResponseTopic:
    key = ("metadata", wanted.lineage, wanted.operations)
    made = topic.derived.get(key)
    if not isinstance(made, MetadataResponseTopic):
        made = topic.derived[key] = _described(topic.view, wanted)
    return made


def _described(view: TopicView, wanted: _Wanted) -> MetadataResponseTopic:
    lineage = wanted.lineage
    return MetadataResponseTopic(
        name=view.name,
        topic_id=view.topic_id,
        is_internal=view.internal,
        partitions=[
            MetadataResponsePartition(
                error_code=ErrorCode.NONE if it.leader >= 0 else ErrorCode.LEADER_NOT_AVAILABLE,
                partition_index=it.partition,
                leader_id=it.leader,
                leader_epoch=it.leader_epoch,
                replica_nodes=list(it.replicas),
                isr_nodes=list(it.isr),
                offline_replicas=list(it.offline_replicas),
                retiring=lineage and it.retiring,
            )
            for it in view.partitions
        ],
        topic_authorized_operations=ON_TOPIC if wanted.operations else NOT_SAID,
        initial_partition_count=view.initial_partition_count if lineage else COUNT_NOT_SAID,
        undeleted_partition_count=view.undeleted_partition_count if lineage else COUNT_NOT_SAID,
        layouts=_layouts(view) if lineage else [],
        removed=[RemovedPartition(partition=p, next_offset=at) for p, at in view.removed] if lineage else [],
    )


@lru_cache(maxsize=LAYOUTS_PER_TOPIC_MAX)
def _layout(count: int, number: int) -> TopicLayout:
    """A layout as every description of a topic says it, which is made anew by every change of the topic."""
    return TopicLayout(count=count, number=number)


def _layouts(view: TopicView) -> list[TopicLayout]:
    found: list[TopicLayout] = []
    following = 0
    for layout in view.layouts:
        found.append(_layout(layout.count, -1 if layout.number == following else layout.number))
        following = layout.number + 1
    return found
