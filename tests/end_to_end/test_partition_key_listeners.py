"""Partition key listeners at a real broker: state by key that moves between partitions, members, and generations.

Every record carries its number among the records of its key. An application keeps the last number of each key of a
partition, flushes it to a store when keys may move away, and loads the store when keys have moved in. Its state is
right for every record only if flush A, commit A, load B and deliver B happen in this order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from anabranch.client import Admin, Consumer, PartitionKeyRebalanceListener, Producer, RebalanceListener, TopicPartition
from anabranch.client import sync as plain
from tests.support.broker import BrokerProcess, running
from tests.support.examples import python_examples

QUICK = {
    "group.consumer.session.timeout.ms": 6_000,
    "group.consumer.min.session.timeout.ms": 1_000,
    "group.consumer.heartbeat.interval.ms": 500,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.min.session.timeout.ms": 1_000,
    "group.initial.rebalance.delay.ms": 0,
}
KEYS = 24
LONG_MS = 600_000
"""An interval of automatic commits that never ends in a test: commits come where gates wait for them."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("data"), **QUICK) as process:
        yield process


@pytest.fixture
def address(broker: BrokerProcess) -> str:
    return f"127.0.0.1:{broker.port}"


class Shop:
    """What the members of one group share: the store, and what was handed out."""

    def __init__(self) -> None:
        self.store: dict[bytes, int] = {}
        self.handed: dict[bytes, list[int]] = {}
        self.partitions: set[int] = set()
        self.closed_gates = 0

    @property
    def count(self) -> int:
        return sum(map(len, self.handed.values()))


class Application(RebalanceListener, PartitionKeyRebalanceListener):
    """One member with state by key. Not the listener's order, but the state shows whether the order was right."""

    def __init__(self, name: str, shop: Shop, consumer: Consumer, *, by_hand: bool) -> None:
        self.name, self.shop, self.consumer, self.by_hand = name, shop, consumer, by_hand
        self.state: dict[int, dict[bytes, int]] = {}
        self.flushed: list[int] = []
        self.loaded: list[int] = []

    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> None:
        for tp in partitions:
            self.state[tp.partition] = dict(self.shop.store)

    async def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        self._flush(partitions)
        if self.by_hand:
            await self._commit()
        for tp in partitions:
            del self.state[tp.partition]

    def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> None:
        raise AssertionError(f"{self.name} lost {partitions}")

    async def on_partition_key_maybe_revoked(self, partitions: Collection[TopicPartition]) -> None:
        await asyncio.sleep(0.02)
        self._flush(partitions)
        self.flushed += [tp.partition for tp in partitions]
        if self.by_hand:
            await self._commit()

    async def on_partition_key_assigned(self, partitions: Collection[TopicPartition]) -> None:
        await asyncio.sleep(0.02)
        for tp in partitions:
            _merge(self.state[tp.partition], self.shop.store)
            self.loaded.append(tp.partition)

    def _flush(self, partitions: Collection[TopicPartition]) -> None:
        for tp in partitions:
            _merge(self.shop.store, self.state.get(tp.partition, {}))

    async def _commit(self) -> None:
        self._flush(self.consumer.assignment())  # a commit of all partitions needs the flush of all
        await self.consumer.commit()

    async def run(self, topic: str) -> None:
        self.consumer.subscribe(topic, self, self)
        while True:
            for record in await self.consumer.poll(0.2, max_records=50):
                state, number = self.state[record.partition], int(record.value or b"")
                assert record.key is not None
                last = state.get(record.key, -1)
                assert number == last + 1, f"{self.name}: {record.key!r} {number} after {last} in {record.partition}"
                state[record.key] = number
                self.shop.handed.setdefault(record.key, []).append(number)
                self.shop.partitions.add(record.partition)
            await asyncio.sleep(0.01)

    async def watch_gates(self) -> None:
        """Note closed gates: they may close and open again within one poll."""
        while True:
            self.shop.closed_gates += bool(self.consumer._fetcher.needs())
            await asyncio.sleep(0.001)


def _merge(into: dict[bytes, int], other: dict[bytes, int]) -> None:
    for key, number in other.items():
        into[key] = max(number, into.get(key, -1))


async def until(holds: Any, members: Collection[asyncio.Task[None]], timeout_s: float = 40) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            for member in members:
                if member.done():
                    member.result()
            await asyncio.sleep(0.02)


