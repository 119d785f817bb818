"""The lineage of topics that were resized often or far: read by our clients, without a word too many, or with one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.client import Admin, Consumer, Producer, TopicInfo, TopicPartition
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
        for protocol in (None, "classic", "consumer"):
            asyncio.run(_ours_reads_what_it_may(f"127.0.0.1:{broker.port}", protocol))
    finally:
        broker.stop()


async def _ours_reads_what_it_may(address: str, protocol: str | None) -> None:
    """A consumer of the whole topic, assigned or alone in a group: it reads partitions 1 and 3, and nothing of 2."""
    async with Admin(bootstrap_servers=address) as admin:
        lineage = await admin.lineage("t")
        assert lineage.unknown == {0: 0}
        ends = await admin.list_offsets({("t", 1): -1, ("t", 3): -1})
    found: dict[int, int] = {}
    of_group = {"group_id": f"ours-{protocol}", "group_protocol": protocol, "auto_commit_interval_ms": 50}
    consumer = Consumer(address, auto_offset_reset="earliest", **({} if protocol is None else of_group))  # type: ignore[arg-type]
    try:
        if protocol is None:
            consumer.assign([TopicPartition("t", number) for number in range(4)])
        else:
            consumer.subscribe("t")
        deadline = time.monotonic() + 30
        while sum(found.values()) < sum(end.offset for end in ends.values()):
            assert time.monotonic() < deadline, found
            for record in await consumer.poll(0.2):
                found[record.partition] = found.get(record.partition, 0) + 1
        for record in await consumer.poll(0.5):
            found[record.partition] = found.get(record.partition, 0) + 1
    finally:
        await consumer.close()
    assert found.keys() == {1, 3}


def test_a_topic_that_is_resized_without_end_remembers_what_its_logs_hold(tmp_path: Path) -> None:
    """Layouts without records go at once, those whose records were deleted with the next round of upkeep."""
    broker = BrokerProcess(tmp_path, log_retention_check_interval_ms=100).start()
    address = f"127.0.0.1:{broker.port}"

    async def story() -> None:
        async with Admin(bootstrap_servers=address) as admin, Producer(address) as producer:
            await admin.create_topics("t", partitions=1)
            await producer.send("t", key=b"k", value=b"0")
            await producer.flush()
            for turn in range(1, 22):
                await admin.resize("t", 1 + turn % 2)
            await producer.send("t", key=b"k", value=b"1")
            await producer.flush()
            await admin.resize("t", 1)
            await producer.send("t", key=b"k", value=b"2")
            await producer.flush()
            info = await _until_layouts(admin, [0, 21, 22])
            assert [layout.count for layout in info.layouts] == [1, 2, 1]
            assert await read_all(address, "t", 3) == {b"k": [0, 1, 2]}
            consumer = Consumer(address, auto_offset_reset="earliest")
            consumer.assign(["t"])
            rows: list[tuple[int, int]] = []
            while len(rows) < 3:
                table = await consumer.poll_arrow(1.0, columns=("value", "sequence"))
                rows += zip(map(int, table["value"].to_pylist()), table["sequence"].to_pylist(), strict=True)
            await consumer.close()
            assert [sequence >> 48 for _, sequence in sorted(rows)] == [0, 21, 22]
            await admin.delete_records({("t", 0): 1})
            await _until_layouts(admin, [21, 22])
            await admin.delete_records(
                {("t", partition): -1 for partition in (await admin.topics(["t"]))["t"].partitions}
            )
            await _until_layouts(admin, [22])
            history = await admin.explain("t", b"k")
            assert [stay.layout for stay in history.stays] == [22]

    async def after_restart() -> None:
        async with (
            Admin(bootstrap_servers=f"127.0.0.1:{broker.port}") as admin,
            Producer(f"127.0.0.1:{broker.port}") as producer,
        ):
            await admin.resize("t", 3)
            await producer.send("t", key=b"k", value=b"3")
            await producer.flush()
            lineage = await admin.lineage("t")
            assert (lineage.current, lineage.count, dict(lineage.cuts)) == (23, 3, {})
            assert lineage.first in (22, 23), "it has no records either, and goes with the next round"

    try:
        asyncio.run(story())
        assert broker.stop() == 0
        broker.start()
        asyncio.run(after_restart())
    finally:
        if broker.alive:
            broker.kill()


async def _until_layouts(admin: Admin, numbers: list[int]) -> TopicInfo:
    """Wait until these layouts are left of topic t."""
    deadline = time.monotonic() + 20
    while True:
        info = (await admin.topics(["t"]))["t"]
        if [layout.number for layout in info.layouts] == numbers:
            return info
        assert time.monotonic() < deadline, info.layouts
        await asyncio.sleep(0.05)
