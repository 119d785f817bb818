"""A compacted topic through kills and resizes: every key ends with its last value, and deleted keys stay deleted."""

from __future__ import annotations

import random

from anabranch.records.hashing import placement_hash
from tests.crash.work import INITIAL, IdempotentProducer, Seen, Stopped, read_to_the_end, turns
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient

KEYS = 40
CONFIGS = {
    "cleanup_policy": "compact",
    "segment_bytes": "1500",
    "min_cleanable_dirty_ratio": "0.01",
    "delete_retention_ms": "0",
}


class Compacted:
    """One producer of some keys, which writes and deletes them."""

    def __init__(self, seed: int, topic: str = "compacted") -> None:
        self.topic = topic
        self.chance = random.Random(f"compacted {seed}")
        self.producer = IdempotentProducer(topic)
        self.written = 0
        self.state: dict[bytes, bytes | None] = {}
        """What is acknowledged, None for what is deleted."""
        self.left = 0
        """Records that were there, when they were compared last."""

    def prepare(self, client: WireClient) -> None:
        client.create(self.topic, INITIAL, **CONFIGS)

    def run(self, client: WireClient, stopped: Stopped) -> None:
        while not stopped():
            self._step(client)

    def settle(self, client: WireClient) -> None:
        while self.producer.pending is not None:
            self._step(client)

    def _step(self, client: WireClient) -> None:
        self.producer.begin(client)
        if self.producer.pending is None:
            key = b"key-%d" % self.chance.randrange(KEYS)
            values: list[bytes | None] = []
            for _ in range(self.chance.randint(1, 3)):
                self.written += 1
                values.append(None if self.chance.random() < 0.3 else b"%0100d" % self.written)
            self.producer.aim(tuple(values), key, placement_hash(key))
        sent = self.producer.send(client)
        if sent is not None:
            assert sent.key is not None
            self.state[sent.key] = sent.values[-1]

    async def verify(self, broker: BrokerProcess, client: WireClient) -> None:
        runs = -1.0
        for _ in turns("the cleaner does not come to rest"):
            runs, found = cleanings(broker), await read_to_the_end(broker, self.topic)
            if runs == cleanings(broker):
                break  # Else a tombstone may have gone while the reader was on its way to it.
        state: dict[bytes, bytes | None] = {}
        for record in found:
            assert record.key is not None
            state[record.key] = record.value
        for key, value in self.state.items():
            there = state.get(key)
            assert there == value, f"{key!r} ends with {there!r} and not with {value!r}: {of_key(found, key)}"
        assert state.keys() <= self.state.keys()
        self.left = len(found)

    def summary(self) -> str:
        gone = sum(value is None for value in self.state.values())
        return f"{self.written} writes of {len(self.state)} keys compacted to {self.left} records, {gone} keys deleted"


def of_key(found: list[Seen], key: bytes) -> list[Seen]:
    """The records of one key, for a message."""
    return [record for record in found if record.key == key]


def cleanings(broker: BrokerProcess) -> float:
    """Compactions that this process has run."""
    return broker.metrics().get("anabranch_compaction_runs_total", 0.0)
