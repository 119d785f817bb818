"""Our consumer as a member of groups, by both protocols, against Apache Kafka's coordinator and ours."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import confluent_kafka
import pytest

from anabranch.client import (
    Admin,
    ApiError,
    AssignmentSpec,
    AssignorMetadata,
    Consumer,
    ErrorCode,
    GroupAssignment,
    MemberAssignment,
    OffsetAndMetadata,
    PartitionAssignor,
    Producer,
    Record,
    SubscriptionPattern,
    TopicIdPartition,
    TopicPartition,
    sync,
)
from benchmarks.peers.kafka import ApacheKafka
from tests.conformance.kinds import ALL_KINDS
from tests.support.broker import BrokerProcess, running

T = TypeVar("T")
_numbers = itertools.count()
SETTINGS = {
    "group.consumer.session.timeout.ms": "3000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.heartbeat.interval.ms": "300",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.min.session.timeout.ms": "1000",
    "group.initial.rebalance.delay.ms": "100",
}


OURS = {name.replace(".", "_"): value for name, value in SETTINGS.items()}


@pytest.fixture(scope="module", params=["anabranch", "apache-kafka"] if ALL_KINDS in os.environ else ["anabranch"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "anabranch":
        with running(tmp_path_factory.mktemp("broker"), **OURS) as broker:
            yield f"127.0.0.1:{broker.port}"
    else:
        with ApacheKafka(settings=SETTINGS) as kafka:
            yield kafka.address


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Our broker, for what Apache Kafka does not have."""
    with running(tmp_path_factory.mktemp("elastic"), **OURS) as broker:
        yield f"127.0.0.1:{broker.port}"


PROTOCOLS = ["consumer", "classic"]


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def topic(address: str) -> str:
    name = f"group-topic-{time.time_ns()}-{next(_numbers)}"
    with sync.Admin(address) as admin:
        admin.create_topics(name, partitions=4)
    return name


def run(scenario: Coroutine[Any, Any, T], timeout_s: float = 60) -> T:
    async def in_time() -> T:
        async with asyncio.timeout(timeout_s):
            return await scenario

    return asyncio.run(in_time())


class Told:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.owned: set[int] = set()
        self.said: list[tuple[str, list[int]]] = []

    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> None:
        numbers = [tp.partition for tp in partitions]
        assert self.owned.isdisjoint(numbers)
        self.owned |= set(numbers)
        self.said.append(("+", numbers))

    async def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        await asyncio.sleep(0)
        self._gone("-", partitions)

    def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> None:
        self._gone("!", partitions)

    def _gone(self, sign: str, partitions: Collection[TopicPartition]) -> None:
        numbers = [tp.partition for tp in partitions]
        assert self.owned >= set(numbers)
        self.owned -= set(numbers)
        self.said.append((sign, numbers))


class Reader:
    """A member that polls in the background, and remembers what it read."""

    def __init__(self, address: str, topic: str | SubscriptionPattern, group: str, **settings: Any) -> None:
        self.told = Told()
        self.records: list[Record] = []
        self.error: Exception | None = None
        settings = {"auto_offset_reset": "earliest", "retry_backoff_ms": 20, **settings}
        if settings.get("group_protocol") == "classic":
            settings = {"session_timeout_ms": 3_000, "heartbeat_interval_ms": 300, **settings}
        self.consumer = Consumer(address, group_id=group, **settings)
        self.consumer.subscribe(topic, listener=self.told)
        self._polling = asyncio.ensure_future(self._poll())

    async def _poll(self) -> None:
        try:
            while True:
                self.records += await self.consumer.poll(0.1)
        except ApiError as error:
            self.error = error

    @property
    def owned(self) -> set[int]:
        return self.told.owned

    async def stop(self, **how: Any) -> None:
        """Stop polling, and close."""
        await self.stop_polling()
        await self.consumer.close(**how)

    async def stop_polling(self) -> None:
        self._polling.cancel()
        await asyncio.gather(self._polling, return_exceptions=True)

    def poll_again(self) -> None:
        self._polling = asyncio.ensure_future(self._poll())

    async def vanish(self) -> None:
        """End as a process that is killed ends: without a word."""
        await self.stop_polling()
        await self.consumer._cluster.close()


