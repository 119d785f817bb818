"""Long requests of some APIs take short steps; `python -m tests.fuzz.arrays` sends the longest ones of all APIs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple
from uuid import UUID

import pytest

from anabranch.protocol.messages.create_partitions import (
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from anabranch.protocol.messages.create_topics import CreatableReplicaAssignment, CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup
from tests.fuzz.arrays import DEEP, DIFFERING, PARTITIONS, SAME, TIMEOUT_S, TOPIC, Place, begin, send
from tests.support.broker import BrokerProcess, running
from tests.support.group_client import GroupClient
from tests.support.groups import assigned, assignment, subscription
from tests.support.steps import in_short_steps
from tests.support.thorough import thorough
from tests.support.wire import WireClient, batch

COUNT = 40_000


class Rig(NamedTuple):
    broker: BrokerProcess
    topic_id: UUID


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(tmp_path_factory.mktemp("largest")) as broker:
        yield Rig(broker, begin(broker))


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        (Place(1, 17, ("topics", "partitions")), DIFFERING),
        (Place(9, 10, ("groups",)), DIFFERING),
        (Place(9, 7, ("topics",)), DEEP),
        (Place(27, 1, ("markers",)), SAME),
        (Place(19, 7, ("topics", "configs")), DIFFERING),
        (Place(34, 2, ("dirs",)), DIFFERING),
        (Place(34, 2, ("dirs", "topics", "partitions")), SAME),
        (Place(61, 0, ("topics",)), DEEP),
        (Place(61, 0, ("topics", "partition_indexes")), DIFFERING),
    ],
    ids=str,
)
def test_a_request_that_names_much_takes_short_steps(rig: Rig, place: Place, kind: str) -> None:
    assert send(rig.broker, place, kind, COUNT, rig.topic_id) > 0


@pytest.mark.parametrize(
    ("place", "elements"),
    [
        (Place(1, 4, ("topics", "partitions")), 1 << 30),
        (Place(9, 7, ("topics",)), 1 << 30),
        (Place(14, 5, ("assignments",)), 1 << 30),
        (Place(27, 1, ("markers", "topics")), 1 << 30),
        (Place(27, 1, ("markers", "topics", "partition_indexes")), 1 << 30),
        (Place(35, 4, ("topics",)), 1 << 30),
        (Place(49, 1, ("entries",)), 1 << 30),
        (Place(50, 0, ("users",)), 1 << 30),
        (Place(51, 0, ("upsertions",)), 1 << 30),
        (Place(68, 1, ("subscribed_topic_names",)), 1 << 30),
        (Place(68, 1, ("client_assignors",)), 150_000),
        (Place(10003, 0, ("members",)), 150_000),
    ],
    ids=str,
)
def test_the_longest_request_takes_short_steps(rig: Rig, place: Place, elements: int) -> None:
    assert send(rig.broker, place, DIFFERING, elements, rig.topic_id) > 0


def test_all_that_a_group_has_committed_is_answered_in_short_steps(rig: Rig) -> None:
    parts = [OffsetCommitRequestPartition(partition_index=it, committed_offset=it) for it in range(PARTITIONS)]
    with WireClient(rig.broker.port, TIMEOUT_S) as client:
        topics = [f"many-{number}" for number in range(6)]
        for name in topics:
            client.create(name, PARTITIONS)
            asked = OffsetCommitRequest(group_id="much", topics=[OffsetCommitRequestTopic(name=name, partitions=parts)])
            assert {it.error_code for it in client.call(asked, 8).topics[0].partitions} == {0}
        for version in (5, 10):
            one, several = {"group_id": "much", "topics": None}, [OffsetFetchRequestGroup(group_id="much", topics=None)]
            asked = OffsetFetchRequest(groups=several) if version >= 8 else OffsetFetchRequest(**one)
            answer = in_short_steps(rig.broker, lambda: client.call(asked, version))  # noqa: B023
            found = answer.groups[0].topics if version >= 8 else answer.topics
            assert len(found) == len(topics)
            for topic in found:
                assert [it.committed_offset for it in topic.partitions] == [*range(PARTITIONS)]
            if version < 10:
                assert [topic.name for topic in found] == topics
            else:
                assert len({topic.topic_id for topic in found}) == len(topics)
        client.delete(topics[3])
        answer = client.call(OffsetFetchRequest(groups=several), 8).groups[0]
        assert [topic.name for topic in answer.topics] == [*topics[:3], *topics[4:]]


def test_a_topic_is_described_once_however_often_its_id_is_named(rig: Rig) -> None:
    with WireClient(rig.broker.port, TIMEOUT_S) as client:
        for count in (100, 3_000):
            named = [MetadataRequestTopic(name=f"x{it}", topic_id=rig.topic_id) for it in range(count)]
            answer = client.call(MetadataRequest(topics=named, allow_auto_topic_creation=True))
            assert [(it.name, len(it.partitions)) for it in answer.topics] == [(TOPIC, PARTITIONS)]
            assert client.metadata("x0").error_code != 0, "nothing is created by the name beside an id"


def test_a_partition_that_a_fetch_names_often_wakes_it_once(rig: Rig) -> None:
    with WireClient(rig.broker.port, TIMEOUT_S) as reader, WireClient(rig.broker.port, TIMEOUT_S) as producer:
        name = "named-often"
        topic_id = producer.create(name)
        asked = reader.fetch_request(topic_id, {0: 0}, wait_ms=60_000)
        asked.topics[0].partitions = asked.topics[0].partitions * COUNT

        def woken() -> int:
            sent = reader.send(asked, 17)
            time.sleep(0.5)  # Until it waits.
            producer.produce(name, 0, batch([b"x"]))
            (topic,) = reader.receive(sent).responses
            return len(topic.partitions)

        assert in_short_steps(rig.broker, woken) == 1


def test_assignments_of_many_partitions_are_read_in_short_steps(rig: Rig) -> None:
    given = [CreatableReplicaAssignment(partition_index=it, broker_ids=[1]) for it in range(60_000)]
    fresh = CreatableTopic(name="assigned", num_partitions=-1, replication_factor=-1, assignments=given)
    create = CreateTopicsRequest(topics=[fresh], timeout_ms=60_000, validate_only=True)
    more = CreatePartitionsTopic(
        name=TOPIC,
        count=PARTITIONS + 60_000,
        assignments=[CreatePartitionsAssignment(broker_ids=[1]) for _ in range(60_000)],
    )
    resize = CreatePartitionsRequest(topics=[more], timeout_ms=60_000, validate_only=True)
    with WireClient(rig.broker.port, TIMEOUT_S) as client:
        (created,) = in_short_steps(rig.broker, lambda: client.call(create)).topics
        assert (created.error_code, created.num_partitions) == (0, 60_000), created
        (resized,) = in_short_steps(rig.broker, lambda: client.call(resize)).results
        assert resized.error_code == 0, resized


def test_a_group_of_many_members_is_described_in_short_steps(rig: Rig) -> None:
    members = 60
    with GroupClient(rig.broker.port, 60) as client:
        client.ready("host")
        for number in range(members):
            joined = client.beat("host", f"m{number}", 0, topics=["nowhere"])
            assert joined.error_code == 0, joined
        described = in_short_steps(rig.broker, lambda: client.described("host"))
        assert sorted(it.member_id for it in described.members) == sorted(f"m{number}" for number in range(members))
        assert [it.member_id for it in described.members] == sorted(it.member_id for it in described.members)
        assert {tuple(it.subscribed_topic_names) for it in described.members} == {("nowhere",)}


def test_a_large_classic_group_is_joined_and_assigned_in_short_steps(rig: Rig) -> None:
    members, connections = thorough(800, 500), 100
    groups = (f"large-{number}" for number in count())

    def join_and_sync() -> list[str]:
        group = next(groups)
        with contextlib.ExitStack() as opened:
            clients = [opened.enter_context(GroupClient(rig.broker.port, TIMEOUT_S)) for _ in range(connections)]
            times = {"session_timeout_ms": 120_000, "rebalance_timeout_ms": 120_000}
            asked = clients[0].join_request(group, metadata=subscription(TOPIC), **times)
            sent = [(client, client.send(asked, 3)) for client in clients for _ in range(members // connections)]
            joined = [(client, client.receive(one)) for client, one in sent]
            assert {(it.error_code, it.generation_id) for _, it in joined} == {(0, 1)}
            ((led_by, leader),) = [(client, it) for client, it in joined if it.member_id == it.leader]
            given = {it.member_id: assignment(f"{TOPIC}-{number}") for number, (_, it) in enumerate(joined)}
            followers = [(client, it) for client, it in joined if it is not leader]
            sent = [(client, client.send(client.sync_request(group, it), 3)) for client, it in followers]
            sent.append((led_by, led_by.send(led_by.sync_request(group, leader, given), 3)))
            return [assigned(client.receive(one).assignment) for client, one in sent]

    with GroupClient(rig.broker.port, TIMEOUT_S) as client:
        for _ in range(3):
            client.ready("large-0")
    owned = in_short_steps(rig.broker, join_and_sync)
    assert sorted(owned) == sorted(f"{TOPIC}-{number}" for number in range(members))
