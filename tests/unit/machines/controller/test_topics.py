"""Making and deleting topics: names, counts, placements, configs; and no step that a crash could leave half done."""

from __future__ import annotations

from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import PARTITIONS_PER_TOPIC_MAX
from anabranch.machines.controller import topics, views
from anabranch.machines.controller.effects import Accepted, Refused, Validated, WaitForResize
from anabranch.machines.controller.resize import ResizeTopic, decide_resize_topic
from tests.unit.machines.controller.transcript import TOPIC_ID, Cluster


def test_a_topic_has_its_configs_before_it_is_there() -> None:
    cluster = Cluster()
    accepted = cluster.create(2, configs={"retention.ms": "1000", "cleanup.policy": None})
    assert accepted == Accepted("t", TOPIC_ID)
    assert cluster.text() == (
        'write /config/topics/t {"version":1,"config":{"retention.ms":"1000"}}\n'
        "write t: layouts 2, partitions 2\n"
        "write t-0: epoch 0 at 1\n"
        "write t-1: epoch 0 at 1\n"
        "  tell 1: count 2, 0:0 1:0\n"
        "  publish t"
    )
    assert not views.settled(cluster.state, accepted)
    cluster.run()
    assert views.settled(cluster.state, accepted)


def test_a_topic_is_hidden_then_its_replicas_go_then_its_nodes_and_the_mark_last() -> None:
    cluster = Cluster(partitions=1)
    accepted = cluster.delete()
    assert cluster.text() == (
        'write /admin/delete_topics/t {"version":1,"topic_id":"AAAAAAAAAAAAAAAAAAAAAQ"}\n  publish t\n  stop 1: 0:0'
    )
    assert views.topic_view(cluster.state, "t") is None
    assert isinstance(accepted, Accepted)
    assert not views.settled(cluster.state, accepted)
    cluster.run()
    assert cluster.text() == (
        "delete /brokers/topics/t/partitions/0/state\n"
        "delete /brokers/topics/t/partitions/0\n"
        "delete /brokers/topics/t/partitions\n"
        "delete /brokers/topics/t\n"
        "delete /config/topics/t\n"
        "delete /admin/delete_topics/t"
    )
    assert views.settled(cluster.state, accepted)


def test_deleting_twice_is_deleting_once() -> None:
    cluster = Cluster(partitions=1)
    first, second = cluster.delete(), cluster.delete()
    assert first == second
    cluster.run()
    assert cluster.delete() == topics.unknown_topic("t")


def test_a_topic_is_deleted_in_the_middle_of_a_resize() -> None:
    cluster = Cluster(partitions=2, brokers=2)
    cluster.resize(4)
    cluster.answer()
    cluster.delete()
    cluster.run()
    assert cluster.state.topics == {}
    assert cluster.state.partitions == {}


def test_a_replica_that_is_still_there_keeps_the_topic_from_being_gone() -> None:
    cluster = Cluster(partitions=2, brokers=2)
    cluster.delete()
    cluster.text()
    cluster.answer()
    assert cluster.text() == ""
    cluster.answer(ErrorCode.KAFKA_STORAGE_ERROR)
    assert cluster.text() == "timer ('retry', 't')"
    reply = cluster.create(1)
    assert isinstance(reply, WaitForResize)
    assert reply.code is ErrorCode.TOPIC_ALREADY_EXISTS


def test_by_id() -> None:
    cluster = Cluster(partitions=1)
    missing = topics.DeleteTopic(topic_id=UUID(int=9))
    reply = cluster.submit(lambda state: topics.decide_delete_topic(state, missing))
    assert isinstance(reply, Refused)
    assert reply.code is ErrorCode.UNKNOWN_TOPIC_ID
    known = topics.DeleteTopic(topic_id=TOPIC_ID)
    assert isinstance(cluster.submit(lambda state: topics.decide_delete_topic(state, known)), Accepted)


@pytest.mark.parametrize("name", ["", ".", "..", "a" * 250, "a b", "a/b", "é", "a\n", "a:b"])
def test_a_name_that_is_not_legal_is_refused(name: str) -> None:
    reply = Cluster().create(1, name=name)
    assert isinstance(reply, Refused)
    assert reply.code is ErrorCode.INVALID_TOPIC_EXCEPTION
    assert "is not valid" in reply.message


@pytest.mark.parametrize("name", ["a", "a" * 249, "A-z_0.9", "...", "__x"])
def test_a_legal_name_is_taken(name: str) -> None:
    assert isinstance(Cluster().create(1, name=name), Accepted)


def test_names_that_differ_in_dots_and_underscores_alone_collide() -> None:
    cluster = Cluster()
    cluster.create(1, name="a.b_c")
    reply = cluster.create(1, name="a_b.c")
    assert isinstance(reply, Refused)
    assert reply.code is ErrorCode.INVALID_TOPIC_EXCEPTION
    assert "collides with the existing topic 'a.b_c'" in reply.message
    reply = cluster.create(1, name="a.b_c")
    assert isinstance(reply, Refused)
    assert reply.code is ErrorCode.TOPIC_ALREADY_EXISTS
    cluster.submit(lambda state: topics.decide_delete_topic(state, topics.DeleteTopic("a.b_c")))
    cluster.run()
    assert isinstance(cluster.create(1, name="a_b.c"), Accepted), "the name is free again"


