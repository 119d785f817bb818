"""Groups that begin at the end of a topic: what was written before, what comes in later partitions, what is deleted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from pathlib import Path

import pytest
from confluent_kafka import Consumer as StockConsumer
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client import Admin, Consumer, Producer, SubscriptionPattern
from anabranch.protocol.messages.join_group import JoinGroupRequestProtocol
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetRange,
)
from tests.end_to_end.test_gates_by_time import name_at
from tests.support.applications import Workers, stage
from tests.support.broker import BrokerProcess, running
from tests.support.group_client import GroupClient
from tests.support.groups import assignment, subscription

QUICK = {
    "group.consumer.heartbeat.interval.ms": 500,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.initial.rebalance.delay.ms": 0,
}


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_history_of_before_the_group_is_not_read_and_records_of_later_partitions_are(
    tmp_path: Path, protocol: str
) -> None:
    async def scenario(port: int) -> None:
        address = f"127.0.0.1:{port}"
        async with Admin(address) as admin, Producer(address) as producer:

            async def send(name: str) -> set[bytes]:
                for number in range(20):
                    await producer.send("t", f"{name}-{number}", key=f"k{number}")
                await producer.flush()
                return {f"{name}-{number}".encode() for number in range(20)}

            async def read(wanted: set[bytes], *, send_first: bool) -> None:
                consumer = Consumer(address, group_id="g", group_protocol=protocol, auto_offset_reset="latest")
                async with consumer, asyncio.timeout(30):
                    consumer.subscribe("t")
                    got: list[bytes | None] = []
                    while not (consumer.assignment() and len(consumer._fetcher.positions()) == partitions):
                        got += [record.value for record in await consumer.poll(0.1)]
                    if send_first:
                        wanted |= await send("live")
                    while len(got) < len(wanted):
                        got += [record.value for record in await consumer.poll(0.5)]
                    got += [record.value for record in await consumer.poll(0.3)]
                    assert len(got) == len(wanted) and set(got) == wanted

            await admin.create_topics("t", partitions=1)
            await send("history")
            await admin.resize("t", 2)
            await send("history of the new partition")
            partitions = 2
            await read(set(), send_first=True)
            await admin.resize("t", 4)
            partitions = 4
            await read(await send("while the group was away"), send_first=False)

    with running(tmp_path, **QUICK) as broker:
        asyncio.run(scenario(broker.port))


def test_records_deleted_from_a_partition_that_waits_take_no_others_with_them(tmp_path: Path) -> None:
    """The group was to begin at the log start, and what is deleted there while the gate is closed is out of range."""

    async def scenario(address: str) -> None:
        consumer = Consumer(address, group_id="g", auto_offset_reset="latest", enable_auto_commit=False)
        async with Admin(address) as admin, Producer(address) as producer, consumer, asyncio.timeout(40):

            async def send(count: int) -> None:
                for number in range(count):
                    await producer.send("t", str(number), key="k1")
                await producer.flush()

            await admin.create_topics("t", partitions=1)
            consumer.subscribe("t")
            while ("t", 0) not in consumer._fetcher.positions():
                assert not await consumer.poll(0.1)
            await send(4)
            read: list[int] = []
            while len(read) < 4:
                read += [record.partition for record in await consumer.poll(0.2)]
            await admin.resize("t", 2)
            await send(6)
            for _ in range(10):
                assert not await consumer.poll(0.1), "nothing of partition 0 is committed"
            await admin.delete_records({("t", 1): 3})
            await consumer.commit()
            while len(read) < 4 + 3:
                read += [record.partition for record in await consumer.poll(0.2)]
            assert read == [0] * 4 + [1] * 3

    with running(tmp_path, **QUICK) as broker:
        asyncio.run(scenario(broker.address))


def test_a_partition_that_was_begun_behind_a_closed_gate_waits_for_it_under_its_next_owner(tmp_path: Path) -> None:
    """The coordinator wrote where the next owner begins, behind the gate, and the gate counted as open once."""

    async def scenario(address: str) -> None:
        async with Admin(address) as admin, Producer(address) as producer, asyncio.timeout(60):

            async def send(name: str, count: int = 30) -> None:
                for number in range(count):
                    await producer.send("t", f"{name}-{number}", key=f"k{number}")
                await producer.flush()

            def member(topic: str = "t") -> Consumer:
                consumer = Consumer(address, group_id="g", auto_offset_reset="latest", enable_auto_commit=False)
                consumer.subscribe(topic)
                return consumer

            async def begun(consumer: Consumer, partitions: int) -> None:
                while len(consumer._fetcher.positions()) < partitions:
                    await consumer.poll(0.1)

            await admin.create_topics(["t", "other"], partitions=1)
            await send("history")
            async with member("other") as keeper:  # The coordinator knows its group all the time.
                await begun(keeper, 1)
                async with member() as first:
                    await begun(first, 1)
                    await send("read, not committed", 5)
                    read = 0
                    while read < 5:
                        read += len(await first.poll(0.2))
                    await admin.resize("t", 3)
                    await send("wide")
                    await admin.resize("t", 1)
                    await send("narrow")
                async with member() as second:
                    await begun(second, 3)
                    for _ in range(10):
                        await second.poll(0.1)
                await send("later")
                async with member() as third:
                    read_from: list[int] = []
                    for _ in range(30):
                        read_from += [record.partition for record in await third.poll(0.1)]
                    assert set(read_from) == {1, 2}, "what is left in these is not committed"
                    await third.commit()
                    got: list[bytes | None] = []
                    while len(got) < 30 + 30:
                        got += [record.value for record in await third.poll(0.2)]
                    assert set(got[:30]) == {f"narrow-{number}".encode() for number in range(30)}
                    assert got[30:] == [f"later-{number}".encode() for number in range(30)]

    with running(tmp_path, **QUICK) as broker:
        asyncio.run(scenario(broker.address))


@pytest.mark.parametrize("wider", ["wide-a wide-b", "wide-.*"])
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_topic_that_a_member_subscribes_to_later_is_read_from_its_end(
    shared: BrokerProcess, protocol: str, wider: str
) -> None:
    """The member had not seen its partitions when it began, and took them for new ones: it read all history."""
    prefix = f"{protocol}-{len(wider)}-"

    async def scenario() -> None:
        names = [f"{prefix}wide-a", f"{prefix}wide-b"]
        async with Admin(shared.address) as admin, Producer(shared.address) as producer:
            for name in names:
                await admin.create_topics(name, partitions=2)
                for number in range(20):
                    await producer.send(name, f"history-{number}", key=f"k{number}")
            await producer.flush()
            consumer = Consumer(shared.address, group_id=prefix, group_protocol=protocol, auto_offset_reset="latest")
            async with consumer, asyncio.timeout(30):
                consumer.subscribe(names[0])
                while len(consumer._fetcher.positions()) < 2:
                    assert not await consumer.poll(0.1)
                consumer.subscribe(SubscriptionPattern(prefix + wider) if "*" in wider else names)
                while len(consumer._fetcher.positions()) < 4:
                    assert not await consumer.poll(0.1), "history"
                for name in names:
                    await producer.send(name, "live", key="k")
                await producer.flush()
                got: list[tuple[str, bytes | None]] = []
                while len(got) < 2:
                    got += [(record.topic, record.value) for record in await consumer.poll(0.2)]
                assert sorted(got) == [(name, b"live") for name in names]

    asyncio.run(scenario())


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_records_deleted_before_and_behind_a_closed_gate_take_no_others_with_them(
    shared: BrokerProcess, workers: Workers, library: str
) -> None:
    """The group began at the log start of the partition that waits, and its members' reset says the end."""
    with stage(shared.address, f"emptied-{library}", 1, workers) as it:
        group = it.group(library, members=2, commit="told", reset="latest", poll_interval_ms=300_000, patient=True)
        it.until_all_owned()
        it.wait_until_positioned(group)
        name = name_at((2, 1))
        it.load.send(10, keys=1, name=name)
        _, last = it.load.places[name, f"{name}-0"][9]
        it.until(lambda: group.edge.last((name, f"{name}-0")) or group.check(), "partition 0 is not read")
        group.owner(0).commit({0: last - 5})
        it.until(lambda: group.committed.get(0) == last - 5, "nothing is committed")
        it.resize(2)
        it.load.send(6, keys=1, name=name)
        it.delete_records(1, 3)
        it.keeps(lambda: not group.handed_from[1], "the gate is open")
        it.delete_records(0)
        if library == "stock":  # What it still hands out of the deleted records nobody knows but by its commits.
            it.keeps(lambda: not group.handed_from[1], "the gate is open")
            group.owner(0).commit({0: last + 1})
        it.until(lambda: group.handed_from[1] == 3, "records are left out")
        it.finish()


