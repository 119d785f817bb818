"""Batches that compaction has left without records: every client reads on behind them, however many there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.client import sync
from anabranch.records.batch import headers
from tests.conformance.clients import Client
from tests.conformance.clients.aio import Aiokafka
from tests.conformance.clients.confluent import ConfluentKafka
from tests.conformance.clients.java import JavaClient
from tests.conformance.clients.python import KafkaPython
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient, batch

EMPTY = 40
"""Segments in a row of which compaction leaves one batch without records: librdkafka gave up after ten."""
CONFIGS = {"retention.ms": "-1", "segment.bytes": "2000", "min.cleanable.dirty.ratio": "0.01"}


class Told:
    """The broker, and the producer of the batches without records."""

    def __init__(self, broker: BrokerProcess, producer: int) -> None:
        self.broker = broker
        self.producer = producer


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """A broker with a topic `t`: segments without records, then three records, the last one at `EMPTY + 2`."""
    data = tmp_path_factory.mktemp("data")
    process = BrokerProcess(data, durability="fsync", log_cleaner_backoff_ms=50).start()
    with WireClient(process.port) as client, sync.Admin(process.address) as admin:
        client.create("t", **CONFIGS)
        producer, other = client.producer_id(), client.producer_id()
        for number in range(EMPTY):
            client.produce("t", 0, value(number, b"k", producer, number))
        for number, key in enumerate((b"k", b"a", b"b")):
            client.produce("t", 0, value(EMPTY + number, key, other, number))
        admin.alter_configs("topic", "t", {"cleanup.policy": "compact"})
    deadline = time.monotonic() + 30
    while (found := records(data / "t-0"))[-3:] != [1, 1, 1] or found.count(0) != len(found) - 3 or len(found) < 30:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    yield Told(process, producer)
    process.kill()


@pytest.fixture
def broker(told: Told) -> BrokerProcess:
    return told.broker


def value(number: int, key: bytes, producer: int, sequence: int) -> bytearray:
    """A batch that fills a segment."""
    return batch([b"%01500d" % number], key=key, producer=(producer, 0, sequence))


def records(path: Path) -> list[int]:
    """The numbers of records in the segments of a log; nothing while one of them is replaced."""
    try:
        files = [file.read_bytes() for file in sorted(path.glob("*.log"))]
    except FileNotFoundError:
        return []
    return [sum(header.record_count for _, header in headers(file)) for file in files]


@pytest.mark.parametrize("kind", [ConfluentKafka, Aiokafka, KafkaPython, JavaClient])
def test_a_client_reads_on_behind_batches_without_records(kind: Callable[[str], Client], broker: BrokerProcess) -> None:
    client = kind(broker.address)
    try:
        found = client.fetch("t", {0: EMPTY + 3})
    finally:
        client.close()
    assert [each.offset for each in found[0]] == [EMPTY, EMPTY + 1, EMPTY + 2]


def test_our_consumer_reads_on_behind_batches_without_records(broker: BrokerProcess) -> None:
    with sync.Consumer(broker.address, auto_offset_reset="earliest") as consumer:
        consumer.assign("t")
        found: list[int] = []
        deadline = time.monotonic() + 60
        while len(found) < 3 and time.monotonic() < deadline:
            found += [record.offset for record in consumer.poll(0.2)]
    assert found[:3] == [EMPTY, EMPTY + 1, EMPTY + 2]


def test_an_answer_begins_with_records_and_a_fetch_of_one_byte_makes_way(broker: BrokerProcess) -> None:
    with WireClient(broker.port) as client:
        found = client.fetch("t", 0, max_bytes=1)
        (_, first), *_ = headers(bytes(found.records or b""))
        assert (first.base_offset, first.record_count) == (EMPTY, 1)


def test_the_producer_of_batches_without_records_is_remembered(told: Told) -> None:
    told.broker.kill()
    told.broker.start()
    with WireClient(told.broker.port) as client:
        repeated = client.produce("t", 0, value(EMPTY - 1, b"k", told.producer, EMPTY - 1))
        assert (repeated.error_code, repeated.base_offset) == (0, EMPTY - 1)
        assert client.produce("t", 0, value(0, b"c", told.producer, EMPTY)).base_offset == EMPTY + 3
