"""Static members (KIP-345): their instance is what is known, their id may change."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic import ClassicState
from anabranch.protocol.messages.leave_group import MemberIdentity
from tests.support.classic_groups import GroupWorld
from tests.support.groups import assignment, subscription, topics

INSTANCES = {"a": "ia", "b": "ib"}


def stable() -> tuple[GroupWorld, str, str]:
    world = GroupWorld()
    a, b = world.start("a", "b", instances=INSTANCES)
    return world, a, b


def test_a_static_member_needs_no_second_join_to_get_its_id() -> None:
    world = GroupWorld()
    call = world.join("a", instance="ia")
    assert call.is_parked
    world.advance(3_000)
    assert call.member_id == "ia-1" and call.members[0].group_instance_id == "ia"


def test_a_follower_that_was_started_anew_gets_its_assignment_without_a_rebalance() -> None:
    world, a, b = stable()
    again = world.join("b", instance="ib")
    assert (again.error, again.generation_id, again.leader, again.skip_assignment) == (ErrorCode.NONE, 1, a, False)
    assert again.member_id not in (a, b) and list(again.members) == []
    assert bytes(world.sync(again.member_id, instance="ib").assignment) == b.encode()
    assert world.group.state is ClassicState.STABLE and world.heartbeat(a) == ErrorCode.NONE


def test_a_leader_that_was_started_anew_leads_and_does_not_assign() -> None:
    world, _, b = stable()
    again = world.join("a", instance="ia", version=9)
    assert again.leader == again.member_id and again.skip_assignment
    assert [m.member_id for m in again.members] == [again.member_id, b]
    assert world.group.leader == again.member_id


def test_a_leader_of_an_old_version_is_told_that_its_former_self_leads() -> None:
    world, a, _ = stable()
    again = world.join("a", instance="ia", version=8)
    assert again.leader == a and not again.skip_assignment and list(again.members) == []
    assert world.group.leader == again.member_id


@pytest.mark.parametrize("version", [8, 9])
@pytest.mark.parametrize("count", [3, 4])
def test_a_leader_that_comes_back_to_a_topic_that_grew_meanwhile_assigns_again(version: int, count: int) -> None:
    """It knows what it sees now, not what it assigned: nobody would have noticed, until the topic changed again."""
    world = GroupWorld()
    said = {"range": subscription("foo")}
    a, b = world.start("a", "b", instances=INSTANCES, protocols=said)
    for member, given in ((a, "foo-0 foo-1"), (b, "foo-2")):
        world.group.put(world.group.members[member]._replace(assignment=assignment(given)))
    world.image = topics(foo=count)
    assert not world.join("b", instance="ib", protocols=said).is_parked, "a leader is there, and watches the topic"
    again = world.join("a", instance="ia", protocols=said, version=version)
    assert again.is_parked == (count == 4)
    assert world.group.state is (ClassicState.PREPARING_REBALANCE if again.is_parked else ClassicState.STABLE)


def test_the_former_self_is_fenced() -> None:
    world, _, b = stable()
    world.join("b", instance="ib")
    assert world.heartbeat(b, instance="ib") == ErrorCode.FENCED_INSTANCE_ID
    assert world.sync(b, instance="ib").error == ErrorCode.FENCED_INSTANCE_ID
    assert world.join("b", b, instance="ib").error == ErrorCode.FENCED_INSTANCE_ID
    left = world.leave(MemberIdentity(member_id=b, group_instance_id="ib"))
    assert [member.error_code for member in left.members] == [ErrorCode.FENCED_INSTANCE_ID]
    assert world.heartbeat(b) == ErrorCode.UNKNOWN_MEMBER_ID


def test_the_former_self_is_fenced_while_it_waits_for_the_join() -> None:
    world, a, _ = stable()
    waiting = world.join("a", a, instance="ia")
    again = world.join("a", instance="ia")
    assert waiting.error == ErrorCode.FENCED_INSTANCE_ID and again.is_parked


def test_the_former_self_is_fenced_while_it_waits_for_an_assignment() -> None:
    world = GroupWorld()
    calls = [world.join(client, instance=instance) for client, instance in INSTANCES.items()]
    world.advance(6_000)
    waiting = world.sync(calls[1].member_id, instance="ib")
    again = world.join("b", instance="ib")
    assert waiting.error == ErrorCode.FENCED_INSTANCE_ID
    assert again.is_parked and world.group.state is ClassicState.PREPARING_REBALANCE


def test_an_instance_that_nobody_knows_with_an_id_is_unknown() -> None:
    world, a, _ = stable()
    assert world.join("c", a, instance="ic").error == ErrorCode.UNKNOWN_MEMBER_ID
    assert world.heartbeat(a, instance="ic") == ErrorCode.UNKNOWN_MEMBER_ID


def test_an_id_that_was_given_to_a_dynamic_member_is_not_a_static_members() -> None:
    world = GroupWorld()
    pending = world.join("a").member_id
    assert world.join("a", pending, instance="ia").error == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_new_instance_begins_a_rebalance() -> None:
    world, a, _ = stable()
    assert world.join("c", instance="ic").is_parked
    assert world.heartbeat(a) == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_restart_that_changes_the_groups_choice_begins_a_rebalance() -> None:
    world = GroupWorld()
    both = {"range": b"", "sticky": b""}
    world.start("a", instances={"a": "ia"}, protocols=both)
    assert world.group.protocol_name == "range"
    again = world.join("a", instance="ia", protocols={"sticky": b"", "range": b""})
    assert again.protocol_name == "sticky" and again.generation_id == 2


def test_what_a_restarted_member_says_anew_is_stored_though_nobody_rebalances() -> None:
    world, _, _ = stable()
    again = world.join("b", instance="ib", protocols={"range": b"new topics"}, session_timeout_ms=20_000)
    world.fail_over()
    member = world.group.members[again.member_id]
    assert member.metadata("range") == b"new topics" and member.session_timeout_ms == 20_000
    assert world.heartbeat(again.member_id, instance="ib") == ErrorCode.NONE


def test_a_static_member_stays_through_a_rebalance_that_it_missed() -> None:
    world, a, b = stable()
    rejoined = world.join("a", a, instance="ia", protocols={"range": b"new"})
    for _ in range(10):
        world.advance(6_000)
        world.heartbeat(b, instance="ib")
    assert [m.member_id for m in rejoined.members] == [a, b]


def test_a_static_member_whose_session_ends_is_removed() -> None:
    world, _, b = stable()
    world.advance(9_000)
    world.heartbeat(b, instance="ib")
    world.advance(1_000)
    assert list(world.group.static) == ["ib"] and world.group.state is ClassicState.PREPARING_REBALANCE


def test_when_only_static_members_are_left_and_none_joins_their_sessions_decide() -> None:
    world, a, b = stable()
    world.join("c", version=3)
    world.leave(next(member_id for member_id in world.group.members if member_id not in (a, b)))
    for _ in range(13):
        world.advance(5_000)
        assert {world.heartbeat(a), world.heartbeat(b)} == {ErrorCode.REBALANCE_IN_PROGRESS}
    assert world.group.generation == 1
    world.advance(9_999)
    assert len(world.group.members) == 2
    world.advance(1)
    assert world.group.state is ClassicState.EMPTY


def test_an_administrator_removes_a_static_member_by_its_instance() -> None:
    world, _, _ = stable()
    left = world.leave(MemberIdentity(member_id="", group_instance_id="ib"))
    assert [(m.member_id, m.group_instance_id, m.error_code) for m in left.members] == [("", "ib", 0)]
    assert list(world.group.static) == ["ia"] and world.group.state is ClassicState.PREPARING_REBALANCE


def test_a_restarted_member_must_sync_where_its_former_self_did_not() -> None:
    world = GroupWorld()
    calls = [world.join(client, instance=instance) for client, instance in INSTANCES.items()]
    world.advance(6_000)
    world.sync(calls[0].member_id, instance="ia")
    again = world.join("b", instance="ib")
    assert list(world.group.unsynced) == [again.member_id]
    world.sync(again.member_id, instance="ib")
    assert ("classic", "g", "sync") not in world.timers


def test_a_member_restarted_during_its_first_join_has_a_session_like_any_other() -> None:
    world = GroupWorld()
    (a,) = world.start("a")
    first = world.join("b", instance="ib")
    again = world.join("b", instance="ib", session_timeout_ms=6_000)
    assert first.error == ErrorCode.FENCED_INSTANCE_ID
    for _ in range(10):
        world.advance(5_000)
        world.heartbeat(a)
    assert again.is_parked, "a member that waits for a join need not beat"
    world.join("a", a)
    assert again.error == ErrorCode.NONE


def test_a_static_member_that_was_started_anew_with_other_topics_calls_for_a_rebalance() -> None:
    world = GroupWorld()
    foo, bar = subscription("foo"), subscription("bar")
    world.start("a", "b", instances=INSTANCES, protocols={"range": foo})
    again = world.join("b", instance="ib", protocols={"range": bar})
    assert again.is_parked and world.group.state is ClassicState.PREPARING_REBALANCE


def test_a_static_member_that_owns_nothing_any_more_but_reads_the_same_does_not() -> None:
    world = GroupWorld()
    owning, fresh = subscription("foo", owned="foo-0", generation=1), subscription("foo")
    world.start("a", "b", instances=INSTANCES, protocols={"range": owning})
    assert not world.join("b", instance="ib", protocols={"range": fresh}).is_parked


def test_who_was_started_anew_while_it_was_to_give_something_up_begins_a_rebalance() -> None:
    """Its former self was to join again when that was done (KIP-429); else it would stay with nobody."""
    world = GroupWorld()
    said = {"range": subscription("foo", owned="foo-0 foo-1")}
    a, b = world.start("a", "b", instances=INSTANCES, protocols=said)
    world.group.put(world.group.members[b]._replace(assignment=assignment("foo-1")))
    assert world.join("b", instance="ib", protocols={"range": subscription("foo")}).is_parked
    assert world.heartbeat(a) == ErrorCode.REBALANCE_IN_PROGRESS