def test_a_topic_that_grows_while_members_change_their_strategy_is_read_from_the_start_of_its_new_partitions(
    tmp_path: Path,
) -> None:
    topic_of = subscription("t")
    with running(tmp_path, **QUICK) as broker, GroupClient(broker.port) as old, GroupClient(broker.port) as new:
        old.create("t", 2)
        old.ready()
        both = [JoinGroupRequestProtocol(name=name, metadata=topic_of) for name in ("sticky", "range")]
        asked = old.join_request("g")
        asked.protocols = both
        joined = old.call(asked, 3)
        assert joined.protocol_name == "sticky"
        whole = {joined.member_id: assignment("t-0 t-1")}
        old.call(old.sync_request("g", joined, whole), 3)

        waiting = new.send(new.join_request("g", metadata=topic_of), 3)
        while old.heartbeat("g", joined, 3) is not ErrorCode.REBALANCE_IN_PROGRESS:
            time.sleep(0.02)
        assert old.resize("t", 3) is ErrorCode.NONE
        old.until_partitions("t", 3)
        asked.member_id = joined.member_id
        again = old.call(asked, 3)
        assert again.protocol_name == "range"
        other = new.receive(waiting)
        shares = {again.member_id: assignment("t-0 t-1"), other.member_id: assignment("t-2")}
        old.call(old.sync_request("g", again, shares), 3)
        new.call(new.sync_request("g", other), 3)
        assert new.committed("g") == {("t", 2): 0}, "what was written before the member came is not skipped"


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_owner_that_began_behind_a_closed_gate_leaves_it_closed_for_the_next_one(
    tmp_path: Path, by_hand: bool
) -> None:
    """The place at which the first owner began was taken for one that it had read up to."""
    key = f"{name_at((3, 2), (1, 0))}-0"

    async def scenario(address: str) -> None:
        def member(commits: bool = True) -> Consumer:
            settings = {"group_id": "g", "group_protocol": "classic", "auto_offset_reset": "latest"}
            return Consumer(address, enable_auto_commit=commits, **settings)

        async with Admin(address) as admin, Producer(address) as producer, asyncio.timeout(60):

            async def send(value: str) -> None:
                await (await producer.send("t", value, key=key))

            async def placed(consumer: Consumer) -> None:
                """Wait until partition 0 has a position; later ones are not read meanwhile."""

                async def pause(assigned: Collection[TopicPartition]) -> None:
                    if holding:
                        await consumer.pause(*(tp for tp in assigned if tp.partition))

                consumer.subscribe("t", on_partitions_assigned=pause)
                while TopicPartition("t", 0) not in consumer._fetcher.positions():
                    assert not await consumer.poll(0.05), "nothing is read behind the gate"

            holding = True
            await admin.create_topics("t", partitions=1)
            async with member(commits=False) as consumer:
                await placed(consumer)
            await admin.resize("t", 3)
            await send("first")
            await admin.resize("t", 1)
            await send("second, before the group began")
            async with member(not by_hand) as consumer:
                await placed(consumer)
                if by_hand:
                    await consumer.commit({("t", 0): 1})
            await send("third")
            async with member() as consumer:
                await placed(consumer)
                for _ in range(10):
                    assert not await consumer.poll(0.1), "the gate was taken for open"
                holding = False
                await consumer.resume(*consumer.assignment())
                got: list[bytes | None] = []
                while len(got) < 2:
                    got += [record.value for record in await consumer.poll(0.5)]
                assert got == [b"first", b"third"]

    with running(tmp_path, **QUICK) as broker:
        asyncio.run(scenario(broker.address))


