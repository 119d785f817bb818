"""A resize that an offline partition holds up: what is said of it, everywhere, and how it is canceled or ended."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.client import Admin, ApiError, Consumer, Producer, ResizeDescription
from anabranch.machines.placement import place
from anabranch.protocol.messages.cancel_topic_resizes import CancelTopicResizesRequest
from anabranch.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from anabranch.records.hashing import placement_hash
from tests.support.broker import BrokerProcess, running
from tests.support.commands import document, run
from tests.support.wire import WireClient, batch

TOPIC = "rivers"
STORAGE = ErrorCode.KAFKA_STORAGE_ERROR


def damage(broker: BrokerProcess, partition: int) -> Callable[[], None]:
    """Damage a partition's log while the broker is down; the function that repairs it again."""
    log = broker.data / f"{TOPIC}-{partition}"
    kept = broker.data.parent / "kept"
    shutil.copytree(log, kept)
    for segment in log.glob("*.log"):
        segment.write_bytes(segment.read_bytes()[:100])

    def repair() -> None:
        shutil.rmtree(log)
        kept.rename(log)

    return repair


@pytest.fixture
def held(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker with the topic: 2 partitions at creation, 4 now, records in each."""
    with running(tmp_path / "data") as broker:
        with WireClient(broker.port) as client:
            client.create(TOPIC, 2)
            assert client.resize(TOPIC, 4) == 0
            for partition in range(4):
                for _ in range(3):
                    client.produce(TOPIC, partition, batch([b"x" * 100]))
        yield broker


def restart(broker: BrokerProcess, change: Callable[[], object]) -> None:
    assert broker.stop() == 0
    change()
    broker.start()


def ask_to_resize(client: WireClient, count: int, timeout_ms: int = 300) -> tuple[ErrorCode, str]:
    asked = CreatePartitionsTopic(name=TOPIC, count=count, assignments=None)
    (result,) = client.call(CreatePartitionsRequest(topics=[asked], timeout_ms=timeout_ms)).results
    return ErrorCode(result.error_code), result.error_message or ""


def resize_of(address: str) -> ResizeDescription | None:
    async def ask() -> ResizeDescription | None:
        async with Admin(address) as admin:
            described = (await admin.describe_topics(TOPIC))[TOPIC]
            assert (described.resize is None) is (TOPIC not in await admin.resizes())
            return described.resize

    return asyncio.run(ask())


def partition_of(key: bytes) -> int:
    return place(placement_hash(key), 2, 4)


def cancel(address: str) -> None:
    async def ask() -> None:
        async with Admin(address) as admin:
            await admin.cancel_resize(TOPIC)

    asyncio.run(ask())


def test_a_growth_that_an_offline_partition_holds_up_says_so_and_can_be_canceled(held: BrokerProcess) -> None:
    repair: list[Callable[[], None]] = []
    restart(held, lambda: repair.append(damage(held, 1)))
    address = f"127.0.0.1:{held.port}"
    with WireClient(held.port) as client:
        code, message = ask_to_resize(client, 6)
        assert code is ErrorCode.REQUEST_TIMED_OUT
        assert "it will be finished. It waits for partition 1 on broker " in message
        assert "its log cannot be opened, written or synced. See `anabranch topic describe rivers`." in message
        code, message = ask_to_resize(client, 8)
        assert code is ErrorCode.REASSIGNMENT_IN_PROGRESS
        assert "still being resized to 6; try again. It waits for partition 1 on broker" in message
        assert client.produce(TOPIC, 0, batch([b"y"]), count=4).error_code == ErrorCode.INVALID_PARTITION_METADATA
        (line,) = held.said("warning", "resize waits for a partition")
        assert (line["topic"], line["partition"], line["to"]) == (TOPIC, 1, 6)
        assert line["remedy"].endswith("anabranch topic resize rivers --cancel")
        (metric,) = (name for name in held.metrics() if name.startswith("anabranch_controller_resize_waiting_seconds"))
        assert f'topic="{TOPIC}"' in metric and 'partition="1"' in metric and held.metrics()[metric] > 0
        resize = resize_of(address)
        assert resize is not None
        assert (resize.from_count, resize.to_count, resize.phase, resize.cancelable) == (4, 6, "cut", True)
        assert [(wait.partition, wait.error) for wait in resize.waits] == [(1, STORAGE)]
        assert resize.waits[0].waiting_ms > 0
        told = run(address, "topic", "describe", TOPIC)[0]
        assert "being resized from 4 to 6 partitions, phase cut" in told
        assert "waits for partition 1 on broker" in told and "topic resize rivers --cancel" in told
        assert document(address, "topic", "resize", TOPIC, "--cancel") == {
            "topic": TOPIC,
            "canceled": True,
            "partitions": 4,
        }
        assert resize_of(address) is None
        for partition in (0, 2, 3):
            answer = client.produce(TOPIC, partition, batch([b"y"]), count=4)
            assert (answer.error_code, answer.base_offset) == (0, 3)
        assert client.produce(TOPIC, 0, batch([b"y"]), count=6).error_code == ErrorCode.INVALID_PARTITION_METADATA
        assert held.said("info", "resize waits no more")
        with pytest.raises(ApiError, match="is not being resized; it has 4 partitions"):
            cancel(address)
    restart(held, repair[0])
    with WireClient(held.port) as client:
        assert client.produce(TOPIC, 1, batch([b"y"]), count=4).base_offset == 3
        assert ask_to_resize(client, 6, 20_000)[0] is ErrorCode.NONE


def test_a_shrink_is_canceled_while_partitions_close_and_refused_with_advice_after_that(held: BrokerProcess) -> None:
    repair: list[Callable[[], None]] = []
    restart(held, lambda: repair.append(damage(held, 3)))
    address = f"127.0.0.1:{held.port}"
    with WireClient(held.port) as client:
        assert ask_to_resize(client, 2)[0] is ErrorCode.REQUEST_TIMED_OUT
        assert client.produce(TOPIC, 2, batch([b"y"]), count=4).error_code == ErrorCode.INVALID_PARTITION_METADATA
        assert client.produce(TOPIC, 0, batch([b"y"]), count=4).error_code == 0, "the others still have 4 partitions"
        resize = resize_of(address)
        assert resize is not None and resize.phase == "close" and resize.cancelable
        cancel(address)
        assert client.produce(TOPIC, 2, batch([b"y"]), count=4).error_code == 0
    restart(held, repair[0])
    repair.clear()
    restart(held, lambda: repair.append(damage(held, 0)))
    with WireClient(held.port) as client:
        assert ask_to_resize(client, 2)[0] is ErrorCode.REQUEST_TIMED_OUT
        with pytest.raises(ApiError, match=r"cannot be canceled any more.*Bring back what it waits for") as refused:
            cancel(f"127.0.0.1:{held.port}")
        assert refused.value.code is ErrorCode.REASSIGNMENT_IN_PROGRESS
        resize = resize_of(f"127.0.0.1:{held.port}")
        assert resize is not None and resize.phase == "cut" and not resize.cancelable
    restart(held, repair[0])
    with WireClient(held.port) as client:
        deadline = time.monotonic() + 10
        while client.metadata(TOPIC).undeleted_partition_count != 2:
            assert time.monotonic() < deadline, "the resize ends with the partition's return"


def test_the_client_that_asked_for_a_canceled_resize_is_told(held: BrokerProcess) -> None:
    restart(held, lambda: damage(held, 1))
    with WireClient(held.port) as client, WireClient(held.port) as other:
        asked = CreatePartitionsTopic(name=TOPIC, count=6, assignments=None)
        sent = client.send(CreatePartitionsRequest(topics=[asked], timeout_ms=20_000))
        held.until_said("warning", "resize waits for a partition")
        cancel(f"127.0.0.1:{held.port}")
        (result,) = client.receive(sent).results
        assert result.error_code == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
        assert result.error_message == "The resize of topic 'rivers' to 6 partitions was canceled."
        other.metadata(TOPIC)


def test_a_request_to_cancel_more_resizes_than_a_cluster_needs_is_refused(held: BrokerProcess) -> None:
    """Each named topic is a step of the controller: 200,000 of them stopped the broker for half a minute."""
    with WireClient(held.port) as client:
        some, many = (
            client.call(CancelTopicResizesRequest(topics=["nowhere"] * count)).results for count in (100, 101)
        )
    assert [it.error_code for it in some] == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION] * 100
    assert [it.error_code for it in many] == [ErrorCode.INVALID_REQUEST] * 101
    assert many[0].error_message == "101 topics are too many: name at most 100."


def test_keys_keep_their_order_through_resizes_that_are_canceled(held: BrokerProcess) -> None:
    """Our producer goes on where it can, and waits while the topic is stuck; nothing is lost or out of order."""
    repair: list[Callable[[], None]] = []
    restart(held, lambda: repair.append(damage(held, 1)))
    keys = [f"k-{number}".encode() for number in range(40)]

    async def stuck(address: str) -> None:
        async with Admin(address, request_timeout_ms=300) as admin, Producer(address) as producer:
            sending = asyncio.Event()
            done = asyncio.Event()

            async def send() -> None:
                for number in range(120):
                    for key in keys:
                        if partition_of(key) != 1:
                            await producer.send(TOPIC, str(number), key=key)
                    sending.set()
                    await asyncio.sleep(0.01)
                done.set()

            writing = asyncio.create_task(send())
            await sending.wait()
            canceled = 0
            while not done.is_set():
                with pytest.raises(ApiError, match="waits for partition 1"):
                    await admin.resize(TOPIC, 6)
                await admin.cancel_resize(TOPIC)
                canceled += 1
                await asyncio.sleep(0.05)
            await writing
            await producer.flush()
            assert canceled > 1

    asyncio.run(stuck(f"127.0.0.1:{held.port}"))
    restart(held, repair[0])

    async def read(address: str) -> None:
        numbers: dict[bytes, list[int]] = {}
        async with Admin(address) as admin, Consumer(address, auto_offset_reset="earliest") as consumer:
            await admin.resize(TOPIC, 7)
            consumer.assign(TOPIC)
            wanted = 120 * sum(partition_of(key) != 1 for key in keys)
            while sum(map(len, numbers.values())) < wanted:
                records = await consumer.poll(10)
                assert records
                for record in records:
                    if record.key is not None:
                        numbers.setdefault(record.key, []).append(int(record.value or b"-1"))
        assert set(map(tuple, numbers.values())) == {tuple(range(120))}

    asyncio.run(read(f"127.0.0.1:{held.port}"))
