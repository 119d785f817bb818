"""A client hangs up before it is answered.

What its request changes in the metadata is changed wholly, or not at all. A request that only reads is dropped, and
what came behind it is done.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.api_versions import ApiVersionsRequest
from anabranch.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from anabranch.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.describe_groups import DescribeGroupsRequest
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.protocol.messages.metadata import MetadataRequest
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.storage.directory import METADATA_FILE
from tests.support.broker import BrokerProcess, running
from tests.support.group_client import GroupClient
from tests.support.wire import WireClient, batch

TOPIC_RESOURCE = 2
CONNECTIONS = "kafka_server_socketservermetrics_connections"
ANSWERED = 'kafka_network_requestmetrics_totaltime_seconds_count{request="DescribeGroups"}'
MIB = 1 << 20
GROUPS = [f"group-{number:0190}" for number in range(250)]
"""Their names alone make a large request."""
METADATA_SIZE = 200_000
HANG_UPS = 16


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


# -- reads -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with groups of which a description has 50 MB."""
    with running(tmp_path_factory.mktemp("crowded"), group_initial_rebalance_delay_ms=0) as broker:
        with GroupClient(broker.port, 60) as client:
            client.ready()
            for group in GROUPS:
                joined = client.join(group, metadata=bytes(METADATA_SIZE), session_timeout_ms=1_800_000)
                assert client.call(client.sync_request(group, joined, {joined.member_id: b"a"})).error_code == 0
            described = client.call(DescribeGroupsRequest(groups=GROUPS))
            assert {len(it.members[0].member_metadata) for it in described.groups} == {METADATA_SIZE}
        yield broker


def test_descriptions_for_clients_that_have_hung_up_are_not_made(crowded: BrokerProcess) -> None:
    with WireClient(crowded.port) as friend:
        answered, resident = crowded.metrics()[ANSWERED], crowded.resident_bytes()
        crowded.forget_peak()
        for _ in range(HANG_UPS):
            with WireClient(crowded.port) as other:
                other.send(DescribeGroupsRequest(groups=GROUPS))
            assert friend.call(ApiVersionsRequest()).error_code == ErrorCode.NONE
        until(lambda: crowded.metrics()[CONNECTIONS] == 1)
        assert crowded.metrics()[ANSWERED] - answered <= HANG_UPS / 4
        assert crowded.peak_bytes() - resident < 120 * MIB
        described = friend.call(DescribeGroupsRequest(groups=GROUPS)).groups
        assert [(it.group_id, len(it.members)) for it in described] == [(group, 1) for group in GROUPS]


def test_what_a_client_wrote_behind_a_read_is_done_although_it_has_hung_up(crowded: BrokerProcess) -> None:
    with GroupClient(crowded.port, 60) as friend:
        friend.create("written")
        read = DescribeGroupsRequest(groups=GROUPS)
        for number in range(5):
            with GroupClient(crowded.port, 60) as other:
                part = OffsetCommitRequestPartition(partition_index=0, committed_offset=number + 7)
                topics = [OffsetCommitRequestTopic(name="written", partitions=[part])]
                commit = OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=-1, topics=topics)
                silent = other.produce_request("written", 0, batch([b"%d" % number]), acks=0)
                for asked, version in ((read, 5), (silent, 9), (commit, 8), (read, 5), (silent, 9)):
                    other.send(asked, version)
            # That no other connection is left says nothing: it may not have been accepted yet.
            until(lambda number=number: friend.committed("g") == {("written", 0): number + 7})  # type: ignore[misc]
            until(lambda: crowded.metrics()[CONNECTIONS] == 1)
            assert [value for _, value in friend.read_all("written", 0, 2 * number)] == [b"%d" % number] * 2
