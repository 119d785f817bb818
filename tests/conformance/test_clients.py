"""Other people's clients, unmodified: what one of them writes, every other one reads, byte for byte."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.conformance.clients import COMPRESSIONS, Admin, Client, Record, RefusedError
from tests.conformance.clients.aio import Aiokafka
from tests.conformance.clients.confluent import ConfluentKafka
from tests.conformance.clients.kafkajs import KafkaJs
from tests.conformance.clients.kcat import Kcat
from tests.conformance.clients.python import KafkaPython
from tests.support.broker import BrokerProcess, running

KINDS: tuple[type[Client], ...] = (ConfluentKafka, Aiokafka, KafkaPython, KafkaJs, Kcat)
ADMINS = tuple(kind for kind in KINDS if issubclass(kind, Admin))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("broker"), message_max_bytes=4 << 20) as process:
        yield process


@pytest.fixture(scope="module")
def clients(broker: BrokerProcess) -> Iterator[dict[str, Client]]:
    made = {kind.name: kind(f"127.0.0.1:{broker.port}") for kind in KINDS}
    yield made
    for client in made.values():
        client.close()


@pytest.fixture(scope="module")
def admin(clients: dict[str, Client]) -> ConfluentKafka:
    client = clients[ConfluentKafka.name]
    assert isinstance(client, ConfluentKafka)
    return client


def sample(client: Client) -> list[Record]:
    """Records of every shape that this client can send."""
    now = int(time.time() * 1000)
    when = now - 60_000 if client.chooses_timestamps else None
    records = [Record(f"key-{i % 7}".encode(), f"value {i} ".encode() * (i % 50 + 1), when) for i in range(200)]
    if client.sends_empty_bytes:
        records.append(Record(b"", b"", when))
    records.append(Record(None, b"no key", when))
    records.append(Record(b"tombstone", None, when))
    if client.name != Kcat.name:
        records.append(Record(b"h", b"headers", when, (("a", b"1"), ("b", b"\xc3\xa9"))))
        if client.sends_null_headers:
            records.append(Record(b"h", b"null header", when, (("a", None),)))
    return records


def comparable(record: Record, *, timestamps: bool, null_headers: bool) -> Record:
    headers = record.headers if null_headers else tuple((name, value or b"") for name, value in record.headers)
    return Record(record.key, record.value, record.timestamp if timestamps else None, headers)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_one_writes_every_other_reads(clients: dict[str, Client], admin: ConfluentKafka, compression: str) -> None:
    topic = f"all-{compression}"
    admin.create_topic(topic, len(clients), {})
    written: dict[int, list[Record]] = {}
    for partition, client in enumerate(clients.values()):
        if compression in client.compressions:
            records = sample(client)
            idempotent = partition % 2 == 0
            offsets = client.produce(topic, partition, records, compression=compression, idempotent=idempotent)
            assert list(offsets) in ([], list(range(len(records)))), client.name
            written[partition] = records
    ends = {partition: len(records) for partition, records in written.items()}
    for client in clients.values():
        found = client.fetch(topic, ends)
        for (partition, records), writer in zip(written.items(), clients.values(), strict=True):
            exact = client.receives_null_headers
            expected = [comparable(it, timestamps=False, null_headers=exact) for it in records]
            got = [comparable(it.record, timestamps=False, null_headers=exact) for it in found[partition]]
            assert got == expected, f"{writer.name} to {client.name}"
            if writer.chooses_timestamps:
                assert [it.record.timestamp for it in found[partition]] == [it.timestamp for it in records]


@pytest.mark.parametrize("kind", ADMINS, ids=lambda kind: kind.name)
def test_topics_are_administered_and_resized_both_ways(clients: dict[str, Client], kind: type[Client]) -> None:
    client = clients[kind.name]
    assert isinstance(client, Admin)
    topic = f"admin-{kind.name}"
    client.create_topic(topic, 2, {"retention.ms": "1234567"})
    assert topic in client.topics()
    assert client.partitions(topic) == [0, 1]
    assert client.configs(topic)["retention.ms"] == "1234567"
    records = [Record(b"k", b"%d" % number) for number in range(10)]
    client.produce(topic, 1, records, compression="none", idempotent=False)
    if client.can_create_partitions:
        client.create_partitions(topic, 5)
        assert client.partitions(topic) == [0, 1, 2, 3, 4]
        client.produce(topic, 4, records, compression="none", idempotent=False)
        client.create_partitions(topic, 3)
        assert 4 in client.partitions(topic), "a retiring partition is readable until it is empty"
        assert len(client.fetch(topic, {4: 10})[4]) == 10
        with pytest.raises(RefusedError):
            client.create_partitions(topic, 1)
    if client.can_alter_configs:
        client.alter_config(topic, "retention.ms", "7654321")
        assert client.configs(topic)["retention.ms"] == "7654321"
    if client.can_delete_records:
        client.delete_records(topic, 1, 4)
        assert client.offsets(topic)[1] == (4, 10)
    client.delete_topic(topic)
    assert topic not in client.topics()


def test_a_message_near_the_limit_passes_and_one_above_is_refused(
    clients: dict[str, Client], admin: ConfluentKafka
) -> None:
    admin.create_topic("large", 1, {"max.message.bytes": "2000000"})
    admin.produce("large", 0, [Record(None, b"x" * 1_999_000)], compression="none", idempotent=True)
    with pytest.raises(RefusedError, match=r"(?i)large"):
        admin.produce("large", 0, [Record(None, b"x" * 2_000_001)], compression="none", idempotent=True)
    for client in clients.values():
        if client.name != Kcat.name:
            assert len(client.fetch("large", {0: 1})[0][0].record.value or b"") == 1_999_000


def test_a_timestamp_is_found_at_its_exact_record(clients: dict[str, Client], admin: ConfluentKafka) -> None:
    admin.create_topic("times", 1, {})
    records = [Record(None, b"%d" % number, 1_000_000 + 1_000 * number) for number in range(20)]
    admin.produce("times", 0, records, compression="zstd", idempotent=True)
    for client in clients.values():
        if isinstance(client, Admin) and client.can_look_up_timestamps:
            assert client.offset_at("times", 0, 1_006_500) == 7, client.name
