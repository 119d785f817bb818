"""A topic is deleted and created again while a producer writes to it: another topic, of the same name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client import Admin, AnabranchError, ApiError, Consumer, Producer, SubscriptionPattern
from anabranch.client.consumer.slice_fetches import SliceFetches
from anabranch.machines.placement import place
from anabranch.records.hashing import placement_hash
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient, batch

TOPIC = "t"
KEYS = [f"k-{number}".encode() for number in range(60)]
Read = list[tuple[int, bytes, int]]
"""(partition, key, number), in the order of each partition."""


async def read_all(address: str, count: int) -> Read:
    """Read so many records; then there is no other."""
    found: Read = []
    async with Consumer(address, auto_offset_reset="earliest") as consumer:
        consumer.assign(TOPIC)
        while len(found) < count:
            records = await consumer.poll(10)
            assert records, f"{len(found)} of {count} records"
            found += [(it.partition, it.key or b"", int(it.value or b"-1")) for it in records]
        assert not await consumer.poll(0.3)
    return found


def check(found: Read, initial: int, count: int) -> None:
    """Each record is where the topic's own layout places its key, and the numbers of a key ascend."""
    last: dict[bytes, int] = {}
    for partition, key, number in found:
        assert partition == place(placement_hash(key), initial, count), f"{key!r} in {partition}"
        assert number > last.get(key, -1), f"{key!r}: {number} after {last[key]}"
        last[key] = number


def test_no_record_is_placed_by_the_layout_of_the_topic_that_was_deleted(broker: BrokerProcess) -> None:
    address = f"127.0.0.1:{broker.port}"

    async def scenario() -> None:
        async with Admin(address) as admin, Producer(address, allow_auto_create_topics=False) as producer:
            await admin.create_topics(TOPIC, partitions=3)
            await admin.resize(TOPIC, 4)
            for number in range(5):
                for key in KEYS:
                    await producer.send(TOPIC, str(number), key=key)
            await producer.flush()
            await admin.delete_topics(TOPIC)
            await admin.create_topics(TOPIC, partitions=4)
            for number in range(5, 15):
                for key in KEYS:
                    await producer.send(TOPIC, str(number), key=key)
                await producer.flush()
            check(await read_all(address, 10 * len(KEYS)), 4, 4)

    assert any(place(placement_hash(key), 3, 4) != place(placement_hash(key), 4, 4) for key in KEYS), (
        "the layouts differ"
    )
    asyncio.run(scenario())


def test_records_in_flight_follow_to_the_topic_that_is_created_again_once_and_in_order(broker: BrokerProcess) -> None:
    address = f"127.0.0.1:{broker.port}"
    rounds = [(4, 4), (2, 4), (1, 4), (3, 4), (4, 4)]

    async def scenario() -> None:
        sent = 0
        done = asyncio.Event()

        async def write(producer: Producer) -> None:
            nonlocal sent
            while not done.is_set():
                for key in KEYS:
                    await producer.send(TOPIC, str(sent), key=key)
                sent += 1
                await asyncio.sleep(0.002)

        async with Admin(address) as admin, Producer(address, allow_auto_create_topics=False) as producer:
            await admin.create_topics(TOPIC, partitions=2)
            writing = asyncio.create_task(write(producer))
            for initial, count in rounds:
                before = sent
                while sent < before + 20:
                    await asyncio.sleep(0.01)
                await admin.delete_topics(TOPIC)
                await admin.create_topics(TOPIC, partitions=initial)
                created_at = sent
                if count > initial:
                    await admin.resize(TOPIC, count)
            while sent < created_at + 20:
                await asyncio.sleep(0.01)
            done.set()
            await writing
            await producer.flush()
            spans = await admin.topic_offsets(TOPIC)
            found = await read_all(address, sum(span.end for span in spans.values()))
            check(found, *rounds[-1])
            numbers = {number for _, _, number in found}
            assert {*range(created_at, sent)} <= numbers, "nothing that was sent after the creation is missing"

    asyncio.run(scenario())


