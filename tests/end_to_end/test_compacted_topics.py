"""Compacted topics that are resized: what readers of real brokers end with, and what becomes of retiring partitions."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import confluent_kafka
import pytest

from anabranch.client import Admin, AnabranchError, Consumer, Producer, sync
from anabranch.client import TopicPartition as At
from anabranch.machines.placement import place
from anabranch.records.hashing import placement_hash
from tests.end_to_end.test_order_through_resizes import free_port
from tests.support.broker import BrokerProcess

TOPIC = "cities"
CONFIGS = {
    "cleanup.policy": "compact",
    "segment.bytes": "2000",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
}
DEADLINE_S = 60.0
FOLDED_KEYS = 12_000
"""So many that folding half of them back takes longer than writing some of them anew."""
TURN_S = 0.1
"""Whoever writes faster than logs are cleaned makes every cleaning longer than the last."""
State = dict[bytes, bytes]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(
        tmp_path,
        listeners=f"127.0.0.1:{free_port()}",
        log_cleaner_backoff_ms=50,
        reaper_interval_ms=50,
    )
    process.start()
    yield process
    process.kill()


def address(broker: BrokerProcess) -> str:
    return f"127.0.0.1:{broker.port}"


async def ours(broker: BrokerProcess) -> State:
    """What our consumer ends with."""
    state: State = {}
    settings = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    async with Consumer(address(broker), **settings) as consumer:  # type: ignore[arg-type]
        consumer.assign(TOPIC)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            records = await consumer.poll(0.2)
            for record in records:
                assert record.key is not None
                put(state, record.key, record.value)
            if not records and not any((await consumer.lag()).values()):
                return state
            assert time.monotonic() < deadline


def stock(broker: BrokerProcess) -> tuple[State, list[bytes]]:
    """What librdkafka's consumer ends with, and the keys of all records that it read, partition by partition."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address(broker),
            "group.id": "none",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # It reports an end when a fetch there is answered.
            "isolation.level": "read_committed",
            "log_level": 0,
        }
    )
    state: State = {}
    keys: list[bytes] = []
    try:
        partitions = sorted(consumer.list_topics(TOPIC, timeout=10).topics[TOPIC].partitions)
        for number in partitions:
            consumer.assign([confluent_kafka.TopicPartition(TOPIC, number, confluent_kafka.OFFSET_BEGINNING)])
            deadline = time.monotonic() + DEADLINE_S
            while True:
                assert time.monotonic() < deadline
                message = consumer.poll(0.5)
                if message is None:
                    continue
                error = message.error()
                if error is not None:
                    if error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                        break
                    continue
                keys.append(message.key())
                put(state, message.key(), message.value())
    finally:
        consumer.close()
    return state, keys


def put(state: State, key: bytes, value: bytes | None) -> None:
    if value is None:
        state.pop(key, None)
    else:
        state[key] = value


async def write(producer: Producer, rows: dict[bytes, bytes | None]) -> None:
    for outcome in [await producer.send(TOPIC, value, key=key) for key, value in rows.items()]:
        await outcome


def city(number: int) -> bytes:
    return b"city-%d" % number


def test_a_key_that_was_deleted_after_a_growth_stays_deleted(broker: BrokerProcess) -> None:
    """An open transaction keeps the old values uncleanable while their tombstones in other partitions grow old."""

    async def story() -> None:
        async with Admin(address(broker)) as admin, Producer(address(broker)) as producer:
            await admin.create_topics(TOPIC, partitions=1, configs=CONFIGS)
            transactional = Producer(address(broker), transactional_id="long")
            await transactional.init_transactions()
            await transactional.begin_transaction()
            await (await transactional.send(TOPIC, b"pending", key=b"pending"))
            await write(producer, {city(number): b"old" for number in range(40)})
            await admin.resize(TOPIC, 4)
            await write(producer, {city(number): None for number in range(20)})
            await write(producer, {city(number): b"new" for number in range(20, 30)})
            expected = {city(number): b"new" if number < 30 else b"old" for number in range(20, 40)}
            filler = Filler(producer)
            await filler.until(lambda: cleanings(broker) > filler.cleanings_at_first + 15, broker)
            await transactional.commit_transaction()
            await transactional.close()
            expected[b"pending"] = b"pending"
            deadline = time.monotonic() + DEADLINE_S
            state: State = {}
            runs = -1.0
            while b"pending" not in state or runs != cleanings(broker):  # The marker is written after the answer.
                assert time.monotonic() < deadline
                runs, state = cleanings(broker), await ours(broker)
            assert filler.without(state) == expected
            broker.kill()
            broker.start()

            def are_gone() -> bool:
                runs = cleanings(broker)
                state, keys = stock(broker)
                if runs != cleanings(broker):
                    return False  # Tombstones may go while the reader is on its way to them.
                assert filler.without(state) == expected
                return not set(keys) & {city(number) for number in range(20)}

            await filler.until(are_gone, broker)
            assert filler.without(await ours(broker)) == expected

    asyncio.run(story())
    assert broker.stop() == 0


