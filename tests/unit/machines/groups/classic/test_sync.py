"""SyncGroup: the leader's assignment, and those who wait for it."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic import ClassicState
from tests.support.classic_groups import Call, GroupWorld


def joined(*clients: str) -> tuple[GroupWorld, list[str]]:
    """A world in which everyone has joined and nobody synced."""
    world = GroupWorld()
    calls = [world.join(client, version=3) for client in clients]
    world.advance(3_000)
    world.advance(3_000 if len(clients) > 1 else 0)
    assert world.group.state is ClassicState.COMPLETING_REBALANCE
    return world, [call.member_id for call in calls]


def test_a_follower_waits_for_the_leader() -> None:
    world, (a, b) = joined("a", "b")
    follower = world.sync(b)
    assert follower.is_parked
    world.sync(a, assignments={b: b"all"})
    assert bytes(follower.assignment) == b"all"


def test_a_follower_that_comes_late_is_answered_at_once() -> None:
    world, (a, b) = joined("a", "b")
    world.sync(a, assignments={a: b"0", b: b"1"})
    assert world.group.state is ClassicState.STABLE
    assert bytes(world.sync(b).assignment) == b"1"


def test_a_member_that_the_leader_forgot_is_assigned_nothing() -> None:
    world, (a, b) = joined("a", "b")
    world.sync(a, assignments={a: b"0", "stranger": b"x"})
    late = world.sync(b)
    assert (late.error, bytes(late.assignment)) == (ErrorCode.NONE, b"")


def test_a_follower_cannot_assign() -> None:
    world, (_, b) = joined("a", "b")
    assert world.sync(b, assignments={b: b"all"}).is_parked
    assert not world.journal


def test_the_next_generation_does_not_keep_the_former_assignment() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    world.join("b", b, protocols={"range": b"new"})
    world.join("a", a)
    world.sync(a, assignments={a: b"all"})
    assert bytes(world.sync(b).assignment) == b""


def test_an_old_or_future_generation_is_refused() -> None:
    world, (a, _) = joined("a", "b")
    assert [world.sync(a, generation).error for generation in (0, 2)] == [ErrorCode.ILLEGAL_GENERATION] * 2


def test_an_unknown_member_is_refused() -> None:
    world, _ = joined("a")
    assert world.sync("nobody").error == ErrorCode.UNKNOWN_MEMBER_ID
    assert world.sync("nobody", instance="i").error == ErrorCode.UNKNOWN_MEMBER_ID
    assert GroupWorld().sync("nobody").error == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_member_that_was_given_an_id_only_cannot_sync() -> None:
    world, _ = joined("a")
    pending = world.join("b").member_id
    assert world.sync(pending).error == ErrorCode.UNKNOWN_MEMBER_ID
    assert world.heartbeat(pending) == ErrorCode.UNKNOWN_MEMBER_ID


def test_another_protocol_is_refused() -> None:
    world, (a,) = joined("a")
    assert world.sync(a, protocol_type="connect").error == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert world.sync(a, protocol_name="sticky").error == ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_from_version_5_on_the_protocol_must_be_said() -> None:
    world, (a,) = joined("a")
    assert world.sync(a, protocol_type=None).error == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert world.sync(a, protocol_name=None).error == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert world.sync(a, protocol_type=None, protocol_name=None, version=4).error == ErrorCode.NONE


def test_during_a_rebalance_members_must_join_first() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    world.join("a", a)
    assert world.sync(b).error == ErrorCode.REBALANCE_IN_PROGRESS


def test_who_waits_for_an_assignment_is_told_of_a_rebalance() -> None:
    world, (_, b) = joined("a", "b")
    waiting = world.sync(b)
    newcomer = world.join("c", version=3)
    assert waiting.error == ErrorCode.REBALANCE_IN_PROGRESS and newcomer.is_parked


def test_who_waits_for_an_assignment_need_not_beat_and_has_a_whole_session_afterwards() -> None:
    world, (a, b) = joined("a", "b")
    waiting = world.sync(b)
    for _ in range(3):
        world.advance(9_000)
        assert world.heartbeat(a) == ErrorCode.NONE
    assert waiting.is_parked
    world.sync(a, assignments={b: b"1"})
    world.advance(9_999)
    assert b in world.group.members
    world.advance(1)
    assert b not in world.group.members


def test_a_sync_that_is_sent_twice_is_answered_twice() -> None:
    world, (a, b) = joined("a", "b")
    first = world.sync(b)
    second = world.sync(b)
    assert first.error == ErrorCode.REBALANCE_IN_PROGRESS and second.is_parked
    world.sync(a)
    assert second.error == ErrorCode.NONE


def beat_for(world: GroupWorld, duration_ms: int, *members: str) -> list[ErrorCode]:
    """Let time pass while these members beat: what the last beats were answered."""
    for _ in range(duration_ms // 1_000):
        world.advance(1_000)
        errors = [world.heartbeat(member) for member in members]
    return errors


def test_a_leader_that_beats_and_never_assigns_is_removed_after_the_rebalance_timeout() -> None:
    world, (a, b) = joined("a", "b")
    waiting = world.sync(b)
    assert beat_for(world, 59_000, a) == [ErrorCode.NONE]
    assert waiting.is_parked
    assert beat_for(world, 1_000, a) == [ErrorCode.UNKNOWN_MEMBER_ID]
    assert waiting.error == ErrorCode.REBALANCE_IN_PROGRESS
    assert list(world.group.members) == [b]


def test_a_follower_that_beats_and_never_syncs_is_removed_after_the_rebalance_timeout() -> None:
    world, (a, b) = joined("a", "b")
    world.sync(a, assignments={a: b"0", b: b"1"})
    assert beat_for(world, 59_000, a, b) == [ErrorCode.NONE, ErrorCode.NONE]
    assert beat_for(world, 1_000, a, b) == [ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.UNKNOWN_MEMBER_ID]


def test_nobody_syncs_and_the_group_is_empty() -> None:
    world, (a, b) = joined("a", "b")
    beat_for(world, 60_000, a, b)
    assert world.group.state is ClassicState.EMPTY and world.group.generation == 2


@pytest.mark.parametrize("syncs", [1, 2])
def test_the_sync_timer_ends_with_the_last_sync(syncs: int) -> None:
    world, ids = joined("a", "b")
    calls: list[Call] = [world.sync(member_id) for member_id in ids[:syncs]]
    assert all(call.error == ErrorCode.NONE for call in calls)
    assert (("classic", "g", "sync") in world.timers) is (syncs < 2)


def test_a_sync_and_a_join_that_are_answered_at_once_begin_the_session_anew() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b", session_timeout_ms=10_000)
    world.advance(9_000)
    assert not world.sync(a).is_parked
    assert not world.join("b", b, session_timeout_ms=10_000).is_parked
    world.advance(9_000)
    assert sorted(world.group.members) == sorted([a, b])


# -- a large group is answered in several decisions ------------------------------------------------------------------

CLIENTS = "abcdefg"


@pytest.fixture
def half_answered(monkeypatch: pytest.MonkeyPatch) -> tuple[GroupWorld, dict[str, Call]]:
    """A group of seven, of which three are answered at a time, as the first three are; the leader has come last."""
    monkeypatch.setattr("anabranch.machines.groups.classic.sync.ANSWERED_AT_A_TIME", 3)
    world, ids = joined(*CLIENTS)
    calls = {member_id: world.sync(member_id) for member_id in ids[1:]}
    calls[ids[0]] = world.sync(ids[0], assignments={member_id: member_id.encode() for member_id in ids})
    assert world.group.state is ClassicState.STABLE
    assert [call.is_parked for call in calls.values()] == [False] * 3 + [True] * 4
    return world, calls


def test_the_members_of_a_large_group_are_answered_some_at_a_time(
    half_answered: tuple[GroupWorld, dict[str, Call]],
) -> None:
    world, calls = half_answered
    world.advance(0)
    assert {member_id: bytes(call.assignment) for member_id, call in calls.items()} == {
        member_id: member_id.encode() for member_id in calls
    }
    assert len(world.journal) == 1
    world.advance(9_999)
    assert world.group.members.keys() == calls.keys(), "sessions begin with the answers"
    world.advance(1)
    assert not world.group.members


def test_members_that_are_still_to_be_answered_are_refused_when_a_rebalance_begins(
    half_answered: tuple[GroupWorld, dict[str, Call]],
) -> None:
    world, calls = half_answered
    world.kick()
    assert [call.error for call in calls.values()] == [ErrorCode.NONE] * 3 + [ErrorCode.REBALANCE_IN_PROGRESS] * 4
    again = [world.join("again", member_id, version=3) for member_id in calls]
    assert {call.error for call in again} == {ErrorCode.NONE}
    late = world.sync(again[1].member_id)
    world.advance(0)
    assert late.is_parked, "the timer of the former generation does not answer for this one"


@pytest.mark.parametrize("which", [0, -1])
def test_a_member_that_leaves_before_it_is_answered_is_refused_and_the_others_join_again(
    half_answered: tuple[GroupWorld, dict[str, Call]], which: int
) -> None:
    world, calls = half_answered
    waiting = [member_id for member_id, call in calls.items() if call.is_parked]
    world.leave(waiting[which])
    codes = {member_id: calls[member_id].error for member_id in waiting}
    assert codes.pop(waiting[which]) == ErrorCode.UNKNOWN_MEMBER_ID
    assert set(codes.values()) == {ErrorCode.REBALANCE_IN_PROGRESS}


def test_a_group_that_ends_while_members_are_still_to_be_answered_leaves_no_timer(
    half_answered: tuple[GroupWorld, dict[str, Call]],
) -> None:
    world, calls = half_answered
    world.dissolve()
    assert [call.error for call in calls.values()][3:] == [ErrorCode.REBALANCE_IN_PROGRESS] * 4


def test_a_coordinator_that_takes_over_answers_those_that_were_not_answered_when_they_ask_again(
    half_answered: tuple[GroupWorld, dict[str, Call]],
) -> None:
    world, calls = half_answered
    waiting = [member_id for member_id, call in calls.items() if call.is_parked]
    world.fail_over()
    assert [bytes(world.sync(member_id).assignment) for member_id in waiting] == [it.encode() for it in waiting]
