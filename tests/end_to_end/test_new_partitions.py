"""A member reads a partition that was added to its topic, whatever it reads of the others."""

from __future__ import annotations

import asyncio

import pytest

from anabranch.client import Admin, Consumer, Producer
from tests.end_to_end.test_gates_by_time import name_at
from tests.support.broker import BrokerProcess


@pytest.mark.parametrize("ordered", [True, False])
def test_a_member_that_fetches_nothing_else_of_a_topic_reads_its_new_partition(
    shared: BrokerProcess, ordered: bool
) -> None:
    """No refused fetch tells it that the topic has grown: it waited until its metadata were five minutes old."""
    topic = f"grown-{ordered}"
    key = f"{name_at((2, 1))}-0"

    async def scenario() -> None:
        configs = {"enable.ordered.delivery": str(ordered).lower()}
        async with Admin(shared.address) as admin, Producer(shared.address) as producer, asyncio.timeout(60):
            await admin.create_topics(topic, partitions=1, configs=configs)
            consumer = Consumer(shared.address, group_id=topic, group_protocol="consumer", auto_offset_reset="earliest")
            async with consumer:
                consumer.subscribe(topic)
                while not consumer.assignment():
                    assert not await consumer.poll(0.1)
                await consumer.pause((topic, 0))
                await consumer.poll(1.0)  # The fetch that is on its way ends.
                await admin.resize(topic, 2)
                await (await producer.send(topic, b"new", key=key, partition=None if ordered else 1))
                got: list[bytes | None] = []
                while not got:
                    got += [record.value for record in await consumer.poll(0.5)]
                assert got == [b"new"]

    asyncio.run(scenario())
