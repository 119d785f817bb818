"""JoinGroup and the rebalances that it begins, as transcripts."""

from __future__ import annotations

import pytest

from anabranch.base import limits
from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic import ClassicSettings, ClassicState, join
from tests.support.classic_groups import GroupWorld

COOPERATIVE_THEN_RANGE = {"cooperative-sticky": b"c", "range": b"r"}


def test_two_members_form_a_group() -> None:
    world = GroupWorld(initial_rebalance_delay_ms=3_000)
    a = world.join("a", version=3)
    b = world.join("b", version=3)
    assert a.is_parked and b.is_parked
    assert world.group.state is ClassicState.PREPARING_REBALANCE
    world.advance(6_000)
    assert (a.error, a.generation_id, a.protocol_name, a.protocol_type) == (ErrorCode.NONE, 1, "range", "consumer")
    assert a.leader == b.leader == a.member_id
    assert [(m.member_id, bytes(m.metadata)) for m in a.members] == [(a.member_id, b"topics"), (b.member_id, b"topics")]
    assert list(b.members) == []
    assert world.group.state is ClassicState.COMPLETING_REBALANCE
    follower = world.sync(b.member_id, 1)
    assert follower.is_parked
    leader = world.sync(a.member_id, 1, {a.member_id: b"0", b.member_id: b"1"})
    assert (bytes(leader.assignment), bytes(follower.assignment)) == (b"0", b"1")
    assert (follower.protocol_type, follower.protocol_name) == ("consumer", "range")
    assert world.group.state is ClassicState.STABLE
    assert len(world.journal) == 1


def test_a_member_without_an_id_is_given_one_and_comes_again_with_it() -> None:
    world = GroupWorld()
    first = world.join("a")
    assert first.error == ErrorCode.MEMBER_ID_REQUIRED
    assert first.member_id == "a-1"
    assert first.protocol_name is None
    assert list(world.group.pending) == ["a-1"] and world.group.state is ClassicState.EMPTY
    second = world.join("a", first.member_id)
    assert second.is_parked and not world.group.pending
    world.advance(3_000)
    assert (second.error, second.member_id) == (ErrorCode.NONE, "a-1")


def test_the_id_of_a_member_has_only_the_beginning_of_a_long_name() -> None:
    world = GroupWorld()
    first, second = world.join("a" * 32_767), world.join("a" * 32_767)
    assert first.member_id == "a" * limits.MEMBER_ID_PREFIX_MAX + "-1" != second.member_id
    assert world.join("a" * 32_767, first.member_id).is_parked


def test_ids_are_not_required_of_versions_that_do_not_know_it() -> None:
    world = GroupWorld()
    assert world.join("a", version=3).is_parked


def test_a_given_id_is_forgotten_when_nobody_comes_with_it_within_the_session_timeout() -> None:
    world = GroupWorld()
    call = world.join("a", session_timeout_ms=10_000)
    world.advance(9_999)
    assert call.member_id in world.group.pending
    world.advance(1)
    assert not world.group.pending
    assert world.join("a", call.member_id).error == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_rebalance_waits_for_those_that_were_given_an_id() -> None:
    world = GroupWorld()
    (a,) = world.start("a")
    b = world.join("b")
    rejoined = world.join("a", a)
    assert rejoined.is_parked
    joined = world.join("b", b.member_id)
    assert (rejoined.error, joined.error) == (ErrorCode.NONE, ErrorCode.NONE)
    assert rejoined.generation_id == joined.generation_id == 2


def test_a_given_id_that_nobody_uses_delays_a_rebalance_by_its_timeout_only() -> None:
    world = GroupWorld()
    (a,) = world.start("a")
    world.join("b", session_timeout_ms=7_000)
    rejoined = world.join("a", a)
    world.advance(6_999)
    assert rejoined.is_parked
    world.advance(1)
    assert rejoined.error == ErrorCode.NONE


def test_given_ids_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "PENDING_MEMBERS_PER_GROUP_MAX", 2)
    assert limits.PENDING_MEMBERS_PER_GROUP_MAX > 2
    world = GroupWorld()
    errors = [world.join("a").error for _ in range(3)]
    assert errors == [ErrorCode.MEMBER_ID_REQUIRED] * 2 + [ErrorCode.COORDINATOR_LOAD_IN_PROGRESS]


