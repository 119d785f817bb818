"""Producers in flight, a topic that is resized all the time, a broker that is killed: what a reader is handed.

Every record has a number that grows with each sending of its key, so order and exactly-once are read off the records.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from anabranch.client import Admin, AnabranchError, Consumer, Producer, TopicPartition
from tests.support.broker import BrokerProcess

TOPIC = "rivers"
INITIAL, LARGEST = 2, 9
KEYS = 40


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Readings:
    """Everything that was read, checked as it comes."""

    def __init__(self) -> None:
        self.last: dict[bytes, int] = {}
        self.missing: set[tuple[bytes, int]] = set()
        self.count = 0

    def take(self, key: bytes, number: int) -> None:
        """Numbers of a key come ascending: none twice, none out of order; those left out are noted."""
        last = self.last.get(key, -1)
        assert number > last, f"key {key!r}: {number} after {last}"
        self.missing.update((key, between) for between in range(last + 1, number))
        self.last[key] = number
        self.count += 1


class Load:
    """Producers, a resizer and a reader around one broker."""

    def __init__(
        self, address: str, seconds: float, seed: int, *, retry_backoff_ms: int = 100, turns_between_deletes: int = 50
    ) -> None:
        self.address = address
        self.retries = {"retry_backoff_ms": retry_backoff_ms, "retry_backoff_max_ms": 2 * retry_backoff_ms}
        self.turns_between_deletes = turns_between_deletes
        self.until = time.monotonic() + seconds
        self.chance = random.Random(seed)
        self.sent: dict[bytes, int] = {}
        self.readings = Readings()
        self.resizes = 0

    @property
    def running(self) -> bool:
        return time.monotonic() < self.until

    def next_record(self, name: str) -> tuple[bytes, int]:
        key = f"{name}-{self.chance.randrange(KEYS)}".encode()
        number = self.sent.get(key, 0)
        self.sent[key] = number + 1
        return key, number

    async def send_records(self, name: str) -> None:
        producer = Producer(self.address, linger_ms=2, **self.retries)
        outcomes = []
        while self.running:
            for _ in range(30):
                key, number = self.next_record(name)
                outcomes.append(await producer.send(TOPIC, str(number), key=key))
            await asyncio.sleep(0.003)
        await self.finish(producer, outcomes)

    async def send_columns(self, name: str) -> None:
        producer = Producer(self.address, compression_type="lz4", **self.retries)
        outcomes = []
        while self.running:
            rows = [self.next_record(name) for _ in range(self.chance.choice([10, 500]))]
            table = pa.table({"key": [key for key, _ in rows], "value": [str(number) for _, number in rows]})
            outcomes.append(await producer.send_arrow(TOPIC, table))
            await asyncio.sleep(0.01)
        await self.finish(producer, outcomes)

    async def finish(self, producer: Producer, outcomes: list[Any]) -> None:
        await producer.close()
        for outcome in outcomes:
            await outcome

    async def resize(self, pause_s: float) -> None:
        """Resize, and delete what was read, so that retiring partitions are removed and made again."""
        count = INITIAL
        async with Admin(self.address, request_timeout_ms=5_000) as admin:
            while self.running:
                count = self.chance.choice([n for n in range(INITIAL, LARGEST) if n != count])
                try:
                    await admin.resize(TOPIC, count)
                    self.resizes += 1
                except AnabranchError:
                    count = -1
                await asyncio.sleep(pause_s * self.chance.random())

    async def read_records(self, consumer: Consumer) -> int:
        records = await consumer.poll(0.3, max_records=2_000)
        for record in records:
            assert record.key is not None and record.value is not None
            self.readings.take(record.key, int(record.value))
        return len(records)

    async def read_columns(self, consumer: Consumer) -> int:
        table = await consumer.poll_arrow(0.3, columns=("key", "value"))
        for key, value in zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True):
            self.readings.take(key, int(value))
        return table.num_rows

    async def read(self, producing: asyncio.Future[list[None]]) -> None:
        """Read, by turns in both ways, until everything that was sent was read, or for a while nothing comes."""
        ways: list[Callable[[Consumer], Awaitable[int]]] = [self.read_records, self.read_columns]
        async with Consumer(self.address, auto_offset_reset="earliest") as consumer, Admin(self.address) as admin:
            consumer.assign(TOPIC)
            silent_since = time.monotonic()
            turn = 0
            while not (producing.done() and self.readings.count >= sum(self.sent.values())):
                turn += 1
                if await ways[turn // 20 % 2](consumer) or not producing.done():
                    silent_since = time.monotonic()
                if turn % self.turns_between_deletes == 0:
                    await self.delete_what_was_read(consumer, admin)
                assert time.monotonic() - silent_since < 30, f"stuck at {self.readings.count}: {await consumer.lag()}"

    async def delete_what_was_read(self, consumer: Consumer, admin: Admin) -> None:
        for tp in consumer.assignment():
            try:
                await admin.delete_records({tp: await asyncio.wait_for(consumer.position(*tp), 1)})
            except (AnabranchError, OSError):
                continue

    async def run(self, *others: Awaitable[None], pause_s: float = 0.3) -> None:
        async with Admin(self.address) as admin:
            await admin.create_topics(TOPIC, partitions=INITIAL)
        producing = asyncio.gather(
            self.send_records("a"), self.send_records("b"), self.send_columns("c"), self.resize(pause_s), *others
        )
        async with asyncio.timeout(150):
            await asyncio.gather(producing, self.read(producing))
        for key, count in self.sent.items():
            self.readings.missing.update((key, number) for number in range(self.readings.last.get(key, -1) + 1, count))
        assert not self.readings.missing


@pytest.fixture
def broker(tmp_path: Path) -> BrokerProcess:
    return BrokerProcess(tmp_path, durability="fsync", listeners=f"127.0.0.1:{free_port()}")


def test_keys_keep_their_order_while_a_topic_is_resized(broker: BrokerProcess) -> None:
    broker.start()
    try:
        load = Load(f"127.0.0.1:{broker.port}", seconds=6, seed=1)
        asyncio.run(load.run())
        assert load.resizes > 0
        assert load.readings.count > 500
        assert broker.stop() == 0
    finally:
        broker.kill()


def test_keys_keep_their_order_while_the_broker_is_killed_between_and_in_resizes(broker: BrokerProcess) -> None:
    broker.start()
    # Producers that hesitate repeat batches whose records have been read and deleted since, and past a second kill.
    load = Load(f"127.0.0.1:{broker.port}", seconds=10, seed=2, retry_backoff_ms=1_200, turns_between_deletes=4)

    async def kill() -> None:
        while load.running:
            await asyncio.sleep(load.chance.uniform(0.2, 0.9))
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)

    try:
        asyncio.run(load.run(kill()))
        assert load.resizes > 0
        assert load.readings.count > 200
        assert broker.stop() == 0
    finally:
        broker.kill()


def test_the_positions_of_a_reader_are_offsets_of_the_partitions_there_are(broker: BrokerProcess) -> None:
    broker.start()

    async def scenario() -> None:
        address = f"127.0.0.1:{broker.port}"
        async with Admin(address) as admin, Producer(address) as producer:
            await admin.create_topics(TOPIC, partitions=2)
            for count in (4, 3):
                for number in range(100):
                    await producer.send(TOPIC, b"x", key=str(number))
                await producer.flush()
                await admin.resize(TOPIC, count)
            async with Consumer(address, auto_offset_reset="earliest") as consumer:
                consumer.assign(TOPIC)
                read = 0
                while read < 200:
                    read += len(await consumer.poll(5))
                ends = await consumer.end_offsets()
                assert {tp: await consumer.position(*tp) for tp in consumer.assignment()} == ends
                assert set(ends) == {TopicPartition(TOPIC, number) for number in range(4)}
                assert set((await consumer.lag()).values()) == {0}

    try:
        asyncio.run(scenario())
    finally:
        broker.kill()


def test_a_gate_that_opens_while_decoded_records_are_left_lets_nothing_overtake_them(broker: BrokerProcess) -> None:
    broker.start()

    async def scenario() -> None:
        address = f"127.0.0.1:{broker.port}"
        async with Admin(address) as admin, Producer(address, batch_size=500) as producer:
            await admin.create_topics(TOPIC, partitions=1)
            for round_, count in enumerate((2, 1, 1)):
                for number in range(300):
                    await producer.send(TOPIC, str(10 * round_ + number // 30), key=f"k-{number % 30}")
                await producer.flush()
                if count != 1 or round_ == 1:
                    await admin.resize(TOPIC, count)
        async with Consumer(address, auto_offset_reset="earliest", max_partition_fetch_bytes=12_000) as consumer:
            consumer.assign(TOPIC)
            readings = Readings()

            async def read(most: int, timeout_s: float = 5) -> int:
                records = await consumer.poll(timeout_s, max_records=most)
                for record in records:
                    assert record.key is not None and record.value is not None
                    readings.take(record.key, int(record.value))
                return len(records)

            await consumer.pause((TOPIC, 1))
            while await consumer.position(TOPIC, 0) < 400:
                await read(10)
            await asyncio.sleep(0.5)
            await read(1)
            await consumer.pause((TOPIC, 0))
            await consumer.resume((TOPIC, 1))
            while await read(1_000, 0.5):
                pass
            await consumer.resume((TOPIC, 0))
            while readings.count < 900:
                await read(1_000)
            assert not readings.missing

    try:
        asyncio.run(scenario())
    finally:
        broker.kill()
