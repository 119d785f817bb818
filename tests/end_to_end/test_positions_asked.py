"""ConsumerGroupPosition over the wire: answered, parked, ended by the next question and by a closed connection."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.client import sync
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from anabranch.protocol.messages.consumer_group_position import (
    ConsumerGroupPositionRequest,
    ConsumerGroupPositionRequestPartition,
    ConsumerGroupPositionRequestTopic,
)
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from tests.support.broker import BrokerProcess, running
from tests.support.group_client import GroupClient
from tests.support.groups import assignment, subscription
from tests.support.steps import TRIES, in_short_steps

TOPIC, GROUP, MEMBER = "rivers", "g", "m"


@pytest.fixture
def process(tmp_path: Path) -> Iterator[BrokerProcess]:
    with running(tmp_path / "data") as found:
        yield found


@contextlib.contextmanager
def member(process: BrokerProcess) -> Iterator[GroupClient]:
    """A member that has both partitions of a topic."""
    with GroupClient(process.port) as client, sync.Admin(f"127.0.0.1:{process.port}") as admin:
        admin.create_topics(TOPIC, partitions=2)
        client.ready(GROUP)
        joining = ConsumerGroupHeartbeatRequest(
            group_id=GROUP,
            member_id=MEMBER,
            member_epoch=0,
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=[TOPIC],
            topic_partitions=[],
        )
        assert client.call(joining, 1).error_code == ErrorCode.NONE
        yield client


def question(known: int, *, wait_ms: int = 20_000, epoch: int = 1, group: str = GROUP) -> ConsumerGroupPositionRequest:
    part = ConsumerGroupPositionRequestPartition(partition=0, need_position=True, position=known)
    return ConsumerGroupPositionRequest(
        group_id=group,
        generation_id=epoch,
        member_id=MEMBER,
        topics=[ConsumerGroupPositionRequestTopic(topic=TOPIC, partitions=[part])],
        max_wait_ms=wait_ms,
    )


def positions(answer: Any) -> list[tuple[int, int]]:
    assert answer.error_code == ErrorCode.NONE, ErrorCode(answer.error_code)
    return [(part.partition, part.position) for topic in answer.topics for part in topic.partitions]


def parked(process: BrokerProcess, count: int) -> None:
    deadline = time.monotonic() + 30
    while process.metrics()["kafka_server_group_coordinator_metrics_parked_requests"] != count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_question_is_answered_parked_and_ended(process: BrokerProcess) -> None:
    with member(process) as client, GroupClient(process.port) as asker:
        assert positions(asker.call(question(-1), 0)) == [(0, 0)]
        waiting = asker.send(question(0), 0)
        parked(process, 1)
        client.commit(GROUP, {(TOPIC, 0): 0}, member=MEMBER, epoch=1)
        assert positions(client.call(question(0, wait_ms=0), 0)) == [(0, 0)]
        assert positions(asker.receive(waiting)) == [(0, 0)], "the later question ends the parked one"
        parked(process, 0)
        assert asker.call(question(0, epoch=7), 0).error_code == ErrorCode.FENCED_MEMBER_EPOCH


@pytest.mark.parametrize("given", [b"", b"\0\0\x7f\xff\xff\xff", "far too much"], ids=["nothing", "nonsense", "much"])
def test_whatever_a_classic_leader_assigns_its_members_are_answered(process: BrokerProcess, given: bytes | str) -> None:
    """What the coordinator cannot read, or would read too long, names no owner to it."""
    handed = given.encode() if isinstance(given, str) else given
    if handed == b"far too much":
        handed = assignment(" ".join(f"{TOPIC}-{number}" for number in range(900_000)))
    with GroupClient(process.port) as client, sync.Admin(f"127.0.0.1:{process.port}") as admin:
        admin.create_topics(TOPIC, partitions=2)
        groups = (f"{GROUP}-{number}" for number in range(TRIES))  # What a leader assigned is read once.

        def act() -> None:
            group = next(groups)
            client.ready(group)
            asked = client.join_request(group, metadata=subscription(TOPIC), protocol_type="consumer")
            asked = client.join_request(
                group, client.call(asked, 9).member_id, subscription(TOPIC), protocol_type="consumer"
            )
            joined = client.call(asked, 9)
            synced = client.call(client.sync_request(group, joined, {joined.member_id: handed}), 5)
            assert synced.error_code == ErrorCode.NONE
            assert bytes(synced.assignment) == handed
            mine = question(-1, wait_ms=0, epoch=joined.generation_id, group=group)
            mine.member_id = joined.member_id
            assert positions(client.call(mine, 0)) == [(0, 0)]
            admin.resize(TOPIC, 4)
            admin.resize(TOPIC, 2)
            assert client.heartbeat(group, joined) == ErrorCode.NONE

        in_short_steps(process, act, works=["ConsumerGroupPosition"])
        assert not process.said("error")


def test_a_question_that_waits_keeps_no_memory_that_other_large_requests_need(tmp_path: Path) -> None:
    """Each kept up to 200,000 elements of its request, for as long as it waited."""
    with running(tmp_path, **{"queued.max.decoded.bytes": 1 << 20}) as process, member(process) as client:
        mine = ConsumerGroupPositionRequestPartition(partition=1, position=0)
        with GroupClient(process.port) as asker, GroupClient(process.port) as other:
            assert positions(asker.call(question(-1), 0)) == [(0, 0)]
            asked = question(0)
            asked.topics[0].partitions = [*asked.topics[0].partitions, *[mine] * 1_000]
            waiting = asker.send(asked, 0)
            parked(process, 1)
            assert process.metrics()["kafka_server_socketservermetrics_decoded_bytes"] == 0
            names = [MetadataRequestTopic(name=f"unknown-topic-{it}") for it in range(2_000)]
            other.call(MetadataRequest(topics=names, allow_auto_topic_creation=False), 12)
            client.commit(GROUP, {(TOPIC, 0): 0}, member=MEMBER, epoch=1)
            assert positions(client.call(question(0, wait_ms=0), 0)) == [(0, 0)]
            assert positions(asker.receive(waiting)) == [(0, 0)]
            asked.topics = [ConsumerGroupPositionRequestTopic(topic="x" * 250, partitions=[])]
            assert other.call(asked, 0).error_code == ErrorCode.INVALID_REQUEST, "its name would be kept"


def test_a_question_is_dropped_with_its_connection(process: BrokerProcess) -> None:
    with member(process):
        with GroupClient(process.port) as gone:
            gone.send(question(0), 0)
            parked(process, 1)
        parked(process, 0)
