"""What the shell adds to what a group coordinator weighs: members, committed offsets, assignments, resized topics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import Classic, ConsumerGroup
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.positions import Position, position_record
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest, TopicPartitions
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from anabranch.server.coordinators import weights
from anabranch.server.coordinators.shard import ON_LOOP_MAX
from tests.support.groups import GROUP, GroupWorld, topic_id, topics

MANY = 4_000


def beat(epoch: int, **fields: Any) -> ConsumerGroupHeartbeatRequest:
    return ConsumerGroupHeartbeatRequest(group_id=GROUP, member_id="m0", member_epoch=epoch, **fields)


def joined(image: Image | None = None) -> GroupWorld:
    """A group of the consumer protocol with one member."""
    world = GroupWorld(image or topics(foo=3))
    world.join("m0")
    return world


def heavy(weight: int) -> bool:
    return weight > ON_LOOP_MAX


def test_whoever_changes_a_large_group_is_decided_apart_and_quiet_heartbeats_are_not() -> None:
    machine = joined().coordinator
    group = machine.groups[GROUP]
    assert isinstance(group, ConsumerGroup)
    (member,) = group.members.values()
    before = {which: weights.of_heartbeat(beat(which))(machine) for which in (0, -1)}
    assert not any(map(heavy, before.values()))
    group.members.update({f"n{it}": replace(member, member_id=f"n{it}") for it in range(MANY)})
    for changing in (beat(0), beat(-1), beat(1, subscribed_topic_names=["foo"]), beat(1, server_assignor="range")):
        assert heavy(weights.of_heartbeat(changing)(machine)), changing
    for key in (("session", GROUP, "m0"), ("rebalance", GROUP, "m0"), ("balance", GROUP), ("compute", GROUP)):
        assert heavy(weights.of_timer(machine, key)), key
    assert heavy(weights.of_change(GROUP)(machine))
    assert not heavy(weights.of_heartbeat(beat(member.epoch))(machine))


def test_a_group_of_which_the_last_member_of_the_consumer_protocol_leaves_is_converted_apart() -> None:
    machine = joined().coordinator
    group = machine.groups[GROUP]
    assert isinstance(group, ConsumerGroup)
    (member,) = group.members.values()
    said = replace(member.described, classic=Classic(10_000, ()))
    group.members.update({f"n{it}": replace(member, member_id=f"n{it}", described=said) for it in range(100)})
    assert heavy(weights.of_heartbeat(beat(-1))(machine)) and heavy(weights.of_timer(machine, ("session", GROUP, "m0")))
    group.members["another"] = replace(member, member_id="another")
    assert not heavy(weights.of_heartbeat(beat(-1))(machine)), "others of the consumer protocol are left"


def test_a_group_that_changes_its_protocol_is_converted_apart() -> None:
    machine = GroupWorld(topics(foo=3)).coordinator
    group = machine.groups[GROUP] = ClassicGroup(GROUP)
    assert not heavy(weights.of_heartbeat(beat(0))(machine))
    group.members.update(dict.fromkeys(map(str, range(100))))  # type: ignore[arg-type]
    assert heavy(weights.of_heartbeat(beat(0))(machine))
    assert not heavy(weights.of_change("another")(machine)) and not heavy(weights.of_change(GROUP)(machine))


def test_many_topics_without_partitions_weigh_too() -> None:
    none = [TopicPartitions(topic_id=topic_id(f"t{it}"), partitions=[]) for it in range(MANY)]
    assert heavy(weights.of_heartbeat(beat(1, topic_partitions=none))(joined().coordinator))


@pytest.mark.parametrize("count", [10, MANY])
def test_offsets_of_which_there_are_many_expire_apart(count: int) -> None:
    machine = GroupWorld(topics(foo=count)).coordinator
    for number in range(count):
        machine.apply(position_record(GROUP, "foo", number, Position(1, topic_id=topic_id("foo"))))
    assert heavy(weights.of_timer(machine, ("expire",))) is (count == MANY)
    machine.positions.unread = object()  # type: ignore[assignment]
    assert heavy(weights.of_timer(machine, ("expire",))), "nobody knows how many a group has"


def test_a_leaders_assignments_weigh_by_their_bytes_and_by_the_topics_of_the_group() -> None:
    def sync(*sizes: int) -> SyncGroupRequest:
        given = [SyncGroupRequestAssignment(member_id=str(it), assignment=bytes(it)) for it in sizes]
        return SyncGroupRequest(group_id=GROUP, member_id="m", assignments=given)

    wide = Image(1, {"foo": TopicImage(topic_id("foo"), "foo", range(MANY), initial=MANY // 2)})
    small, large = joined().coordinator, joined(wide)
    assert not heavy(weights.of_sync(sync(100), 100)(small)) and heavy(weights.of_sync(sync(100_000), 100_000)(small))
    assert heavy(weights.of_sync(sync(100), 100)(large.coordinator)) and heavy(weights.of_loading(large.coordinator))
    assert not heavy(weights.of_loading(GroupWorld(wide).coordinator))
    assert heavy(weights.of_timer(small, ("settle",)))
