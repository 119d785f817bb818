"""Our producer's transactions, and our consumer reading what is committed, on a real broker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.client import Admin, Consumer, DeliveryError, Producer, TopicPartition, sync
from anabranch.client.producer.transactions import FENCED
from tests.support.broker import BrokerProcess
from tests.support.transactions import committed
from tests.support.wire import WireClient


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop of its own."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def at(broker: BrokerProcess) -> str:
    return f"127.0.0.1:{broker.port}"


def producer_of(broker: BrokerProcess, **settings: object) -> Producer:
    return Producer(at(broker), **{"transactional_id": "tx", "linger_ms": 0, **settings})  # type: ignore[arg-type]


def until_committed(client: WireClient, topic: str, values: list[bytes], partition: int = 0) -> None:
    """A commit is decided when it returns; the partitions hear of it right after."""
    deadline = time.monotonic() + 20
    while client.fetch(topic, partition).last_stable_offset < client.fetch(topic, partition).high_watermark:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert committed(client, topic, partition) == values


async def read(broker: BrokerProcess, topic: str, *partitions: int, last: bytes) -> list[bytes]:
    """The committed values of partitions, until the `last` one of each."""
    async with Consumer(at(broker), isolation_level="read_committed", auto_offset_reset="earliest") as consumer:
        consumer.assign([(topic, partition) for partition in partitions])
        found: list[bytes] = []
        async with asyncio.timeout(20):
            while found.count(last) < len(partitions):
                found += [record.value or b"" for record in await consumer.poll(timeout_s=0.2)]
        return [value for value in found if value != last]


@in_loop
async def test_records_are_seen_together_or_never(broker: BrokerProcess, client: WireClient) -> None:
    client.create("t", 2)
    async with producer_of(broker) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send("t", b"a", partition=0)
        await producer.send("t", b"b", partition=1)
        await producer.flush()
        assert committed(client, "t", 0) == committed(client, "t", 1) == []
        await producer.commit_transaction()
        async with producer.transaction():
            await producer.send("t", b"c", partition=0)

        async def fail() -> None:
            async with producer.transaction():
                await producer.send("t", b"void", partition=0)
                await producer.flush()
                raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            await fail()
        async with producer.transaction():
            await producer.send("t", b"last", partition=0)
            await producer.send("t", b"last", partition=1)
    assert await read(broker, "t", 0, last=b"last") == [b"a", b"c"]
    assert await read(broker, "t", 1, last=b"last") == [b"b"]


@in_loop
async def test_columns_are_sent_and_read_in_transactions(broker: BrokerProcess, client: WireClient) -> None:
    import pyarrow as pa

    client.create("t", 1)
    async with producer_of(broker) as producer:
        await producer.init_transactions()
        for number in range(4):
            await producer.begin_transaction()
            await producer.send_arrow("t", pa.table({"value": [f"{number}-{row}" for row in range(100)]}))
            await producer.flush()
            await (producer.abort_transaction() if number % 2 else producer.commit_transaction())
    async with Consumer(at(broker), isolation_level="read_committed", auto_offset_reset="earliest") as consumer:
        consumer.assign([("t", 0)])
        found: list[bytes] = []
        async with asyncio.timeout(20):
            while len(found) < 200:
                found += (await consumer.poll_arrow(timeout_s=0.2)).column("value").to_pylist()
        assert found == [b"%d-%d" % (number, row) for number in (0, 2) for row in range(100)]
        assert await consumer.position("t", 0) == 404


@in_loop
async def test_what_may_be_said_when(broker: BrokerProcess, client: WireClient) -> None:
    client.create("t")
    async with Producer(at(broker)) as plain:
        with pytest.raises(ApiError, match=r"no transactional\.id"):
            await plain.begin_transaction()
    with pytest.raises(ValueError, match=r"transactional\.id"):
        Producer(transactional_id="x", acks=1)
    async with producer_of(broker) as producer:
        with pytest.raises(ApiError, match="init_transactions first"):
            await producer.begin_transaction()
        await producer.init_transactions()
        with pytest.raises(ApiError, match="begin_transaction first"):
            await producer.send("t", b"x")
        with pytest.raises(ApiError, match="begin_transaction first"):
            await producer.commit_transaction()
        await producer.begin_transaction()
        with pytest.raises(ApiError, match="open already"):
            await producer.begin_transaction()
        await producer.commit_transaction()
        await producer.begin_transaction()
        await producer.abort_transaction()


@in_loop
async def test_a_transaction_that_lost_a_record_can_only_be_aborted(broker: BrokerProcess, client: WireClient) -> None:
    client.create("t", 1, max_message_bytes="1000")
    async with producer_of(broker) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send("t", b"small")
        await producer.flush()
        await producer.send("t", b"x" * 5_000)
        with pytest.raises(DeliveryError):
            await producer.commit_transaction()
        with pytest.raises(ApiError, match="abort"):
            await producer.send("t", b"more")
        with pytest.raises(ApiError, match="abort"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send("t", b"good")
    until_committed(client, "t", [b"good"])


@in_loop
async def test_an_abort_forgets_what_is_on_its_way(broker: BrokerProcess, client: WireClient) -> None:
    client.create("t", 4)
    async with producer_of(broker, linger_ms=5) as producer:
        await producer.init_transactions()
        for round_ in range(10):
            await producer.begin_transaction()
            sent = [await producer.send("t", b"void", partition=number % 4) for number in range(200)]
            await asyncio.sleep(0.004 * round_)
            await producer.abort_transaction()
            assert all(outcome.done() for outcome in sent)
            async with producer.transaction():
                for partition in range(4):
                    await producer.send("t", b"%d" % round_, partition=partition)
    for partition in range(4):
        until_committed(client, "t", [b"%d" % round_ for round_ in range(10)], partition)


@in_loop
async def test_the_producer_that_comes_later_has_the_id(broker: BrokerProcess, client: WireClient) -> None:
    client.create("t")
    async with producer_of(broker) as old, producer_of(broker) as new:
        await old.init_transactions()
        await old.begin_transaction()
        await old.send("t", b"zombie")
        await old.flush()
        await new.init_transactions()
        with pytest.raises(ApiError, match="make a new one") as fenced:
            await old.commit_transaction()
        assert fenced.value.code is ErrorCode.PRODUCER_FENCED
        with pytest.raises(ApiError):
            await old.begin_transaction()
        async with new.transaction():
            await new.send("t", b"good")
    until_committed(client, "t", [b"good"])


@in_loop
async def test_a_closed_producer_leaves_no_transaction_open(broker: BrokerProcess, client: WireClient) -> None:
    client.create("t")
    async with producer_of(broker) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send("t", b"void")
        await producer.flush()
    until_committed(client, "t", [])
    assert client.fetch("t").high_watermark == 2


def test_the_synchronous_producer_has_transactions_too(broker: BrokerProcess, client: WireClient) -> None:
    client.create("t")
    with sync.Producer(at(broker), transactional_id="tx") as producer:
        producer.init_transactions()
        with producer.transaction():
            for number in range(1_000):
                producer.send("t", b"%d" % number)

        def fail() -> None:
            with producer.transaction():
                producer.send("t", b"void")
                raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            fail()
        producer.begin_transaction()
        outcome = producer.send("t", b"more")
        producer.commit_transaction()
        assert outcome.result(1).offset >= 1_001
    until_committed(client, "t", [b"%d" % number for number in range(1_000)] + [b"more"])


@in_loop
async def test_transactions_go_on_through_resizes(broker: BrokerProcess, client: WireClient) -> None:
    """Keyed records, committed and aborted, while the topic grows and shrinks: in order, each once, by key."""
    client.create("t", 1)
    keys = [b"k%d" % number for number in range(16)]
    sent: dict[bytes, list[bytes]] = {key: [] for key in keys}

    async def resize() -> None:
        async with Admin(at(broker)) as admin:
            for count in (4, 2, 5, 1, 3):
                await asyncio.sleep(0.15)
                await admin.resize("t", count)

    async with producer_of(broker) as producer:
        await producer.init_transactions()
        resizing = asyncio.create_task(resize())
        number = 0
        while not resizing.done() or number % 5:
            number += 1
            await producer.begin_transaction()
            for key in keys:
                await producer.send("t", b"%d" % number, key=key)
            await asyncio.sleep(0.01)
            if number % 3:
                await producer.commit_transaction()
                for key in keys:
                    sent[key].append(b"%d" % number)
            else:
                await producer.abort_transaction()
        await resizing
    seen: dict[bytes, list[bytes]] = {key: [] for key in keys}
    left = sum(len(values) for values in sent.values())
    async with Consumer(at(broker), isolation_level="read_committed", auto_offset_reset="earliest") as consumer:
        consumer.assign([("t", partition.partition_index) for partition in client.metadata("t").partitions])
        async with asyncio.timeout(30):
            while left:
                for record in await consumer.poll(timeout_s=0.2):
                    assert record.key is not None and record.value is not None
                    seen[record.key].append(record.value)
                    left -= 1
    assert seen == sent


@in_loop
async def test_reading_and_writing_exactly_once_through_kills(tmp_path: Path) -> None:
    """Read, transform, write: the progress is part of the transaction, and the broker is killed in between."""
    broker = BrokerProcess(tmp_path, durability="fsync").start()
    try:
        with WireClient(broker.port) as client:
            client.create("in", 1)
            client.create("out", 1)
        broker.settings["listeners"] = f"127.0.0.1:{broker.port}"
        async with Producer(at(broker)) as source:
            for number in range(300):
                await source.send("in", b"%d" % number)
        progress = 0
        for life in range(4):
            try:
                progress = await copy(broker, kill_after=3 * life if life < 3 else None)
            except (AnabranchError, OSError):
                assert not broker.alive
                broker.start()
        assert progress == 300
        with WireClient(broker.port) as client:
            until_committed(client, "out", [b"%d" % number for number in range(300)])
        assert broker.stop() == 0
    finally:
        if broker.alive:
            broker.kill()


@in_loop
async def test_a_prepared_transaction_is_ended_by_another_client(broker: BrokerProcess, client: WireClient) -> None:
    client.create("t", 1)
    async with producer_of(broker) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send("t", b"kept")
        kept = await producer.prepare_transaction()
        with pytest.raises(ApiError, match="prepared"):
            await producer.send("t", b"too late")
        with pytest.raises(ApiError, match=r"Admin\.end_transaction"):
            await producer.commit_transaction()
    assert committed(client, "t") == [] and kept is not None, "closing it ends nothing"
    async with Admin(at(broker)) as admin:
        await admin.end_transaction(kept, commit=True)
        until_committed(client, "t", [b"kept"])
        await admin.end_transaction(kept, commit=True)
        async with producer_of(broker) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            assert await producer.prepare_transaction() is None
        async with producer_of(broker) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send("t", b"dropped")
            dropped = await producer.prepare_transaction()
            assert dropped is not None
        name, before_ms = dropped.transactional_id, time.time() * 1000
        open_ = (await admin.describe_transactions([name, "nobody's"])).popitem()[1]
        assert open_[:4] == (name, "Ongoing", dropped.producer_id, dropped.producer_epoch)
        assert abs(open_.started_ms - before_ms) < 60_000 and open_.timeout_ms == 60_000
        async with producer_of(broker) as producer:
            await producer.init_transactions()
            with pytest.raises(ApiError) as fenced:
                await admin.end_transaction(dropped, commit=True)
            assert fenced.value.code in FENCED
            assert (await admin.describe_transactions(name))[name].state != "Ongoing"
            async with producer.transaction():
                await producer.send("t", b"last")
    until_committed(client, "t", [b"kept", b"last"])


async def copy(broker: BrokerProcess, kill_after: int | None) -> int:
    """Copy ten records per transaction; kill the broker in the middle of one."""
    settings = {"request_timeout_ms": 2_000, "delivery_timeout_ms": 3_000, "max_block_ms": 1_500}
    async with producer_of(broker, **settings) as producer:
        await producer.init_transactions()
        async with Consumer(
            at(broker), group_id="g", enable_auto_commit=False, isolation_level="read_committed"
        ) as consumer:
            start = await consumer.committed(("in", 0))
            at_offset = start[TopicPartition("in", 0)]
            position = 0 if at_offset is None else at_offset.offset
            consumer.assign([("in", 0)])
            await consumer.seek("in", 0, position)
            held: list[bytes] = []
            done = 0
            while position < 300:
                while len(held) < 10:
                    held += [record.value or b"" for record in await consumer.poll(timeout_s=0.2)]
                async with producer.transaction():
                    for value in held[:10]:
                        await producer.send("out", value, partition=0)
                    await producer.send_offsets_to_transaction({TopicPartition("in", 0): position + 10}, "g")
                    if done == kill_after:
                        await producer.flush()
                        broker.kill()
                del held[:10]
                position += 10
                done += 1
            return position


def test_what_threads_send_while_others_commit_is_committed_once_or_refused(broker: BrokerProcess) -> None:
    """A record taken between the flush and the end was sent all the same: the producer was of no use from then on."""
    with sync.Admin(at(broker)) as admin, WireClient(broker.port) as client:
        admin.create_topics("threads", partitions=1)
        stopped = threading.Event()
        sent: list[list[sync.Outcome[Any]]] = [[], [], []]
        refused: set[ErrorCode] = set()
        aborted = 0
        with sync.Producer(at(broker), transactional_id="threads", linger_ms=0, buffer_memory=50_000) as producer:

            def sender(number: int) -> None:
                while not stopped.is_set():
                    try:
                        value = f"{number} {len(sent[number])}"
                        sent[number].append(producer.send("threads", value, key=b"k"))
                    except ApiError as error:
                        refused.add(error.code)
                        time.sleep(0.0005)

            producer.init_transactions()
            threads = [threading.Thread(target=sender, args=(number,)) for number in range(len(sent))]
            for thread in threads:
                thread.start()
            try:
                for _ in range(60):
                    producer.begin_transaction()
                    time.sleep(0.003)
                    try:
                        producer.commit_transaction()
                    except DeliveryError:  # A record came behind the end of the last one: its thread had looked before.
                        producer.abort_transaction()
                        aborted += 1
            finally:
                stopped.set()
                for thread in threads:
                    thread.join()
            assert aborted < 30
            assert min(map(len, sent)) > 60 and refused == {ErrorCode.INVALID_TXN_STATE}
        found = [value.decode().split() for value in committed(client, "threads", 0)]
        for number, outcomes in enumerate(sent):
            numbers = [int(n) for by, n in found if int(by) == number]
            assert numbers == sorted(set(numbers)) and all(outcomes[it].exception(0) is None for it in numbers)
            if not aborted:
                assert numbers == list(range(len(outcomes)))


def test_a_record_that_comes_after_the_end_of_its_transaction_is_not_sent(broker: BrokerProcess) -> None:
    """As that of a thread which looked at the transaction before its end; the next flush says that it is lost."""
    with (
        sync.Admin(at(broker)) as admin,
        WireClient(broker.port) as client,
        sync.Producer(at(broker), transactional_id="late", linger_ms=0) as producer,
    ):
        admin.create_topics("late", partitions=1)
        producer.init_transactions()
        with producer.transaction():
            producer.send("late", b"early")
        row = "late", None, b"late", time.time()
        before = producer._intake.tray
        before.rows.extend(row)
        tray, _ = producer._intake.place(before, row)
        with pytest.raises(DeliveryError, match="the transaction has ended meanwhile"), producer.transaction():
            pass
        assert isinstance(tray.receipt.error(0), ApiError)
        with producer.transaction():
            producer.send("late", b"next")
        until_committed(client, "late", [b"early", b"next"])
