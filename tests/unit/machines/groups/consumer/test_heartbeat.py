"""ConsumerGroupHeartbeat, request by request (KIP-848): what is refused, with which words, and changes nothing."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.settings import GroupSettings
from anabranch.protocol.messages.consumer_group_heartbeat import Assignor
from tests.support.groups import GROUP, GroupWorld, topics

SOUND: dict[str, Any] = {"topics": ["foo"], "rebalance_timeout_ms": 60_000}


def offer(name: str = "mine", lowest: int = 0, highest: int = 1, version: int = 1, data: bytes = b"") -> Assignor:
    return Assignor(
        name=name, minimum_version=lowest, maximum_version=highest, metadata_version=version, metadata_bytes=data
    )


@pytest.mark.parametrize(
    ("member", "epoch", "owned", "said", "code", "words"),
    [
        ("A", 0, "", {**SOUND, "group": ""}, "INVALID_REQUEST", "GroupId is empty"),
        ("", 1, None, {}, "INVALID_REQUEST", "MemberId is empty"),
        ("", 0, "", SOUND, "INVALID_REQUEST", "MemberId is empty"),
        ("A", -3, None, {}, "INVALID_REQUEST", "MemberEpoch is -3"),
        ("A", -2, None, {}, "INVALID_REQUEST", "only a member with an InstanceId"),
        ("A", 0, "", {**SOUND, "instance_id": ""}, "INVALID_REQUEST", "InstanceId is empty"),
        ("A", 0, "", {**SOUND, "rack_id": ""}, "INVALID_REQUEST", "RackId is empty"),
        ("A", 0, "", {**SOUND, "rebalance_timeout_ms": 0}, "INVALID_REQUEST", "RebalanceTimeoutMs must be above 0"),
        ("N", 0, "", {**SOUND, "rebalance_timeout_ms": -1}, "INVALID_REQUEST", "RebalanceTimeoutMs must be above 0"),
        ("N", 0, "", {**SOUND, "topics": None}, "INVALID_REQUEST", "says what is subscribed to"),
        ("A", 0, "", {**SOUND, "topics": [""]}, "INVALID_REQUEST", "an empty name"),
        ("A", 0, "foo-1", SOUND, "INVALID_REQUEST", "who joins owns nothing"),
        ("A", 0, "", {**SOUND, "subscribed_topic_regex": "a("}, "INVALID_REGULAR_EXPRESSION", "missing )"),
        ("A", 0, "", {**SOUND, "subscribed_topic_regex": "x" * 1_001}, "INVALID_REGULAR_EXPRESSION", "1001 characters"),
        ("A", 0, "", {**SOUND, "subscribed_topic_regex": "(x{99}){99}"}, "INVALID_REGULAR_EXPRESSION", "RE2"),
        ("A", 0, "", {**SOUND, "server_assignor": "nobody's"}, "UNSUPPORTED_ASSIGNOR", "choose of uniform, range"),
        (
            "A",
            0,
            "",
            {**SOUND, "server_assignor": "range", "client_assignors": [offer()]},
            "INVALID_REQUEST",
            "cannot be used together",
        ),
        ("A", 0, "", {**SOUND, "client_assignors": [offer()] * 101}, "INVALID_REQUEST", "101; 100 are allowed"),
        ("A", 0, "", {**SOUND, "client_assignors": [offer("")]}, "INVALID_REQUEST", "an empty name"),
        ("A", 0, "", {**SOUND, "client_assignors": [offer(lowest=-2)]}, "INVALID_REQUEST", "below -1"),
        ("A", 0, "", {**SOUND, "client_assignors": [offer(lowest=2)]}, "INVALID_REQUEST", "MaximumVersion 1 is below"),
        ("A", 0, "", {**SOUND, "client_assignors": [offer(version=2)]}, "INVALID_REQUEST", "not in its range"),
        ("nobody", 1, None, {}, "UNKNOWN_MEMBER_ID", "has no member nobody"),
        ("nobody", -1, None, {}, "UNKNOWN_MEMBER_ID", "has no member nobody"),
        ("nobody", 5, None, {"group": "no-group"}, "UNKNOWN_MEMBER_ID", "no-group has no member"),
        ("A", 7, None, {}, "FENCED_MEMBER_EPOCH", "is at epoch 2, not 7"),
        ("A", 1, "foo-0 foo-2", {}, "FENCED_MEMBER_EPOCH", "is at epoch 2, not 1"),
        ("B", 1, "", {}, "FENCED_MEMBER_EPOCH", "is at epoch 2, not 1"),
    ],
)
def test_what_is_refused_is_named_and_changes_nothing(
    member: str, epoch: int, owned: str | None, said: dict[str, Any], code: str, words: str
) -> None:
    world = GroupWorld(topics(foo=3))
    world.join("A")
    world.join("B")
    world.beat("A", 1)
    world.beat("A", 1, "foo-0 foo-1")
    before, log, timers = deepcopy(world.group), list(world.log), dict(world.timers)
    answer = world.beat(member, epoch, owned, **said)
    assert ErrorCode.of(answer.error_code).name == code
    assert words in (answer.error_message or "")
    assert (world.group, world.log, world.timers) == (before, log, timers)


def test_a_group_at_its_largest_refuses_the_next_member() -> None:
    world = GroupWorld(topics(foo=3), GroupSettings(consumer_max_size=2))
    world.join("A")
    world.join("B")
    answer = world.beat("C", 0, "", **SOUND)
    assert answer.error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert "has 2 members; group.consumer.max.size allows no more" in (answer.error_message or "")
    assert world.join("A").error_code == ErrorCode.NONE


def test_who_leaves_need_not_say_anything_sensible_but_its_name() -> None:
    world = GroupWorld(topics(foo=3))
    world.join("A")
    answer = world.beat("A", -1, "", topics=[], rebalance_timeout_ms=0)
    assert (answer.error_code, answer.member_epoch) == (0, -1)
    assert "A" not in world.group.members


def test_the_coordinator_names_members_that_cannot_themselves() -> None:
    world = GroupWorld()
    from anabranch.machines.groups.caller import Caller
    from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest

    request = ConsumerGroupHeartbeatRequest(
        group_id=GROUP, member_epoch=0, subscribed_topic_names=["foo"], rebalance_timeout_ms=1, topic_partitions=[]
    )
    answer = world.submit(
        lambda machine: machine.consumer_group_heartbeat(request, Caller("c", "h", 0, "made-here"), world.now_ms)
    )
    assert (answer.error_code, answer.member_id, answer.member_epoch) == (0, "made-here", 1)


def test_a_member_whose_answer_was_lost_is_let_on() -> None:
    world = GroupWorld(topics(foo=3))
    world.join("A")
    world.join("B")
    world.beat("A", 1)
    assert world.beat("A", 1, "foo-0 foo-1").member_epoch == 2  # which A never hears
    answer = world.beat("A", 1, "foo-0")
    assert (answer.error_code, answer.member_epoch, world.told(answer)) == (0, 2, "foo-0 foo-1")


def test_a_member_stays_as_long_as_it_beats_and_leaves_when_silent() -> None:
    world = GroupWorld(settings=GroupSettings(consumer_session_timeout_ms=10_000))
    world.join("A")
    world.advance(9_999)
    world.beat("A", 1)
    world.advance(9_999)
    assert "A" in world.group.members
    world.advance(1)
    assert "A" not in world.group.members
    assert world.group.state().value == "Empty"
    assert not [key for key in world.timers if isinstance(key, tuple) and "A" in key]
    world.check()


def test_a_group_config_takes_the_place_of_the_brokers_setting() -> None:
    configs = {GROUP: {"consumer.session.timeout.ms": "1000", "consumer.heartbeat.interval.ms": "50"}}
    world = GroupWorld(settings=GroupSettings(group_configs=lambda group: configs.get(group, {})))
    assert world.join("A").heartbeat_interval_ms == 50
    world.advance(1_000)
    assert not world.group.members


def test_who_does_not_revoke_within_its_rebalance_timeout_is_removed() -> None:
    world = GroupWorld(topics(foo=2))
    world.join("A", rebalance_timeout_ms=20_000)
    world.join("B")
    assert world.told(world.beat("A", 1)) == "foo-0"
    for _ in range(4):
        world.advance(4_000)
        world.beat("A", 1)
        world.beat("B", 2)
    assert "A" in world.group.members
    world.advance(4_000)
    assert sorted(world.group.members) == ["B"]
    assert world.told(world.beat("B", 2)) == "foo-0 foo-1"
    assert world.beat("A", 1).error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_static_member_is_back_with_what_it_had_and_nobody_moves() -> None:
    world = GroupWorld(topics(foo=4))
    world.join("A", instance_id="one")
    world.join("B")
    world.beat("A", 1)
    world.beat("A", 1, "foo-0 foo-1")
    world.beat("B", 2)
    epoch = world.group.epoch
    assert world.beat("A", -2, instance_id="one").member_epoch == -2
    world.advance(40_000)
    world.beat("B", 2)
    answer = world.join("A2", instance_id="one")
    assert (answer.member_epoch, world.told(answer)) == (2, "foo-0 foo-1")
    assert world.group.epoch == epoch
    assert world.group.static_members == {"one": "A2"}
    fenced = world.beat("A", 2, instance_id="one")
    assert fenced.error_code == ErrorCode.FENCED_INSTANCE_ID
    world.check()


def test_a_static_member_that_stays_away_is_removed_when_its_session_is_over() -> None:
    world = GroupWorld(topics(foo=2))
    world.join("A", instance_id="one")
    world.beat("A", -2, instance_id="one")
    world.advance(45_000)
    assert not world.group.members
    assert world.group.static_members == {}


def test_an_instance_id_in_use_is_not_given_to_another() -> None:
    world = GroupWorld()
    world.join("A", instance_id="one")
    answer = world.beat("A2", 0, "", instance_id="one", **SOUND)
    assert answer.error_code == ErrorCode.UNRELEASED_INSTANCE_ID
    assert "in use by member A" in (answer.error_message or "")


def test_a_regex_follows_the_topics_that_match_it() -> None:
    world = GroupWorld(topics(1, foo=1))
    answer = world.join("A", topics=None, subscribed_topic_regex="fo+|ba.")
    assert world.told(answer) == "foo-0"
    world.set_topics(topics(2, foo=1, bar=2, bazaar=1, __internal=1))
    assert world.told(world.beat("A", 1)) == "bar-0 bar-1 foo-0"
    world.set_topics(topics(3, bar=2))
    assert world.told(world.beat("A", 2)) == "bar-0 bar-1"


def test_the_assignor_that_most_members_name_decides() -> None:
    world = GroupWorld(topics(foo=2, bar=2))
    both = ["foo", "bar"]
    world.join("A", topics=both)
    world.join("B", topics=both, server_assignor="range")
    world.join("C", topics=both, server_assignor="range")
    world.beat("A", 1, "")
    world.beat("A", 1, "")
    assert {member: world.named(target) for member, target in sorted(world.group.targets.items())} == {
        "A": "bar-0 foo-0",
        "B": "bar-1 foo-1",
        "C": "",
    }


def test_what_comes_late_on_an_older_connection_changes_nothing() -> None:
    world = GroupWorld(topics(foo=2))
    world.join("A", connection=1)
    world.join("B", connection=2)
    assert world.told(world.beat("A", 1, connection=3)) == "foo-0"
    late = world.beat("A", 1, "", connection=1)  # sent before it was given anything
    assert late.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert world.told(world.beat("B", 2, connection=2)) is None
    assert world.beat("A", 0, "", connection=1, **SOUND).error_code == ErrorCode.FENCED_MEMBER_EPOCH
    assert world.beat("A", -1, connection=1).error_code == ErrorCode.FENCED_MEMBER_EPOCH
    assert world.beat("A", 1, "foo-0", connection=3).member_epoch == 2
    assert world.told(world.beat("B", 2, connection=2)) == "foo-1"


def test_a_late_heartbeat_does_not_bring_back_an_old_subscription() -> None:
    world = GroupWorld(topics(foo=1, bar=1))
    world.join("A", topics=["foo"], connection=1)
    world.beat("A", 1, topics=["bar"], connection=2)
    late = world.beat("A", 1, topics=["foo"], connection=1)
    assert late.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert world.group.members["A"].described.topics == ("bar",)


def test_a_late_heartbeat_does_not_take_the_word_to_let_go_that_its_member_would_never_hear() -> None:
    world = GroupWorld(topics(foo=2))
    world.join("A", connection=1)
    world.beat("A", 1, "foo-0 foo-1", connection=2)
    world.join("B", connection=3)
    world.beat("A", 1, "foo-0 foo-1", connection=1)
    assert world.told(world.beat("A", 1, connection=2)) == "foo-0"


def test_a_member_is_told_everything_on_a_connection_of_which_a_coordinator_knows_nothing() -> None:
    world = GroupWorld(topics(foo=2))
    world.join("A", connection=1)
    world.beat("A", 1, "foo-0 foo-1", connection=2)
    world.join("B", connection=3)
    world.reload()
    assert world.told(world.beat("A", 1, connection=1)) == "foo-0"  # it came late, and A hears nothing of it
    assert world.told(world.beat("A", 1, connection=2)) == "foo-0"
    assert world.told(world.beat("A", 1, connection=2)) is None


def test_a_member_that_an_administrator_removed_does_not_join_by_what_it_said_long_ago() -> None:
    world = GroupWorld(topics(foo=2))
    world.join("A", connection=1)
    world.beat("A", 1, "foo-0 foo-1", connection=2)
    world.join("B", connection=3)
    assert world.leave_classic("A") is ErrorCode.NONE
    late = world.beat("A", 0, "", topics=["foo"], rebalance_timeout_ms=60_000, connection=1)
    assert late.error_code == ErrorCode.FENCED_MEMBER_EPOCH
    assert list(world.group.members) == ["B"]
    assert world.beat("A", 1, connection=2).error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert world.join("A", connection=2).member_epoch == world.group.epoch


def test_a_static_member_comes_back_on_a_connection_that_is_older_than_its_former_selfs() -> None:
    world = GroupWorld(topics(foo=1))
    world.join("A", instance_id="i", connection=5)
    world.beat("A", -2, instance_id="i", connection=5)
    assert world.told(world.join("B", instance_id="i", connection=4)) == "foo-0"


def test_a_client_that_went_back_to_an_older_connection_is_heard_when_its_session_is_over() -> None:
    world = GroupWorld(topics(foo=1), GroupSettings(consumer_session_timeout_ms=10_000))
    world.join("A", connection=1)
    world.join("A", connection=2)
    world.advance(9_999)
    assert world.beat("A", 1, connection=1).error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    world.advance(1)
    assert world.beat("A", 1, connection=1).error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert world.told(world.join("A", connection=1)) == "foo-0"
