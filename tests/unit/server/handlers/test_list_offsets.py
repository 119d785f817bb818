"""ListOffsets: what one request may have searched, which is little of what it can name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from anabranch.records.batch import parse_header
from anabranch.records.compression import Compression
from anabranch.server.context import PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext
from anabranch.server.handlers import ENDPOINTS
from anabranch.server.partitions import checks
from anabranch.server.partitions.checks import BatchChecks
from anabranch.server.partitions.offsets import LATEST, MAX_TIMESTAMP
from tests.support.batches import make_keyed_batch
from tests.support.replicas import NOW_MS, TOPIC, LocalReplicas

PARTITIONS = 4
BOMB_RECORDS = 140_000
TWICE = ErrorCode.INVALID_REQUEST


class Broker:
    """The parts of a broker that ListOffsets uses."""

    def __init__(self, path: Path) -> None:
        self.local = LocalReplicas(path, initial=PARTITIONS)
        self.local.resize(PARTITIONS)
        self.checks = BatchChecks()
        self.told: list[Mapping[UUID, Mapping[int, int]]] = []
        parts = SimpleNamespace(
            replicas=self.local.replicas,
            checks=self.checks,
            view=SimpleNamespace(topic=lambda name: SimpleNamespace(topic_id=UUID(int=1))),
            groups=SimpleNamespace(reset_heard=self._heard),
        )
        self.context = cast(BrokerContext, parts)

    def _heard(self, asked: Mapping[UUID, Mapping[int, int]], *_: str) -> list[asyncio.Future[None]]:
        self.told.append(asked)
        return []

    def append(self, data: bytearray) -> None:
        for number in range(PARTITIONS):
            self.local[number].append(data, parse_header(data), NOW_MS)

    async def ask(
        self, *topics: ListOffsetsTopic, connection: int = 1, version: int = 10
    ) -> list[ListOffsetsPartitionResponse]:
        """The answers for all partitions of a request, in its order."""
        call = RequestContext("User:ANONYMOUS", "client", "test:1", connection, version)
        answer: Any = ENDPOINTS[2].handle(self.context, ListOffsetsRequest(topics=[*topics]), call)
        if isinstance(answer, Awaitable):
            answer = await answer
        if isinstance(answer, Large):
            answer = answer.make()
        assert isinstance(answer, ListOffsetsResponse)
        return [found for topic in answer.topics for found in topic.partitions]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path)
    yield made
    made.checks.close()
    made.local.close()


@pytest.fixture(scope="module")
def bomb() -> bytearray:
    """A batch within all limits that takes as long to search as one can."""
    data = make_keyed_batch([(None, bytes(440))] * BOMB_RECORDS, timestamp=NOW_MS, compression=Compression.ZSTD)
    assert len(data) < 1_000_000, "max.message.bytes"
    return data


def named(*numbers: int, timestamp: int = LATEST) -> ListOffsetsTopic:
    return ListOffsetsTopic(
        name=TOPIC, partitions=[ListOffsetsPartition(partition_index=it, timestamp=timestamp) for it in numbers]
    )


def test_a_partition_that_is_named_twice_is_refused_and_the_others_are_answered(broker: Broker) -> None:
    for timestamp in (LATEST, NOW_MS):
        found = asyncio.run(
            broker.ask(named(0, 1, timestamp=timestamp), named(2, 0, timestamp=timestamp), named(3, timestamp=5))
        )
        assert [it.partition_index for it in found] == [0, 1, 2, 0, 3]
        assert [it.error_code for it in found] == [TWICE, ErrorCode.NONE, ErrorCode.NONE, TWICE, ErrorCode.NONE]
    told = [{1: LATEST, 2: LATEST, 3: 5}, {1: NOW_MS, 2: NOW_MS, 3: 5}]
    assert [asked[UUID(int=1)] for asked in broker.told] == told, "no coordinator hears of what is refused"


def test_coordinators_are_asked_once_for_a_part_of_a_long_request_and_not_of_what_is_refused(broker: Broker) -> None:
    """Each of 50 shards was asked for each of 3,000 topics that named one partition: a step took 15 ms."""
    found = asyncio.run(broker.ask(*[named(0)] * 3_000))
    assert [it.error_code for it in found] == [TWICE] * 3_000
    assert not broker.told
    asyncio.run(broker.ask(*[named(it) for it in range(3_000)]))
    assert len(broker.told) <= 2 * 3_000 // 200 + 1
    assert sorted(it for asked in broker.told for it in asked[UUID(int=1)]) == [*range(3_000)]


def test_a_partition_that_a_long_request_names_in_two_parts_is_refused_and_never_searched(
    broker: Broker, bomb: bytearray
) -> None:
    broker.append(bomb)
    broker.checks.search = cast(Any, None)
    many = 20 * PARTITIONS_AT_A_TIME
    found = asyncio.run(broker.ask(named(*[0] * many, timestamp=MAX_TIMESTAMP), named(1)))
    assert [it.error_code for it in found] == [TWICE] * many + [ErrorCode.NONE]
    assert found[-1].offset == BOMB_RECORDS


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("limit", ["SEARCH_S", "SEARCHING_S"])
def test_the_searches_of_a_request_are_bounded_and_its_client_is_told_to_ask_again(
    broker: Broker, bomb: bytearray, monkeypatch: pytest.MonkeyPatch, version: int, parts: int, limit: str
) -> None:
    """By the processor's time, and by that of its client, who asks for all of it again when it gives up."""
    monkeypatch.setattr(checks, limit, 0.001)  # A search of this batch takes longer, however fast the machine.
    broker.append(bomb)
    filler = named(*range(PARTITIONS, PARTITIONS_AT_A_TIME * (parts - 1) + PARTITIONS))
    asked = named(*range(2), timestamp=MAX_TIMESTAMP), filler, named(2, 3, timestamp=MAX_TIMESTAMP)
    found = {it.partition_index: it for it in asyncio.run(broker.ask(*asked, version=version))}
    assert (found[0].error_code, found[0].offset) == (ErrorCode.NONE, BOMB_RECORDS - 1)
    for number in range(1, PARTITIONS):
        error = ErrorCode.of(found[number].error_code)
        assert error is (ErrorCode.LEADER_NOT_AVAILABLE if version < 5 else ErrorCode.OFFSET_NOT_AVAILABLE)
        assert error.retriable
    again = asyncio.run(broker.ask(named(1, timestamp=MAX_TIMESTAMP), version=version))
    assert (again[0].error_code, again[0].offset) == (ErrorCode.NONE, BOMB_RECORDS - 1), "each request has its share"


def test_ends_of_a_log_are_told_also_behind_long_searches(
    broker: Broker, bomb: bytearray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SEARCH_S", 0.001)
    broker.append(bomb)
    found = asyncio.run(broker.ask(named(0, timestamp=MAX_TIMESTAMP), named(1)))
    assert [(it.error_code, it.offset) for it in found] == [
        (ErrorCode.NONE, BOMB_RECORDS - 1),
        (ErrorCode.NONE, BOMB_RECORDS),
    ]


def test_many_requests_of_one_connection_do_not_keep_others_waiting(broker: Broker) -> None:
    """A search that comes behind 50 requests of another connection waits for one of them."""
    broker.append(make_keyed_batch([(None, b"v")], timestamp=NOW_MS))
    ended: list[int] = []

    async def ask(connection: int) -> None:
        found = await broker.ask(named(connection % PARTITIONS, timestamp=NOW_MS), connection=connection)
        assert found[0].error_code == ErrorCode.NONE
        ended.append(connection)

    async def story() -> None:
        await asyncio.gather(*(ask(1) for _ in range(50)), ask(2), ask(3))

    asyncio.run(story())
    assert len(ended) == 52
    assert {2, 3} <= {*ended[:6]}, ended