def read_by_stock(address: str, protocol: str, count: int) -> list[bytes | None]:
    """What a stock member of the group reads that begins at the end: so many records, or those of half a minute."""
    said = {"bootstrap.servers": address, "group.id": "g", "auto.offset.reset": "latest", "group.protocol": protocol}
    consumer = StockConsumer(said)
    consumer.subscribe(["t"])
    got: list[bytes | None] = []
    end = time.monotonic() + 30
    while len(got) < count and time.monotonic() < end:
        record = consumer.poll(0.2)
        if record is not None and record.error() is None:
            got.append(record.value())
    consumer.close()
    return got


@pytest.mark.parametrize("client", ["librdkafka", "classic", "consumer"])
def test_records_deleted_from_a_later_partition_while_the_group_is_away_take_no_others_with_them(
    tmp_path: Path, client: str
) -> None:
    """It begins at the log start, wherever that is when it is read first: the group has never been there."""

    async def left(address: str) -> list[bytes | None]:
        """What a member reads that comes when three of six records are deleted."""
        if client == "librdkafka":
            return await asyncio.to_thread(read_by_stock, address, "classic", 3)
        got: list[bytes | None] = []
        async with Consumer(address, group_id="g", group_protocol=client, auto_offset_reset="latest") as consumer:
            consumer.subscribe("t")
            while len(got) < 3:
                got += [record.value for record in await consumer.poll(0.2)]
        return got

    async def scenario(address: str) -> None:
        async with Admin(address) as admin, Producer(address) as producer, asyncio.timeout(60):
            await admin.create_topics("t", partitions=1)
            await producer.send("t", "of before", key="k1")
            await producer.flush()
            await admin.alter_group_offsets("g", {("t", 0): 1})
            await admin.resize("t", 2)
            for number in range(6):
                await producer.send("t", str(number), key="k1")
            await producer.flush()
            await admin.delete_records({("t", 1): 3})
            assert await left(address) == [b"3", b"4", b"5"]

    with running(tmp_path, **QUICK) as broker:
        asyncio.run(scenario(broker.address))


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_records_deleted_from_a_later_partition_whose_owner_committed_nothing_take_no_others_with_them(
    tmp_path: Path, protocol: str
) -> None:
    """That no client had begun there was not to be seen any more when the partition had been handed out."""

    async def scenario(address: str) -> None:
        async with Admin(address) as admin, Producer(address) as producer, asyncio.timeout(60):

            async def send(count: int) -> None:
                for number in range(count):
                    await producer.send("t", str(number), key="k1")
                await producer.flush()

            await admin.create_topics("t", partitions=1)
            first = Consumer(address, group_id="g", auto_offset_reset="latest", enable_auto_commit=False)
            async with first:
                first.subscribe("t")
                while ("t", 0) not in first._fetcher.positions():
                    assert not await first.poll(0.1)
                await send(4)
                read = 0
                while read < 4:
                    read += len(await first.poll(0.2))
                await admin.resize("t", 2)
                await send(6)
                await first.commit()
                while read < 4 + 6:
                    read += len(await first.poll(0.2))
            await admin.delete_records({("t", 1): 3})
            left = await asyncio.to_thread(read_by_stock, address, protocol, 3)
            assert left == [b"3", b"4", b"5"]

    with running(tmp_path, **QUICK) as broker:
        asyncio.run(scenario(broker.address))


