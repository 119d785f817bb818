"""Groups, at a real broker: every API of the coordinator, restarts and crashes, a full disk, compaction."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.frames import encode_request
from anabranch.protocol.messages.alter_configs import AlterConfigsRequest
from anabranch.protocol.messages.alter_configs import AlterConfigsResource as Replaced
from anabranch.protocol.messages.api_versions import ApiVersionsRequest
from anabranch.protocol.messages.consumer_group_heartbeat import Assignor
from anabranch.protocol.messages.consumer_group_install_assignment import ConsumerGroupInstallAssignmentRequest
from anabranch.protocol.messages.consumer_group_install_assignment import Member as InstalledMember
from anabranch.protocol.messages.consumer_group_install_assignment import TopicPartition as InstalledTopic
from anabranch.protocol.messages.consumer_group_prepare_assignment import ConsumerGroupPrepareAssignmentRequest
from anabranch.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.delete_groups import DeleteGroupsRequest
from anabranch.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.describe_groups import DescribeGroupsRequest
from anabranch.protocol.messages.describe_topic_partitions import Cursor, DescribeTopicPartitionsRequest, TopicRequest
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from anabranch.protocol.messages.list_config_resources import ListConfigResourcesRequest
from anabranch.protocol.messages.list_groups import ListGroupsRequest
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from tests.support.broker import BrokerProcess, log_size, running
from tests.support.group_client import GroupClient, owned
from tests.support.wire import batch

OFFSETS = "__consumer_offsets"
GROUP = 32


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[GroupClient]:
    with GroupClient(broker.port) as connection:
        connection.ready()
        yield connection


@pytest.fixture(scope="module")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all tests whose groups and topics have names of their own."""
    with running(tmp_path_factory.mktemp("data"), **{"group.initial.rebalance.delay.ms": 0}) as process:
        yield process


@pytest.fixture
def shared(long_lived: BrokerProcess, version: int) -> Iterator[GroupClient]:
    with another(long_lived) as connection:
        connection.ready(f"g{version}")
        yield connection


@contextlib.contextmanager
def another(broker: BrokerProcess) -> Iterator[GroupClient]:
    with GroupClient(broker.port) as connection:
        yield connection


def until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- finding the coordinator ---------------------------------------------------------------------------------------


def test_the_first_search_for_a_coordinator_makes_the_internal_topic(broker: BrokerProcess) -> None:
    with another(broker) as client:
        assert client.fetched("g").error_code == ErrorCode.NOT_COORDINATOR
        assert client.listed() == {}
        (found,) = client.find("g").coordinators
        assert (found.key, found.node_id, found.host, found.port) == ("g", 1, "127.0.0.1", broker.port)
        topic = client.metadata(OFFSETS)
        assert topic.is_internal
        assert len(topic.partitions) == 50
        assert client.fetched("g").error_code == ErrorCode.NONE


@pytest.mark.parametrize("version", range(7))
def test_every_version_finds_the_coordinator(shared: GroupClient, long_lived: BrokerProcess, version: int) -> None:
    answer = shared.find("g", version=version)
    found = answer.coordinators[0] if version >= 4 else answer
    assert (found.error_code, found.node_id, found.port) == (ErrorCode.NONE, 1, long_lived.port)


def test_many_coordinators_are_found_at_once_and_none_of_an_unknown_kind(client: GroupClient) -> None:
    assert [it.key for it in client.find("a", "b", "c").coordinators] == ["a", "b", "c"]
    answer = client.call(FindCoordinatorRequest(key_type=2, coordinator_keys=["a", "b"]))
    assert [it.error_code for it in answer.coordinators] == [ErrorCode.INVALID_REQUEST] * 2


def test_who_asks_for_the_internal_topic_by_name_makes_it_as_it_must_be(broker: BrokerProcess) -> None:
    with another(broker) as client:
        asked = MetadataRequest(topics=[MetadataRequestTopic(name=OFFSETS)], allow_auto_topic_creation=True)
        (topic,) = client.call(asked, 12).topics
        assert (topic.is_internal, len(topic.partitions)) == (True, 50)
        resource = DescribeConfigsResource(
            resource_type=2, resource_name=OFFSETS, configuration_keys=["cleanup.policy", "segment.bytes"]
        )
        (found,) = client.call(DescribeConfigsRequest(resources=[resource])).results
        assert {it.name: it.value for it in found.configs} == {
            "cleanup.policy": "compact",
            "segment.bytes": str(100 << 20),
        }