def cleanings(broker: BrokerProcess) -> float:
    return broker.metrics().get("anabranch_compaction_runs_total", 0.0)


class Filler:
    """Writes a few keys of every partition again and again, so that segments are finished."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._turn = 0
        self.cleanings_at_first = 0.0

    async def until(self, true: Callable[[], bool], broker: BrokerProcess) -> None:
        self.cleanings_at_first = cleanings(broker)
        deadline = time.monotonic() + DEADLINE_S
        while not await asyncio.to_thread(true):
            assert time.monotonic() < deadline
            self._turn += 1
            await write(self._producer, {b"filler-%d" % number: b"%0100d" % self._turn for number in range(24)})
            await asyncio.sleep(TURN_S)

    @staticmethod
    def without(state: State) -> State:
        return {key: value for key, value in state.items() if not key.startswith(b"filler")}


def test_retiring_partitions_are_folded_back_and_disappear_while_producers_write(broker: BrokerProcess) -> None:
    expected: dict[bytes, bytes] = {}
    failed: list[object] = []
    running = True

    async def write_on(name: bytes) -> None:
        chance, number = random.Random(name), 0
        async with Producer(address(broker), linger_ms=1) as producer:
            while running:
                key = b"%s-%d" % (name, chance.randrange(30))
                number += 1
                expected[key] = b"%d" % number
                await (await producer.send(TOPIC, expected[key], key=key))

    def delivered(error: object, message: object) -> None:
        if error is not None:
            failed.append(error)

    async def write_stock() -> None:
        chance, number = random.Random(3), 0
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": address(broker),
                "partitioner": "murmur2_random",
                "max.in.flight.requests.per.connection": 1,
                "topic.metadata.refresh.interval.ms": 200,
                "message.timeout.ms": 5_000,
                # Or, after an outage, it forgets who leads the partitions that were removed (elastic-topics.md).
                "metadata.recovery.strategy": "none",
                "linger.ms": 1,
                "log_level": 0,
            }
        )
        while running:
            key = b"stock-%d" % chance.randrange(30)
            failed.append(None)
            while failed:  # librdkafka gives up what was under way to a partition that is removed meanwhile.
                failed.clear()
                number += 1
                producer.produce(TOPIC, b"%d" % number, key=key, on_delivery=delivered)
                while await asyncio.to_thread(producer.flush, 1):
                    pass
            expected[key] = b"%d" % number

    async def read_on(seen: dict[bytes, int]) -> None:
        """A reader that is there all the time is given no older value after a newer one."""
        async with Consumer(address(broker), auto_offset_reset="earliest") as consumer:
            consumer.assign(TOPIC)
            while running:
                try:
                    records = await consumer.poll(0.2)
                except (AnabranchError, OSError):
                    continue
                for record in records:
                    assert record.key is not None and record.value is not None
                    number = int(record.value)
                    if not record.key.startswith(b"stock"):
                        assert number >= seen.get(record.key, -1), f"{record.key!r}: {number} after {seen[record.key]}"
                    seen[record.key] = number

    async def has(admin: Admin, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while len((await admin.topics([TOPIC]))[TOPIC].partitions) != count:
            assert time.monotonic() < deadline, "a retiring partition does not disappear"
            await asyncio.sleep(0.05)

    async def story() -> None:
        nonlocal running
        async with Admin(address(broker), request_timeout_ms=20_000) as admin:
            await admin.create_topics(TOPIC, partitions=1, configs=CONFIGS)
            await admin.resize(TOPIC, 4)
            async with Producer(address(broker)) as producer:
                still = {b"still-%d" % number: b"0" for number in range(200)}
                await write(producer, still)  # type: ignore[arg-type]
                expected.update(still)
            seen: dict[bytes, int] = {}
            tasks: list[Awaitable[None]] = [write_on(b"a"), write_on(b"b"), write_stock(), read_on(seen)]
            work = [asyncio.ensure_future(task) for task in tasks]
            await until_sent(expected, 200)
            await admin.resize(TOPIC, 2)
            await has(admin, 2)
            await admin.resize(TOPIC, 4)
            await until_sent(expected, 400)
            await admin.resize(TOPIC, 1)
            broker.kill()
            broker.start()
            await has(admin, 1)
            deadline = time.monotonic() + DEADLINE_S
            while not expected.keys() <= seen.keys():
                assert time.monotonic() < deadline, f"the reader is stuck: {expected.keys() - seen.keys()}"
                await asyncio.sleep(0.05)
            running = False
            await asyncio.gather(*work)
            spans = await admin.topic_offsets(TOPIC)
            assert sorted(spans) == [0]
        assert stock(broker)[0] == expected
        assert await ours(broker) == expected

    asyncio.run(story())
    metrics = broker.metrics()
    assert metrics.get("anabranch_compaction_failures_total", 0.0) == 0
    assert broker.stop() == 0


def test_no_copy_of_a_folded_record_comes_after_a_later_write_of_its_key(broker: BrokerProcess) -> None:
    """The segment is never finished, so the survivor's log keeps everything: each key's numbers must not go back.

    The lag keeps the retiring partition from being folded back until a producer is about to write all keys anew.
    """
    keys = [b"key-%d" % number for number in range(FOLDED_KEYS)]
    log: list[tuple[bytes, int]] = []
    moved: set[bytes] = set()

    async def write_anew(producer: Producer, done: asyncio.Event) -> None:
        chance, turn = random.Random(1), 0
        while not done.is_set():
            turn += 1
            for sent, key in enumerate(chance.sample(keys, len(keys))):
                await producer.send(TOPIC, b"%d" % turn, key=key)
                if sent % 20 == 0:
                    await asyncio.sleep(0.005)
                    if done.is_set():
                        break
        await producer.flush()

    async def story() -> None:
        configs = {**CONFIGS, "segment.bytes": str(1 << 30), "min.compaction.lag.ms": "3600000"}
        async with Admin(address(broker)) as admin, Producer(address(broker), linger_ms=2) as producer:
            await admin.create_topics(TOPIC, partitions=1, configs=configs)
            await admin.resize(TOPIC, 2)
            outcomes = [(key, await producer.send(TOPIC, b"0", key=key)) for key in keys]
            moved.update([key for key, outcome in outcomes if (await outcome).partition == 1])
            await admin.resize(TOPIC, 1)
            await (await producer.send(TOPIC, b"0", key=b"learns of the resize"))
            done = asyncio.Event()
            await admin.alter_configs("topic", TOPIC, {"min.compaction.lag.ms": "0"})
            writing = asyncio.create_task(write_anew(producer, done))
            deadline = time.monotonic() + DEADLINE_S
            while len((await admin.topics([TOPIC]))[TOPIC].partitions) > 1:
                assert time.monotonic() < deadline, "the retiring partition does not disappear"
                await asyncio.sleep(0.01)
            done.set()
            await writing
            end = (await admin.topic_offsets(TOPIC))[0].end
        async with Consumer(address(broker), auto_offset_reset="earliest") as consumer:
            consumer.assign(TOPIC)
            while await consumer.position(TOPIC, 0) < end:
                table = await consumer.poll_arrow(1.0, columns=("key", "value"))
                log.extend(zip(table["key"].to_pylist(), map(int, table["value"].to_pylist()), strict=True))

    asyncio.run(story())
    copies = [place for place, (key, number) in enumerate(log) if number == 0 and key in moved]
    assert copies, "nothing was folded back"
    assert any(number for _, number in log[: copies[-1]]), "nothing was written while it was folded back"
    newest: dict[bytes, int] = {}
    for key, number in log:
        assert number >= newest.get(key, 0), f"{key!r}: the copy of {number} comes after {newest[key]}"
        newest[key] = number
    assert set(keys) <= newest.keys()
    assert broker.stop() == 0


def test_what_was_compacted_away_unread_holds_no_gate(broker: BrokerProcess) -> None:
    """Fault 2: the records behind the commit are superseded by records of the new partition, which wait for them."""
    moving = [key for key in map(city, range(40)) if place(placement_hash(key), 1, 2) == 1][:10]
    partitions: list[int] = []
    values: list[bytes | None] = []

    async def story(consumer: sync.Consumer) -> None:
        def reads_on() -> bool:
            for record in consumer.poll(0.2):
                partitions.append(record.partition)
                values.append(record.value)
            return b"new" in values

        async with Admin(address(broker)) as admin, Producer(address(broker)) as producer:
            await admin.create_topics(TOPIC, partitions=1, configs=CONFIGS)
            await write(producer, {b"head": b"head"})
            await write(producer, dict.fromkeys(moving, b"old"))
            consumer.subscribe(TOPIC)
            while len(values) < 11:
                reads_on()
            consumer.commit({(TOPIC, 0): 1})
            await admin.resize(TOPIC, 2)
            await write(producer, dict.fromkeys(moving, b"new"))
            assert not await asyncio.to_thread(reads_on) and set(partitions) == {0}
            await Filler(producer).until(reads_on, broker)

    settings = {"group_id": "g", "group_protocol": "consumer", "auto_offset_reset": "earliest"}
    with sync.Consumer(address(broker), enable_auto_commit=False, **settings) as consumer:  # type: ignore[arg-type]
        asyncio.run(story(consumer))
    assert values.count(b"old") == values.count(b"new") == 10
    assert broker.stop() == 0


async def until_sent(expected: dict[bytes, bytes], number: int) -> None:
    """Wait until a writer has written so often."""
    deadline = time.monotonic() + DEADLINE_S
    while max(map(int, expected.values())) < number:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_a_record_without_a_key_is_refused_by_name(broker: BrokerProcess) -> None:
    async def story() -> None:
        async with Admin(address(broker)) as admin:
            await admin.create_topics(TOPIC, partitions=1, configs=CONFIGS)
            producer = Producer(address(broker))
            with pytest.raises(AnabranchError, match="takes no record without a key"):
                await (await producer.send(TOPIC, b"nowhere"))
            await write(producer, {b"a": b"1"})
            with pytest.raises(AnabranchError, match="1 record was not delivered"):
                await producer.close()
            assert (await admin.topic_offsets(TOPIC))[At(TOPIC, 0).partition].end == 1

    asyncio.run(story())
    failed: list[confluent_kafka.KafkaError] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": address(broker), "log_level": 0})
    producer.produce(TOPIC, b"nowhere", on_delivery=lambda error, _: failed.append(error))
    producer.flush(20)
    assert [error.code() for error in failed] == [confluent_kafka.KafkaError.INVALID_RECORD]


@pytest.mark.parametrize("reset", ["none", "latest"])
def test_a_reader_inside_a_partition_that_is_folded_back_reads_on(broker: BrokerProcess, reset: str) -> None:
    """With `none` it failed, with `latest` it left out what was not folded back yet."""
    expected = {city(number): b"v" for number in range(300)} | {b"last": b"new"}

    async def story() -> None:
        state: State = {}
        async with (
            Admin(address(broker)) as admin,
            Producer(address(broker), batch_size=200) as producer,
            Producer(address(broker), transactional_id="open") as open_one,
            Consumer(
                address(broker),
                auto_offset_reset=reset,
                isolation_level="read_committed",
                max_partition_fetch_bytes=500,
            ) as reader,
        ):

            async def read_until(holds: Callable[[], bool]) -> None:
                deadline = time.monotonic() + DEADLINE_S
                while not holds():
                    assert time.monotonic() < deadline, len(state)
                    for record in await reader.poll(0.2, max_records=5):
                        put(state, record.key or b"", record.value)

            await admin.create_topics(TOPIC, partitions=1, configs=CONFIGS)
            await admin.resize(TOPIC, 2)
            for outcome in [
                await producer.send(TOPIC, value, key=key, partition=1)
                for key, value in (expected | {b"last": b"old"}).items()
            ]:
                await outcome
            await open_one.init_transactions()
            await open_one.begin_transaction()
            await (await open_one.send(TOPIC, b"new", key=b"last", partition=0))
            both = [At(TOPIC, 0), At(TOPIC, 1)]
            reader.assign(both)
            for at in both:
                await reader.seek(at.topic, at.partition, 0)
            await read_until(lambda: bool(state))
            position = await reader.position(TOPIC, 1)
            await admin.resize(TOPIC, 1)
            async with asyncio.timeout(DEADLINE_S):
                while (await reader.beginning_offsets(*both))[At(TOPIC, 1)] <= position + 100:
                    await asyncio.sleep(0.02)
            await read_until(lambda: state.get(b"last") == b"old")
            await open_one.commit_transaction()
            await read_until(lambda: state == expected)

    asyncio.run(story())
