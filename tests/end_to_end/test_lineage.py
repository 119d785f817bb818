"""The lineage of topics that were resized often or far: read by our clients, without a word too many, or with one."""

from __future__ import annotations

import asyncio
import time

import pytest

from anabranch.client import Admin, Consumer, Producer
from tests.support.broker import BrokerProcess


async def read_all(address: str, topic: str, count: int) -> dict[bytes, list[int]]:
    """What a consumer of the whole topic is handed, by key, until it has `count` records."""
    found: dict[bytes, list[int]] = {}
    consumer = Consumer(address, auto_offset_reset="earliest", group_id=f"readers-of-{topic}")
    try:
        consumer.subscribe([topic])
        deadline = time.monotonic() + 40
        while sum(map(len, found.values())) < count:
            assert time.monotonic() < deadline, f"{found} of {count}"
            for record in await consumer.poll(0.2):
                found.setdefault(record.key, []).append(int(record.value))
    finally:
        await consumer.close()
    return found


@pytest.mark.parametrize(("counts", "keys"), [((1_000, 2_000), 30), ((80, *((160, 80) * 55)), 3)])
def test_a_topic_that_was_resized_far_or_often_is_read_in_order(
    broker: BrokerProcess, counts: tuple[int, ...], keys: int
) -> None:
    """Each once passed 1,000,000 elements of the lineage's answer, and consumers returned nothing."""
    address = f"127.0.0.1:{broker.port}"
    sent: dict[bytes, list[int]] = {}

    async def story() -> None:
        async with Admin(bootstrap_servers=address) as admin, Producer(address) as producer:
            await admin.create_topics("far", partitions=counts[0])
            for turn, count in enumerate(counts):
                if turn:
                    await admin.resize("far", count)
                if turn < 3 or turn >= len(counts) - 2:
                    for key in (f"{number}".encode() for number in range(keys)):
                        await producer.send("far", key=key, value=f"{turn}".encode())
                        sent.setdefault(key, []).append(turn)
                    await producer.flush()
            lineage = await admin.lineage("far")
            assert lineage.counts[-2:] == counts[-2:]
        assert await read_all(address, "far", sum(map(len, sent.values()))) == sent

    asyncio.run(story())