def test_the_first_rebalance_is_delayed_while_members_keep_coming() -> None:
    world = GroupWorld(initial_rebalance_delay_ms=3_000)
    first = world.join("a", version=3, rebalance_timeout_ms=60_000)
    world.advance(2_000)
    world.join("b", version=3)
    world.advance(1_000)
    assert first.is_parked
    world.advance(2_999)
    assert first.is_parked
    world.advance(1)
    assert first.error == ErrorCode.NONE and len(first.members) == 2


def test_the_first_rebalance_is_delayed_up_to_the_rebalance_timeout() -> None:
    world = GroupWorld(initial_rebalance_delay_ms=3_000)
    first = world.join("0", version=3, rebalance_timeout_ms=10_000)
    for name in "123456789":
        world.advance(999)
        world.join(name, version=3, rebalance_timeout_ms=10_000)
        assert first.is_parked
    world.advance(10_000 - 9 * 999 - 1)
    assert first.is_parked
    world.advance(1)
    assert first.error == ErrorCode.NONE and len(first.members) == 10


def test_without_a_delay_the_first_member_is_answered_when_the_timer_of_nothing_rings() -> None:
    world = GroupWorld(initial_rebalance_delay_ms=0)
    call = world.join("a", version=3)
    world.advance(0)
    assert call.error == ErrorCode.NONE


def test_members_that_do_not_join_in_time_are_removed_and_the_others_go_on() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b", rebalance_timeout_ms=20_000)
    rejoined = world.join("a", a, rebalance_timeout_ms=20_000)
    for _ in range(4):
        world.advance(4_999)
        assert world.heartbeat(b) == ErrorCode.REBALANCE_IN_PROGRESS
    assert rejoined.is_parked
    world.advance(4)
    assert rejoined.error == ErrorCode.NONE and [m.member_id for m in rejoined.members] == [a]
    assert world.heartbeat(b) == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_session_that_ends_during_a_rebalance_lets_it_complete() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b", session_timeout_ms=10_000)
    rejoined = world.join("a", a)
    world.advance(10_000)
    assert rejoined.error == ErrorCode.NONE
    assert list(world.group.members) == [a] and b not in world.group.members


def test_the_leader_that_does_not_come_back_is_followed_by_one_that_did() -> None:
    world = GroupWorld()
    a, b, c = world.start("a", "b", "c")
    assert world.group.leader == a
    calls = [world.join("c", c, protocols={"range": b"new"}), world.join("b", b)]
    world.advance(60_000)
    assert [call.leader for call in calls] == [b, b]
    assert [m.member_id for m in calls[1].members] == [b, c]
    assert list(calls[0].members) == []


def test_the_leader_that_leaves_is_followed() -> None:
    world = GroupWorld()
    a, b, c = world.start("a", "b", "c")
    world.leave(a)
    calls = [world.join("b", b), world.join("c", c)]
    assert calls[0].leader == b


def test_members_vote_among_the_protocols_that_all_support() -> None:
    world = GroupWorld()
    calls = [
        world.join("a", version=3, protocols={"x": b"", "range": b"", "sticky": b""}),
        world.join("b", version=3, protocols={"sticky": b"", "range": b""}),
        world.join("c", version=3, protocols={"sticky": b"", "x": b"", "range": b""}),
    ]
    world.advance(60_000)
    assert {call.protocol_name for call in calls} == {"sticky"}


def test_a_member_that_supports_nothing_in_common_is_refused() -> None:
    world = GroupWorld()
    (a,) = world.start("a")
    assert world.join("b", protocols={"sticky": b""}).error == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert world.join("b", protocol_type="connect").error == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert world.join("a", a, protocols={"sticky": b""}).error == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert world.group.state is ClassicState.STABLE


def test_the_first_member_must_name_a_type_and_a_protocol() -> None:
    world = GroupWorld()
    assert world.join("a", protocol_type="").error == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert world.join("a", protocols={}).error == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert world.group.is_vacant


