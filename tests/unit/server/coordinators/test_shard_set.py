"""Which partition coordinates what: as Apache Kafka says, for every kind of text."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.limits import STRING_SIZE_MAX
from anabranch.server.coordinators import shard_set
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


def hash_by_definition(text: str) -> int:
    units, found = text.encode("utf-16-be", "surrogatepass"), 0
    for position in range(0, len(units), 2):
        found = (31 * found + int.from_bytes(units[position : position + 2], "big")) % (1 << 32)
    return found - (1 << 32) if found >= 1 << 31 else found


@pytest.mark.parametrize("last", [0x7F, 0xFF, 0xFFFF, 0x10FFFF])
def test_the_hash_of_a_long_key_is_javas_and_no_long_key_is_remembered(last: int) -> None:
    chance = random.Random(last)
    longest = shard_set.KEY_LENGTH_REMEMBERED_MAX
    remembered = shard_set._hash_of_short.cache_info
    for length in (longest - 1, longest, longest + 1, 1_000, STRING_SIZE_MAX):
        text = "".join(chr(chance.randint(0, last)) for _ in range(length))
        before = remembered().misses
        assert java_hash(text) == hash_by_definition(text)
        assert remembered().misses - before == (length <= longest)


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
