"""A client hangs up while its request changes the metadata: the change is made wholly, or not at all."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from anabranch.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.protocol.messages.metadata import MetadataRequest
from anabranch.storage.directory import METADATA_FILE
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient, batch

TOPIC_RESOURCE = 2
CONNECTIONS = "kafka_server_socketservermetrics_connections"


def create(name: str) -> CreateTopicsRequest:
    asked = CreatableTopic(name=name, num_partitions=2, replication_factor=1)
    return CreateTopicsRequest(topics=[asked], timeout_ms=20_000)


def delete(name: str) -> DeleteTopicsRequest:
    return DeleteTopicsRequest(topics=[DeleteTopicState(name=name)], timeout_ms=20_000)


def grow(name: str) -> CreatePartitionsRequest:
    asked = CreatePartitionsTopic(name=name, count=4, assignments=None)
    return CreatePartitionsRequest(topics=[asked], timeout_ms=20_000)


def configure(name: str, value: str) -> IncrementalAlterConfigsRequest:
    config = AlterableConfig(name="retention.ms", config_operation=0, value=value)
    asked = AlterConfigsResource(resource_type=TOPIC_RESOURCE, resource_name=name, configs=[config])
    return IncrementalAlterConfigsRequest(resources=[asked])


def configured(client: WireClient, name: str) -> str | None:
    """The retention of a topic."""
    asked = DescribeConfigsResource(
        resource_type=TOPIC_RESOURCE, resource_name=name, configuration_keys=["retention.ms"]
    )
    answer = client.call(DescribeConfigsRequest(resources=[asked]))
    return next(config.value for result in answer.results for config in result.configs)


def listed(client: WireClient) -> dict[str, int]:
    """The partition count of every topic."""
    answer = client.call(MetadataRequest(topics=None, allow_auto_topic_creation=False))
    return {topic.name: len(topic.partitions) for topic in answer.topics}


def code(client: WireClient, request: Any) -> ErrorCode:
    answer = client.call(request)
    (result,) = getattr(answer, "topics", None) or getattr(answer, "responses", None) or answer.results
    return ErrorCode(result.error_code)


@contextlib.contextmanager
def held(metadata: Path) -> Iterator[None]:
    """Hold the lock of the metadata store: a transaction of the broker that begins meanwhile waits for its end."""
    connection = sqlite3.connect(metadata, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


def until(true: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hang_up_in_the_transaction(broker: BrokerProcess, request: Any, changed: Callable[[], bool]) -> None:
    """Send a request, and hang up while the transaction that it needs is running; then wait for the change.

    A hang-up before the transaction has begun changes nothing, on a slow machine: it is tried again, later.
    """
    api = type(request).__name__.removesuffix("Request")
    metric = f'kafka_network_requestmetrics_requests_total{{request="{api}"}}'
    for pause_s in (0.1, 0.5, 2):
        before = broker.metrics().get(metric, 0)
        with held(broker.data / METADATA_FILE):
            with WireClient(broker.port) as other:
                other.send(request)
                until(lambda before=before: broker.metrics().get(metric, 0) > before)  # type: ignore[misc]
                time.sleep(pause_s)
            until(lambda: broker.metrics()[CONNECTIONS] == 1)
        with contextlib.suppress(AssertionError):
            until(changed, 3)
            return
    raise AssertionError("the change was not made, or is not seen")


def test_a_topic_whose_creator_hung_up_is_listed_and_usable(broker: BrokerProcess, client: WireClient) -> None:
    hang_up_in_the_transaction(broker, create("t"), lambda: listed(client) == {"t": 2})
    assert code(client, create("t")) is ErrorCode.TOPIC_ALREADY_EXISTS
    until(lambda: client.produce("t", 1, batch([b"x"])).error_code == 0)
    assert broker.stop() == 0
    broker.start()
    with WireClient(broker.port) as later:
        assert listed(later) == {"t": 2}


def test_a_topic_whose_deleter_hung_up_is_gone_and_creatable(broker: BrokerProcess, client: WireClient) -> None:
    client.create("t", 2)
    hang_up_in_the_transaction(broker, delete("t"), lambda: listed(client) == {})
    until(lambda: code(client, create("t")) is ErrorCode.NONE)
    assert client.produce("t", 1, batch([b"x"])).base_offset == 0


def test_a_topic_whose_resizer_hung_up_has_the_new_count(broker: BrokerProcess, client: WireClient) -> None:
    client.create("t", 2)
    hang_up_in_the_transaction(broker, grow("t"), lambda: listed(client) == {"t": 4})
    assert code(client, grow("t")) is ErrorCode.INVALID_PARTITIONS
    assert client.produce("t", 3, batch([b"x"]), count=4).base_offset == 0


def test_a_topic_that_somebody_configured_who_hung_up_is_described_as_it_is_stored(
    broker: BrokerProcess, client: WireClient
) -> None:
    client.create("t", 1)
    hang_up_in_the_transaction(broker, configure("t", "123456"), lambda: configured(client, "t") == "123456")
    assert broker.stop() == 0
    broker.start()
    with WireClient(broker.port) as later:
        assert configured(later, "t") == "123456"
