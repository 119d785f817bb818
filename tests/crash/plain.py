"""Numbered records of idempotent producers that go on after each kill: none lost or doubled, every key in order."""

from __future__ import annotations

import random
from collections import Counter

from tests.crash.work import INITIAL, IdempotentProducer, Seen, Stopped, read_to_the_end
from tests.support.application_edge import ApplicationEdge, Handed
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient

PRODUCERS = 3


class _Numbers:
    """One producer of one key."""

    def __init__(self, topic: str, name: str, seed: int) -> None:
        self.name = name
        self.chance = random.Random(f"{name} {seed}")
        self.key_hash = self.chance.getrandbits(31)
        self.producer = IdempotentProducer(topic)
        self.sent = 0
        self.acknowledged: list[int] = []

    def step(self, client: WireClient) -> None:
        """Send what is pending, or else new records."""
        self.producer.begin(client)
        if self.producer.pending is None:
            numbers = range(self.sent, self.sent + self.chance.randint(1, 5))
            self.sent = numbers.stop
            values = tuple(f"{self.name}:{number}".encode() for number in numbers)
            self.producer.aim(values, None, self.key_hash)
        sent = self.producer.send(client)
        if sent is not None:
            self.acknowledged += [int((value or b"").rpartition(b":")[2]) for value in sent.values]


class Plain:
    """Some producers to one topic."""

    def __init__(self, seed: int, topic: str = "plain") -> None:
        self.topic = topic
        self.writers = [_Numbers(topic, f"p{number}", seed) for number in range(PRODUCERS)]
        self.moves = 0
        """Records whose predecessor of the same key lies in another partition, when they were compared last."""

    def prepare(self, client: WireClient) -> None:
        client.create(self.topic, INITIAL, retention_ms="-1")

    def run(self, client: WireClient, stopped: Stopped) -> None:
        while not stopped():
            for writer in self.writers:
                writer.step(client)

    def settle(self, client: WireClient) -> None:
        for writer in self.writers:
            while writer.producer.pending is not None:
                writer.step(client)

    async def verify(self, broker: BrokerProcess, client: WireClient) -> None:
        found = await read_to_the_end(broker, self.topic)
        times = Counter(record.value for record in found)
        doubled = sorted(value or b"" for value, count in times.items() if count > 1)
        assert not doubled, f"more than once: {doubled[:10]}"
        for writer in self.writers:
            lost = [number for number in writer.acknowledged if f"{writer.name}:{number}".encode() not in times]
            assert not lost, f"acknowledged and lost: {writer.name} {lost[:10]}"
        self.moves = self._in_order(found)

    def _in_order(self, found: list[Seen]) -> int:
        """Compare the order of each key; count the records that follow one in another partition.

        What a consumer without a group was handed counts at once: no commit is between it and the next record.
        """
        edge = ApplicationEdge()
        for record in found:
            name, _, number = (record.value or b"").partition(b":")
            place = self.topic, record.partition
            edge.delivered("reader", Handed(name.decode(), "", int(number), place, record.offset))
            edge.committed({place: record.offset + 1})
        assert not edge.repetitions, "a record was handed out twice"
        return edge.moves

    def summary(self) -> str:
        records = sum(len(writer.acknowledged) for writer in self.writers)
        return f"{records} records in order across {self.moves} moves"
