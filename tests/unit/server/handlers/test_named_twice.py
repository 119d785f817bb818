"""What a request may name once is not done many times: each time would be durable, and a step of all other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.alter_configs import AlterConfigsRequest
from anabranch.protocol.messages.alter_configs import AlterConfigsResource as Replaced
from anabranch.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from anabranch.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from anabranch.protocol.messages.incremental_alter_configs import AlterConfigsResource, IncrementalAlterConfigsRequest
from anabranch.records.batch import parse_header
from anabranch.server.context import PARTITIONS_AT_A_TIME, Large, RequestContext
from anabranch.server.handlers import ENDPOINTS
from tests.support.batches import make_batch
from tests.support.replicas import NOW_MS, TOPIC, LocalReplicas

CALL = RequestContext("User:ANONYMOUS", "client", "test:1", 1, 1)
MANY = 2 * PARTITIONS_AT_A_TIME
TOPIC_KIND, BROKER_KIND, GROUP_KIND = 2, 4, 32
TWICE = ErrorCode.INVALID_REQUEST


async def answered(key: int, broker: Any, request: Any) -> Any:
    answer = ENDPOINTS[key].handle(broker, request, CALL)
    if isinstance(answer, Awaitable):
        answer = await answer
    return answer.make() if isinstance(answer, Large) else answer


class Commands:
    """Notes what is to be changed."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.settings = SimpleNamespace(node_id=1)
        self.chance = SimpleNamespace(uuid=uuid4)
        self.commands = self

    async def _named(self, command: Any, *_: object) -> Any:
        self.done.append(getattr(command, "topic", None) or getattr(command, "name", ""))
        return SimpleNamespace(topic_id=uuid4(), partition_count=1, replication_factor=1, configs={})

    alter_configs = replace_configs = resize_topic = _named

    async def alter_group_configs(self, command: Any) -> None:
        self.done.append(f"group {command.group}")

    async def alter_broker_configs(self, command: Any) -> None:
        self.done.append(f"broker {command.broker}")


Make = Callable[[list[tuple[int, str]]], Any]
CONFIGS: dict[int, Make] = {
    33: lambda named: AlterConfigsRequest(
        resources=[Replaced(resource_type=kind, resource_name=name, configs=[]) for kind, name in named]
    ),
    44: lambda named: IncrementalAlterConfigsRequest(
        resources=[AlterConfigsResource(resource_type=kind, resource_name=name, configs=[]) for kind, name in named]
    ),
}


@pytest.mark.parametrize("key", CONFIGS)
@pytest.mark.parametrize("many", [2, MANY])
def test_a_resource_that_is_named_twice_is_refused_also_where_parts_name_it(key: int, many: int) -> None:
    broker = Commands()
    named = [(TOPIC_KIND, "a"), *[(TOPIC_KIND, "b"), (BROKER_KIND, "1")] * many, (TOPIC_KIND, "1"), (BROKER_KIND, "")]
    answer = asyncio.run(answered(key, broker, CONFIGS[key](named)))
    assert [(it.resource_type, it.resource_name) for it in answer.responses] == named
    errors = [it.error_code for it in answer.responses]
    assert errors == [ErrorCode.NONE, *[TWICE] * 2 * many, ErrorCode.NONE, ErrorCode.NONE]
    assert broker.done[:2] == ["a", "1"] and len(broker.done) == 3


@pytest.mark.parametrize("many", [2, MANY])
def test_a_topic_is_resized_once_by_a_request(many: int) -> None:
    broker = Commands()
    counts = {"a": [3], "b": [*range(2, 2 + many)], "c": [4]}
    topics = [CreatePartitionsTopic(name=name, count=count) for name, given in counts.items() for count in given]
    answer = asyncio.run(answered(37, broker, CreatePartitionsRequest(topics=topics, timeout_ms=1)))
    assert [it.error_code for it in answer.results] == [ErrorCode.NONE, *[TWICE] * many, ErrorCode.NONE]
    assert sorted(broker.done) == ["a", "c"]


@pytest.mark.parametrize("many", [2, MANY])
def test_a_topic_that_a_request_creates_twice_is_not_created(many: int) -> None:
    topics = [CreatableTopic(name="a", num_partitions=1, replication_factor=1) for _ in range(many)]
    answer = asyncio.run(answered(19, Commands(), CreateTopicsRequest(topics=topics, timeout_ms=1)))
    assert [it.error_code for it in answer.topics] == [TWICE] * many


@pytest.mark.parametrize("many", [1, MANY])
def test_records_of_a_partition_are_deleted_once_below_the_offset_that_is_given_last(tmp_path: Path, many: int) -> None:
    local = LocalReplicas(tmp_path, initial=2)
    local.resize(2)
    data = make_batch(10)
    for number in range(2):
        local[number].append(data, parse_header(data), NOW_MS)
    inspected: list[str] = []
    broker = SimpleNamespace(
        replicas=local.replicas, commands=SimpleNamespace(inspect_retiring=lambda topic: inspected.append(topic))
    )

    def named(*offsets: tuple[int, int]) -> DeleteRecordsTopic:
        return DeleteRecordsTopic(
            name=TOPIC,
            partitions=[DeleteRecordsPartition(partition_index=number, offset=offset) for number, offset in offsets],
        )

    topics = [named((0, 8), (1, 3), *[(0, 9)] * many), named((1, 5), (0, 4))]
    request = DeleteRecordsRequest(topics=topics, timeout_ms=1_000)
    answer = local.runner.run(answered(21, broker, request))
    found = [(it.partition_index, it.error_code, it.low_watermark) for at in answer.topics for it in at.partitions]
    assert found == [(0, 0, 4), (1, 0, 5)], "as by Kafka, the last one counts, and is answered"
    assert [local[number].log.log_start for number in range(2)] == [4, 5]
    local.close()