def test_what_is_written_while_a_partition_waits_is_read_by_the_classic_members_that_come_then(tmp_path: Path) -> None:
    """No coordinator hands a partition out to those, and nobody wrote where they are to begin."""

    async def scenario(address: str) -> None:
        async with Admin(address) as admin, Producer(address) as producer, asyncio.timeout(60):

            async def send(*values: str) -> None:
                for value in values:
                    await producer.send("t", value, key="k1")
                await producer.flush()

            await admin.create_topics("t", partitions=1)
            await send("of before")
            await admin.resize("t", 2)
            said = {"bootstrap.servers": address, "group.id": "g", "auto.offset.reset": "latest"}
            first = StockConsumer({**said, "group.protocol": "consumer"})
            first.subscribe(["t"])
            while not first.assignment():
                assert await asyncio.to_thread(first.poll, 0.2) is None
            assert [it.partition for it in first.assignment()] == [0], "the other one waits for what is not read yet"
            await send("1", "2", "3")
            for _ in range(5):
                assert await asyncio.to_thread(first.poll, 0.2) is None
            await asyncio.to_thread(first.close)
            assert await asyncio.to_thread(read_by_stock, address, "classic", 3) == [b"1", b"2", b"3"]

    with running(tmp_path, **QUICK) as broker:
        asyncio.run(scenario(broker.address))


