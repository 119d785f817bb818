"""Records as large as a topic allows, larger ones, and topics whose broker sets the time."""

from __future__ import annotations

import random
import time

import pytest

from tests.conformance.clients import Record, RefusedError
from tests.conformance.conftest import KINDS, Broker, Clients
from tests.support.oracle import stored_batches, wait_until_served

LARGE = random.Random(64).randbytes(990_000).replace(b"<", b"x")
HUGE = random.Random(65).randbytes(3_000_000).replace(b"<", b"x")


@pytest.mark.parametrize("writer", KINDS)
def test_a_record_near_the_limit_is_taken_and_one_above_it_is_refused(
    writer: str, clients: Clients, broker: Broker, topic: str
) -> None:
    clients["confluent-kafka"].create_topic(topic, 1, {})
    wait_until_served(broker.address, topic, 1)
    client = clients[writer]
    small = Record(None, b"after the refusal")
    client.produce(topic, 0, [Record(b"large", LARGE)], compression="none", idempotent=True)
    with pytest.raises(RefusedError, match=r"(?i)large"):
        client.produce(topic, 0, [Record(b"huge", HUGE)], compression="none", idempotent=False)
    client.produce(topic, 0, [small], compression="none", idempotent=False)
    found = clients["aiokafka"].fetch(topic, {0: 2})[0]
    assert [each.record.value for each in found] == [LARGE, small.value]


@pytest.mark.parametrize("reader", KINDS)
def test_a_record_larger_than_a_fetch_is_delivered(
    reader: str, clients: Clients, broker: Broker, huge_topic: str
) -> None:
    found = clients[reader].fetch(huge_topic, {0: 3})[0]
    assert [each.record.value for each in found] == [b"before", HUGE, b"after"]


@pytest.fixture(scope="session")
def huge_topic(clients: Clients, broker: Broker) -> str:
    admin = clients["confluent-kafka"]
    admin.create_topic("huge-records", 1, {"max.message.bytes": "4000000"})
    wait_until_served(broker.address, "huge-records", 1)
    for value in (b"before", HUGE, b"after"):
        admin.produce("huge-records", 0, [Record(None, value)], compression="none", idempotent=True)
    return "huge-records"


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_every_client_sees_the_brokers_time_where_the_broker_sets_it(
    compression: str, clients: Clients, broker: Broker, topic: str
) -> None:
    writer = clients["confluent-kafka"]
    writer.create_topic(topic, 1, {"message.timestamp.type": "LogAppendTime"})
    wait_until_served(broker.address, topic, 1)
    before = time.time_ns() // 1_000_000 - 1
    records = [Record(b"k", b"v", 1_000), Record(b"k", b"w", 2_000)]
    writer.produce(topic, 0, records, compression=compression, idempotent=False)
    after = time.time_ns() // 1_000_000 + 1

    assert all(batch.log_append_time for batch in stored_batches(broker.address, topic, 0))
    for name, kind in KINDS.items():
        if kind.reads(KINDS["confluent-kafka"], compression):
            found = [each.record for each in clients[name].fetch(topic, {0: 2})[0]]
            assert [record.value for record in found] == [b"v", b"w"], name
            assert all(before <= (record.timestamp or 0) <= after for record in found), name


@pytest.mark.parametrize("stored", ["gzip", "snappy", "lz4", "zstd", "uncompressed"])
def test_a_topic_may_store_another_compression_than_producers_use(
    stored: str, clients: Clients, broker: Broker, topic: str
) -> None:
    writer = clients["confluent-kafka"]
    writer.create_topic(topic, 1, {"compression.type": stored})
    wait_until_served(broker.address, topic, 1)
    records = [Record(b"k", b"compressible " * 100, 1_700_000_000_000 + number) for number in range(20)]
    writer.produce(topic, 0, records, compression="lz4", idempotent=True)

    code = ("uncompressed", "gzip", "snappy", "lz4", "zstd").index(stored)
    assert {batch.compression for batch in stored_batches(broker.address, topic, 0)} == {code}
    for name, kind in KINDS.items():
        if stored == "uncompressed" or kind.reads(KINDS["java"], stored):
            assert [each.record for each in clients[name].fetch(topic, {0: 20})[0]] == records, name
