"""The load of a topic by key, from producers to the picture of the command line: of a real broker."""

from __future__ import annotations

import asyncio
import time

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client import Admin, Producer
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval, cuts_by_load, spread
from anabranch.machines.partition.load import HALF_LIFE_MS, PartitionLoad
from anabranch.protocol.messages.describe_load import DescribeLoadRequest, DescribeLoadResponse, DescribeLoadTopic
from anabranch.records.hashing import murmur2
from tests.support import commands
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient

LOWER = Interval(0, SPACE_END // 2)


def in_lower_half(key: bytes, initial: int = 1) -> bool:
    """Whether a key lies in the lower half of the key space."""
    return spread(murmur2(key), initial) <= LOWER.end


async def _produce(address: str, topic: str, seconds: float, compression: str) -> None:
    """Produce eight of nine records with keys of the lower half, and by far the largest ones.

    In large batches: a compressed one is a sample, and in one of few records a key looks hot by chance.
    """
    low = [key for key in (b"k%d" % n for n in range(400)) if in_lower_half(key)]
    high = [key for key in (b"k%d" % n for n in range(400)) if not in_lower_half(key)]
    async with Producer(address, linger_ms=50, batch_size=1 << 20, compression_type=compression) as producer:
        ends = time.monotonic() + seconds
        number = 0
        while time.monotonic() < ends:
            for _ in range(450):
                number += 1
                key = high[number % len(high)] if number % 9 == 0 else low[number % len(low)]
                await producer.send(topic, b"v" * (100 if number % 9 else 800), key=key, partition=0)
            await producer.flush()
            await asyncio.sleep(0.05)


async def _observed(admin: Admin, topic: str) -> PartitionLoad:
    deadline = time.monotonic() + 30
    while True:
        load = (await admin.describe_load(topic))[TopicPartition(topic, 0)]
        if sum(load.records):
            return load
        assert time.monotonic() < deadline, "no load was seen"
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_the_load_shows_which_keys_are_written(shared: BrokerProcess, compression: str) -> None:
    topic = f"load-{compression}"

    async def main() -> PartitionLoad:
        async with Admin(shared.address) as admin:
            await admin.create_topics(topic, configs={"accept.range.fetch": "true"})
            first = (await admin.describe_load(topic))[TopicPartition(topic, 0)]
            assert not sum(first.records)
            await asyncio.sleep(1.2)  # Observed from now on.
            await _produce(shared.address, topic, 1.5, compression)
            return await _observed(admin, topic)

    load = asyncio.run(main())
    assert load.held == SPACE
    low, high = sum(load.records[:32]), sum(load.records[32:])
    assert 4 * high < low < 16 * high
    assert 0.5 * sum(load.bytes[:32]) < sum(load.bytes[32:]) < 2 * sum(load.bytes[:32])
    shares = cuts_by_load(load.held, load.records, 3)
    assert shares[2].start < LOWER.end  # Each of three shares has a part of the busy half.
    shown, _ = commands.run(shared.address, "topic", "describe", topic, "--load", "--shares", 3)
    assert f"{topic} partition 0: " in shown
    assert "█" in shown
    assert f"-{SPACE_END}  33.3 %" in shown
    found = commands.document(shared.address, "topic", "describe", topic, "--load", "--shares", 3)
    assert [len(found[0][name]) for name in ("records_per_second", "bytes_per_second", "shares")] == [64, 64, 3]
    assert (found[0]["shares"][0]["start"], found[0]["shares"][-1]["end"]) == (0, SPACE_END)


def test_what_cannot_be_described_is_named(shared: BrokerProcess) -> None:
    async def main() -> ApiError:
        async with Admin(shared.address) as admin:
            await admin.create_topics("load-refused")
            with pytest.raises(ApiError) as refused:
                await admin.describe_load("load-refused")
            return refused.value

    error = asyncio.run(main())
    assert error.code is ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED
    _, said = commands.run(shared.address, "topic", "describe", "load-refused", "--load", code=1)
    assert "anabranch topic config load-refused accept.range.fetch=true" in said
    assert "load-nowhere" in commands.run(shared.address, "topic", "describe", "load-nowhere", "--load", code=1)[1]
    with WireClient(shared.port) as client:

        def ask(*numbers: int) -> DescribeLoadResponse:
            topics = [DescribeLoadTopic(name="load-refused", partition_indexes=numbers)]
            return client.call(DescribeLoadRequest(topics=topics))

        answer = ask(0, 7, -1)
        assert answer.half_life_ms == HALF_LIFE_MS
        assert [it.error_code for it in answer.topics[0].partitions] == [
            ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED,
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ]
        many = ask(*range(1001))
        assert (many.error_code, many.topics) == (ErrorCode.INVALID_REQUEST, [])
        assert many.error_message == "1001 partitions are too many: name at most 1000."