@asynccontextmanager
async def group_of(
    count: int, address: str, topic: str | SubscriptionPattern, group: str, **settings: Any
) -> AsyncIterator[list[Reader]]:
    readers = [Reader(address, topic, group, **settings) for _ in range(count)]
    try:
        yield readers
    finally:
        for reader in readers:
            await reader.stop(timeout_s=5)


async def until(holds: Any, timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.02)


def shared(readers: list[Reader], partitions: int = 4) -> bool:
    """Whether the partitions are all owned, each once, and everybody has a fair share."""
    numbers = [number for reader in readers for number in reader.owned]
    fair = partitions // len(readers)
    return sorted(numbers) == list(range(partitions)) and all(len(reader.owned) >= fair for reader in readers)


async def produce(address: str, topic: str, first: int, count: int, partitions: Sequence[int] = range(4)) -> None:
    async with Producer(address) as producer:
        for number in range(first, first + count):
            await producer.send(topic, str(number), partition=partitions[number % len(partitions)])


def values(*readers: Reader) -> list[int]:
    return sorted(int(record.value or b"") for reader in readers for record in reader.records)


def test_members_share_partitions_and_every_record_comes_once(address: str, topic: str, protocol: str) -> None:
    async def scenario() -> None:
        await produce(address, topic, 0, 100)
        settings = {"group_protocol": protocol}
        async with group_of(1, address, topic, topic, **settings) as [first]:
            await until(lambda: len(first.records) == 100)
            assert shared([first])
            second = Reader(address, topic, topic, **settings)
            await until(lambda: shared([first, second]))
            await produce(address, topic, 100, 100)
            await until(lambda: len(first.records) + len(second.records) == 200)
            await second.stop()
            assert second.owned == set()
            await until(lambda: shared([first]))
            await produce(address, topic, 200, 100)
            await until(lambda: len(values(first, second)) == 300)
            assert values(first, second) == list(range(300))
            assert [sign for sign, _ in first.told.said].count("!") == 0

    run(scenario())


def test_who_comes_after_begins_where_the_group_has_committed(address: str, topic: str, protocol: str) -> None:
    async def scenario() -> None:
        await produce(address, topic, 0, 100)
        settings = {"group_protocol": protocol, "auto_commit_interval_ms": 60_000}
        for round_ in range(3):
            async with group_of(1, address, topic, topic, **settings) as [reader]:
                await until(lambda reader=reader: len(reader.records) == 100)
                assert values(reader) == list(range(100 * round_, 100 * (round_ + 1)))
                assert reader.consumer.subscription() == {topic}
            assert reader.owned == set()
            await produce(address, topic, 100 * (round_ + 1), 100)

    run(scenario())


def test_commits_by_hand(address: str, topic: str, protocol: str) -> None:
    async def scenario() -> None:
        await produce(address, topic, 0, 40)
        async with group_of(1, address, topic, topic, group_protocol=protocol, enable_auto_commit=False) as [reader]:
            consumer = reader.consumer
            await until(lambda: len(reader.records) == 40)
            assert set((await consumer.committed()).values()) == {None}
            await consumer.commit({(topic, 0): 3, (topic, 1): OffsetAndMetadata(4, "so far")})
            found = await consumer.committed((topic, 0), (topic, 1), (topic, 2))
            assert found[TopicPartition(topic, 0)].offset == 3  # type: ignore[union-attr]
            assert found[TopicPartition(topic, 1)].metadata == "so far"  # type: ignore[union-attr]
            assert found[TopicPartition(topic, 2)] is None
            tasks = [consumer.commit_async({(topic, 0): offset}) for offset in range(4, 9)]
            await asyncio.gather(*tasks)
            await consumer.commit_async()
            committed = await consumer.committed()
            assert {at.offset for at in committed.values() if at} == {10}
            assert set((await consumer.lag()).values()) == {0}
            metadata = consumer.group_metadata()
            assert metadata.group_id == topic and metadata.generation_id > 0 and metadata.member_id
        async with group_of(1, address, topic, topic, group_protocol=protocol) as [reader]:
            await until(lambda: len(reader.owned) == 4)
            await produce(address, topic, 40, 4)
            await until(lambda: len(reader.records) == 4)

    run(scenario())


def test_a_member_that_vanishes_is_replaced_after_its_session(address: str, topic: str, protocol: str) -> None:
    async def scenario() -> None:
        await produce(address, topic, 0, 100)
        settings = {"group_protocol": protocol, "auto_commit_interval_ms": 100}
        async with group_of(1, address, topic, topic, **settings) as [stays]:
            goes = Reader(address, topic, topic, **settings)
            await until(lambda: shared([stays, goes]))
            await goes.vanish()
            await until(lambda: shared([stays]))
            await goes.consumer.close(timeout_s=0.1)
            await until(lambda: set(values(stays, goes)) == set(range(100)))

    run(scenario())


