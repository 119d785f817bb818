"""Static members that change from the classic to the consumer protocol while the session of the old member is alive.

A classic static member sends no LeaveGroup when it is closed, as its instance is expected to come back. An instance
that comes back with the consumer protocol replaces the old member at once, like one that keeps the classic protocol.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import confluent_kafka
import pytest
from confluent_kafka import KafkaError

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client import Admin, Consumer
from tests.support.broker import BrokerProcess

NUMBERS = itertools.count()
SESSION_S = 45
"""The session timeout of classic members: longer than a test waits."""
SOON_S = 20


class Instance:
    """A stock consumer with an instance id."""

    def __init__(self, address: str, group: str, name: str, protocol: str) -> None:
        self.errors: list[KafkaError] = []
        settings = {"bootstrap.servers": address, "group.id": group, "group.instance.id": name, "log_level": 0}
        if protocol == "classic":
            settings |= {"session.timeout.ms": SESSION_S * 1000, "heartbeat.interval.ms": 200}
        self.consumer = confluent_kafka.Consumer({**settings, "group.protocol": protocol})
        self.consumer.subscribe([group])

    def poll(self) -> None:
        record = self.consumer.poll(0.05)
        if record is not None and (error := record.error()) is not None:
            self.errors.append(error)

    @property
    def owned(self) -> set[int]:
        return {it.partition for it in self.consumer.assignment()}


@contextmanager
def instance(address: str, group: str, name: str, protocol: str) -> Iterator[Instance]:
    made = Instance(address, group, name, protocol)
    try:
        yield made
    finally:
        made.consumer.close()


def until_shared(*instances: Instance) -> None:
    """Poll until the instances share the two partitions evenly; fail at the first error of an instance."""
    deadline = time.monotonic() + SOON_S
    while sorted(sorted(each.owned) for each in instances) != ([[0, 1]] if len(instances) == 1 else [[0], [1]]):
        errors = [each.errors for each in instances]
        assert time.monotonic() < deadline and not any(errors), ([each.owned for each in instances], errors)
        for each in instances:
            each.poll()


@pytest.fixture
def topic(shared: BrokerProcess) -> str:
    """A topic with two partitions; its name is the group id, too."""
    name = f"topic-{next(NUMBERS)}"

    async def create() -> None:
        async with Admin(shared.address) as admin:
            await admin.create_topics(name, partitions=2)

    asyncio.run(create())
    return name


def test_a_lone_instance_that_changes_its_protocol_is_assigned_its_partitions_at_once(
    shared: BrokerProcess, topic: str
) -> None:
    with instance(shared.address, topic, "a", "classic") as old:
        until_shared(old)
    with instance(shared.address, topic, "a", "consumer") as new:
        until_shared(new)


def test_an_instance_that_changes_its_protocol_beside_a_classic_one_is_assigned_its_share_at_once(
    shared: BrokerProcess, topic: str
) -> None:
    with instance(shared.address, topic, "b", "classic") as other:
        with instance(shared.address, topic, "a", "classic") as old:
            until_shared(old, other)
        with instance(shared.address, topic, "a", "consumer") as new:
            until_shared(new, other)


def test_a_classic_member_that_lives_on_is_fenced_by_the_member_that_took_its_place(
    shared: BrokerProcess, topic: str
) -> None:
    with instance(shared.address, topic, "a", "classic") as old:
        until_shared(old)
        with instance(shared.address, topic, "a", "consumer") as new:
            until_shared(new)
            deadline = time.monotonic() + SOON_S
            while not old.errors:
                assert time.monotonic() < deadline
                old.poll()
                new.poll()
        assert old.errors[0].code() == KafkaError._FATAL and "fenced" in old.errors[0].str()


@pytest.mark.parametrize("commits", [False, True])
def test_our_member_that_changes_its_protocol_is_assigned_its_partitions_and_fences_the_old_one(
    shared: BrokerProcess, topic: str, commits: bool
) -> None:
    def member(protocol: str) -> Consumer:
        consumer = Consumer(
            shared.address,
            group_id=topic,
            group_instance_id="a",
            group_protocol=protocol,
            session_timeout_ms=SESSION_S * 1000,
            heartbeat_interval_ms=200,
            enable_auto_commit=commits,
        )
        consumer.subscribe(topic)
        return consumer

    async def until_assigned(consumer: Consumer) -> None:
        async with asyncio.timeout(SOON_S):
            while len(consumer.assignment()) < 2:
                await consumer.poll(0.05)

    async def poll(*consumers: Consumer) -> None:
        async with asyncio.timeout(SOON_S):
            while True:
                await asyncio.gather(*(consumer.poll(0.05) for consumer in consumers))

    async def scenario() -> None:
        async with member("classic") as old:
            await until_assigned(old)
            async with member("consumer") as new:
                await until_assigned(new)
                with pytest.raises(ApiError) as fenced:
                    await poll(old, new)
                assert fenced.value.code is ErrorCode.FENCED_INSTANCE_ID
                assert len(new.assignment()) == 2

    asyncio.run(scenario())
