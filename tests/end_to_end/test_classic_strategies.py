"""Two classic members of ours at a real broker, through a growth and a shrink: even in both lists.

Their metadata is not refreshed by age meanwhile: the leader learns of a resize because its fetches are refused; or
because it asks, of a topic that it does not fetch.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import confluent_kafka
import pytest

from anabranch.client import Admin, Consumer, Producer
from tests.support.broker import running

STRATEGIES = ("range", "roundrobin", "sticky", "cooperative-sticky")
LIVE, ALL = 4, 8


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_member_has_its_share_of_live_and_of_retiring_partitions(tmp_path: Path, strategy: str) -> None:
    async def story(servers: str) -> None:
        async with Admin(servers) as admin, Producer(servers) as producer:
            await admin.create_topics("t", partitions=2)
            await admin.resize("t", ALL)
            for partition in range(ALL):
                await producer.send("t", b"v", partition=partition)  # A retiring partition with records stays.
            await producer.flush()
            consumers = [
                Consumer(
                    servers,
                    group_id="g",
                    group_protocol="classic",
                    partition_assignment_strategy=strategy,
                    auto_offset_reset="earliest",
                    heartbeat_interval_ms=100,
                    session_timeout_ms=10_000,
                )
                for _ in range(2)
            ]
            for consumer in consumers:
                consumer.subscribe("t")
            try:
                await until_shared(consumers, [frozenset(range(ALL)), frozenset()])
                await admin.resize("t", LIVE)
                await until_shared(consumers, [frozenset(range(LIVE)), frozenset(range(LIVE, ALL))])
            finally:
                for consumer in consumers:
                    await consumer.close()

    with running(tmp_path, **{"group.initial.rebalance.delay.ms": 0, "group.min.session.timeout.ms": 1_000}) as broker:
        asyncio.run(asyncio.wait_for(story(f"127.0.0.1:{broker.port}"), 60))


def test_a_leader_that_owns_no_partition_of_a_topic_learns_of_its_resize(tmp_path: Path) -> None:
    """It learned with its metadata: after five minutes."""

    async def story(servers: str) -> None:
        async with Admin(servers) as admin:
            await admin.create_topics(["t", "leader"], partitions=1)
            settings = {"group_id": "g", "group_protocol": "classic", "heartbeat_interval_ms": 100}
            async with Consumer(servers, **settings) as leader, Consumer(servers, **settings) as other:
                leader.subscribe("leader")
                while not leader.assignment():
                    await leader.poll(0.05)
                other.subscribe("t")
                while not other.assignment():
                    await asyncio.gather(leader.poll(0.05), other.poll(0.05))
                await admin.resize("t", 3)
                while len(other.assignment()) < 3:
                    await asyncio.gather(leader.poll(0.05), other.poll(0.05))

    with running(tmp_path, **{"group.initial.rebalance.delay.ms": 0}) as broker:
        asyncio.run(asyncio.wait_for(story(f"127.0.0.1:{broker.port}"), 40))


@pytest.mark.parametrize("kind", ["ours", "librdkafka"])
def test_a_leader_that_comes_back_assigns_what_its_topic_has_got_meanwhile(tmp_path: Path, kind: str) -> None:
    """A static member gets its assignment back without a rebalance, and nobody compared that with the topic."""

    async def of_ours(servers: str, count: int) -> set[int]:
        found: set[int] = set()
        settings = {"group_id": "g", "group_instance_id": "i", "group_protocol": "classic"}
        async with Consumer(servers, heartbeat_interval_ms=100, **settings) as consumer:
            consumer.subscribe("t")
            while len(found) < count:
                await consumer.poll(0.05)
                found = {tp.partition for tp in consumer.assignment()}
        return found

    def of_librdkafka(servers: str, count: int) -> set[int]:
        settings = {"group.id": "g", "group.instance.id": "i", "heartbeat.interval.ms": 100}
        consumer = confluent_kafka.Consumer({"bootstrap.servers": servers, **settings})
        consumer.subscribe(["t"])
        ends_at = time.monotonic() + 20
        while len(consumer.assignment()) < count and time.monotonic() < ends_at:
            consumer.poll(0.05)
        found = {tp.partition for tp in consumer.assignment()}
        consumer.close()
        return found

    async def story(servers: str) -> None:
        async with Admin(servers) as admin:
            await admin.create_topics("t", partitions=1, configs={"enable.ordered.delivery": "false"})
            for count in (1, 3):
                if count > 1:
                    await admin.resize("t", count)
                if kind == "ours":
                    assert await of_ours(servers, count) == set(range(count))
                else:
                    assert await asyncio.to_thread(of_librdkafka, servers, count) == set(range(count))

    with running(tmp_path, **{"group.initial.rebalance.delay.ms": 0}) as broker:
        asyncio.run(asyncio.wait_for(story(f"127.0.0.1:{broker.port}"), 25))


async def until_shared(consumers: list[Consumer], lists: list[frozenset[int]]) -> None:
    """Poll until every partition has one owner, and both members have as many of each list."""

    def shared() -> bool:
        owned = [{tp.partition for tp in consumer.assignment()} for consumer in consumers]
        everything = sorted(number for numbers in owned for number in numbers)
        even = all(len({len(numbers & listed) for numbers in owned}) == 1 for listed in lists)
        return everything == sorted(frozenset().union(*lists)) and even

    while not shared():
        await asyncio.gather(*(consumer.poll(0.05) for consumer in consumers))