def test_a_member_that_does_not_poll_leaves_and_comes_back(address: str, topic: str, protocol: str) -> None:
    async def scenario() -> None:
        settings: dict[str, Any] = {"group_protocol": protocol}
        async with (
            group_of(1, address, topic, topic, **settings) as [stays],
            group_of(1, address, topic, topic, **settings, max_poll_interval_ms=1_000) as [slow],
        ):
            await until(lambda: shared([stays, slow]))
            await slow.stop_polling()
            await until(lambda: len(stays.owned) == 4)
            assert slow.told.said[-1][0] == "+"
            with pytest.raises(ApiError, match=r"no member of group .* any more"):
                await slow.consumer.commit({(topic, 0): 1})
            slow.poll_again()
            await until(lambda: shared([stays, slow]))
            assert [sign for sign, _ in slow.told.said][-2:] == ["!", "+"]

    run(scenario())


def test_heartbeats_go_on_while_the_application_works(address: str, topic: str, protocol: str) -> None:
    async def scenario() -> None:
        async with group_of(1, address, topic, topic, group_protocol=protocol) as [reader]:
            await until(lambda: len(reader.owned) == 4)
            await reader.stop_polling()
            before = reader.consumer.group_metadata()
            await asyncio.sleep(4)
            reader.poll_again()
            await produce(address, topic, 0, 8)
            await until(lambda: len(reader.records) == 8)
            assert reader.consumer.group_metadata() == before
            assert reader.told.said == [("+", [0, 1, 2, 3])]

    run(scenario())


def test_a_pattern_takes_in_topics_that_appear(address: str, topic: str, protocol: str) -> None:
    async def scenario() -> None:
        await produce(address, topic, 0, 20)
        pattern = SubscriptionPattern(f"{topic}(-more)?")
        settings = {"group_protocol": protocol, "metadata_max_age_ms": 500, "auto_offset_reset": "latest"}
        async with Admin(address) as admin, Consumer(address, group_id=topic, **settings) as consumer:
            consumer.subscribe(pattern)
            assert consumer.subscription() == pattern
            async with asyncio.timeout(20):
                while len(consumer.assignment()) < 4:
                    assert await consumer.poll(0.1) == []
                await admin.create_topics(f"{topic}-more", partitions=4)
                await produce(address, f"{topic}-more", 0, 20)
                records: list[Record] = []
                while len(records) < 20:
                    records += await consumer.poll(0.1)
            assert {record.topic for record in records} == {f"{topic}-more"}

    run(scenario())


def test_a_partition_that_appears_is_read_from_its_beginning_though_reset_says_latest(
    address: str, topic: str, protocol: str
) -> None:
    async def scenario() -> None:
        await produce(address, topic, 0, 20)
        settings = {
            "group_protocol": protocol,
            "auto_offset_reset": "latest",
            "auto_commit_interval_ms": 100,
            "metadata_max_age_ms": 500,
        }
        async with group_of(1, address, topic, topic, **settings) as [reader]:
            await until(lambda: len(reader.owned) == 4)
            await asyncio.sleep(0.5)
            assert reader.records == []
        async with Admin(address) as admin, Producer(address) as producer:
            await admin.resize(topic, 6)
            for partition in range(6):
                await producer.send(topic, b"-1", partition=partition)
            await producer.flush()
        async with group_of(1, address, topic, topic, **settings) as [reader]:
            await until(lambda: len(reader.records) == 6)
            assert {record.partition for record in reader.records} == set(range(6))

    run(scenario())


def test_a_static_member_comes_back_to_what_it_had(address: str, topic: str, protocol: str) -> None:
    async def scenario() -> None:
        settings = {"group_protocol": protocol}
        async with group_of(1, address, topic, topic, **settings, group_instance_id="one") as [one]:
            two = Reader(address, topic, topic, **settings, group_instance_id="two")
            await until(lambda: shared([one, two]))
            had, told = set(two.owned), len(one.told.said)
            await two.stop()
            again = Reader(address, topic, topic, **settings, group_instance_id="two")
            await until(lambda: again.owned == had)
            assert len(one.told.said) == told
            await again.stop(leave=True)
            await until(lambda: len(one.owned) == 4)

    run(scenario())


