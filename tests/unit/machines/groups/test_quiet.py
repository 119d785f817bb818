"""Heartbeats that say nothing: which these are, and that they leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.quiet import describes_nothing, says_nothing
from anabranch.protocol.messages.consumer_group_heartbeat import (
    Assignor,
    ConsumerGroupHeartbeatRequest,
    TopicPartitions,
)
from tests.support.groups import GROUP, GroupWorld, topic_id, topics

WHO = {"group_id", "member_id", "instance_id"}
SAID: dict[str, Any] = {
    "member_epoch": 0,
    "rack_id": "r",
    "rebalance_timeout_ms": 1_000,
    "subscribed_topic_names": ["foo"],
    "subscribed_topic_regex": "f.*",
    "server_assignor": "range",
    "topic_partitions": [TopicPartitions(topic_id=topic_id("foo"), partitions=[0])],
    "client_assignors": [Assignor(name="mine")],
    "allow_key_share": True,
}
STATE = {"member_epoch", "topic_partitions", "allow_key_share"}
"""Fields that say where the member is, not what it is."""


def quiet(**fields: Any) -> ConsumerGroupHeartbeatRequest:
    return ConsumerGroupHeartbeatRequest(**{"group_id": GROUP, "member_id": "m0", "member_epoch": 1, **fields})


def test_every_field_that_says_something_is_heard() -> None:
    assert says_nothing(quiet()) and describes_nothing(quiet())
    assert SAID.keys() | WHO | {"unknown_tags"} == set(ConsumerGroupHeartbeatRequest.__slots__)


@pytest.mark.parametrize("field", SAID)
def test_a_heartbeat_that_says_something_is_not_quiet(field: str) -> None:
    assert not says_nothing(quiet(**{field: SAID[field]}))
    assert describes_nothing(quiet(**{field: SAID[field]})) == (field in STATE)


@pytest.mark.parametrize(
    "said",
    [{}, {"member_id": "m" * 10_000}, {"group_id": "g" * 10_000}, {"instance_id": "i" * 10_000}],
    ids=["its own", "another's", "another group's", "an instance's"],
)
def test_a_quiet_heartbeat_leaves_nothing(said: dict[str, Any]) -> None:
    world = GroupWorld(topics(foo=3))
    world.join("m0")
    machine = world.coordinator
    groups, members = set(machine.groups), set(machine.groups[GROUP].members)
    request = quiet(member_epoch=next(iter(machine.groups[GROUP].members.values())).epoch, **said)
    assert says_nothing(request)
    outcome = machine.consumer_group_heartbeat(request, Caller(client_id="c" * 10_000, connection=9), 0)
    assert outcome.reply.error_code == (ErrorCode.UNKNOWN_MEMBER_ID if said else ErrorCode.NONE)
    assert not outcome.records
    assert (set(machine.groups), set(machine.groups[GROUP].members)) == (groups, members)


def test_a_quiet_heartbeat_of_a_static_member_leaves_nothing_whether_or_not_it_says_which_it_is() -> None:
    world = GroupWorld(topics(foo=3))
    world.join("m0", instance_id="i0")
    machine = world.coordinator
    (member,) = machine.groups[GROUP].members.values()
    for instance_id in ("i0", None):
        request = quiet(member_epoch=member.epoch, instance_id=instance_id)
        assert says_nothing(request)
        outcome = machine.consumer_group_heartbeat(request, Caller(client_id="c" * 10_000, connection=9), 0)
        assert outcome.reply.error_code == ErrorCode.NONE
        assert not outcome.records
