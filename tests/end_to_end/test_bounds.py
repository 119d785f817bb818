"""Whatever one client sends, and however much of it: the steps of the loop stay short, and its memory stays bounded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from anabranch.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.delete_acls import DeleteAclsFilter, DeleteAclsRequest
from anabranch.protocol.messages.delete_groups import DeleteGroupsRequest
from anabranch.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.describe_groups import DescribeGroupsRequest
from anabranch.protocol.messages.describe_log_dirs import DescribableLogDirTopic, DescribeLogDirsRequest
from anabranch.protocol.messages.describe_producers import DescribeProducersRequest, TopicRequest
from anabranch.protocol.messages.describe_topic_partitions import DescribeTopicPartitionsRequest
from anabranch.protocol.messages.describe_topic_partitions import TopicRequest as DescribedTopic
from anabranch.protocol.messages.fetch import FetchRequest, ForgottenTopic
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from anabranch.protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from tests.support.broker import BrokerProcess, running
from tests.support.steps import in_short_steps
from tests.support.wire import WireClient

MANY = 20_000
TOPIC = "wide"


LONG: dict[str, Any] = {
    "commit": lambda: OffsetCommitRequest(
        group_id="committed",
        generation_id_or_member_epoch=-1,
        topics=[
            OffsetCommitRequestTopic(
                name=TOPIC,
                partitions=[
                    OffsetCommitRequestPartition(partition_index=it, committed_offset=1, committed_metadata="")
                    for it in range(MANY)
                ],
            )
        ],
    ),
    "committed": lambda: OffsetFetchRequest(
        groups=[
            OffsetFetchRequestGroup(
                group_id="committed", topics=[OffsetFetchRequestTopics(name=TOPIC, partition_indexes=[*range(MANY)])]
            )
        ]
    ),
    "list": lambda: ListOffsetsRequest(
        topics=[
            ListOffsetsTopic(name=f"t{it}", partitions=[ListOffsetsPartition(partition_index=0, timestamp=-1)])
            for it in range(MANY)
        ]
    ),
    "producers": lambda: DescribeProducersRequest(topics=[TopicRequest(name=TOPIC, partition_indexes=[*range(MANY)])]),
    "groups": lambda: DescribeGroupsRequest(groups=[f"g{it}" for it in range(MANY)]),
    "delete groups": lambda: DeleteGroupsRequest(groups_names=[f"g{it}" for it in range(MANY)]),
    "coordinators": lambda: FindCoordinatorRequest(key_type=0, coordinator_keys=[f"g{it}" for it in range(MANY)]),
    "delete records": lambda: DeleteRecordsRequest(
        topics=[
            DeleteRecordsTopic(
                name=TOPIC, partitions=[DeleteRecordsPartition(partition_index=it, offset=0) for it in range(MANY)]
            )
        ],
        timeout_ms=1000,
    ),
    "access control lists": lambda: DeleteAclsRequest(
        filters=[
            DeleteAclsFilter(resource_type_filter=1, pattern_type_filter=1, operation=1, permission_type=1)
            for _ in range(MANY - 1_000)
        ]
    ),
    "delete topics": lambda: DeleteTopicsRequest(
        topics=[DeleteTopicState(name=f"t{it}") for it in range(MANY)], timeout_ms=1000
    ),
    "refused topics": lambda: CreateTopicsRequest(
        topics=[CreatableTopic(name=f"?{it}", num_partitions=1, replication_factor=1) for it in range(MANY)],
        timeout_ms=1000,
    ),
    "log dirs": lambda: DescribeLogDirsRequest(
        topics=[DescribableLogDirTopic(topic=f"t{it}", partitions=[0]) for it in range(MANY)]
    ),
    "configs": lambda: DescribeConfigsRequest(
        resources=[DescribeConfigsResource(resource_type=2, resource_name=f"t{it}") for it in range(MANY)]
    ),
    "described": lambda: DescribeTopicPartitionsRequest(
        topics=[DescribedTopic(name=f"t{it}") for it in range(4 * MANY)], response_partition_limit=2_000
    ),
    "forgotten": lambda: FetchRequest(
        session_epoch=-1,
        forgotten_topics_data=[ForgottenTopic(topic_id=UUID(int=1), partitions=[*range(4 * MANY)])],
    ),
    "metadata that would create": lambda: MetadataRequest(
        topics=[MetadataRequestTopic(name=f"/{it}") for it in range(4 * MANY)], allow_auto_topic_creation=True
    ),
    "metadata": lambda: MetadataRequest(
        topics=[MetadataRequestTopic(name=f"t{it}") for it in range(MANY)], allow_auto_topic_creation=False
    ),
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("bounds")) as process:
        with WireClient(process.port, 60) as client:
            client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=["committed"]))
            while client.call(LONG["committed"]()).groups[0].error_code:
                time.sleep(0.01)
        yield process


@pytest.mark.parametrize("name", LONG)
def test_a_long_request_is_handled_in_short_steps(broker: BrokerProcess, name: str) -> None:
    with WireClient(broker.port, 60) as client:
        assert in_short_steps(broker, lambda: client.call(LONG[name]()))


def test_a_long_request_of_an_earlier_version_is_handled_in_short_steps(tmp_path: Path) -> None:
    """Up to version 5 the array has another name."""
    asked = DeleteTopicsRequest(topic_names=[f"t{it % 9}" for it in range(MANY - 1_000)], timeout_ms=1000)
    with running(tmp_path) as broker, WireClient(broker.port, 60) as client:
        assert len(in_short_steps(broker, lambda: client.call(asked, 5)).responses) == MANY - 1_000


def test_one_metadata_request_creates_few_topics_and_has_the_client_ask_again_for_the_others(
    broker: BrokerProcess,
) -> None:
    names = [MetadataRequestTopic(name=f"wanted-{it}") for it in range(130)]
    names = [MetadataRequestTopic(name=f"not/allowed-{it}") for it in range(150)] + names
    with WireClient(broker.port, 60) as client:
        first = {it.name: it.error_code for it in client.call(MetadataRequest(topics=names)).topics}
        assert sum(first[it.name] == 0 for it in names) == 100
        assert sum(first[it.name] == 5 for it in names) == 30  # LEADER_NOT_AVAILABLE: ask again
        assert sum(first[it.name] == 17 for it in names) == 150
        second = {it.name: it.error_code for it in client.call(MetadataRequest(topics=names)).topics}
        assert sum(second[it.name] == 0 for it in names) == 130


@pytest.mark.parametrize("elements", [1_000_000])
def test_a_request_of_a_million_elements_ends_its_connection_before_anything_is_made_of_it(
    broker: BrokerProcess, elements: int
) -> None:
    asked = OffsetFetchRequest(
        groups=[
            OffsetFetchRequestGroup(
                group_id="g", topics=[OffsetFetchRequestTopics(name="t", partition_indexes=[0] * elements)]
            )
        ]
    )
    before, said = broker.resident_bytes(), len(broker.said("warning", "connection closed"))
    with WireClient(broker.port, 60) as client:
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            client.call(asked)
    (event,) = broker.until_said("warning", "connection closed", said + 1)[said:]
    assert "more elements than its API allows" in event["reason"]
    assert time.monotonic() - began < 5
    assert broker.resident_bytes() - before < 32 << 20


def test_metadata_of_members_holds_bounded_memory(tmp_path: Path) -> None:
    def join(client: WireClient, group: str, size: int) -> ErrorCode:
        protocols = [JoinGroupRequestProtocol(name="p", metadata=bytes(size))]
        asked = JoinGroupRequest(
            group_id=group,
            protocol_type="connect",
            session_timeout_ms=30_000,
            rebalance_timeout_ms=30_000,
            protocols=protocols,
        )
        asked.member_id = client.call(asked).member_id
        return ErrorCode(client.call(asked).error_code) if asked.member_id else ErrorCode.GROUP_MAX_SIZE_REACHED

    mib = 1 << 20
    limits = {"group_metadata_max_bytes": 8 * mib, "group_initial_rebalance_delay_ms": 0}
    with running(tmp_path, **limits) as broker, WireClient(broker.port, 60) as client:
        client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=["g"]))
        while join(client, "honest", 100) is not ErrorCode.NONE:
            time.sleep(0.02)
        assert join(client, "large", 5 * mib) is ErrorCode.GROUP_MAX_SIZE_REACHED
        before = broker.resident_bytes()
        answers = [join(client, f"g{it}", 2 * mib) for it in range(12)]
        assert answers.count(ErrorCode.GROUP_MAX_SIZE_REACHED) >= 8
        assert answers[0] is ErrorCode.NONE
        held = broker.metrics()["kafka_server_group_coordinator_metrics_member_metadata_bytes"]
        assert 2 * mib <= held <= 8 * mib
        assert broker.resident_bytes() - before < 60 * mib
        assert join(client, "after", 100) is ErrorCode.NONE
        assert any(
            "group.metadata.max.bytes" in it["reason"] for it in broker.said("warning", "member refused")
        ) or any("group.member.metadata" in it["reason"] for it in broker.said("warning", "member refused"))


def test_fetch_sessions_hold_bounded_memory(tmp_path: Path) -> None:
    mib, wide = 1 << 20, 4_000
    settings = {"max_incremental_fetch_session_cache_bytes": 4 * mib}
    with running(tmp_path, **settings) as broker, WireClient(broker.port, 60) as client:
        topic = client.create(TOPIC, wide)
        offsets = dict.fromkeys(range(wide), 0)
        made = [client.call(client.fetch_request(topic, offsets, session=(0, 0)), 17) for _ in range(12)]
        assert made[0].session_id > 0
        assert broker.metrics()["kafka_server_fetchsessioncache_bytes"] <= 4 * mib
        small = client.call(client.fetch_request(topic, {0: 0}, session=(0, 0)), 17)
        assert small.session_id > 0, "a small reader gets a session, whatever large ones have"
        grown = client.call(client.fetch_request(topic, offsets, session=(small.session_id, 1)), 17)
        assert grown.error_code == ErrorCode.NONE
        assert broker.metrics()["kafka_server_fetchsessioncache_bytes"] <= 4 * mib


def test_committed_offsets_hold_bounded_memory(tmp_path: Path) -> None:
    def commit(client: WireClient, group: str, offset: int, count: int) -> list[ErrorCode]:
        partitions = [OffsetCommitRequestPartition(partition_index=it, committed_offset=offset) for it in range(count)]
        request = OffsetCommitRequest(
            group_id=group, topics=[OffsetCommitRequestTopic(name=TOPIC, partitions=partitions)]
        )
        return [ErrorCode(it.error_code) for it in client.call(request, 8).topics[0].partitions]

    with running(tmp_path, offsets_max_bytes=40_000) as broker, WireClient(broker.port, 60) as client:
        client.create(TOPIC, 100)
        client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=["g"]))
        while commit(client, "honest", 1, 10)[0] is not ErrorCode.NONE:
            time.sleep(0.02)
        one = commit(client, "greedy", 1, 100)
        refused = one.count(ErrorCode.INVALID_COMMIT_OFFSET_SIZE)
        assert 0 < refused < 100 and one.count(ErrorCode.NONE) == 100 - refused
        held = broker.metrics()["kafka_server_group_coordinator_metrics_offset_bytes"]
        assert 30_000 < held <= 40_000
        many = [code for it in range(20) for code in commit(client, f"invented-{it}", 1, 1)]
        assert set(many) == {ErrorCode.INVALID_COMMIT_OFFSET_SIZE}
        assert set(commit(client, "honest", 2, 10)) == {ErrorCode.NONE}
        assert "offsets.max.bytes" in broker.said("warning", "offset refused")[0]["reason"]
        assert len(broker.said("warning", "offset refused")) == 1
        client.call(DeleteGroupsRequest(groups_names=["greedy"]))
        assert commit(client, "later", 1, 1) == [ErrorCode.NONE]


def test_groups_and_members_without_metadata_hold_bounded_memory(tmp_path: Path) -> None:
    def join(client: WireClient, group: str, member: str) -> ErrorCode:
        asked = ConsumerGroupHeartbeatRequest(
            group_id=group,
            member_id=member,
            member_epoch=0,
            rebalance_timeout_ms=30_000,
            subscribed_topic_names=[TOPIC],
            topic_partitions=[],
        )
        return ErrorCode(client.call(asked).error_code)

    with running(tmp_path, group_metadata_max_bytes=100_000) as broker, WireClient(broker.port, 60) as client:
        client.create(TOPIC, 1)
        client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=["g"]))
        while join(client, "honest", "first") is not ErrorCode.NONE:
            time.sleep(0.02)
        answers = [join(client, f"invented-{it}", "m") for it in range(40)]
        refused = answers.count(ErrorCode.GROUP_MAX_SIZE_REACHED)
        assert 10 < refused < 30 and answers.count(ErrorCode.NONE) == 40 - refused
        assert join(client, "honest", "second") is ErrorCode.GROUP_MAX_SIZE_REACHED
        assert join(client, "honest", "first") is ErrorCode.NONE
        held = broker.metrics()["kafka_server_group_coordinator_metrics_member_metadata_bytes"]
        assert 80_000 < held <= 100_000
        assert broker.said("warning", "member refused")


def test_strings_of_members_hold_bounded_memory_and_those_of_ids_that_nobody_joins_with(tmp_path: Path) -> None:
    kib = 1 << 10

    def join(client: WireClient, group: str) -> ErrorCode:
        """Ask for an id, and never join with it."""
        protocols = [JoinGroupRequestProtocol(name="range", metadata=b"")]
        asked = JoinGroupRequest(
            group_id=group, session_timeout_ms=1_800_000, protocol_type="consumer", protocols=protocols
        )
        return ErrorCode(client.call(asked, 5, client_id="c" * 32_000).error_code)

    def beat(client: WireClient, group: str, **said: Any) -> ErrorCode:
        asked = ConsumerGroupHeartbeatRequest(
            group_id=group,
            member_id="m",
            member_epoch=0,
            rebalance_timeout_ms=30_000,
            subscribed_topic_names=[TOPIC],
            topic_partitions=[],
            **said,
        )
        return ErrorCode(client.call(asked, 1).error_code)

    limits = {"group_metadata_max_bytes": 400 * kib, "group_initial_rebalance_delay_ms": 0}
    with running(tmp_path, **limits) as broker, WireClient(broker.port, 60) as client:
        client.create(TOPIC, 1)
        client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=["g"]))
        while beat(client, "honest") is not ErrorCode.NONE:
            time.sleep(0.02)
        racks = [beat(client, f"g{it}", rack_id="r" * 32_000) for it in range(12)]
        assert racks[:4] == [ErrorCode.NONE] * 4 and racks[-1] is ErrorCode.GROUP_MAX_SIZE_REACHED
        held = broker.metrics()["kafka_server_group_coordinator_metrics_member_metadata_bytes"]
        assert 4 * 32_000 < held <= 400 * kib
        leaves = [ConsumerGroupHeartbeatRequest(group_id=f"g{it}", member_id="m", member_epoch=-1) for it in range(12)]
        for leave in leaves:
            client.call(leave, 1)
        deadline = time.monotonic() + 20
        while join(client, "pending") is not ErrorCode.MEMBER_ID_REQUIRED:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        while join(client, "pending") is not ErrorCode.GROUP_MAX_SIZE_REACHED:
            held = broker.metrics()["kafka_server_group_coordinator_metrics_member_metadata_bytes"]
            assert held <= 400 * kib and time.monotonic() < deadline
        assert held > 300 * kib
        assert beat(client, "honest") is ErrorCode.NONE


def test_large_requests_of_many_connections_are_decoded_within_bounded_memory(tmp_path: Path) -> None:
    """Twelve connections with 90,000 names each held 460 MB: only their frames were counted."""
    topics = [MetadataRequestTopic(name=f"unknown-topic-{it}") for it in range(40_000)]
    request = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
    with running(tmp_path, **{"queued.max.decoded.bytes": "1048576"}) as broker, ExitStack() as clients:
        wires = [clients.enter_context(WireClient(broker.port)) for _ in range(9)]
        wires[0].call(request, 12)
        before = highest = broker.resident_bytes()
        gone, *staying = wires
        gone.send(request, 12)
        sent = [(wire, wire.send(request, 12)) for wire in staying]
        gone.close()  # What a client that has hung up waited for is free again.
        with ThreadPoolExecutor(8) as readers:
            answers = [readers.submit(wire.receive, which) for wire, which in sent]
            while not all(each.done() for each in answers):
                highest = max(highest, broker.resident_bytes())
                time.sleep(0.01)
        assert {topic.error_code for each in answers for topic in each.result().topics} == {
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        }
        assert highest - before < 60 << 20
        assert broker.metrics()["kafka_server_socketservermetrics_decoded_bytes"] == 0
