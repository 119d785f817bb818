"""The lineage of topics that were resized often or far: read by our clients, without a word too many, or with one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.client import Admin, Consumer, Producer, TopicPartition
from tests.support.broker import BrokerProcess
from tests.support.group_client import GroupClient, owned


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


def test_while_a_log_is_offline_its_children_are_not_handed_out(tmp_path: Path) -> None:
    """Nobody knows where its segments end, so nobody has read them to their ends, whatever a group has committed."""
    broker = BrokerProcess(tmp_path, durability="fsync", group_initial_rebalance_delay_ms=0).start()
    address = f"127.0.0.1:{broker.port}"

    async def set_up() -> None:
        async with Admin(bootstrap_servers=address) as admin, Producer(address) as producer:
            await admin.create_topics("t", partitions=2)
            for count in (2, 4):
                if count > 2:
                    await admin.resize("t", count)
                for number in range(200):
                    await producer.send("t", key=f"{number % 20}".encode(), value=f"{count}-{number}".encode())
                await producer.flush()

    asyncio.run(set_up())
    assert broker.stop() == 0
    damaged = next((tmp_path / "t-0").glob("*.log"))
    damaged.write_bytes(damaged.read_bytes()[:500])
    broker.start()
    assert broker.said("error", "partition offline")
    try:
        with GroupClient(broker.port) as client:
            client.ready()
            answer = client.beat("stock", "a", 0, topics=["t"], rebalance_timeout_ms=1_000)
            (assigned,) = owned(answer).values()
            assert 0 in assigned and 1 in assigned, "they existed first, and wait for nobody"
            assert 2 not in assigned, "partition 0 held its keys"
            assert 3 not in assigned, "partition 1 holds records of its keys"
            everything = {("t", 0): 1 << 40, ("t", 1): 1 << 40}
            committed = client.commit("stock", everything, member="a", epoch=answer.member_epoch)
            assert committed == [ErrorCode.NONE, ErrorCode.NONE]
            answer = client.beat("stock", "a", answer.member_epoch, owned=owned(answer))
            (assigned,) = owned(answer).values()
            assert 3 in assigned, "partition 1 is read to its end"
            assert 2 not in assigned, "no position is known to be behind the end of partition 0"
        asyncio.run(_ours_reads_what_it_may(f"127.0.0.1:{broker.port}"))
    finally:
        broker.stop()


async def _ours_reads_what_it_may(address: str) -> None:
    """A consumer of the whole topic: it reads partitions 1 and 3, and nothing of partition 2."""
    async with Admin(bootstrap_servers=address) as admin:
        lineage = await admin.lineage("t")
        assert lineage.unknown == {0: 0}
        ends = await admin.list_offsets({("t", 1): -1, ("t", 3): -1})
    found: dict[int, int] = {}
    consumer = Consumer(address, auto_offset_reset="earliest")
    try:
        consumer.assign([TopicPartition("t", number) for number in range(4)])
        deadline = time.monotonic() + 30
        while sum(found.values()) < sum(end.offset for end in ends.values()):
            assert time.monotonic() < deadline, found
            for record in await consumer.poll(0.2):
                found[record.partition] = found.get(record.partition, 0) + 1
    finally:
        await consumer.close()
    assert found.keys() == {1, 3}