def test_an_instance_id_belongs_to_one_member(address: str, topic: str) -> None:
    async def scenario() -> None:
        async with group_of(1, address, topic, topic, group_instance_id="one") as [one]:
            await until(lambda: len(one.owned) == 4)
            other = Reader(address, topic, topic, group_instance_id="one")
            await until(lambda: other.error is not None)
            assert isinstance(other.error, ApiError) and other.error.code is ErrorCode.UNRELEASED_INSTANCE_ID
            assert "another member uses the instance id 'one'" in str(other.error)
            await other.consumer.close()

    run(scenario())


def test_a_changed_subscription_moves_partitions_and_an_ended_one_gives_them_up(
    address: str, topic: str, protocol: str
) -> None:
    async def scenario() -> None:
        other = f"{topic}-other"
        async with Admin(address) as admin:
            await admin.create_topics(other, partitions=2)
        async with Consumer(address, group_id=topic, group_protocol=protocol) as consumer:

            async def until_assigned(wanted: set[tuple[str, int]]) -> None:
                async with asyncio.timeout(20):
                    while set(consumer.assignment()) != wanted:
                        await consumer.poll(0.1)

            consumer.subscribe(topic)
            await until_assigned({(topic, number) for number in range(4)})
            consumer.subscribe([topic, other])
            await until_assigned({(topic, n) for n in range(4)} | {(other, n) for n in range(2)})
            consumer.subscribe([other])
            await until_assigned({(other, number) for number in range(2)})
            await consumer.unsubscribe()
            assert consumer.assignment() == () and consumer.subscription() is None
            consumer.subscribe(topic)
            await until_assigned({(topic, number) for number in range(4)})

    run(scenario())


def test_a_topic_that_is_made_anew_is_a_new_topic(address: str, topic: str) -> None:
    async def scenario() -> None:
        await produce(address, topic, 0, 40)
        settings = {"auto_commit_interval_ms": 100, "metadata_max_age_ms": 500}
        async with Admin(address) as admin, group_of(1, address, topic, topic, **settings) as [reader]:
            await until(lambda: len(reader.records) == 40)
            await admin.delete_topics(topic)
            await admin.create_topics(topic, partitions=4)
            await produce(address, topic, 40, 60)
            await until(lambda: len(reader.records) == 100)
            assert values(reader) == list(range(100))

    run(scenario())


def test_what_is_assigned_by_hand_begins_at_the_committed_offset_and_is_committed_too(address: str, topic: str) -> None:
    async def scenario() -> None:
        await produce(address, topic, 0, 40)
        settings: dict[str, Any] = {"group_id": topic, "auto_offset_reset": "earliest"}
        async with Consumer(address, **settings) as consumer:
            consumer.assign(topic)
            records: list[Record] = []
            while len(records) < 40:
                records += await consumer.poll(1)
        await produce(address, topic, 40, 8)
        async with Consumer(address, **settings) as consumer:
            consumer.assign([(topic, 1), (topic, 2)])
            records = []
            while len(records) < 4:
                records += await consumer.poll(1)
            assert sorted(int(record.value or b"") for record in records) == [41, 42, 45, 46]

    run(scenario())


def test_a_loop_that_is_left_has_consumed_what_it_came_to(address: str, topic: str, protocol: str) -> None:
    async def scenario() -> None:
        await produce(address, topic, 0, 40)
        settings = {"group_protocol": protocol, "auto_offset_reset": "earliest", "group_id": topic}
        seen: list[int] = []
        for _ in range(4):
            async with Consumer(address, **settings) as consumer:
                consumer.subscribe(topic)
                count = 0
                async for record in consumer:
                    seen.append(int(record.value or b""))
                    count += 1
                    if count == 10:
                        break
        assert sorted(seen) == list(range(40))

    run(scenario())