def test_the_leader_answers_the_id_of_a_deleted_topic_with_unknown_topic_id(client: WireClient) -> None:
    first = client.create(TOPIC, 2)
    assert client.produce(first, 0, batch([b"a"]), count=2).base_offset == 0
    client.delete(TOPIC)
    assert client.produce(first, 0, batch([b"b"]), count=2).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    second = client.create(TOPIC, 2)
    for topic_id in (first, UUID(int=7), UUID(int=0)):
        assert client.produce(topic_id, 0, batch([b"b"]), count=2).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    assert client.produce(second, 0, batch([b"c"]), count=2).base_offset == 0
    assert client.produce(second, 9, batch([b"c"]), count=2).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert [value for _, value in client.read_all(TOPIC)] == [b"c"]


def test_sequence_numbers_begin_again_with_a_topic_that_is_created_again(client: WireClient) -> None:
    producer = client.producer_id()

    def produce(topic_id: UUID, sequence: int) -> int:
        data = batch([b"x"], producer=(producer, 0, sequence))
        answer = client.produce(topic_id, 0, data, count=1)
        return int(answer.base_offset) if not answer.error_code else -int(answer.error_code)

    first = client.create(TOPIC)
    assert [produce(first, sequence) for sequence in (0, 1, 1)] == [0, 1, 1]
    client.delete(TOPIC)
    second = client.create(TOPIC)
    assert produce(first, 1) == -ErrorCode.UNKNOWN_TOPIC_ID, "not taken for a repetition"
    assert [produce(second, sequence) for sequence in (0, 0, 1, 3)] == [
        0,
        0,
        1,
        -ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ]


def test_records_for_a_topic_that_is_not_created_again_fail_in_time(broker: BrokerProcess) -> None:
    address = f"127.0.0.1:{broker.port}"

    async def scenario() -> None:
        options = {"delivery_timeout_ms": 6_000, "request_timeout_ms": 5_000, "max_block_ms": 5_000}
        async with Admin(address) as admin, Producer(address) as first:
            await admin.create_topics(TOPIC, partitions=1)
            await (await first.send(TOPIC, b"x"))  # A process loads its kernels with its first record.
            producer = Producer(address, allow_auto_create_topics=False, **options)
            await (await producer.send(TOPIC, b"x", key=b"k"))
            await admin.delete_topics(TOPIC)
            outcome = await producer.send(TOPIC, b"y", key=b"k")
            with pytest.raises(ApiError, match="REQUEST_TIMED_OUT"):
                await outcome
            with pytest.raises(AnabranchError, match="1 record was not delivered"):
                await producer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_created_again", [True, False])
def test_a_reader_of_a_topic_that_is_deleted_waits_for_records_of_the_others(
    broker: BrokerProcess, *, is_created_again: bool
) -> None:
    """Its session kept partitions of which the leader answered an error, at once: it fetched as fast as it could."""

    def fetches() -> float:
        return sum(value for name, value in broker.metrics().items() if "requests_total" in name and "Fetch" in name)

    async def scenario() -> None:
        async with Admin(broker.address) as admin, Producer(broker.address) as producer:
            await admin.create_topics([TOPIC, "other"], partitions=2)
            settings = {"group_id": "g", "auto_offset_reset": "earliest", "metadata_max_age_ms": 500}
            async with Consumer(broker.address, **settings) as consumer:
                consumer.subscribe([TOPIC, "other"])
                while len(consumer._fetcher.positions()) < 4:
                    await consumer.poll(0.1)
                await admin.delete_topics(TOPIC)
                for _ in range(10):
                    await consumer.poll(0.1)
                if is_created_again:
                    await admin.create_topics(TOPIC, partitions=2)
                async with asyncio.timeout(30):
                    while len(consumer._fetcher.positions()) < 2 + 2 * is_created_again:
                        await consumer.poll(0.1)
                for _ in range(20):
                    await consumer.poll(0.1)
                before = fetches()
                for _ in range(20):
                    await consumer.poll(0.1)
                assert fetches() - before < 60, "a fetch waits 500 ms for records"
                await producer.send("other", "there")
                await producer.flush()
                async with asyncio.timeout(30):
                    while not [record for record in await consumer.poll(1) if record.value == b"there"]:
                        pass

    asyncio.run(scenario())