def test_an_empty_group_may_take_another_type() -> None:
    world = GroupWorld()
    (a,) = world.start("a")
    world.leave(a)
    call = world.join("w", version=3, protocol_type="connect", protocols={"sessioned": b""})
    world.advance(3_000)
    assert (call.error, call.protocol_type, call.generation_id) == (ErrorCode.NONE, "connect", 3)


@pytest.mark.parametrize(("timeout_ms", "allowed"), [(5_999, False), (6_000, True), (30_000, True), (30_001, False)])
def test_session_timeouts_are_bounded(timeout_ms: int, allowed: bool) -> None:
    world = GroupWorld(session_timeout_min_ms=6_000, session_timeout_max_ms=30_000)
    call = world.join("a", version=3, session_timeout_ms=timeout_ms)
    assert call.is_parked if allowed else call.error == ErrorCode.INVALID_SESSION_TIMEOUT


def test_version_0_knows_no_rebalance_timeout() -> None:
    world = GroupWorld()
    world.join("a", version=0, session_timeout_ms=7_000, rebalance_timeout_ms=-1)
    assert world.group.rebalance_timeout_ms == 7_000


def test_errors_of_old_versions_have_a_protocol_name() -> None:
    world = GroupWorld()
    assert world.join("a", "nobody", version=6).protocol_name == ""
    assert world.join("a", "nobody", version=7).protocol_name is None


def test_an_unknown_id_is_refused() -> None:
    world = GroupWorld()
    assert world.join("a", "nobody").error == ErrorCode.UNKNOWN_MEMBER_ID
    world.start("a")
    assert world.join("b", "nobody").error == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_full_group_refuses_the_next_member() -> None:
    world = GroupWorld(size_max=2)
    a, _ = world.start("a", "b")
    assert world.join("c").error == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert world.join("a", a).is_parked
    assert world.group.state is ClassicState.PREPARING_REBALANCE


def test_a_group_above_its_maximum_loses_those_who_join_last() -> None:
    world = GroupWorld(size_max=3)
    a, b, c = world.start("a", "b", "c")
    world.settings = ClassicSettings(size_max=2)
    calls = [world.join("a", a), world.join("b", b)]
    assert world.join("c", c).error == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert [call.error for call in calls] == [ErrorCode.NONE] * 2
    assert list(world.group.members) == [a, b]


def test_a_group_above_its_maximum_is_rebalanced_once_it_is_loaded() -> None:
    world = GroupWorld(size_max=3)
    world.start("a", "b", "c")
    world.settings = ClassicSettings(size_max=2)
    world.fail_over()
    assert world.group.state is ClassicState.PREPARING_REBALANCE


def test_a_static_member_takes_its_own_place_in_a_full_group() -> None:
    world = GroupWorld(size_max=2)
    world.start("a", "b", instances={"a": "i"})
    assert world.join("a", instance="i").error == ErrorCode.NONE


def test_a_follower_that_joins_again_with_nothing_new_is_told_the_generation() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    again = world.join("b", b)
    assert (again.error, again.generation_id, again.leader, list(again.members)) == (ErrorCode.NONE, 1, a, [])
    assert world.group.state is ClassicState.STABLE


def test_a_follower_that_says_something_new_begins_a_rebalance_and_is_heard() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    follower = world.join("b", b, protocols={"range": b"other topics"})
    assert follower.is_parked and world.heartbeat(a) == ErrorCode.REBALANCE_IN_PROGRESS
    leader = world.join("a", a)
    assert {m.member_id: bytes(m.metadata) for m in leader.members} == {a: b"topics", b: b"other topics"}
    assert world.complete([leader, follower]) == [a, b]


def test_the_leader_that_joins_again_begins_a_rebalance_since_topics_may_have_changed() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    assert world.join("a", a).is_parked
    assert world.heartbeat(b) == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_member_that_missed_the_answer_to_its_join_is_told_again() -> None:
    world = GroupWorld()
    calls = [world.join("a", version=3), world.join("b", version=3)]
    world.advance(6_000)
    leader = world.join("a", calls[0].member_id)
    follower = world.join("b", calls[1].member_id)
    assert leader.generation_id == follower.generation_id == 1
    assert (len(leader.members), len(follower.members)) == (2, 0)
    assert world.group.state is ClassicState.COMPLETING_REBALANCE