def test_the_synchronous_consumer_calls_listeners_in_its_own_thread(address: str, topic: str, protocol: str) -> None:
    with sync.Producer(address) as producer:
        for number in range(40):
            producer.send(topic, str(number), partition=number % 4)
    said: list[str] = []
    settings: dict[str, Any] = {"group_protocol": protocol, "enable_auto_commit": False}
    with sync.Consumer(address, group_id=topic, auto_offset_reset="latest", **settings) as consumer:

        def assigned(partitions: Collection[TopicPartition]) -> None:
            said.append("assigned")
            assert set(consumer.committed().values()) == {None}
            for tp in partitions:
                consumer.seek(*tp, 5)
            with pytest.raises(ApiError, match=r"must not poll"):
                consumer.poll(0)

        def revoked(partitions: Collection[TopicPartition]) -> None:
            said.append("revoked")
            consumer.commit()

        consumer.subscribe(topic, on_partitions_assigned=assigned, on_partitions_revoked=revoked)
        rows = 0
        while rows < 20:
            rows += consumer.poll_arrow(1).num_rows
        consumer.commit_async({(topic, 0): 7}).result(10)
        found = consumer.committed((topic, 0))[TopicPartition(topic, 0)]
        assert found is not None and found.offset == 7
    assert said == ["assigned", "revoked"]
    with sync.Consumer(address, group_id=topic, **settings) as consumer:
        committed = consumer.committed(*[(topic, number) for number in range(4)])
        assert {at.offset for at in committed.values() if at} == {10}


def test_a_listener_that_raises_is_heard_in_poll(address: str, topic: str) -> None:
    async def scenario() -> None:
        def raising(partitions: Collection[TopicPartition]) -> None:
            raise RuntimeError("not today")

        async with Consumer(address, group_id=topic, auto_offset_reset="earliest") as consumer:
            consumer.subscribe(topic, on_partitions_assigned=raising)
            with pytest.raises(RuntimeError, match="not today"):
                await consumer.poll(20)
            await produce(address, topic, 0, 4)
            records: list[Record] = []
            while len(records) < 4:
                records += await consumer.poll(1)

    run(scenario())


def test_our_members_and_librdkafkas_share_a_group(address: str, topic: str, protocol: str) -> None:
    async def scenario() -> None:
        settings: dict[str, Any] = {"bootstrap.servers": address, "group.id": topic, "group.protocol": protocol}
        if protocol == "classic":
            settings["partition.assignment.strategy"] = "range"
            settings["session.timeout.ms"] = 3_000
        stock = confluent_kafka.Consumer({**settings, "auto.offset.reset": "earliest"})
        stock.subscribe([topic])
        theirs: list[int] = []

        async def poll_theirs() -> None:
            while True:
                messages = await asyncio.to_thread(stock.consume, 100, 0.1)
                theirs.extend(int(message.value()) for message in messages)

        polling = asyncio.ensure_future(poll_theirs())
        try:
            async with group_of(1, address, topic, topic, group_protocol=protocol) as [ours]:
                await until(lambda: len(ours.owned) == 2 and len(stock.assignment()) == 2)
                await produce(address, topic, 0, 100)
                await until(lambda: len(theirs) + len(ours.records) == 100)
                assert sorted(theirs + values(ours)) == list(range(100))
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            await asyncio.to_thread(stock.close)

    run(scenario())


def test_what_cannot_be_done_is_said_in_a_sentence(address: str, topic: str) -> None:
    async def scenario() -> None:
        async with Consumer(address) as consumer:
            with pytest.raises(ApiError, match=r"has no group_id, and cannot subscribe"):
                consumer.subscribe(topic)
        async with Consumer(address, group_id=topic) as consumer:
            with pytest.raises(ValueError, match=r"subscribe to at least one topic"):
                consumer.subscribe([])
            consumer.subscribe(topic)
            with pytest.raises(ApiError, match=r"unsubscribe before assigning"):
                consumer.assign(topic)
        async with Consumer(address, group_id=topic, group_remote_assignor="no-such") as consumer:
            consumer.subscribe(topic)
            with pytest.raises(ApiError, match=r"UNSUPPORTED_ASSIGNOR: group .* refuses this member"):
                await consumer.poll(20)
        async with Consumer(address, group_id=topic) as consumer:
            consumer.subscribe(SubscriptionPattern("*"))
            with pytest.raises(ApiError, match=r"INVALID_REGULAR_EXPRESSION.*RE2 regular expression"):
                await consumer.poll(20)
            consumer.subscribe(topic)
            async with asyncio.timeout(20):
                while len(consumer.assignment()) < 4:
                    await consumer.poll(0.1)
        async with Consumer(address, group_id=f"{topic}-none", auto_offset_reset="none") as consumer:
            consumer.subscribe(topic)
            with pytest.raises(ApiError, match=r"has committed no offset of .*Seek, or set it"):
                await consumer.poll(20)

    run(scenario())