def test_a_latest_group_is_given_all_of_a_topic_that_is_created_again(broker: BrokerProcess) -> None:
    """Its member took the partitions for those that were there when it began, and skipped what was written to them."""

    async def scenario() -> None:
        async with Admin(broker.address) as admin, Producer(broker.address) as producer:
            await admin.create_topics(TOPIC, partitions=2)
            async with Consumer(broker.address, group_id="g", auto_offset_reset="latest") as consumer:
                consumer.subscribe(TOPIC)
                while len(consumer._fetcher.positions()) < 2:
                    assert not await consumer.poll(0.1)
                await admin.delete_topics(TOPIC)
                async with asyncio.timeout(30):
                    while consumer._fetcher.positions():
                        await consumer.poll(0.1)
                await admin.create_topics(TOPIC, partitions=2)
                for number, key in enumerate(KEYS):
                    await producer.send(TOPIC, str(number), key=key)
                await producer.flush()
                found: set[bytes | None] = set()
                async with asyncio.timeout(30):
                    while len(found) < len(KEYS):
                        found |= {record.key for record in await consumer.poll(0.2)}

    asyncio.run(scenario())


@pytest.mark.parametrize("written", [20, 60])
def test_members_of_slices_are_given_all_of_a_topic_that_is_created_again(broker: BrokerProcess, written: int) -> None:
    """The offset at which the old one was begun was asked for: what lies before was skipped, or it was out of range."""

    async def scenario() -> None:
        async with Admin(broker.address) as admin, Producer(broker.address) as producer:

            async def made(count: int, name: str) -> None:
                await admin.create_topics(TOPIC, partitions=1, configs={"accept.range.fetch": "true"})
                for number in range(count):
                    await producer.send(TOPIC, f"{name}-{number}", key=f"{number}")
                await producer.flush()

            await made(50, "old")
            settings = {"group_id": "g", "share": "any", "auto_offset_reset": "latest"}
            async with Consumer(broker.address, **settings) as consumer:
                consumer.subscribe(TOPIC)
                for _ in range(15):
                    assert not await consumer.poll(0.1)
                await admin.delete_topics(TOPIC)
                await made(written, "new")
                found: set[bytes | None] = set()
                async with asyncio.timeout(30):
                    while len(found) < written:
                        found |= {record.value for record in await consumer.poll(0.2)}
                assert found == {f"new-{number}".encode() for number in range(written)}

    asyncio.run(scenario())