def test_many_searches_at_once_make_one_topic(broker: BrokerProcess) -> None:
    clients = [GroupClient(broker.port) for _ in range(5)]
    sent = [client.send(FindCoordinatorRequest(coordinator_keys=["g"])) for client in clients]
    for client, request in zip(clients, sent, strict=True):
        assert client.receive(request).coordinators[0].error_code == ErrorCode.NONE
        client.close()


def test_internal_topics_belong_to_the_broker(client: GroupClient) -> None:
    assert client.produce(OFFSETS, 0, batch([b"x"])).error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert client.resize(OFFSETS, 60) == ErrorCode.INVALID_PARTITIONS
    deleted = client.call(DeleteTopicsRequest(topics=[DeleteTopicState(name=OFFSETS)], timeout_ms=1_000))
    assert deleted.responses[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    made = client.call(CreateTopicsRequest(topics=[CreatableTopic(name="__transaction_state")], timeout_ms=1_000))
    assert made.topics[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    part = DeleteRecordsPartition(partition_index=0, offset=0)
    cut = client.call(DeleteRecordsRequest(topics=[DeleteRecordsTopic(name=OFFSETS, partitions=[part])]))
    assert cut.topics[0].partitions[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert client.fetch(OFFSETS).error_code == ErrorCode.NONE


def test_what_is_served_is_advertised(client: GroupClient) -> None:
    versions = {it.api_key: (it.min_version, it.max_version) for it in client.call(ApiVersionsRequest(), 3).api_keys}
    expected = {
        8: (2, 10), 9: (1, 10), 10: (0, 6), 11: (0, 9), 12: (0, 4), 13: (0, 5), 14: (0, 5), 15: (0, 6), 16: (0, 5),
        42: (0, 2), 47: (0, 0), 68: (0, 1), 69: (0, 1), 74: (0, 1), 75: (0, 0), 10002: (0, 0), 10003: (0, 0),
    }  # fmt: skip
    assert {key: versions.get(key) for key in expected} == expected


# -- the consumer protocol -----------------------------------------------------------------------------------------


def test_members_of_the_consumer_protocol_share_partitions_and_leave(client: GroupClient) -> None:
    topic = client.create("t", 4)
    first = client.beat("g", "a", 0, topics=["t"])
    assert (first.error_code, first.member_epoch, first.heartbeat_interval_ms) == (ErrorCode.NONE, 1, 5_000)
    assert owned(first) == {topic: [0, 1, 2, 3]}
    second = client.beat("g", "b", 0, topics=["t"])
    assert owned(second) == {}
    kept = owned(client.beat("g", "a", 1, owned=owned(first)))
    assert len(kept[topic]) == 2
    assert client.described("g").group_state == "Reconciling"
    client.beat("g", "a", 1, owned=kept)
    rest = owned(client.beat("g", "b", 2))
    assert sorted(kept[topic] + rest[topic]) == [0, 1, 2, 3]
    assert client.described("g").group_state == "Stable"
    assert client.beat("g", "b", -1).member_epoch == -1
    assert owned(client.beat("g", "a", 2)) == {topic: [0, 1, 2, 3]}
    client.beat("g", "a", -1)
    described = client.described("g")
    assert (described.group_state, list(described.members)) == ("Empty", [])


def test_a_member_that_says_to_own_nothing_yet_and_takes_all_shares_nothing_with_another_one(
    long_lived: BrokerProcess,
) -> None:
    """As a Java consumer does that learns its topic's name meanwhile: two of them would read the same records."""
    with another(long_lived) as client:
        client.ready("hasty")
        topic = client.create("hasty", 4)
        all_ = owned(client.beat("hasty", "a", 0, topics=["hasty"]))
        assert all_ == {topic: [0, 1, 2, 3]}
        client.beat("hasty", "b", 0, topics=["hasty"])
        kept = owned(client.beat("hasty", "a", 1, owned={}))
        assert len(kept[topic]) == 2
        second = client.beat("hasty", "b", 2, owned={})
        assert second.assignment is None or not owned(second)
        assert owned(client.beat("hasty", "a", 1, owned=all_)) == kept
        assert client.beat("hasty", "b", 2).assignment is None
        assert client.beat("hasty", "a", 1, owned=kept).member_epoch == 2
        rest = owned(client.beat("hasty", "b", 2))
        assert sorted(kept[topic] + rest[topic]) == [0, 1, 2, 3]


def test_a_member_that_is_unknown_or_late_is_told_so_in_words(client: GroupClient) -> None:
    client.create("t")
    nobody = client.beat("g", "a", 3)
    assert nobody.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert nobody.error_message
    client.beat("g", "a", 0, topics=["t"])
    assert client.beat("g", "a", 5).error_code == ErrorCode.FENCED_MEMBER_EPOCH
    assert client.beat("", "a", 0, topics=["t"]).error_code == ErrorCode.INVALID_REQUEST
    unnamed = client.beat("h", "", 0, topics=["t"], version=0)
    assert (unnamed.error_code, unnamed.member_epoch) == (ErrorCode.NONE, 1)
    assert unnamed.member_id


def test_a_new_topic_and_new_partitions_reach_the_members(client: GroupClient) -> None:
    first = client.create("log-a", 1)
    member = client.beat("g", "a", 0, subscribed_topic_regex="log-.*")
    assert owned(member) == {first: [0]}
    second = client.create("log-b", 2)
    client.create("other", 2)
    seen = {}

    def has(wanted: dict[object, list[int]]) -> bool:
        answer = client.beat("g", "a", seen.get("epoch", member.member_epoch))
        assert answer.error_code == ErrorCode.NONE, answer
        seen["epoch"] = answer.member_epoch
        return answer.assignment is not None and owned(answer) == wanted

    until(lambda: has({first: [0], second: [0, 1]}))
    assert client.resize("log-b", 4) == ErrorCode.NONE
    until(lambda: has({first: [0], second: [0, 1, 2, 3]}))


def test_a_silent_member_is_out(tmp_path: Path) -> None:
    quick = {
        "group.consumer.session.timeout.ms": 300,
        "group.consumer.min.session.timeout.ms": 100,
        "group.consumer.heartbeat.interval.ms": 100,
        "group.consumer.min.heartbeat.interval.ms": 50,
    }
    with running(tmp_path, **quick) as broker, another(broker) as client:
        client.ready()
        client.create("t")
        client.beat("g", "a", 0, topics=["t"])
        assert client.listed() == {"g": "Stable"}
        until(lambda: client.listed() == {"g": "Empty"})
        assert client.beat("g", "a", 1).error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_prepare_and_install_are_answered_by_the_coordinator(client: GroupClient) -> None:
    prepared = client.call(ConsumerGroupPrepareAssignmentRequest(group_id="g", member_id="a", member_epoch=1))
    installed = client.call(ConsumerGroupInstallAssignmentRequest(group_id="g", member_id="a", member_epoch=1))
    for answer in (prepared, installed):
        assert answer.error_code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.GROUP_ID_NOT_FOUND)
        assert answer.error_message


def test_a_client_side_assignor_is_named_and_gives_nobody_what_it_does_not_subscribe_to(client: GroupClient) -> None:
    for topic in ("foo", "bar"):
        client.create(topic)
    offer = Assignor(name="mine", minimum_version=0, maximum_version=1, metadata_version=1)
    until(lambda: client.beat("g", "a", 0, topics=["foo"], client_assignors=[offer]).should_compute_assignment)
    client.beat("g", "b", 0, topics=["foo", "bar"], client_assignors=[offer])
    assert client.described("g").assignor_name == "mine"

    def install(**shares: list[str]) -> Any:
        prepared = client.call(ConsumerGroupPrepareAssignmentRequest(group_id="g", member_id="a", member_epoch=0))
        assert prepared.assignor_name == "mine"
        ids = {topic.topic_name: topic.topic_id for topic in prepared.topics}
        members = [
            InstalledMember(
                member_id=name,
                partitions=[InstalledTopic(topic_id=ids[topic], partitions=[0]) for topic in topics],
                metadata_version=1,
            )
            for name, topics in shares.items()
        ]
        return client.call(
            ConsumerGroupInstallAssignmentRequest(
                group_id="g", member_id="a", member_epoch=0, group_epoch=prepared.group_epoch, members=members
            )
        )

    refused = install(a=["foo", "bar"], b=[])
    assert refused.error_code == ErrorCode.INVALID_ASSIGNMENT
    assert "member a does not subscribe to topic" in refused.error_message
    assert install(a=["foo"], b=["bar"]).error_code == ErrorCode.NONE


def test_an_empty_group_without_offsets_is_removed_and_one_with_offsets_is_kept(tmp_path: Path) -> None:
    quick = {"offsets.retention.check.interval.ms": 100}
    with running(tmp_path, **quick) as broker, another(broker) as client:
        client.ready()
        client.create("t")
        for group in ("bare", "kept"):
            client.beat(group, "a", 0, topics=["t"])
        assert client.commit("kept", {("t", 0): 0}, member="a", epoch=1) == [ErrorCode.NONE]
        for group in ("bare", "kept"):
            client.beat(group, "a", -1)
        until(lambda: client.listed() == {"kept": "Empty"})


def test_a_broker_may_do_without_the_consumer_protocol(tmp_path: Path) -> None:
    settings = {"group.coordinator.rebalance.protocols": "classic"}
    with running(tmp_path, **settings) as broker, another(broker) as client:
        client.ready()
        assert client.beat("g", "a", 0, topics=["t"]).error_code == ErrorCode.UNSUPPORTED_VERSION
        assert client.described("g").error_code == ErrorCode.UNSUPPORTED_VERSION


# -- the classic protocol ------------------------------------------------------------------------------------------


def test_members_of_the_classic_protocol_join_together_and_sync(long_lived: BrokerProcess) -> None:
    with another(long_lived) as one, another(long_lived) as two:
        one.ready()
        first = one.join("g")
        assert (first.error_code, first.generation_id, first.leader) == (ErrorCode.NONE, 1, first.member_id)
        synced = one.call(one.sync_request("g", first, {first.member_id: b"all"}))
        assert bytes(synced.assignment) == b"all"
        assert one.heartbeat("g", first) == ErrorCode.NONE
        wanted = two.call(two.join_request("g"), 9)
        assert wanted.error_code == ErrorCode.MEMBER_ID_REQUIRED
        joining = two.send(two.join_request("g", wanted.member_id, metadata=b"two"), 9)
        until(lambda: one.heartbeat("g", first) == ErrorCode.REBALANCE_IN_PROGRESS)
        leader = one.join("g", first.member_id)
        follower = two.receive(joining)
        assert leader.generation_id == follower.generation_id == 2
        assert {it.member_id: bytes(it.metadata) for it in leader.members} == {
            first.member_id: b"m",
            follower.member_id: b"two",
        }
        assert not follower.members
        waiting = two.send(two.sync_request("g", follower), 5)
        one.call(one.sync_request("g", leader, {leader.member_id: b"1", follower.member_id: b"2"}))
        assert bytes(two.receive(waiting).assignment) == b"2"
        described = one.described_classic("g")
        assert (described.group_state, described.protocol_type, described.protocol_data) == (
            "Stable",
            "consumer",
            "range",
        )
        assert {bytes(it.member_assignment) for it in described.members} == {b"1", b"2"}
        assert {it.client_host for it in described.members} == {"/127.0.0.1"}
        leave = LeaveGroupRequest(
            group_id="g", members=[MemberIdentity(member_id=it.member_id) for it in leader.members]
        )
        assert [it.error_code for it in one.call(leave).members] == [ErrorCode.NONE] * 2
        assert one.listed()["g"] == "Empty"


@pytest.mark.parametrize("version", range(10))
def test_every_version_of_the_classic_join_is_served(shared: GroupClient, version: int) -> None:
    group = f"joined {version}"
    joined = shared.join(group, version=version)
    assert joined.error_code == ErrorCode.NONE
    sync = shared.sync_request(group, joined, {joined.member_id: b"all"})
    assert bytes(shared.call(sync, min(5, version)).assignment) == b"all"
    assert shared.heartbeat(group, joined, min(4, version)) == ErrorCode.NONE
    leave = LeaveGroupRequest(
        group_id=group, member_id=joined.member_id, members=[MemberIdentity(member_id=joined.member_id)]
    )
    assert shared.call(leave, min(5, version)).error_code == ErrorCode.NONE


def test_a_join_whose_connection_is_closed_holds_nobody_up(tmp_path: Path) -> None:
    settings = {"group.initial.rebalance.delay.ms": 3_000}
    with running(tmp_path, **settings) as broker, another(broker) as gone, another(broker) as stays:
        stays.ready()
        first = gone.call(gone.join_request("g"), 9)
        gone.send(gone.join_request("g", first.member_id), 9)
        until(lambda: parked(broker) == 1)
        gone.close()
        until(lambda: parked(broker) == 0)
        assert stays.join("g").error_code == ErrorCode.NONE


def test_a_stop_answers_those_who_are_parked(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, **{"group.initial.rebalance.delay.ms": 60_000}).start()
    with another(broker) as client:
        client.ready()
        wanted = client.call(client.join_request("g"), 9)
        joining = client.send(client.join_request("g", wanted.member_id), 9)
        until(lambda: parked(broker) == 1)
        broker.signal(signal.SIGTERM)
        assert client.receive(joining).error_code == ErrorCode.NOT_COORDINATOR
    assert broker.wait() == 0


def parked(broker: BrokerProcess) -> float:
    return broker.metrics()["kafka_server_group_coordinator_metrics_parked_requests"]


# -- offsets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(2, 11))
def test_every_version_commits_offsets(shared: GroupClient, version: int) -> None:
    group, one, other = f"commits {version}", f"one-{version}", f"other-{version}"
    ids = {one: shared.create(one, 2), other: shared.create(other, 1)}
    given = {(one, 0): 5, (one, 1): 6, (other, 0): 7}
    assert shared.commit(group, given, version=version, topic_ids=ids, metadata="note") == [ErrorCode.NONE] * 3
    assert shared.committed(group) == given


@pytest.mark.parametrize("version", range(1, 11))
def test_every_version_fetches_offsets(shared: GroupClient, version: int) -> None:
    group, name = f"fetches {version}", f"fetched-{version}"
    topic = shared.create(name, 3)
    shared.commit(group, {(name, 0): 5, (name, 1): 6}, metadata="note")
    answer = shared.fetched(group, {topic if version >= 10 else name: [0, 1, 2]}, version=version)
    assert answer.error_code == ErrorCode.NONE
    (found,) = answer.topics
    assert [(it.partition_index, it.committed_offset, it.metadata) for it in found.partitions] == [
        (0, 5, "note"),
        (1, 6, "note"),
        (2, -1, ""),
    ]


def test_a_commit_of_a_stale_member_is_refused(client: GroupClient) -> None:
    client.create("t")
    client.beat("g", "a", 0, topics=["t"])
    assert client.commit("g", {("t", 0): 1}, member="a", epoch=1) == [ErrorCode.NONE]
    assert client.commit("g", {("t", 0): 2}, member="a", epoch=0) == [ErrorCode.STALE_MEMBER_EPOCH]
    assert client.commit("g", {("t", 0): 2}, member="b", epoch=1) == [ErrorCode.UNKNOWN_MEMBER_ID]
    assert client.fetched("g", member_id="a", member_epoch=0).error_code == ErrorCode.STALE_MEMBER_EPOCH
    assert client.committed("g") == {("t", 0): 1}
    assert client.commit("h", {("t", 0): 2}, metadata="x" * 5_000) == [ErrorCode.OFFSET_METADATA_TOO_LARGE]


def test_offsets_and_groups_are_deleted(client: GroupClient) -> None:
    client.create("t", 2)
    client.commit("g", {("t", 0): 1, ("t", 1): 2})
    topic = OffsetDeleteRequestTopic(name="t", partitions=[OffsetDeleteRequestPartition(partition_index=0)])
    answer = client.call(OffsetDeleteRequest(group_id="g", topics=[topic]))
    assert answer.error_code == answer.topics[0].partitions[0].error_code == ErrorCode.NONE
    assert client.committed("g") == {("t", 1): 2}
    client.beat("busy", "a", 0, topics=["t"])
    results = client.call(DeleteGroupsRequest(groups_names=["g", "busy", "none"])).results
    assert {it.group_id: it.error_code for it in results} == {
        "g": ErrorCode.NONE,
        "busy": ErrorCode.NON_EMPTY_GROUP,
        "none": ErrorCode.GROUP_ID_NOT_FOUND,
    }
    assert client.committed("g") == {}


def test_a_group_that_is_not_there_is_dead_to_who_knows_no_better(client: GroupClient) -> None:
    client.ready("g")
    for version in range(7):
        (found,) = client.call(DescribeGroupsRequest(groups=["nobodys"]), version).groups
        error = ErrorCode.GROUP_ID_NOT_FOUND if version == 6 else ErrorCode.NONE
        assert (found.group_state, found.error_code) == ("Dead", error)


def test_groups_are_listed_by_state_and_type(client: GroupClient) -> None:
    client.create("t")
    client.beat("new", "a", 0, topics=["t"])
    client.commit("old", {("t", 0): 1})
    assert client.listed() == {"new": "Stable", "old": "Empty"}
    assert client.listed(states=["stable"]) == {"new": "Stable"}
    assert client.listed(types=["Classic"]) == {"old": "Empty"}
    assert client.listed(states=["Empty"], types=["consumer"]) == {}
    assert client.listed(states=["nonsense"]) == {}
    for version in range(6):
        assert set(client.listed(version=version)) == {"new", "old"}
    assert client.described("old").error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert client.described_classic("none").error_code == ErrorCode.GROUP_ID_NOT_FOUND


# -- configs, metadata ---------------------------------------------------------------------------------------------


def alter(client: GroupClient, group: str, **configs: str | None) -> ErrorCode:
    changes = [
        AlterableConfig(name=name.replace("_", "."), config_operation=0 if value is not None else 1, value=value)
        for name, value in configs.items()
    ]
    resource = AlterConfigsResource(resource_type=GROUP, resource_name=group, configs=changes)
    (answer,) = client.call(IncrementalAlterConfigsRequest(resources=[resource])).responses
    assert bool(answer.error_message) == bool(answer.error_code)
    return ErrorCode(answer.error_code)


def configs_of(client: GroupClient, group: str) -> dict[str, tuple[str, int]]:
    resource = DescribeConfigsResource(resource_type=GROUP, resource_name=group, configuration_keys=None)
    (answer,) = client.call(DescribeConfigsRequest(resources=[resource], include_synonyms=True)).results
    assert answer.error_code == ErrorCode.NONE
    return {it.name: (it.value, it.config_source) for it in answer.configs}


def test_a_group_has_configs_of_its_own_within_the_brokers_bounds(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    with another(broker) as client:
        client.ready()
        client.create("t")
        assert configs_of(client, "g") == {
            "consumer.session.timeout.ms": ("45000", 5),
            "consumer.heartbeat.interval.ms": ("5000", 5),
            "max.shares.per.partition": ("16", 5),
        }
        assert alter(client, "g", consumer_heartbeat_interval_ms="7000") == ErrorCode.NONE
        assert configs_of(client, "g")["consumer.heartbeat.interval.ms"] == ("7000", 8)
        assert client.beat("g", "a", 0, topics=["t"]).heartbeat_interval_ms == 7_000
        assert client.beat("h", "a", 0, topics=["t"]).heartbeat_interval_ms == 5_000
        assert alter(client, "g", consumer_session_timeout_ms="1000") == ErrorCode.INVALID_CONFIG
        assert alter(client, "g", consumer_session_timeout_ms="soon") == ErrorCode.INVALID_CONFIG
        assert alter(client, "g", retention_ms="1000") == ErrorCode.INVALID_CONFIG
        assert alter(client, "", consumer_session_timeout_ms="50000") == ErrorCode.INVALID_REQUEST
        assert alter(client, "a/../b ü", consumer_session_timeout_ms="50000") == ErrorCode.NONE
        replaced = Replaced(resource_type=GROUP, resource_name="g", configs=[])
        answer = client.call(AlterConfigsRequest(resources=[replaced])).responses[0]
        assert answer.error_code == ErrorCode.INVALID_REQUEST
    broker.kill()
    with running(tmp_path) as again, another(again) as client:
        client.ready()
        assert client.beat("g", "a", 1).heartbeat_interval_ms == 7_000
        listed = client.call(ListConfigResourcesRequest(resource_types=[GROUP])).config_resources
        assert [(it.resource_name, it.resource_type) for it in listed] == [("a/../b ü", GROUP), ("g", GROUP)]
        assert alter(client, "g", consumer_heartbeat_interval_ms=None) == ErrorCode.NONE
        assert client.beat("g", "a", 1).heartbeat_interval_ms == 5_000
        listed = client.call(ListConfigResourcesRequest(resource_types=[2, 4, GROUP])).config_resources
        assert {(it.resource_name, it.resource_type) for it in listed} == {
            (OFFSETS, 2), ("t", 2), ("1", 4), ("a/../b ü", GROUP)
        }  # fmt: skip
        assert client.call(ListConfigResourcesRequest(), 0).config_resources == []
        assert client.call(ListConfigResourcesRequest(resource_types=[9])).error_code == ErrorCode.UNSUPPORTED_VERSION


def test_topics_are_described_page_by_page(client: GroupClient) -> None:
    for name, count in (("a", 3), ("b", 5), ("c", 1)):
        client.create(name, count)
    pages: list[list[tuple[str, list[int]]]] = []
    cursor: Cursor | None = None
    topics = [TopicRequest(name=name) for name in ("c", "b", "missing", "a")]
    while True:
        asked = DescribeTopicPartitionsRequest(topics=topics, response_partition_limit=4, cursor=cursor)
        answer = client.call(asked)
        pages.append([(it.name, [part.partition_index for part in it.partitions]) for it in answer.topics])
        cursor = answer.next_cursor
        if cursor is None:
            break
    assert pages == [[("a", [0, 1, 2]), ("b", [0])], [("b", [1, 2, 3, 4])], [("c", [0]), ("missing", [])]]
    everything = client.call(DescribeTopicPartitionsRequest(topics=[]))
    assert {it.name: it.is_internal for it in everything.topics} == {OFFSETS: True, "a": False, "b": False, "c": False}


def test_the_metrics_of_the_proposal_are_there(client: GroupClient, broker: BrokerProcess) -> None:
    client.create("t")
    client.beat("g", "a", 0, topics=["t"])
    found = broker.metrics()
    prefix = "kafka_server_group_coordinator_metrics_"
    assert found[f'{prefix}group_count{{protocol="consumer"}}'] == 1
    assert found[f'{prefix}group_count{{protocol="classic"}}'] == 0
    assert found[f'{prefix}consumer_group_count{{state="stable"}}'] == 1
    assert found[f'{prefix}partition_count{{state="active"}}'] == 50
    assert found[f"{prefix}consumer_group_rebalance_count"] == 1
    for name in ("consumer_group_rebalance", "offset_commit", "offset_expiration", "offset_deletion"):
        assert found[f"{prefix}{name}_rate"] == 0, "nothing since the first read"
        assert f"{prefix}{name}_count" in found
    assert found[f"{prefix}event_queue_size"] == 0
    assert 0 <= found[f"{prefix}thread_idle_ratio_avg"] <= 1
    assert found[f"{prefix}partition_load_time_max_seconds"] >= found[f"{prefix}partition_load_time_avg_seconds"]


# -- the end of a broker, and its next life ------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_broker_that_is_killed_comes_back_with_its_groups(tmp_path: Path, durability: str) -> None:
    broker = BrokerProcess(tmp_path, durability=durability, **{"group.initial.rebalance.delay.ms": 0}).start()
    with another(broker) as client:
        client.ready()
        topic = client.create("t", 4)
        member = client.beat("new", "a", 0, topics=["t"])
        client.commit("new", {("t", 0): 10}, member="a", epoch=member.member_epoch)
        joined = client.join("old")
        client.call(client.sync_request("old", joined, {joined.member_id: b"mine"}))
        for offset in range(20):
            client.commit("none", {("t", number): offset for number in range(4)})
    broker.kill()
    broker.start()
    with another(broker) as client:
        for group in ("new", "old", "none"):
            client.ready(group)
        again = client.beat("new", "a", member.member_epoch, owned=owned(member))
        assert (again.error_code, again.member_epoch) == (ErrorCode.NONE, member.member_epoch)
        assert client.described("new").members[0].assignment.topic_partitions[0].topic_id == topic
        assert client.heartbeat("old", joined) == ErrorCode.NONE
        assert bytes(client.described_classic("old").members[0].member_assignment) == b"mine"
        assert client.committed("new") == {("t", 0): 10}
        assert client.committed("none") == {("t", number): 19 for number in range(4)}
        assert client.commit("new", {("t", 1): 1}, member="a", epoch=member.member_epoch) == [ErrorCode.NONE]
    assert broker.stop() == 0


def test_a_full_disk_refuses_commits_and_nothing_is_lost(tmp_path: Path) -> None:
    settings = {"offsets.topic.num.partitions": 1}
    with running(tmp_path, durability="fsync", **settings) as broker, another(broker) as client:
        client.ready()
        client.create("t")
        epoch = client.beat("with members", "a", 0, topics=["t"]).member_epoch
        assert client.commit("g", {("t", 0): 1}) == [ErrorCode.NONE]
        limit = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (60, limit[1]))
        assert client.commit("g", {("t", 0): 2}) == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
        broker.until_said("error", "append refused by the disk")
        until(lambda: client.fetched("g").error_code == ErrorCode.NONE)
        assert client.committed("g") == {("t", 0): 1}
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, limit)
        until(lambda: client.commit("g", {("t", 0): 3}) == [ErrorCode.NONE])
        assert client.committed("g") == {("t", 0): 3}
        with another(broker) as newer:
            assert newer.beat("with members", "a", epoch).member_epoch == epoch
        # What comes on an older connection may be older than what was said to the coordinator that there was before.
        with pytest.raises(ConnectionError):
            client.beat("with members", "a", epoch)


def test_compaction_while_it_runs_and_before_it_loads_changes_nothing(tmp_path: Path) -> None:
    settings = {
        "offsets.topic.num.partitions": 1,
        "offsets.topic.segment.bytes": 4_000,
        "log.retention.check.interval.ms": 100,
        "log.cleaner.backoff.ms": 100,
        "log.cleaner.min.cleanable.ratio": 0.01,
        "log.cleaner.delete.retention.ms": 0,
    }
    broker = BrokerProcess(tmp_path, durability="os", **settings).start()
    expected: dict[tuple[str, int], int] = {}
    for life in range(3):
        with another(broker) as client:
            client.ready()
            if not life:
                client.create("t", 8)
                epoch = client.beat("g", "a", 0, topics=["t"]).member_epoch
            else:
                assert client.committed("many") == expected
            for offset in range(life * 100, life * 100 + 100):
                expected = {("t", number): offset for number in range(8)}
                assert client.commit("many", expected) == [ErrorCode.NONE] * 8
                assert client.beat("g", "a", epoch).error_code == ErrorCode.NONE
            client.commit("gone", {("t", 0): 1})
            client.call(DeleteGroupsRequest(groups_names=["gone"]))
        broker.until_said("info", "compacted")
        broker.kill()
        broker.start()
    with another(broker) as client:
        client.ready()
        assert client.committed("many") == expected
        assert client.committed("gone") == {}
        assert client.beat("g", "a", epoch).error_code == ErrorCode.NONE
    assert broker.stop() == 0
    assert log_size(tmp_path / f"{OFFSETS}-0") < 140_000


def test_damage_below_the_recovery_point_stops_one_coordinator_alone(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, **{"offsets.topic.num.partitions": 2}).start()
    with another(broker) as client:
        client.ready()
        client.create("t")
        assert client.commit("a", {("t", 0): 1}) == client.commit("b", {("t", 0): 1}) == [ErrorCode.NONE]
    assert broker.stop() == 0
    path = tmp_path / f"{OFFSETS}-1" / f"{0:020d}.log"  # hashCode("a") is 97
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    broker.start()
    with another(broker) as client:
        client.ready("b")
        assert client.committed("b") == {("t", 0): 1}
        assert client.fetched("a").error_code in (
            ErrorCode.COORDINATOR_NOT_AVAILABLE,
            ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        )
        said = broker.until_said("error", "coordinator stopped: log not read")
        assert "checksum" in said[0]["reason"]
        assert f"restore the segment of {said[0]['partition']} with this offset" in said[0]["reason"]
    broker.kill()


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.01, 0.02, 0.04])
def test_a_client_that_hangs_up_while_the_coordinators_topic_is_created_leaves_it_to_be_loaded(
    tmp_path: Path, delay_s: float
) -> None:
    """The first FindCoordinator creates the topic: its client may be gone before its shards are loaded."""
    with running(tmp_path / "data", durability="fsync", **{"offsets.topic.num.partitions": "50"}) as broker:
        find = encode_request(FindCoordinatorRequest(coordinator_keys=["g"]), 4, 1, "hasty")
        with socket.create_connection(("127.0.0.1", broker.port)) as hasty:
            hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            hasty.sendall(b"".join(bytes(part) for part in find))
            time.sleep(delay_s)
        with GroupClient(broker.port) as client:
            until = time.monotonic() + 10
            while client.call(ListGroupsRequest(), 4).error_code != ErrorCode.NONE:
                assert time.monotonic() < until, "no client is ever answered"
                client.call(FindCoordinatorRequest(coordinator_keys=["g"]), 4)
                time.sleep(0.05)
