"""Producers with acks=0: the broker answers nothing, so it refuses by closing the connection."""

from __future__ import annotations

import asyncio
import logging

import pytest

from anabranch.client import Admin, Producer
from anabranch.machines.placement import place
from anabranch.records.hashing import placement_hash
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient, batch

TOPIC = "t"
KEYS = [f"k-{number}".encode() for number in range(20)]
LOST = "closed the connection of a producer with acks=0"


def read_all(port: int, partitions: int) -> dict[int, list[tuple[bytes, int]]]:
    """(key, number) of every record by partition: the values are `key number`."""
    with WireClient(port) as client:
        return {
            partition: [(value.split()[0], int(value.split()[1])) for _, value in client.read_all(TOPIC, partition)]
            for partition in range(partitions)
        }


@pytest.mark.parametrize(("before", "after"), [(2, 5), (5, 3)])
def test_what_is_sent_after_a_resize_is_placed_anew_and_only_what_was_on_its_way_is_lost(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture, before: int, after: int
) -> None:
    address = f"127.0.0.1:{broker.port}"

    async def send(producer: Producer, rounds: range) -> None:
        for number in rounds:
            for key in KEYS:
                await producer.send(TOPIC, key + b" %d" % number, key=key)
            await producer.flush()
            await asyncio.sleep(0.005)

    async def scenario() -> None:
        async with Admin(address) as admin, Producer(address, acks=0, linger_ms=1) as producer:
            await admin.create_topics(TOPIC, partitions=2)
            if before > 2:
                await admin.resize(TOPIC, before)
            await send(producer, range(20))
            await admin.resize(TOPIC, after)
            await send(producer, range(20, 100))
            with WireClient(broker.port) as client:  # What is read after this came after everything that was sent.
                client.metadata(TOPIC)

    with caplog.at_level(logging.WARNING, "anabranch.client"):
        asyncio.run(scenario())
    assert [LOST in record.getMessage() for record in caplog.records] == [True], "it is logged once"
    found = read_all(broker.port, max(before, after))
    last: dict[bytes, int] = {}
    for count in (before, after):
        for partition, records in found.items():
            for key, number in records:
                if (number < 20) is (count is before):
                    assert partition == place(placement_hash(key), 2, count)
                    assert number > last.get(key, -1)
                    last[key] = number
    kept = [record for records in found.values() for record in records]
    assert len(kept) == len(set(kept)), "none twice"
    missing = {number for number in range(100) for key in KEYS if (key, number) not in set(kept)}
    assert missing <= set(range(20, 60)), "only records that were on their way at the resize"
    assert missing, "the broker refused some"


def test_a_refused_produce_without_acks_ends_the_connection_and_no_other(client: WireClient) -> None:
    topic_id = client.create(TOPIC, 2)
    port = client.sock.getpeername()[1]
    for version, given, count in ((12, TOPIC, 9), (13, topic_id, 9), (12, "unknown", -1)):
        with WireClient(port) as other:
            other.send(other.produce_request(given, 0, batch([b"x"]), acks=0, count=count), version)
            with pytest.raises(ConnectionError):
                other.receive_frame()
    assert client.produce(topic_id, 0, batch([b"y"]), count=2).base_offset == 0