@pytest.mark.parametrize("written", [20, 60])
def test_where_a_member_of_slices_begins_is_nowhere_in_a_topic_that_is_created_again_meanwhile(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """The topic is another one between the question where its end is and the claim that begins there."""

    async def scenario() -> None:
        async with Admin(broker.address) as admin, Producer(broker.address) as producer:

            async def made(count: int, name: str) -> None:
                await admin.create_topics(TOPIC, partitions=1, configs={"accept.range.fetch": "true"})
                for number in range(count):
                    await producer.send(TOPIC, f"{name}-{number}", key=f"{number}")
                await producer.flush()

            begin_at = SliceFetches._begin_at
            begins: list[int] = []

            async def and_then_another(fetches: SliceFetches, tp: TopicPartition) -> int:
                begins.append(await begin_at(fetches, tp))
                if len(begins) == 1:
                    await admin.delete_topics(TOPIC)
                    await made(written, "new")
                return begins[-1]

            monkeypatch.setattr(SliceFetches, "_begin_at", and_then_another)
            await made(50, "old")
            settings = {"group_id": "g", "share": "any", "auto_offset_reset": "latest"}
            async with Consumer(broker.address, **settings) as consumer:
                consumer.subscribe(TOPIC)
                found: set[bytes | None] = set()
                async with asyncio.timeout(30):
                    while len(found) < written:
                        found |= {record.value for record in await consumer.poll(0.2)}
                assert found == {f"new-{number}".encode() for number in range(written)}
                assert begins[0] == 50

    asyncio.run(scenario())


def test_records_that_an_application_has_left_are_not_those_of_the_topic_that_is_created_again(
    broker: BrokerProcess,
) -> None:
    """The offset of the first that was left was gone back to in the new topic."""

    async def scenario() -> None:
        async with Admin(broker.address) as admin, Producer(broker.address) as producer:

            async def made(name: str) -> None:
                await admin.create_topics(TOPIC, partitions=1)
                for number in range(30):
                    await producer.send(TOPIC, f"{name}-{number}", key="k")
                await producer.flush()

            await made("old")
            async with Consumer(broker.address, auto_offset_reset="earliest", metadata_max_age_ms=500) as consumer:
                consumer.assign([(TOPIC, 0)])
                left = 11
                async for _ in consumer:
                    left -= 1
                    if not left:
                        break
                await admin.delete_topics(TOPIC)
                await made("new")
                found: set[bytes | None] = set()
                async with asyncio.timeout(30):
                    while len(found) < 30:
                        found |= {it.value for it in await consumer.poll(0.2) if (it.value or b"").startswith(b"new")}

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_without_partitions_does_not_turn_while_an_automatic_commit_is_due(
    broker: BrokerProcess, protocol: str
) -> None:
    """Nothing can be committed: each poll went round a hundred times a second."""

    async def scenario() -> None:
        settings = {"group_id": "g", "group_protocol": protocol, "auto_commit_interval_ms": 100}
        async with Consumer(broker.address, **settings) as consumer:
            consumer.subscribe(SubscriptionPattern("nothing-.*"))
            await consumer.poll(1.0)
            group = consumer._group
            assert group is not None
            turns, attend = 0, group.attend

            async def counted() -> None:
                nonlocal turns
                turns += 1
                await attend()

            group.attend = counted  # type: ignore[method-assign]
            await consumer.poll(2.0)
            assert turns < 60

    asyncio.run(scenario())


def test_a_topic_that_is_deleted_stays_so_while_its_producer_has_no_record_for_it(broker: BrokerProcess) -> None:
    """A refresh of the metadata of all topics that the producer ever sent to had the broker create it again."""

    async def scenario() -> None:
        async with Admin(broker.address) as admin, Producer(broker.address, metadata_max_age_ms=200) as producer:
            await (await producer.send(TOPIC, b"x"))
            await admin.delete_topics(TOPIC)
            for number in range(10):
                await (await producer.send("other", f"{number}"))
                await asyncio.sleep(0.1)
            assert TOPIC not in await admin.list_topics()
            outcome = await (await producer.send(TOPIC, b"y"))
            assert (outcome.offset, TOPIC in await admin.list_topics()) == (0, True)

    asyncio.run(scenario())


def test_a_topic_that_is_gone_when_its_slices_are_claimed_keeps_no_other_from_being_read(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the decision to claim and the claim topics are looked at again: one of them is deleted."""
    fetch, gone, kept = SliceFetches._fetch, f"{TOPIC}-gone", f"{TOPIC}-kept"
    forgotten: list[str] = []

    async def look_and_fetch(fetches: SliceFetches, node: int, partitions: Iterable[TopicPartition]) -> None:
        if gone in fetches._topics and not forgotten:
            forgotten.append(gone)
            fetches._topics = {name: info for name, info in fetches._topics.items() if name != gone}
        await fetch(fetches, node, partitions)

    monkeypatch.setattr(SliceFetches, "_fetch", look_and_fetch)

    async def scenario() -> None:
        async with Admin(broker.address) as admin, Producer(broker.address) as producer:
            for name in (gone, kept):
                await admin.create_topics(name, partitions=1, configs={"accept.range.fetch": "true"})
            for number in range(20):
                await producer.send(kept, f"{number}", key=f"{number}")
            await producer.flush()
            settings = {"group_id": "gone", "share": "any", "auto_offset_reset": "earliest"}
            async with Consumer(broker.address, **settings) as consumer, asyncio.timeout(30):
                consumer.subscribe([gone, kept])
                found: set[bytes | None] = set()
                while len(found) < 20:
                    found |= {record.value for record in await consumer.poll(0.2)}
        assert forgotten

    asyncio.run(scenario())