def test_records_done_out_of_turn_in_a_later_partition_take_none_with_them_that_were_not(tmp_path: Path) -> None:
    """The first commit by ranges said that the group had begun where the coordinator wrote, below the log start."""

    async def scenario(address: str, port: int) -> None:
        async with Admin(address) as admin, Producer(address) as producer, asyncio.timeout(60):
            await admin.create_topics("t", partitions=1)
            await producer.send("t", "of before", key="k1")
            await producer.flush()
            await admin.alter_group_offsets("g", {("t", 0): 1})
            await admin.resize("t", 2)
            for number in range(10):
                await producer.send("t", str(number), key="k1")
            await producer.flush()
            await admin.delete_records({("t", 1): 3})
            with GroupClient(port) as client:
                client.ready()
                part = OffsetCommitRequestPartition(
                    partition_index=1, committed_offset=3, offset_ranges=[OffsetRange(start=4, end=5)]
                )
                topics = [OffsetCommitRequestTopic(name="t", partitions=[part])]
                answer = client.call(OffsetCommitRequest(group_id="g", topics=topics), 9).topics[0].partitions[0]
                assert (answer.error_code, answer.last_stable_offset) == (ErrorCode.NONE, 3)
            left = await asyncio.to_thread(read_by_stock, address, "classic", 7)
            assert left == [b"%d" % number for number in range(3, 10)]

    with running(tmp_path, **QUICK) as broker:
        asyncio.run(scenario(broker.address, broker.port))


def test_the_offsets_of_a_group_can_be_listed_after_a_topic_that_it_reads_has_shrunk(tmp_path: Path) -> None:
    """A position that was written in the partition which is removed was waited for, by whoever asked for all."""

    async def scenario(address: str) -> None:
        async with Admin(address) as admin, asyncio.timeout(40):
            await admin.create_topics("t", partitions=1)
            await admin.alter_group_offsets("g", {("t", 0): 0})
            await admin.resize("t", 2)
            stock = AdminClient({"bootstrap.servers": address})
            asked = [ConsumerGroupTopicPartitions("g")]

            async def listed() -> dict[int, int]:
                answer = stock.list_consumer_group_offsets(asked, request_timeout=10)["g"]
                found = await asyncio.to_thread(answer.result)
                return {it.partition: it.offset for it in found.topic_partitions}

            while await listed() != {0: 0, 1: 0}:
                await asyncio.sleep(0.1)
            await admin.resize("t", 1)
            for _ in range(20):
                assert (await listed())[0] == 0
                await asyncio.sleep(0.1)

    with running(tmp_path, **QUICK) as broker:
        asyncio.run(scenario(broker.address))


@pytest.mark.parametrize("version", [1, 9])
def test_nobody_is_told_that_a_group_has_no_position_in_a_later_partition_before_its_turn_has_come(
    tmp_path: Path, version: int
) -> None:
    """A consumer would begin where its reset says. It takes a second to write those of 4,000 groups."""

    async def create_or_resize(address: str, count: int) -> None:
        async with Admin(address) as admin:
            await (admin.create_topics("t", partitions=count) if count == 1 else admin.resize("t", count))

    with running(tmp_path, **QUICK, **{"offsets.topic.num.partitions": 1}) as broker:
        asyncio.run(create_or_resize(broker.address, 1))
        with GroupClient(broker.port) as client:
            client.ready()
            for number in range(4_000):
                assert client.commit(f"g{number:04}", {("t", 0): 0}) == [ErrorCode.NONE]
            asyncio.run(create_or_resize(broker.address, 2))
            told: list[tuple[int, ErrorCode]] = []
            deadline = time.monotonic() + 30
            while (not told or told[-1][0] < 0) and time.monotonic() < deadline:
                parts = client.fetched("g3999", {"t": [0, *range(2, 40), 1]}, version=version).topics[0].partitions
                assert len(parts) == 40, "those that are missing would be taken for partitions without an offset"
                told.append((parts[-1].committed_offset, ErrorCode(parts[-1].error_code)))
            assert told[-1] == (0, ErrorCode.NONE)
            assert set(told) == {(-1, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), (0, ErrorCode.NONE)}
