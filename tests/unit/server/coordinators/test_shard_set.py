"""Which partition coordinates what: as Apache Kafka says, for every kind of text."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.server.coordinators.shard_set import ShardSet, coordinator_partition, java_hash


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 97),
        ("abc", 96_354),
        ("hello world", 1_794_106_052),
        ("polygenelubricants", -(2**31)),
        ("größe", 98_762_257),
        ("\N{GRINNING FACE}", 1_772_899),
    ],
)
def test_the_hash_is_javas(text: str, expected: int) -> None:
    assert java_hash(text) == expected


def test_a_key_has_a_partition_whatever_its_hash() -> None:
    assert coordinator_partition("abc", 50) == 4
    assert coordinator_partition("polygenelubricants", 50) == 0
    assert all(0 <= coordinator_partition(f"group-{number}", 50) < 50 for number in range(1_000))
    assert len({coordinator_partition(f"group-{number}", 50) for number in range(1_000)}) == 50


@pytest.mark.parametrize(
    ("refused", "told", "lines"),
    [
        (ErrorCode.NOT_CONTROLLER, ErrorCode.NOT_COORDINATOR, 0),
        (ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.COORDINATOR_NOT_AVAILABLE, 1),
    ],
)
def test_a_broker_that_stops_makes_no_topic_and_says_so_to_clients_alone(
    refused: ErrorCode, told: ErrorCode, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(command: Any, timeout_ms: int) -> None:
        raise ApiError(refused, "no")

    async def story() -> ErrorCode:
        shards: Any = ShardSet.__new__(ShardSet)
        shards._commands = SimpleNamespace(create_internal_topic=refuse)
        with pytest.raises(ApiError) as answer:
            await shards._create_topic(SimpleNamespace(name="__consumer_offsets"))
        return answer.value.code

    assert asyncio.run(story()) is told
    assert len(caplog.records) == lines
