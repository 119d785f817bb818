"""Each client that administers topics does so as it would with Apache Kafka, and takes partitions away besides."""

from __future__ import annotations

import time

import pytest
from kio.schema.api_versions.v3.request import ApiVersionsRequest
from kio.schema.metadata.v12.request import MetadataRequest

from tests.conformance.clients import Admin, Client, Record, RefusedError
from tests.conformance.conftest import KINDS, Broker, Clients
from tests.support.oracle import ask, wait_until_served

ADMINS = [name for name, kind in KINDS.items() if issubclass(kind, Admin)]
RECORDS = [Record(b"k", b"%d" % number, 1_700_000_000_000 + 1_000 * number) for number in range(10)]


class Administrator(Client, Admin):
    """The type of every client that can do both."""


@pytest.fixture
def client(request: pytest.FixtureRequest, clients: Clients) -> Client:
    return clients[request.param]


def those(ability: str = "") -> pytest.MarkDecorator:
    able = [name for name in ADMINS if not ability or getattr(KINDS[name], ability)]
    return pytest.mark.parametrize("client", able, indirect=True)


def with_records(client: Administrator, broker: Broker, topic: str, partitions: int) -> None:
    """Create a topic with ten records in each partition."""
    client.create_topic(topic, partitions, {"retention.ms": "-1"})
    wait_until_served(broker.address, topic, partitions)
    for partition in range(partitions):
        client.produce(topic, partition, RECORDS, compression="none", idempotent=False)


@those()
def test_a_topic_is_created_described_and_deleted(client: Administrator, broker: Broker, topic: str) -> None:
    client.create_topic(topic, 3, {"retention.ms": "1234567", "cleanup.policy": "delete"})
    wait_until_served(broker.address, topic, 3)
    assert topic in client.topics()
    assert client.partitions(topic) == [0, 1, 2]
    configs = client.configs(topic)
    assert (configs["retention.ms"], configs["cleanup.policy"]) == ("1234567", "delete")
    assert configs["max.message.bytes"] == "1048588"
    client.delete_topic(topic)
    deadline = time.monotonic() + 10.0
    while topic in client.topics():
        assert time.monotonic() < deadline, "the topic is still listed"
        time.sleep(0.05)


@those()
def test_a_topic_that_exists_or_makes_no_sense_is_refused(client: Administrator, broker: Broker, topic: str) -> None:
    client.create_topic(topic, 1, {})
    wait_until_served(broker.address, topic, 1)
    with pytest.raises(RefusedError, match=r"(?i)exist"):
        client.create_topic(topic, 1, {})
    with pytest.raises(RefusedError):
        client.create_topic("not/a/topic", 1, {})
    with pytest.raises(RefusedError):
        client.create_topic(f"{topic}-2", 1, {"retention.ms": "soon"})
    with pytest.raises(RefusedError):
        client.delete_topic(f"{topic}-3")


@those("can_alter_configs")
def test_a_config_is_altered_alone(client: Administrator, broker: Broker, topic: str) -> None:
    client.create_topic(topic, 1, {"retention.ms": "1234567"})
    wait_until_served(broker.address, topic, 1)
    client.alter_config(topic, "max.message.bytes", "2000000")
    configs = client.configs(topic)
    assert (configs["retention.ms"], configs["max.message.bytes"]) == ("1234567", "2000000")
    with pytest.raises(RefusedError):
        client.alter_config(topic, "max.message.bytes", "many")


@those()
def test_partitions_are_added_and_taken_away(client: Administrator, broker: Broker, topic: str) -> None:
    with_records(client, broker, topic, 2)
    client.create_partitions(topic, 5)
    wait_until_served(broker.address, topic, 5)
    assert client.partitions(topic) == [0, 1, 2, 3, 4]
    client.produce(topic, 4, RECORDS, compression="none", idempotent=False)
    if not broker.elastic:
        with pytest.raises(RefusedError):
            client.create_partitions(topic, 3)
        return
    client.create_partitions(topic, 3)
    assert 4 in client.partitions(topic), "a partition that retires is there until it is empty"
    assert [each.record for each in client.fetch(topic, {4: 10})[4]] == RECORDS
    with pytest.raises(RefusedError):
        client.create_partitions(topic, 1)


@those("can_delete_records")
def test_records_are_deleted_up_to_an_offset(client: Administrator, broker: Broker, topic: str) -> None:
    with_records(client, broker, topic, 2)
    client.delete_records(topic, 1, 4)
    assert client.offsets(topic) == {0: (0, 10), 1: (4, 10)}
    found = client.fetch(topic, {0: 10, 1: 10}, starts={0: 7, 1: 4})
    assert [each.offset for each in found[0]] == [7, 8, 9]
    assert [each.offset for each in found[1]] == [4, 5, 6, 7, 8, 9]


@those("can_look_up_timestamps")
def test_a_time_is_looked_up(client: Administrator, broker: Broker, topic: str) -> None:
    with_records(client, broker, topic, 1)
    assert client.offset_at(topic, 0, 1_700_000_000_000) == 0
    assert client.offset_at(topic, 0, 1_700_000_003_001) == 4


def test_kcat_lists_what_there_is_and_looks_up_times(clients: Clients, broker: Broker, topic: str) -> None:
    admin, kcat = clients["confluent-kafka"], clients["kcat"]
    with_records(admin, broker, topic, 3)
    assert f'topic "{topic}" with 3 partitions' in kcat.listing()
    assert f"at {broker.address}" in kcat.listing()
    assert kcat.offset_at(topic, 2, 1_700_000_003_001) == 4


def test_nothing_of_ours_is_said_to_who_did_not_ask(clients: Clients, broker: Broker, topic: str) -> None:
    """The oracle fails on tagged fields it does not know, and so does, less plainly, one of the clients."""
    with_records(clients["confluent-kafka"], broker, topic, 3)
    asked = MetadataRequest(topics=None, include_topic_authorized_operations=False)
    (shown,) = [each for each in ask(broker.address, asked).topics if each.name == topic]
    assert [each.partition_index for each in shown.partitions] == [0, 1, 2]


def test_the_oldest_produce_is_named_for_the_sake_of_older_librdkafka(broker: Broker) -> None:
    answer = ask(broker.address, ApiVersionsRequest(client_software_name="oracle", client_software_version="1"))
    (produce,) = [each for each in answer.api_keys if each.api_key == 0]
    assert produce.min_version == 0
