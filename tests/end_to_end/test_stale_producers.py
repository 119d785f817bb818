"""Our producers with stale metadata, on a topic that is resized: the leaders' check of the count keeps the order.

A producer that is not refused goes on by the old count, and changes to the new one when its metadata is refreshed: then
a key's records lie in two partitions in one layout, which no gate orders. The reader comes late, and reads as it likes.
"""

from __future__ import annotations

import asyncio

from anabranch.client import Admin, Consumer, Producer
from tests.support.broker import BrokerProcess

TOPIC = "t"
COUNTS = (2, 5, 3, 8, 1, 6)
ROUNDS = 30
PRODUCERS = 3
REFUSED = f'anabranch_produce_stalebatches_total{{topic="{TOPIC}"}}'


async def write(address: str) -> dict[bytes, int]:
    """Resize, and send through every resize, with metadata that is refreshed a while later; how many of each key."""
    sent: dict[bytes, int] = {}

    async def send(producer: Producer, name: int) -> None:
        for _ in range(ROUNDS):
            for number in range(12):
                key = f"{name}-{number}".encode()
                await producer.send(TOPIC, str(sent.setdefault(key, 0)), key=key)
                sent[key] += 1
            await asyncio.sleep(0.01)

    producers = [Producer(address, metadata_max_age_ms=700, linger_ms=1) for _ in range(PRODUCERS)]
    async with Admin(address) as admin:
        await admin.create_topics(TOPIC, partitions=1)
        for producer in producers:  # Each has its kernels and its metadata before the first resize.
            await (await producer.send(TOPIC, "0", key=b"first"))
        for count in COUNTS:
            sending = asyncio.gather(*(send(producer, name) for name, producer in enumerate(producers)))
            await asyncio.sleep(0.05)
            await asyncio.gather(sending, admin.resize(TOPIC, count))
    for producer in producers:
        await producer.close()
    return sent


async def read(address: str, wanted: int, *, ordered: bool) -> dict[bytes, list[int]]:
    """Read everything, in a few records at a time; without gates if not `ordered`."""
    found: dict[bytes, list[int]] = {}
    ordering = "key" if ordered else "none"
    async with Consumer(address, auto_offset_reset="earliest", ordering=ordering) as consumer:
        consumer.assign(TOPIC)
        while sum(map(len, found.values())) < wanted:
            records = await consumer.poll(10, max_records=50)
            assert records, "a record is missing, or a gate never opens"
            for record in records:
                found.setdefault(record.key or b"", []).append(int(record.value or b"-1"))
    return found


def test_producers_that_learn_of_a_resize_late_are_refused_and_keys_keep_their_order(broker: BrokerProcess) -> None:
    address = f"127.0.0.1:{broker.port}"
    sent = asyncio.run(write(address))
    total = sum(sent.values()) + PRODUCERS
    refused = broker.metrics().get(REFUSED, 0)
    assert refused >= len(COUNTS), f"producers learned of resizes by {refused} refusals"

    read_in_order = asyncio.run(read(address, total, ordered=True))
    assert read_in_order.pop(b"first") == [0] * PRODUCERS
    assert read_in_order == {key: list(range(count)) for key, count in sent.items()}
    without_gates = asyncio.run(read(address, total, ordered=False))
    assert any(without_gates[key] != read_in_order[key] for key in sent), "without gates, order is lost"
