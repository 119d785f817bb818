"""Canceling a resize: transcripts, and what it waits for."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller import terms
from anabranch.machines.controller.effects import Accepted, Refused, SendLeaderAndIsr
from anabranch.machines.controller.layouts import ended_with
from anabranch.machines.controller.resize import decide_cancel_resize
from anabranch.machines.controller.state import apply
from anabranch.machines.controller.topics import unknown_topic
from anabranch.machines.controller.views import ResizeWait, canceled, describe, resize_waits, settled, topic_view
from tests.unit.machines.controller.transcript import TOPIC_ID, Cluster

STORAGE, GONE = ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.LEADER_NOT_AVAILABLE


def grown(*counts: int) -> Cluster:
    """A topic of 2 partitions on 2 brokers, resized."""
    cluster = Cluster(partitions=2, brokers=2)
    for count in counts:
        cluster.resize(count)
        cluster.run()
    cluster.text()
    return cluster


def test_a_growth_is_undone_while_its_leaders_adopt_the_count() -> None:
    cluster = grown()
    accepted = cluster.resize(3)
    cluster.answer()
    cluster.answer(STORAGE)
    cluster.text()
    assert isinstance(accepted, Accepted) and not settled(cluster.state, accepted)
    assert cluster.cancel() == Accepted("t", TOPIC_ID, layout=0)
    assert cluster.text() == (
        "write t-0: epoch 2 at 1\n"
        "write t-1: epoch 2 at 2\n"
        "write t: layouts 2, partitions 2\n"
        "  publish t\n"
        "  tell 1: count 2, 0:2\n"
        "  tell 2: count 2, 1:2"
    )
    assert settled(cluster.state, accepted) and canceled(cluster.state, accepted)
    cluster.run()
    assert {role.undeleted_partition_count for role in cluster.roles.values()} == {2}
    assert {role.layout for role in cluster.roles.values()} == {0}
    described = describe(cluster.state, "t")
    assert described is not None and described.waiting_for == (), "the roles of the layout before count as taken"


def test_a_shrink_is_undone_while_partitions_close() -> None:
    cluster = grown(4)
    cluster.resize(3)
    cluster.answer()
    assert cluster.cancel() == Refused(
        ErrorCode.REASSIGNMENT_IN_PROGRESS,
        "The resize of topic 't' from 4 to 3 partitions cannot be canceled any more: the remaining partitions may hold "
        "records of partitions 3 to 3 already. Bring back what it waits for (`anabranch topic describe t`); then it "
        "ends, and the topic can be resized to 4.",
    )
    cluster.run()
    cluster.text()
    cluster.resize(2)
    closing = cluster.requests[0]
    assert isinstance(closing, SendLeaderAndIsr)
    assert [role.partition for role in closing.roles] == [2]
    cluster.text()
    cluster.cancel()
    assert cluster.text().startswith("write t-2: epoch 3 at 1\nwrite t: layouts 2(0:0 1:0) 4(0:1 1:1 2:0 3:0) 3, ")
    cluster.run()
    assert [cluster.roles[p].retiring for p in range(4)] == [False, False, False, True]
    assert cluster.roles[2].undeleted_partition_count == 3


def test_a_growth_whose_partitions_open_is_not_undone() -> None:
    cluster = grown()
    cluster.resize(3)
    cluster.answer()
    cluster.answer()
    assert "resize to 3: open" in cluster.text()
    reply = cluster.cancel()
    assert isinstance(reply, Refused) and reply.code is ErrorCode.REASSIGNMENT_IN_PROGRESS
    assert "from 2 to 3 partitions cannot be canceled any more: partitions 2 to 2 may hold records" in reply.message
    cluster.run()
    assert cluster.cancel() == Refused(
        ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "Topic 't' is not being resized; it has 3 partitions."
    )
    assert cluster.submit(lambda state: decide_cancel_resize(state, "x")) == unknown_topic("x")
    cluster.delete()
    assert cluster.cancel() == unknown_topic("t")


def test_the_next_resize_has_the_number_of_the_canceled_one_and_later_epochs() -> None:
    cluster = grown()
    first = cluster.resize(3)
    cluster.answer()
    late = cluster.requests[0]
    assert isinstance(late, SendLeaderAndIsr) and isinstance(first, Accepted)
    cluster.cancel()
    cluster.text()
    second = cluster.resize(4)
    assert isinstance(second, Accepted) and second.layout == first.layout == 1
    assert canceled(cluster.state, first) and not canceled(cluster.state, second)
    assert cluster.text().startswith("write t: layouts 2(0:2 1:2) 4, partitions 2, resize to 4: cut making 2 3")
    cluster.run()
    topic = cluster.state.topics["t"]
    assert ended_with(topic.ended, 0) == {0: 2, 1: 2}, "late answers of earlier epochs counted for nothing"
    assert cluster.epochs == {0: 3, 1: 3, 2: 0, 3: 0}
    assert {role.undeleted_partition_count for role in cluster.roles.values()} == {4}
    assert settled(cluster.state, second)


def test_clients_never_saw_the_layout_that_is_canceled() -> None:
    cluster = grown(4)
    before = topic_view(cluster.state, "t")
    cluster.resize(6)
    cluster.cancel()
    cluster.run()
    after = topic_view(cluster.state, "t")
    assert before is not None and after is not None
    assert (after.layouts, after.undeleted_partition_count) == (before.layouts, 4)


@pytest.mark.parametrize("written", range(4))
def test_a_controller_that_dies_between_the_records_of_a_cancel_is_followed_by_one_that_ends_the_resize(
    written: int,
) -> None:
    cluster = grown()
    cluster.resize(3)
    cluster.requests.clear()
    kept = len(cluster.journal)
    cluster.cancel()
    cluster.requests.clear()
    successor = Cluster()
    successor.roles, successor.epochs = cluster.roles, cluster.epochs
    for record in cluster.journal[: kept + written]:
        successor.journal.append(record)
        apply(successor.state, record)
    successor.submit(terms.decide_elected)
    for broker in (1, 2):
        successor.register(broker, epoch=2)
    successor.run()
    topic = successor.state.topics["t"]
    assert topic.resize is None
    assert topic.undeleted_partition_count == (2 if written >= 3 else 3)
    assert {role.undeleted_partition_count for role in successor.roles.values()} == {topic.undeleted_partition_count}


def test_a_resize_waits_for_leaders_that_refuse_or_are_gone_but_not_for_those_that_have_not_answered() -> None:
    cluster = grown()
    cluster.resize(3)
    assert resize_waits(cluster.state, "t") == ()
    cluster.answer(STORAGE)
    assert resize_waits(cluster.state, "t") == (ResizeWait(0, 1, STORAGE),)
    cluster.submit(lambda state: terms.decide_broker_left(state, 2))
    assert resize_waits(cluster.state, "t") == (ResizeWait(0, 1, STORAGE), ResizeWait(1, 2, GONE))
    cluster.requests.clear()
    cluster.register(1, epoch=2)
    cluster.answer()
    assert resize_waits(cluster.state, "t") == (ResizeWait(1, 2, GONE),)
    cluster.register(2, epoch=2)
    cluster.run()
    assert resize_waits(cluster.state, "t") == resize_waits(cluster.state, "x") == ()
    assert cluster.state.topics["t"].undeleted_partition_count == 3
    assert not cluster.state.unconfirmed["t"]