class Sender:
    """A producer of numbered records."""

    def __init__(self, address: str, topic: str) -> None:
        self.producer = Producer(address, linger_ms=1)
        self.topic = topic
        self.sent = 0

    async def send(self, rounds: int) -> None:
        for number in range(self.sent, self.sent + rounds):
            for key in range(KEYS):
                await self.producer.send(self.topic, str(number), key=f"k{key}")
            await asyncio.sleep(0.005)
        self.sent += rounds
        await self.producer.flush()


@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "by hand"])
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_state_by_key_follows_its_keys_through_resizes_and_members(address: str, protocol: str, by_hand: bool) -> None:
    topic = f"state-{protocol}-{by_hand}"

    async def scenario() -> None:
        shop, sender = Shop(), Sender(address, topic)
        settings: dict[str, Any] = {"group_id": topic, "group_protocol": protocol, "auto_offset_reset": "earliest"}
        settings |= {"enable_auto_commit": not by_hand, "auto_commit_interval_ms": LONG_MS, "metadata_max_age_ms": 300}
        if protocol == "classic":
            settings |= {"partition_assignment_strategy": "cooperative-sticky", "heartbeat_interval_ms": 300}
        consumers = [Consumer(address, **settings) for _ in range(2)]
        applications = [Application(f"m{n}", shop, it, by_hand=by_hand) for n, it in enumerate(consumers)]
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1)
            await sender.send(5)
            work = [each for one in applications for each in (one.run(topic), one.watch_gates())]
            members = [asyncio.create_task(each) for each in work]
            await until(lambda: shop.count == sender.sent * KEYS, members)
            for count in (2, 4, 3, 1, 5):
                resizing = asyncio.create_task(admin.resize(topic, count))
                await sender.send(12)
                await resizing
            await sender.send(5)
            await until(lambda: shop.count >= sender.sent * KEYS, members)
            for member in members:
                member.cancel()
                with suppress(asyncio.CancelledError):
                    await member
            for consumer in consumers:
                await consumer.close()
            await sender.producer.close()
        assert shop.handed == {f"k{key}".encode(): list(range(sender.sent)) for key in range(KEYS)}
        assert len(shop.partitions) > 3 and shop.closed_gates, "nothing was tested"
        assert all(one.flushed and one.loaded for one in applications)

    asyncio.run(scenario())


def test_within_one_member_records_wait_for_the_flush_and_the_commit_of_what_came_before(address: str) -> None:
    """The plain client; listeners that fail are called again by the next poll, and nothing overtakes."""
    topic = "alone"
    told: list[tuple[str, object]] = []
    failing = {"flush": 1, "load": 1}

    class Listener(PartitionKeyRebalanceListener):
        def on_partition_key_maybe_revoked(self, partitions: Collection[TopicPartition]) -> None:
            self._call("flush", partitions)
            consumer.commit()

        def on_partition_key_assigned(self, partitions: Collection[TopicPartition]) -> None:
            self._call("load", partitions)

        def _call(self, what: str, partitions: Collection[TopicPartition]) -> None:
            failing[what] -= 1
            if failing[what] == 0:
                raise ValueError(what)
            told.append((what, [tp.partition for tp in partitions]))

    with plain.Admin(address) as admin, plain.Producer(address) as producer:
        admin.create_topics(topic, partitions=1)
        for number in range(20):
            producer.send(topic, str(number), key=f"k{number % 10}")
        producer.flush()
        admin.resize(topic, 2)
        for number in range(20, 40):
            producer.send(topic, str(number), key=f"k{number % 10}")
        producer.flush()
        settings: dict[str, Any] = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
        with plain.Consumer(address, group_id=topic, group_protocol="classic", **settings) as consumer:
            consumer.subscribe(topic, None, Listener())
            raised: list[str] = []
            values: list[int] = []
            while len(values) < 40:
                try:
                    records = consumer.poll(5)
                except ValueError as error:
                    raised.append(str(error))
                    continue
                told += [("record", record.partition) for record in records]
                values += [int(record.value or b"") for record in records]
    assert raised == ["flush", "load"]
    order = [what for number, what in enumerate(told) if what != told[number - 1] or not number]
    flush, load, delivered = (order.index(what) for what in (("flush", [0]), ("load", [1]), ("record", 1)))
    assert order.index(("record", 0)) < flush < load < delivered
    for key in range(10):
        assert [value for value in values if value % 10 == key] == [key, key + 10, key + 20, key + 30]