def test_groups_are_listed_described_moved_and_deleted(address: str, topic: str, protocol: str) -> None:
    async def scenario() -> None:
        await produce(address, topic, 0, 40)
        async with Admin(address) as admin:
            async with group_of(2, address, topic, topic, group_protocol=protocol, client_id="us") as [one, two]:
                await until(lambda: shared([one, two]) and len(values(one, two)) == 40)
                [listed] = [group for group in await admin.list_groups(types=[protocol]) if group.group_id == topic]
                assert listed.state == "Stable" and listed.protocol_type == "consumer"
                assert topic not in [group.group_id for group in await admin.list_groups(states=["Empty"])]
                described = (await admin.describe_groups(topic))[topic]
                assert (described.type, described.state) == (protocol, "Stable")
                assert {member.client_id for member in described.members} == {"us"}
                owned = {member.member_id: {tp.partition for tp in member.assigned} for member in described.members}
                assert owned == {reader.consumer.group_metadata().member_id: reader.owned for reader in (one, two)}
                assert all(member.topics == (topic,) and not member.pending for member in described.members)
                with pytest.raises(ApiError, match=r"cannot be deleted: it has members; stop them first"):
                    await admin.delete_groups(topic)
                with pytest.raises(ApiError, match=r"cannot be set: the group has members"):
                    await admin.alter_group_offsets(topic, {(topic, 0): 1})
            assert [at.offset for at in (await admin.list_group_offsets(topic)).values()] == [10] * 4
            await admin.alter_group_offsets(topic, {(topic, 0): 2, (topic, 1): OffsetAndMetadata(3, "why")})
            await admin.delete_group_offsets(topic, [(topic, 3)])
            offsets = await admin.list_group_offsets(topic)
            assert {tp.partition: at.offset for tp, at in offsets.items()} == {0: 2, 1: 3, 2: 10}
            assert await admin.list_group_offsets(topic, [(topic, 3)]) == {}
            await admin.delete_groups(topic)
            with pytest.raises(ApiError, match=r"there is no group"):
                await admin.describe_groups(topic)

    run(scenario())


def test_a_group_has_settings_of_its_own(address: str, topic: str) -> None:
    async def scenario() -> None:
        async with Admin(address) as admin:
            await admin.alter_configs("group", topic, {"consumer.heartbeat.interval.ms": "150"})
            async with asyncio.timeout(10):
                while (await admin.describe_configs("group", topic))["consumer.heartbeat.interval.ms"].value != "150":
                    await asyncio.sleep(0.05)
            with pytest.raises(ApiError, match=r"settings of group .* cannot be changed"):
                await admin.alter_configs("group", topic, {"no.such": "1"})

    run(scenario())


@pytest.mark.parametrize("auto", [True, False])
def test_keys_keep_their_order_across_members_while_the_topic_grows_and_shrinks(
    elastic: str, protocol: str, auto: bool
) -> None:
    async def scenario() -> None:
        topic = f"ordered-{protocol}-{auto}"
        handled: list[tuple[str, int]] = []
        settings = {
            "group_protocol": protocol,
            "metadata_max_age_ms": 300,
            "enable_auto_commit": auto,
            "auto_offset_reset": "earliest",
        }

        async def read(count: int) -> None:
            async with Consumer(elastic, group_id=topic, **settings) as consumer:
                consumer.subscribe(topic)
                while len(handled) < count:
                    records = await consumer.poll(0.1, max_records=50)
                    handled.extend(((record.key or b"").decode(), int(record.value or b"")) for record in records)
                    if not auto:
                        with contextlib.suppress(ApiError):
                            await consumer.commit()

        async with Admin(elastic) as admin, Producer(elastic, metadata_max_age_ms=300) as producer:
            await admin.create_topics(topic, partitions=2)
            readers = [asyncio.ensure_future(read(3_000)) for _ in range(3)]
            for turn, count in enumerate((2, 6, 3)):
                if turn:
                    await admin.resize(topic, count)
                for number in range(turn * 1_000, (turn + 1) * 1_000):
                    await producer.send(topic, str(number), key=f"k{number % 40}")
                await producer.flush()
                await asyncio.sleep(0.3)
            await asyncio.gather(*readers)
        seen: dict[str, int] = {}
        for key, number in handled:
            last = seen.get(key, int(key[1:]) - 40)
            assert number <= last + 40, (key, number, last)  # nothing is passed over
            seen[key] = max(number, seen.get(key, -1))
        assert {number for _, number in handled} == set(range(3_000))

    run(scenario(), 90)


