"""Our client against our broker and against Apache Kafka: the same calls, the same answers."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import confluent_kafka
import pyarrow as pa
import pytest

from anabranch.client import (
    Admin,
    ApiError,
    ConfigEntry,
    ConnectError,
    Consumer,
    DeliveryError,
    ErrorCode,
    Producer,
    sync,
)
from anabranch.records.hashing import placement_hash
from benchmarks.peers.kafka import ApacheKafka
from tests.support.broker import running

T = TypeVar("T")
_numbers = itertools.count()


@pytest.fixture(scope="module", params=["anabranch", "apache-kafka"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "anabranch":
        with running(tmp_path_factory.mktemp("broker")) as broker:
            yield f"127.0.0.1:{broker.port}"
    else:
        with ApacheKafka() as kafka:
            yield kafka.address


@pytest.fixture
def topic(address: str) -> str:
    name = f"topic-{next(_numbers)}"
    with sync.Admin(address) as admin:
        admin.create_topics(name, partitions=2)
    return name


def run(scenario: Coroutine[Any, Any, T]) -> T:
    async def in_time() -> T:
        async with asyncio.timeout(60):
            return await scenario

    return asyncio.run(in_time())


@asynccontextmanager
async def reader(address: str, topic: str, **settings: Any) -> AsyncIterator[Consumer]:
    async with Consumer(address, **{"auto_offset_reset": "earliest", **settings}) as consumer:
        consumer.assign(topic)
        yield consumer


async def take(consumer: Consumer, count: int) -> list[Any]:
    records: list[Any] = []
    while len(records) < count:
        records += await consumer.poll(10)
    assert len(records) == count
    return records


async def until_config(admin: Admin, topic: str, name: str, holds: Callable[[ConfigEntry], bool]) -> None:
    """Apache Kafka answers a change before it shows it."""
    async with asyncio.timeout(10):
        while not holds((await admin.describe_configs("topic", topic))[name]):
            await asyncio.sleep(0.02)


def test_a_topic_is_created_described_changed_and_deleted(address: str) -> None:
    async def scenario() -> None:
        async with Admin(address) as admin:
            await admin.create_topics("life", partitions=3, configs={"retention.ms": "3600000"})
            assert "life" in await admin.list_topics()
            described = (await admin.describe_topics("life"))["life"]
            assert [partition.info.partition for partition in described.partitions] == [0, 1, 2]
            assert all(partition.info.leader >= 0 for partition in described.partitions)
            retention = (await admin.describe_configs("topic", "life"))["retention.ms"]
            assert retention.value == "3600000" and not retention.is_default
            await admin.alter_configs("topic", "life", {"max.message.bytes": "2000000"})
            await until_config(admin, "life", "max.message.bytes", lambda config: config.value == "2000000")
            await admin.alter_configs("topic", "life", {"max.message.bytes": None})
            await until_config(admin, "life", "max.message.bytes", lambda config: config.is_default)
            await admin.resize("life", 5)
            assert (await admin.topics(["life"]))["life"].partition_count == 5
            with pytest.raises(ApiError, match=r"topic 'life' cannot be created"):
                await admin.create_topics("life")
            await admin.delete_topics("life")
            assert "life" not in await admin.list_topics()
            assert len((await admin.describe_cluster()).nodes) == 1

    run(scenario())


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_what_is_sent_is_read_in_every_compression(address: str, topic: str, compression: str) -> None:
    async def scenario() -> None:
        async with Producer(address, compression_type=compression) as producer:
            for number in range(100):
                headers = [("n", str(number).encode()), ("none", None)]
                await producer.send(topic, f"value {number}", key=f"k{number % 7}", timestamp=number, headers=headers)
            table = pa.table({"key": ["k"] * 1_000, "value": [f"row {number}" for number in range(1_000)]})
            outcome = await producer.send_arrow(topic, table)
            await producer.flush()
            metadata = await outcome
            assert metadata.record_count == 1_000
            assert sum(last - first + 1 for first, last in metadata.offsets.values()) == 1_000
        async with reader(address, topic) as consumer:
            records = await take(consumer, 1_100)
        ones = sorted((record for record in records if record.headers), key=lambda record: record.timestamp)
        assert [record.value for record in ones] == [f"value {number}".encode() for number in range(100)]
        assert [record.headers for record in ones[:2]] == [(("n", b"0"), ("none", None)), (("n", b"1"), ("none", None))]
        rows = [record.value for record in records if not record.headers]
        assert rows == [f"row {number}".encode() for number in range(1_000)]

    run(scenario())


def test_tables_hold_what_records_hold(address: str, topic: str) -> None:
    async def scenario() -> None:
        async with Producer(address) as producer:
            for number in range(500):
                await producer.send(topic, None if number % 5 == 0 else b"v", key=None if number % 7 == 0 else b"k")
        async with reader(address, topic) as consumer:
            records = await take(consumer, 500)
            await consumer.seek_to_beginning()
            tables = []
            while sum(table.num_rows for table in tables) < 500:
                tables.append(await consumer.poll_arrow(10, columns=[*records[0]._fields[:8], "leader_epoch"]))
        rows = pa.concat_tables(tables).to_pylist()
        found = [
            (
                *(row["topic"], row["partition"], row["offset"], int(row["timestamp"].timestamp() * 1000 + 0.5)),
                *(row["timestamp_type"], row["key"], row["value"]),
            )
            for row in rows
        ]
        assert sorted(found) == sorted(record[:7] for record in records)
        assert {row["leader_epoch"] for row in rows} == {0}

    run(scenario())


def test_keys_are_placed_where_other_clients_place_them(address: str, topic: str) -> None:
    async def scenario() -> dict[bytes, int]:
        async with Producer(address) as producer:
            outcomes = {f"key-{n}": await producer.send(topic, b"x", key=f"key-{n}") for n in range(100)}
            await producer.flush()
            return {key.encode(): (await outcome).partition for key, outcome in outcomes.items()}

    ours = run(scenario())
    assert ours == {key: placement_hash(key) % 2 for key in ours}
    theirs: dict[bytes, int] = {}
    other = confluent_kafka.Producer({"bootstrap.servers": address, "partitioner": "murmur2_random"})
    for key in ours:
        other.produce(topic, b"x", key=key, on_delivery=lambda _, m: theirs.__setitem__(m.key(), m.partition()))
    other.flush()
    assert ours == theirs


def test_other_clients_read_what_we_write_and_we_read_what_they_write(address: str, topic: str) -> None:
    settings = {"bootstrap.servers": address, "compression.type": "zstd", "partitioner": "murmur2_random"}
    other = confluent_kafka.Producer(settings)
    for number in range(200):
        other.produce(topic, f"theirs {number}".encode(), key=b"k")
    other.flush()
    with sync.Producer(address, compression_type="lz4") as producer:
        for number in range(200):
            producer.send(topic, f"ours {number}", key=b"k")
    expected = [f"theirs {number}".encode() for number in range(200)] + [f"ours {n}".encode() for n in range(200)]
    with sync.Consumer(address, auto_offset_reset="earliest") as consumer:
        consumer.assign(topic)
        read: list[bytes | None] = []
        while len(read) < 400:
            read += [record.value for record in consumer.poll(10)]
    assert read == expected
    settings = {"bootstrap.servers": address, "group.id": "none", "enable.auto.commit": False}
    stock = confluent_kafka.Consumer(settings)
    stock.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in range(2)])
    seen: list[bytes] = []
    while len(seen) < 400:
        seen += [message.value() for message in stock.consume(400, 10)]
    stock.close()
    assert seen == expected


@pytest.mark.parametrize("acks", ["all", "1", "0"])
def test_every_kind_of_acknowledgement(address: str, topic: str, acks: str) -> None:
    async def scenario() -> None:
        # A leader that is not ready yet refuses, and without an acknowledgement nobody would hear of it.
        async with Producer(address, acks="all") as producer:
            await (await producer.send(topic, b"first", partition=1))
        async with Producer(address, acks=acks) as producer:
            outcomes = [await producer.send(topic, b"x", partition=1) for _ in range(50)]
            await producer.flush()
            offsets = [(await outcome).offset for outcome in outcomes]
        assert offsets == ([-1] * 50 if acks == "0" else list(range(1, 51)))
        async with reader(address, topic) as consumer:
            assert len(await take(consumer, 51)) == 51

    run(scenario())


def test_a_reader_seeks_pauses_and_tells_where_it_is(address: str, topic: str) -> None:
    async def scenario() -> None:
        async with Producer(address) as producer:
            for number in range(100):
                await producer.send(topic, str(number), partition=number % 2, timestamp=1_000 + number)
        async with reader(address, topic) as consumer:
            await consumer.seek(topic, 0, 40)
            assert await consumer.position(topic, 0) == 40
            await consumer.pause((topic, 1))
            assert [record.offset for record in await take(consumer, 10)] == list(range(40, 50))
            assert await consumer.poll(0.3) == []
            await consumer.resume()
            assert len(await take(consumer, 50)) == 50
            assert await consumer.beginning_offsets() == {(topic, 0): 0, (topic, 1): 0}
            assert await consumer.end_offsets((topic, 0)) == {(topic, 0): 50}
            found = await consumer.offsets_for_times({(topic, 0): 1_050, (topic, 1): 9_999})
            assert found[topic, 0] is not None and found[topic, 0].offset == 25  # type: ignore[index]
            assert found[topic, 1] is None  # type: ignore[index]
            await consumer.seek_to_time(1_090)
            assert sorted(record.timestamp for record in await take(consumer, 10)) == list(range(1_090, 1_100))
            await consumer.seek_to_end()
            assert set((await consumer.lag()).values()) == {0}
            await consumer.seek_to_beginning((topic, 1))
            assert (await take(consumer, 50))[0].offset == 0

    run(scenario())


def test_deleted_records_are_gone_and_a_position_among_them_is_reset(address: str, topic: str) -> None:
    async def scenario() -> None:
        async with Producer(address) as producer, Admin(address) as admin:
            for number in range(20):
                await producer.send(topic, str(number), partition=0)
            await producer.flush()
            assert await admin.delete_records({(topic, 0): 15}) == {(topic, 0): 15}
            assert (await admin.topic_offsets(topic))[0] == (15, 20)
        async with reader(address, topic) as consumer:
            await consumer.seek(topic, 0, 3)
            assert [record.offset for record in await take(consumer, 5)] == list(range(15, 20))
        async with reader(address, topic, auto_offset_reset="none") as consumer:
            await consumer.seek(topic, 0, 3)
            with pytest.raises(ApiError, match=r"offset 3 of .* is not in its log"):
                await consumer.poll(10)
            assert consumer.paused() == (), "the application has paused nothing"
            await consumer.seek(topic, 0, 15)
            assert [record.offset for record in await take(consumer, 5)] == list(range(15, 20))

    run(scenario())


def test_a_reader_sees_partitions_that_appear_and_starts_at_their_beginning(address: str, topic: str) -> None:
    async def scenario() -> None:
        async with (
            Admin(address) as admin,
            Producer(address, metadata_max_age_ms=200) as producer,
            reader(address, topic, auto_offset_reset="latest", metadata_max_age_ms=200) as consumer,
        ):
            assert await consumer.poll(0.5) == []
            await admin.resize(topic, 4)
            await asyncio.sleep(0.3)
            for number in range(200):
                await producer.send(topic, b"x", key=str(number))
            await producer.flush()
            records = await take(consumer, 200)
            assert {record.partition for record in records} == {0, 1, 2, 3}

    run(scenario())


def test_the_rest_of_many_records_comes_with_the_next_poll(address: str, topic: str) -> None:
    with sync.Producer(address) as producer:
        producer.send_arrow(topic, pa.table({"value": [str(number) for number in range(1_000)]}), partition=0)
    with sync.Consumer(address, auto_offset_reset="earliest", max_poll_records=300) as consumer:
        consumer.assign([(topic, 0)])
        sizes: list[int] = []
        values: list[bytes | None] = []
        while len(values) < 1_000:
            records = consumer.poll(10)
            sizes.append(len(records))
            values += [record.value for record in records]
            assert consumer.position(topic, 0) == len(values)
        assert sizes == [300, 300, 300, 100]
        assert values == [str(number).encode() for number in range(1_000)]
        consumer.seek(topic, 0, 500)
        assert consumer.poll(10)[0].offset == 500


def test_records_can_be_read_in_a_loop(address: str, topic: str) -> None:
    async def scenario() -> None:
        async with Producer(address) as producer:
            for number in range(10):
                await producer.send(topic, str(number), partition=0)
        found = []
        async with reader(address, topic) as consumer:
            async for record in consumer:
                found.append(record.offset)
                if len(found) == 10:
                    break
        assert found == list(range(10))

    run(scenario())


def test_a_batch_that_the_broker_finds_too_large_fails_and_the_next_ones_go_on(address: str) -> None:
    async def scenario() -> None:
        async with Admin(address) as admin:
            await admin.create_topics("small", partitions=1, configs={"max.message.bytes": "1000"})
        async with Producer(address, linger_ms=0) as producer:
            outcomes = [await producer.send("small", b"x" * size) for size in (10, 5_000, 20)]
            with pytest.raises(DeliveryError, match=r"1 record was not delivered: MESSAGE_TOO_LARGE"):
                await producer.flush()
            assert (await outcomes[0]).offset == 0
            with pytest.raises(ApiError, match=r"MESSAGE_TOO_LARGE"):
                await outcomes[1]
            assert (await outcomes[2]).offset == 1

    run(scenario())


def test_what_cannot_be_done_is_said_in_a_sentence(address: str, topic: str) -> None:
    with sync.Producer(address, max_block_ms=300, allow_auto_create_topics=False) as producer:
        outcome = producer.send("no-such-topic", b"x")
        with pytest.raises(ApiError, match=r"could not be delivered within 300 ms .*there is no topic 'no-such-topic'"):
            outcome.result(10)
        with pytest.raises(DeliveryError, match=r"1 record was not delivered"):
            producer.flush()
        astray = producer.send(topic, b"x", partition=7)
        with pytest.raises(ApiError, match=r"partition 7 takes no records: the topic has 2 that do"):
            astray.result(10)
        with pytest.raises(DeliveryError):
            producer.flush()
    with pytest.raises(ApiError, match=r"this producer is closed|this client is closed"):
        producer.send(topic, b"x")
    with sync.Consumer(address) as consumer:
        with pytest.raises(ApiError, match=r"nothing is assigned to this consumer"):
            consumer.poll(0)
        consumer.assign([(topic, 9)])
        with pytest.raises(ApiError, match=rf"topic {topic} has no partition 9"):
            consumer.poll(10)
        consumer.assign("no-such-topic")
        with pytest.raises(ApiError, match=r"there is no topic 'no-such-topic'; create it first"):
            consumer.poll(10)
    with sync.Admin(address) as admin, pytest.raises(ApiError, match=r"there is no topic 'nope'; create it first"):
        admin.describe_topics("nope")


def test_the_synchronous_client_is_as_fast_as_it_must_be_for_one_record_at_a_time(address: str, topic: str) -> None:
    """A record sent alone comes back within the linger and a few round trips."""
    with sync.Producer(address, linger_ms=0) as producer:
        producer.send(topic, b"first").result(30)
        began = time.monotonic()
        for _ in range(20):
            producer.send(topic, b"x").result(10)
        assert time.monotonic() - began < 5


def _in_a_forked_process(address: str, topic: str, inherited: sync.Producer, said: Any) -> None:
    try:
        inherited.send(topic, b"x")
    except ApiError as error:
        with sync.Admin(address) as admin:
            said.put((str(error), topic in admin.list_topics()))


def test_a_client_belongs_to_its_process_and_each_process_may_have_one(address: str, topic: str) -> None:
    with sync.Producer(address) as producer:
        producer.send(topic, b"x").result(30)
        context = multiprocessing.get_context("fork")
        said: Any = context.Queue()
        process = context.Process(target=_in_a_forked_process, args=(address, topic, producer, said))
        process.start()
        error, found = said.get(timeout=30)
        process.join()
    assert "this client was made in process" in error and "make one in each" in error
    assert found


def test_a_port_where_nobody_listens_is_said_so() -> None:
    with (
        sync.Admin("127.0.0.1:1", reconnect_backoff_ms=1) as admin,
        pytest.raises(ConnectError, match=r"no connection to 127.0.0.1:1: .*Check the address"),
    ):
        admin.list_topics()


def test_a_server_that_is_no_kafka_broker_is_said_so() -> None:
    async def scenario() -> None:
        async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(babble, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Admin(f"127.0.0.1:{port}") as admin:
            with pytest.raises(ConnectError, match=r"does not answer as a Kafka broker does"):
                await admin.list_topics()
        server.close()
        await server.wait_closed()

    run(scenario())


def test_settings_have_kafkas_names() -> None:
    with sync.Producer.from_config({"bootstrap.servers": "127.0.0.1:1", "linger.ms": "7", "acks": "all"}):
        pass
    with pytest.raises(TypeError, match=r"Producer has no setting 'linger'; it has .*linger.ms"):
        Producer.from_config({"linger": 7})
    with pytest.raises(ValueError, match=r"linger.ms is 'x'; it must be a whole number"):
        Producer.from_config({"linger.ms": "x"})
    with pytest.raises(TypeError):
        sync.Producer("127.0.0.1:1", linger=7)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"enable.idempotence needs acks='all'"):
        Producer(acks=1, enable_idempotence=True)
    with pytest.raises(ValueError, match=r"'here' is not host:port|bootstrap.servers"):
        Admin("here:there")


def test_errors_carry_their_code(address: str) -> None:
    with sync.Admin(address) as admin, pytest.raises(ApiError) as caught:
        admin.describe_topics("nope")
    assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
