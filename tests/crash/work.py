"""What a client does between two kills, and what it claims afterwards.

A work is begun again on a new connection after each kill and goes on where it was: a request without a response is
repeated, as clients do, and only its outcome decides. Before anything is compared, `settle` brings every request to its
outcome; `verify` then compares what is there with what was acknowledged.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from anabranch.base.errors import ErrorCode
from anabranch.client import ApiError, Consumer
from anabranch.machines.placement import place
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient, batch

INITIAL, LARGEST = 2, 9
"""Partitions of a topic that is resized, at its creation and at most."""
WAIT_S = 180.0
"""Long, because a thousand kills run beside other work."""

Stopped = Callable[[], bool]


class Work(Protocol):
    """One client's part."""

    def prepare(self, client: WireClient) -> None:
        """Create what the work needs."""

    def run(self, client: WireClient, stopped: Stopped) -> None:
        """Go on until `stopped`, or until the broker is gone: ConnectionError, TimeoutError."""

    def settle(self, client: WireClient) -> None:
        """Bring every request without a response to its outcome."""

    async def verify(self, broker: BrokerProcess, client: WireClient) -> None:
        """Compare; AssertionError names what is lost, doubled, out of order or back again."""

    def summary(self) -> str:
        """What was compared, in a few words."""


class Aimed(NamedTuple):
    """A batch, and where it is sent. All its records belong to one key."""

    values: tuple[bytes | None, ...]
    key: bytes | None
    key_hash: int
    partition: int
    sequence: int


class IdempotentProducer:
    """One batch at a time. It is repeated to its partition, with its sequence, until its outcome is known."""

    def __init__(self, topic: str, initial: int = INITIAL) -> None:
        self.topic = topic
        self.initial = self.count = initial
        self.producer_id = -1
        self.sequences: Counter[int] = Counter()
        self.pending: Aimed | None = None

    def begin(self, client: WireClient) -> None:
        """Get a producer id once."""
        if self.producer_id < 0:
            self.producer_id = client.producer_id()

    def aim(self, values: tuple[bytes | None, ...], key: bytes | None, key_hash: int) -> None:
        """Choose the partition of records that are in none."""
        partition = place(key_hash, self.initial, self.count)
        self.pending = Aimed(values, key, key_hash, partition, self.sequences[partition])

    def send(self, client: WireClient) -> Aimed | None:
        """Send the pending batch once; return it if it is acknowledged now."""
        assert self.pending is not None
        values, key, key_hash, partition, sequence = aimed = self.pending
        data = batch(values, key=key, producer=(self.producer_id, 0, sequence))
        error = ErrorCode.of(client.produce(self.topic, partition, data, count=self.count).error_code)
        if error is ErrorCode.NONE:
            self.sequences[partition] += len(values)
            self.pending = None
            return aimed
        if error in (ErrorCode.INVALID_PARTITION_METADATA, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
            # Removed, or not made yet: either way it was not appended to what is there now.
            self.count = client.metadata(self.topic).undeleted_partition_count
            self.aim(values, key, key_hash)
        else:
            assert error.retriable, error
            time.sleep(0.01)
        return None


def turns(what: str, timeout_s: float = WAIT_S) -> Iterator[None]:
    """Turns of a wait, 50 ms apart; AssertionError when there were too many."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        yield
        time.sleep(0.05)
    raise AssertionError(what)


class Seen(NamedTuple):
    """A record as a consumer hands it out."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


async def read_to_the_end(broker: BrokerProcess, topic: str, isolation_level: str = "read_uncommitted") -> list[Seen]:
    """Read a topic through our consumer, in its order."""
    found: list[Seen] = []
    settings = {"auto_offset_reset": "earliest", "isolation_level": isolation_level}
    async with Consumer(broker.address, **settings) as consumer:  # type: ignore[arg-type]
        consumer.assign(topic)
        for _ in turns(f"{topic} is not read to its end: {len(found)} records"):
            while records := await consumer.poll(0.2, max_records=5_000):
                found += [Seen(it.partition, it.offset, _bytes(it.key), _bytes(it.value)) for it in records]
            with contextlib.suppress(ApiError):  # A partition is removed when all its records are folded back.
                if not any((await consumer.lag()).values()):
                    return found
    raise AssertionError


def _bytes(data: bytes | memoryview | None) -> bytes | None:
    return None if data is None else bytes(data)


class Resizes:
    """Resizes of a topic, at random."""

    def __init__(self, topic: str, seed: int) -> None:
        self.topic = topic
        self.chance = random.Random(f"resizes {topic} {seed}")
        self.asked = self.answered = self.accepted = 0

    def prepare(self, client: WireClient) -> None:
        """The topic is made by those that write to it."""

    def run(self, client: WireClient, stopped: Stopped) -> None:
        while not stopped():
            self.asked += 1
            error = client.resize(self.topic, self.chance.randint(INITIAL, LARGEST))
            self.answered += 1
            if error is ErrorCode.NONE:
                self.accepted += 1
            else:
                assert error is ErrorCode.INVALID_PARTITIONS, error
            time.sleep(0.03 * self.chance.random())

    def settle(self, client: WireClient) -> None:
        """Nothing is repeated."""

    async def verify(self, broker: BrokerProcess, client: WireClient) -> None:
        for _ in turns("a resize was not finished after the restart"):
            if not broker.metrics()["anabranch_controller_resizing_topics"]:
                return

    def summary(self) -> str:
        return f"{self.accepted} resizes of it, {self.asked - self.answered} cut off"