class OneForAll(PartitionAssignor):
    """Gives every partition to the member that says it is the strongest."""

    def __init__(self, strength: int) -> None:
        self.strength = strength
        self.told: list[MemberAssignment] = []

    @property
    def name(self) -> str:
        return "one-for-all"

    def metadata(self) -> AssignorMetadata:
        return AssignorMetadata(0, bytes([self.strength]))

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        strongest = max(spec.members, key=lambda member_id: spec.members[member_id].metadata.data)
        every = frozenset(
            TopicIdPartition(topic_id, number)
            for topic_id, topic in spec.topics.items()
            for number in range(topic.partition_count)
        )
        none = MemberAssignment()
        return GroupAssignment({**dict.fromkeys(spec.members, none), strongest: MemberAssignment(every)})

    def on_assignment(self, error: int, assignment: MemberAssignment, member_epoch: int) -> None:
        assert error == 0 and member_epoch > 0
        self.told.append(assignment)


def test_an_assignor_of_ones_own_decides(elastic: str) -> None:
    async def scenario() -> None:
        topic = "own-assignor"
        async with Admin(elastic) as admin:
            await admin.create_topics(topic, partitions=4)
        weak, strong = OneForAll(1), OneForAll(2)
        async with group_of(1, elastic, topic, topic, group_local_assignors=[weak]) as [first]:
            await until(lambda: first.owned == {0, 1, 2, 3})
            async with group_of(1, elastic, topic, topic, group_local_assignors=[strong]) as [second]:
                await until(lambda: second.owned == {0, 1, 2, 3} and not first.owned)
                assert len(strong.told[-1].partitions) == 4
                weak.strength = 3
                await until(lambda: first.owned == {0, 1, 2, 3} and not second.owned)
            assert [sign for sign, _ in first.told.said] == ["+", "-", "+"]

    run(scenario())


def test_groups_survive_the_restart_of_their_coordinator(tmp_path: Path, protocol: str) -> None:
    async def scenario(broker: BrokerProcess) -> None:
        address, topic = f"127.0.0.1:{broker.port}", "survivor"
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=4)
        await produce(address, topic, 0, 40)
        settings = {"group_protocol": protocol, "auto_commit_interval_ms": 100}
        async with group_of(2, address, topic, topic, **settings) as readers:
            await until(lambda: shared(readers) and len(values(*readers)) == 40)
            await asyncio.sleep(0.5)
            told = [list(reader.told.said) for reader in readers]
            await asyncio.to_thread(broker.kill)
            broker.settings["listeners"] = address
            await asyncio.to_thread(broker.start)
            await produce(address, topic, 40, 40)
            await until(lambda: len(values(*readers)) >= 80)
            assert values(*readers) == list(range(80))
            assert all("!" not in [sign for sign, _ in reader.told.said] for reader in readers)
            if protocol == "consumer":
                assert [reader.told.said for reader in readers] == told

    with running(tmp_path, **{**OURS, "group_consumer_session_timeout_ms": "10000"}) as broker:
        run(scenario(broker))


def test_a_group_that_commits_nothing_gets_what_it_waits_for_when_nobody_can_be_reading_any_more(
    elastic: str, protocol: str
) -> None:
    """Who began at the end commits nothing of a partition to which nothing comes: others do not wait for ever."""
    topic = f"silent-{time.time_ns()}"

    async def scenario() -> None:
        async with Admin(elastic) as admin:
            await admin.create_topics(topic, partitions=2)
        await produce(elastic, topic, 0, 20, range(2))
        settings: dict[str, Any] = {"auto_offset_reset": "latest", "enable_auto_commit": False}
        settings |= {"max_poll_interval_ms": 3_000, "metadata_max_age_ms": 300}
        async with group_of(2, elastic, topic, topic, group_protocol=protocol, **settings) as [first, second]:
            await until(lambda: len(first.owned) == len(second.owned) == 1)
            async with Admin(elastic) as admin:
                await admin.resize(topic, 4)
            await until(lambda: len(first.owned) == len(second.owned) == 2)
            await produce(elastic, topic, 0, 20, (2, 3))
            await until(lambda: values(first, second) == list(range(20)))

    run(scenario())