def test_no_more_partitions_are_made_than_the_brokers_may_hold() -> None:
    cluster = Cluster(brokers=2)

    def create(name: str, count: int) -> object:
        command = topics.CreateTopic(name, UUID(int=len(name)), count)
        return cluster.submit(lambda state: topics.decide_create_topic(state, command, per_broker_max=5))

    def resize(name: str, count: int) -> object:
        command = ResizeTopic(name, count)
        return cluster.submit(lambda state: decide_resize_topic(state, command, 5))

    assert isinstance(create("a", 6), Accepted)
    refused = create("aa", 5)
    assert isinstance(refused, Refused) and refused.code is ErrorCode.POLICY_VIOLATION
    assert "hold 6 partitions, and max.partitions.per.broker is 5: 5 more" in refused.message
    cluster.run()
    assert isinstance(create("aaa", 2), Accepted)
    assert isinstance(resize("a", 8), Accepted), "partitions of a running resize count"
    refused = create("aaaa", 1)
    assert isinstance(refused, Refused) and refused.code is ErrorCode.POLICY_VIOLATION
    cluster.run()
    assert cluster.state.partition_count == 10
    refused = resize("aaa", 3)
    assert isinstance(refused, Refused) and refused.code is ErrorCode.POLICY_VIOLATION
    assert isinstance(resize("a", 6), Accepted), "a topic may always shrink"
    cluster.run()
    assert isinstance(resize("a", 8), Accepted), "and what retires opens again"
    cluster.run()
    cluster.submit(lambda state: topics.decide_delete_topic(state, topics.DeleteTopic("a")))
    cluster.run()
    assert cluster.state.partition_count == 2
    assert isinstance(create("aaaaa", 8), Accepted)


@pytest.mark.parametrize(
    ("partitions", "factor", "code", "sentence"),
    [
        (0, 1, ErrorCode.INVALID_PARTITIONS, "1 to 100000 partitions, not 0"),
        (-2, 1, ErrorCode.INVALID_PARTITIONS, "not -2"),
        (PARTITIONS_PER_TOPIC_MAX + 1, 1, ErrorCode.INVALID_PARTITIONS, "not 100001"),
        (1, 0, ErrorCode.INVALID_REPLICATION_FACTOR, "at least 1"),
        (1, -2, ErrorCode.INVALID_REPLICATION_FACTOR, "at least 1"),
        (1, 3, ErrorCode.INVALID_REPLICATION_FACTOR, "3 is larger than the number of live brokers, 2"),
        (1, 2, ErrorCode.INVALID_REPLICATION_FACTOR, "2 is not supported"),
    ],
)
def test_counts_that_cannot_be_are_refused(partitions: int, factor: int, code: ErrorCode, sentence: str) -> None:
    reply = Cluster(brokers=2).create(partitions, replication_factor=factor)
    assert isinstance(reply, Refused)
    assert reply.code is code
    assert sentence in reply.message


def test_no_partition_count_is_the_brokers_default() -> None:
    cluster = Cluster()
    command = topics.CreateTopic("t", TOPIC_ID)
    cluster.submit(lambda state: topics.decide_create_topic(state, command, default_count=3))
    assert len(cluster.state.topics["t"].partitions) == 3


def test_without_a_broker_there_is_no_place() -> None:
    reply = Cluster(brokers=0).create(1)
    assert isinstance(reply, Refused)
    assert reply.code is ErrorCode.INVALID_REPLICATION_FACTOR


def test_the_caller_may_place_the_partitions() -> None:
    cluster = Cluster(brokers=2)
    assert isinstance(cluster.create(-1, assignments={1: [1], 0: [2]}), Accepted)
    assert cluster.state.topics["t"].partitions == {0: (2,), 1: (1,)}


@pytest.mark.parametrize(
    ("count", "assignments", "code"),
    [
        (2, {0: [1], 1: [1]}, ErrorCode.INVALID_REQUEST),
        (-1, {0: [1], 2: [1]}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (-1, {1: [1]}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (-1, {0: [1], 1: [1, 1]}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (-1, {0: [3]}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (-1, {0: [1, 2]}, ErrorCode.INVALID_REPLICATION_FACTOR),
    ],
)
def test_placements_that_cannot_be_are_refused(count: int, assignments: dict[int, list[int]], code: ErrorCode) -> None:
    reply = Cluster(brokers=2).create(count, assignments=assignments)
    assert isinstance(reply, Refused)
    assert reply.code is code


def test_validating_says_what_would_be_and_changes_nothing() -> None:
    cluster = Cluster()
    assert cluster.create(1, validate_only=True) == Validated()
    assert isinstance(cluster.create(1, validate_only=True, configs={"retention.ms": "soon"}), Refused)
    assert cluster.text() == ""
