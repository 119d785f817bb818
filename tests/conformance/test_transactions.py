"""What one client commits, every client that reads committed records sees, and nothing else."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, Producer

from tests.conformance.clients import Record
from tests.conformance.conftest import Broker, Clients
from tests.conformance.transactional import KINDS, FencedError, Kind
from tests.support.oracle import wait_until_served

LAST = b"last"


@pytest.fixture(scope="module")
def kinds() -> Iterator[dict[str, Kind]]:
    made = {name: kind() for name, kind in KINDS.items()}
    yield made
    for kind in made.values():
        kind.close()


class Written:
    """Topics, each written by one client, when it is first asked for."""

    def __init__(self, broker: Broker, clients: Clients, kinds: dict[str, Kind]) -> None:
        self._broker = broker
        self._clients = clients
        self._kinds = kinds
        self._topics: dict[str, str] = {}

    def by(self, writer: str) -> str:
        if writer not in self._topics:
            topic = self._topics[writer] = f"transactions-{writer}-{uuid.uuid4().hex[:8]}"
            self._clients["confluent-kafka"].create_topic(topic, 2, {})
            wait_until_served(self._broker.address, topic, 2)
            self._write(topic, self._kinds[writer])
            for partition in (0, 1):
                self._clients["confluent-kafka"].produce(
                    topic, partition, [Record(None, LAST)], compression="none", idempotent=False
                )
        return self._topics[writer]

    def _write(self, topic: str, kind: Kind) -> None:
        name = f"{topic}-producer"
        producer = kind.producer(self._broker.address, name)
        producer.begin()
        producer.send(topic, 0, b"a")
        producer.send(topic, 1, b"b")
        producer.commit()
        producer.begin()
        producer.send(topic, 0, b"aborted")
        producer.send(topic, 1, b"aborted")
        producer.abort()
        for number in range(5):
            producer.begin()
            producer.send(topic, 0, b"c%d" % number)
            producer.commit()
        producer.begin()
        producer.send(topic, 0, b"fenced")
        successor = kind.producer(self._broker.address, name)
        with pytest.raises(FencedError):
            producer.commit()
        successor.begin()
        successor.send(topic, 1, b"d")
        successor.commit()
        successor.close()
        producer.close()


@pytest.fixture(scope="module")
def written(broker: Broker, clients: Clients, kinds: dict[str, Kind]) -> Written:
    return Written(broker, clients, kinds)


@pytest.mark.parametrize("reader", KINDS)
@pytest.mark.parametrize("writer", KINDS)
def test_committed_records_and_no_others_are_read(
    broker: Broker, written: Written, kinds: dict[str, Kind], writer: str, reader: str
) -> None:
    topic = written.by(writer)
    read = kinds[reader].read
    assert read(broker.address, topic, 0, LAST) == [b"a", b"c0", b"c1", b"c2", b"c3", b"c4", LAST]
    assert read(broker.address, topic, 1, LAST) == [b"b", b"d", LAST]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_groups_progress_is_part_of_the_transaction(
    broker: Broker, clients: Clients, kinds: dict[str, Kind], topic: str, protocol: str
) -> None:
    """librdkafka reads as a member of a group, writes, and commits both together; what it aborts it reads again."""
    target = f"{topic}-out"
    for name in (topic, target):
        clients["confluent-kafka"].create_topic(name, 1, {})
        wait_until_served(broker.address, name, 1)
    values = [b"%d" % number for number in range(30)]
    clients["confluent-kafka"].produce(
        topic, 0, [Record(None, value) for value in values], compression="none", idempotent=True
    )
    for life in range(3):
        consumer = Consumer(
            {
                "bootstrap.servers": broker.address,
                "group.id": f"{topic}-group",
                "group.protocol": protocol,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "log_level": 0,
            }
        )
        consumer.subscribe([topic])
        producer = Producer({"bootstrap.servers": broker.address, "transactional.id": topic, "log_level": 0})
        producer.init_transactions(30)
        for commit in (True, False) if life < 2 else (True,):
            producer.begin_transaction()
            read = 0
            deadline = time.monotonic() + 60
            while read < 10:
                assert time.monotonic() < deadline
                message = consumer.poll(1.0)
                if message is None:
                    continue
                assert message.error() is None, message.error()
                producer.produce(target, message.value(), partition=0)
                read += 1
            positions = consumer.position(consumer.assignment())
            producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 30)
            if commit:
                producer.commit_transaction(30)
            else:
                producer.abort_transaction(30)
        consumer.close()
    clients["confluent-kafka"].produce(target, 0, [Record(None, LAST)], compression="none", idempotent=False)
    assert kinds["confluent-kafka"].read(broker.address, target, 0, LAST) == [*values, LAST]
