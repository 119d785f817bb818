"""Groups that read and write in transactions while what they read is resized: every record once, every key in order.

Transactions are aborted again and again, with the offsets that they hold: what they had committed must open no gate.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import confluent_kafka as stock
import pytest

from anabranch.base.errors import AnabranchError
from anabranch.client.sync import Admin, Consumer, Producer
from tests.support.broker import BrokerProcess

KEYS = [b"k-%d" % number for number in range(12)]
SENDS_S = 4.0
TIMEOUT_S = 60.0
SEED = 5


class Copying:
    """Members of one group that copy a topic to another in transactions, until a test has seen enough."""

    def __init__(self, broker: BrokerProcess, library: str) -> None:
        self.address = broker.address
        self.source, self.target = f"{library}-in", f"{library}-out"
        self.is_over = threading.Event()
        self.ended: Counter[str] = Counter()
        self.partitions: set[int] = set()
        """The partitions that records were read in."""

    def ours(self, number: int) -> None:
        some = random.Random(SEED + number)
        with Producer(self.address, transactional_id=f"{self.source}-{number}") as producer:
            producer.init_transactions()
            while not self.is_over.is_set():
                try:
                    self._ours_once(producer, some)
                except AnabranchError:  # Its epoch is stale: what was to be committed is read again.
                    self.ended["refused"] += 1
                    producer.abort_transaction()

    def _ours_once(self, producer: Producer, some: random.Random) -> None:
        with Consumer(
            self.address,
            group_id=self.source,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level="read_committed",
        ) as consumer:
            consumer.subscribe(self.source)
            while not self.is_over.is_set():
                records = consumer.poll(0.1, max_records=some.choice((5, 50)))
                if not records:
                    continue
                self.partitions |= {record.partition for record in records}
                producer.begin_transaction()
                for record in records:
                    producer.send(self.target, record.value, key=record.key)
                offsets = {(self.source, record.partition): record.offset + 1 for record in records}
                producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
                if self._ends(some, producer.commit_transaction, producer.abort_transaction):
                    return

    def stock(self, number: int) -> None:
        some = random.Random(SEED + number)
        settings = {"bootstrap.servers": self.address, "log_level": 0}
        producer = stock.Producer({**settings, "transactional.id": f"{self.source}-{number}"})
        producer.init_transactions(TIMEOUT_S)
        while not self.is_over.is_set():
            consumer = stock.Consumer(
                {
                    **settings,
                    "group.id": self.source,
                    "group.protocol": "consumer",
                    "auto.offset.reset": "earliest",
                    "enable.auto.commit": False,
                    "topic.metadata.refresh.interval.ms": 200,
                    "fetch.wait.max.ms": 100,
                }
            )
            consumer.subscribe([self.source])
            try:
                self._stock_once(producer, consumer, some)
            except stock.KafkaException:
                self.ended["refused"] += 1
                producer.abort_transaction(TIMEOUT_S)
            finally:
                consumer.close()

    def _stock_once(self, producer: stock.Producer, consumer: stock.Consumer, some: random.Random) -> None:
        while not self.is_over.is_set():
            records = [each for each in consumer.consume(some.choice((5, 50)), 0.1) if each.error() is None]
            if not records:
                continue
            self.partitions |= {record.partition() for record in records}
            producer.begin_transaction()
            for record in records:
                producer.produce(self.target, record.value(), key=record.key())
            offsets = {record.partition(): record.offset() + 1 for record in records}
            producer.send_offsets_to_transaction(
                [stock.TopicPartition(self.source, *at) for at in offsets.items()],
                consumer.consumer_group_metadata(),
                TIMEOUT_S,
            )
            if self._ends(some, producer.commit_transaction, producer.abort_transaction):
                return

    def _ends(self, some: random.Random, commit: Callable[[], object], abort: Callable[[], object]) -> bool:
        """End a transaction, perhaps after a while; whether it was aborted, and its records must be read again."""
        if some.random() < 0.2:
            time.sleep(some.uniform(0, 0.5))
        if some.random() < 0.15:
            abort()
            self.ended["aborted"] += 1
            return True
        commit()
        self.ended["committed"] += 1
        return False


def send(address: str, topic: str, resizes: tuple[int, ...]) -> Counter[bytes]:
    """Send numbered records of every key while the topic is resized; how many."""
    sent: Counter[bytes] = Counter()
    with Admin(address) as admin, Producer(address, linger_ms=1) as producer:
        for count in resizes:
            until = time.monotonic() + SENDS_S / len(resizes)
            while time.monotonic() < until:
                for key in KEYS:
                    producer.send(topic, b"%d" % sent[key], key=key)
                    sent[key] += 1
                time.sleep(0.05)
            admin.resize(topic, count)
        for key in KEYS:
            producer.send(topic, b"%d" % sent[key], key=key)
            sent[key] += 1
    return sent


@pytest.mark.parametrize(("library", "resizes"), [("ours", (5, 3, 8, 2, 6)), ("stock", (3, 5, 6, 8))])
def test_what_a_group_copies_in_transactions_is_there_once_and_in_order(
    shared: BrokerProcess, library: str, resizes: tuple[int, ...]
) -> None:
    copying = Copying(shared, library)
    with Admin(shared.address) as admin:
        admin.create_topics(copying.source, partitions=2)
        admin.create_topics(copying.target, partitions=1)
    members = [threading.Thread(target=getattr(copying, library), args=(number,)) for number in range(2)]
    for member in members:
        member.start()
    found: defaultdict[bytes | None, list[int]] = defaultdict(list)
    try:
        sent = send(shared.address, copying.source, resizes)
        left, deadline = sum(sent.values()), time.monotonic() + TIMEOUT_S
        with Consumer(shared.address, auto_offset_reset="earliest", isolation_level="read_committed") as reader:
            reader.assign(copying.target)
            while left > 0:
                assert time.monotonic() < deadline, (left, copying.ended)
                for record in reader.poll(0.2):
                    found[record.key].append(int(record.value or b""))
                    left -= 1
    finally:
        copying.is_over.set()
        for member in members:
            member.join()
    assert found == {key: list(range(count)) for key, count in sent.items()}
    assert copying.ended["aborted"] and copying.ended["committed"] and max(copying.partitions) > 1