def test_a_member_that_says_something_new_before_the_assignment_makes_all_join_again() -> None:
    world = GroupWorld()
    calls = [world.join("a", version=3), world.join("b", version=3)]
    world.advance(6_000)
    waiting = world.sync(calls[1].member_id)
    again = world.join("a", calls[0].member_id, protocols={"range": b"new"})
    assert waiting.error == ErrorCode.REBALANCE_IN_PROGRESS
    assert again.is_parked and world.group.state is ClassicState.PREPARING_REBALANCE


def test_a_request_that_is_sent_twice_is_answered_twice() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    first = world.join("a", a)
    second = world.join("a", a)
    assert first.error == ErrorCode.REBALANCE_IN_PROGRESS and second.is_parked
    world.join("b", b)
    assert second.error == ErrorCode.NONE


def test_a_first_join_is_given_up_when_the_rebalance_takes_too_long() -> None:
    world = GroupWorld(new_member_join_timeout_ms=30_000)
    (a,) = world.start("a", rebalance_timeout_ms=600_000)
    newcomer = world.join("b", version=3)
    for _ in range(30):
        assert newcomer.is_parked
        world.advance(1_000)
        world.heartbeat(a)
    assert (newcomer.error, newcomer.member_id) == (ErrorCode.UNKNOWN_MEMBER_ID, "")
    assert list(world.group.members) == [a]


def test_a_known_member_may_wait_for_a_join_longer_than_its_session() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b", session_timeout_ms=10_000)
    waiting = world.join("a", a)
    for _ in range(9):
        world.advance(5_000)
        world.heartbeat(b)
    assert waiting.is_parked and a in world.group.members
    assert world.join("b", b).error == ErrorCode.NONE
    assert waiting.error == ErrorCode.NONE
    world.advance(9_999)
    assert a in world.group.members
    world.advance(1)
    assert a not in world.group.members


def test_everyone_leaves_while_the_first_rebalance_waits() -> None:
    world = GroupWorld()
    call = world.join("a", version=3)
    member_id = next(iter(world.group.members))
    world.leave(member_id)
    assert call.error == ErrorCode.UNKNOWN_MEMBER_ID
    world.advance(3_000)
    assert world.group.state is ClassicState.EMPTY and world.group.generation == 1
    assert not world.timers


def test_a_dead_group_sends_members_to_the_coordinator_anew() -> None:
    world = GroupWorld()
    (a,) = world.start("a")
    world.dissolve()
    assert world.join("a", a).error == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert world.sync(a).error == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert world.heartbeat(a) == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert world.leave(a).error == ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_a_rolling_change_of_the_protocol_ends_with_the_new_one() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    world.leave(a)
    a_again = world.join("a", version=3, protocols=COOPERATIVE_THEN_RANGE)
    b_again = world.join("b", b)
    assert a_again.protocol_name == b_again.protocol_name == "range"
    a, b = world.complete([a_again, b_again])
    world.leave(b)
    b_again = world.join("b", version=3, protocols=COOPERATIVE_THEN_RANGE)
    a_again = world.join("a", a, protocols=COOPERATIVE_THEN_RANGE)
    assert a_again.protocol_name == b_again.protocol_name == "cooperative-sticky"


def test_a_join_that_comes_late_on_an_older_connection_does_not_speak_for_the_member() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    waiting = world.join("a", a, protocols={"range": b"more"}, connection=2)
    world.complete([waiting, world.join("b", b, connection=3)])
    assert world.join("a", a, connection=2).is_parked  # the leader, who reads the topics anew
    late = world.join("b", b, connection=1)  # it had let go of everything when it sent this, and has it again
    assert late.error == ErrorCode.REBALANCE_IN_PROGRESS
    assert world.group.state is ClassicState.PREPARING_REBALANCE
    assert world.join("b", b, connection=3).error == ErrorCode.NONE
    assert world.group.state is ClassicState.COMPLETING_REBALANCE
