"""Two classic members of ours at a real broker, through a growth and a shrink: even in both lists.

Their metadata is not refreshed by age meanwhile: the leader learns of the shrink because its fetches are refused.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

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


async def until_shared(consumers: list[Consumer], lists: list[frozenset[int]]) -> None:
    """Poll until every partition has one owner, and both members have as many of each list."""

    def shared() -> bool:
        owned = [{tp.partition for tp in consumer.assignment()} for consumer in consumers]
        everything = sorted(number for numbers in owned for number in numbers)
        even = all(len({len(numbers & listed) for numbers in owned}) == 1 for listed in lists)
        return everything == sorted(frozenset().union(*lists)) and even

    while not shared():
        await asyncio.gather(*(consumer.poll(0.05) for consumer in consumers))