def test_what_is_handed_out_and_not_committed_holds_a_gate_of_the_same_member(address: str) -> None:
    topic = "uncommitted"

    async def scenario() -> None:
        async with Admin(address) as admin, Producer(address) as producer:
            await admin.create_topics(topic, partitions=1)
            for number in range(10):
                await producer.send(topic, str(number), key=f"k{number}")
            await producer.flush()
            await admin.resize(topic, 2)
            for number in range(10, 20):
                await producer.send(topic, str(number), key=f"k{number - 10}")
            await producer.flush()
        settings: dict[str, Any] = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
        async with Consumer(address, group_id=topic, group_protocol="classic", **settings) as consumer:
            consumer.subscribe(topic)
            handed: list[tuple[int, int]] = []

            async def read(timeout_s: float) -> None:
                handed.extend((r.partition, r.offset) for r in await consumer.poll(timeout_s))

            while len(handed) < 10:
                await read(5)
            for _ in range(5):
                await read(0.2)
            assert {partition for partition, _ in handed} == {0}
            await consumer.commit({(topic, 0): 9})
            await read(0.5)
            assert {partition for partition, _ in handed} == {0}, "one record is left"
            await consumer.commit({(topic, 0): 10})
            while len(handed) < 20:
                await read(5)

    asyncio.run(scenario())


def test_without_ordered_delivery_nothing_is_called_and_nothing_waits(address: str, tmp_path: Path) -> None:
    topic = "unordered"
    called: list[str] = []

    class Listener(PartitionKeyRebalanceListener):
        def on_partition_key_maybe_revoked(self, partitions: Collection[TopicPartition]) -> None:
            called.append("flush")

        def on_partition_key_assigned(self, partitions: Collection[TopicPartition]) -> None:
            called.append("load")

    with plain.Admin(address) as admin, plain.Producer(address) as producer:
        admin.create_topics(topic, partitions=1, configs={"enable.ordered.delivery": "false"})
        for number in range(20):
            producer.send(topic, str(number), key=f"k{number}")
        producer.flush()
        admin.resize(topic, 2)
        for number in range(20):
            producer.send(topic, str(number), key=f"k{number}")
        producer.flush()
        settings: dict[str, Any] = {"auto_offset_reset": "earliest", "auto_commit_interval_ms": 50}
        with plain.Consumer(address, group_id=topic, group_protocol="classic", **settings) as consumer:
            consumer.subscribe(topic, None, Listener())
            count = 0
            while count < 40:
                count += len(consumer.poll(5))
            consumer.poll(0.2)
            assert "positions-asked" not in consumer._inner._group._context.jobs
    assert called == []


def test_the_example_of_an_application_with_state_counts_right_through_a_resize(address: str) -> None:
    (example,) = (each for each in python_examples("docs/consumer-groups.md", address) if "class Counts" in each)
    with plain.Admin(address) as admin, plain.Producer(address) as producer:
        admin.create_topics("flights", partitions=1)
        for count in (1, 3, 2):
            if count != 1:
                admin.resize("flights", count)
            for number in range(60):
                producer.send("flights", b"x", key=f"k{number % 6}")
            producer.flush()
    names: dict[str, Any] = {}
    exec(compile(example, "docs/consumer-groups.md", "exec"), names)
    assert names["database"] == {f"k{number}".encode(): 30 for number in range(6)}


class Failing(RebalanceListener, PartitionKeyRebalanceListener):
    """A listener of which each call raises."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        self.calls.append("revoked")
        raise ValueError("revoked")

    def on_partition_key_maybe_revoked(self, partitions: Collection[TopicPartition]) -> None:
        self.calls.append("flush")
        raise ValueError("flush")


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("ends", ["close", "unsubscribe"])
def test_a_member_leaves_although_its_listener_raises(address: str, protocol: str, ends: str) -> None:
    """Others would have waited for its partitions until its session is over."""
    topic = f"raises-{protocol}-{ends}"
    with plain.Admin(address) as admin, plain.Producer(address) as producer:
        admin.create_topics(topic, partitions=1)
        producer.send(topic, "a", key="a").result()
        member = plain.Consumer(address, group_id=topic, group_protocol=protocol, auto_offset_reset="earliest")
        listener = Failing()
        member.subscribe(topic, listener, listener)
        while not member.poll(1.0):
            pass
        with pytest.raises(ValueError, match=r"flush|revoked"):
            getattr(member, ends)()
        assert listener.calls
        assert not admin.describe_groups(topic)[topic].members, "it is a member still"
        member.close()
