"""CreateTopics (19), DeleteTopics (20), CreatePartitions (37): commands to the controller, each topic on its own.

CreatePartitions with a smaller count shrinks the topic. A command that is accepted is carried out, whatever happens;
when that takes longer than the request's timeout, the answer is REQUEST_TIMED_OUT.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.machines.controller.configs import TOPIC_CONFIGS, ConfigSource, effective, overrides_of
from anabranch.machines.controller.effects import Accepted
from anabranch.machines.controller.resize import ResizeTopic
from anabranch.machines.controller.topics import (
    CreateTopic,
    DeleteTopic,
)
from anabranch.protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from anabranch.protocol.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from anabranch.protocol.messages.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)
from anabranch.server.context import PARTITIONS_AT_A_TIME, BrokerContext, RequestContext
from anabranch.server.handlers.configs import check_configs

Asked = TypeVar("Asked")
Made = TypeVar("Made")
TIMEOUT_MAX_MS = 600_000
"""The longest wait for a change to be carried out; a limit of the endpoints."""


async def handle_create_topics(
    broker: BrokerContext, request: CreateTopicsRequest, call: RequestContext
) -> CreateTopicsResponse:
    """Create each topic."""

    async def create(topic: CreatableTopic) -> CreatableTopicResult:
        if topic.name in call.twice:
            return CreatableTopicResult(
                name=topic.name, error_code=ErrorCode.INVALID_REQUEST, error_message="The topic is given twice."
            )
        topic_id = broker.chance.uuid()
        try:
            check_configs(topic.configs)
            assignments = await _made(len(topic.assignments), _by_partition, topic)
            command = CreateTopic(
                topic.name,
                topic_id,
                topic.num_partitions,
                topic.replication_factor,
                assignments,
                {it.name: it.value for it in topic.configs},
                validate_only=request.validate_only,
            )
            reply = await broker.commands.create_topic(command, request.timeout_ms)
        except ApiError as error:
            return CreatableTopicResult(
                name=topic.name,
                error_code=error.code,
                error_message=error.message,
                topic_config_error_code=0,
                num_partitions=-1,
                replication_factor=-1,
                configs=None,
            )
        count = len(topic.assignments) or (
            broker.settings.num_partitions if topic.num_partitions == -1 else topic.num_partitions
        )
        return CreatableTopicResult(
            name=topic.name,
            topic_id=topic_id if isinstance(reply, Accepted) else NO_TOPIC_ID,
            num_partitions=count,
            replication_factor=1,
            configs=_configs(broker, overrides_of(command.configs)),
        )

    return CreateTopicsResponse(topics=list(await asyncio.gather(*(create(topic) for topic in request.topics))))


def _configs(broker: BrokerContext, overrides: dict[str, str]) -> list[CreatableTopicConfigs]:
    found = []
    for config in TOPIC_CONFIGS.values():
        value = effective(config, overrides, broker.view.broker_settings)
        source = 1 if value.source is ConfigSource.TOPIC_CONFIG else int(value.source)
        found.append(CreatableTopicConfigs(name=config.name, value=value.value, config_source=source))
    return found


async def handle_delete_topics(
    broker: BrokerContext, request: DeleteTopicsRequest, call: RequestContext
) -> DeleteTopicsResponse:
    """Delete each topic, by name or by id."""
    asked: list[tuple[str | None, UUID]] = [(topic.name, topic.topic_id) for topic in request.topics]
    asked += [(name, NO_TOPIC_ID) for name in request.topic_names]

    async def delete(name: str | None, topic_id: UUID) -> DeletableTopicResult:
        by_id = topic_id != NO_TOPIC_ID
        known = broker.view.name_of(topic_id) if by_id else name
        if by_id == (name is not None):
            return DeletableTopicResult(
                name=name,
                topic_id=topic_id,
                error_code=ErrorCode.INVALID_REQUEST,
                error_message="Give either the topic's name or its id.",
            )
        found = None if known is None else broker.view.find(known)
        found_id = topic_id if found is None else found.topic_id
        del found  # The controller frees it, in a thread if it is large.
        command = DeleteTopic(topic_id=topic_id) if by_id else DeleteTopic(name=name)
        try:
            await broker.commands.delete_topic(command, request.timeout_ms)
        except ApiError as error:
            return DeletableTopicResult(
                name=known, topic_id=topic_id, error_code=error.code, error_message=error.message
            )
        return DeletableTopicResult(name=known, topic_id=found_id)

    async with broker.replicas.room.taken():
        return DeleteTopicsResponse(responses=list(await asyncio.gather(*(delete(*it) for it in asked))))


async def handle_create_partitions(
    broker: BrokerContext, request: CreatePartitionsRequest, call: RequestContext
) -> CreatePartitionsResponse:
    """Resize each topic to the count that is asked for, larger or smaller."""

    async def resize(topic: CreatePartitionsTopic) -> CreatePartitionsTopicResult:
        if topic.name in call.twice:
            return CreatePartitionsTopicResult(
                name=topic.name, error_code=ErrorCode.INVALID_REQUEST, error_message="The topic is given twice."
            )
        assignments = await _made(len(topic.assignments or ()), _in_order, topic)
        command = ResizeTopic(topic.name, topic.count, assignments, request.validate_only)
        try:
            await broker.commands.resize_topic(command, request.timeout_ms)
        except ApiError as error:
            return CreatePartitionsTopicResult(name=topic.name, error_code=error.code, error_message=error.message)
        return CreatePartitionsTopicResult(name=topic.name)

    return CreatePartitionsResponse(results=list(await asyncio.gather(*(resize(it) for it in request.topics))))


async def _made(count: int, make: Callable[[Asked], Made], asked: Asked) -> Made:
    """Make the assignments of a request: those of many partitions in a thread."""
    if count < PARTITIONS_AT_A_TIME:
        return make(asked)
    return await asyncio.get_running_loop().run_in_executor(None, make, asked)


def _by_partition(topic: CreatableTopic) -> dict[int, list[int]]:
    return {it.partition_index: list(it.broker_ids) for it in topic.assignments}


def _in_order(topic: CreatePartitionsTopic) -> list[list[int]] | None:
    return None if topic.assignments is None else [list(it.broker_ids) for it in topic.assignments]
