"""Heartbeats, leaves, commits, and a coordinator that takes over."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import classic
from anabranch.machines.groups.classic import ClassicMember, ClassicState
from anabranch.machines.outcome import SetTimer
from tests.support.classic_groups import GroupWorld


def test_a_member_stays_as_long_as_it_beats_and_is_removed_when_silent() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b", session_timeout_ms=10_000)
    world.advance(9_999)
    assert [world.heartbeat(a), world.heartbeat(b)] == [ErrorCode.NONE, ErrorCode.NONE]
    world.advance(9_999)
    assert world.heartbeat(a) == ErrorCode.NONE
    world.advance(1)
    assert list(world.group.members) == [a]
    assert world.heartbeat(a) == ErrorCode.REBALANCE_IN_PROGRESS
    assert world.heartbeat(b) == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_beat_of_another_generation_prolongs_nothing() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b", session_timeout_ms=10_000)
    world.advance(9_999)
    world.heartbeat(b)
    assert [world.heartbeat(a, generation) for generation in (0, 2)] == [ErrorCode.ILLEGAL_GENERATION] * 2
    world.advance(1)
    assert a not in world.group.members


def test_a_beat_between_join_and_sync_is_a_beat() -> None:
    world = GroupWorld()
    call = world.join("a", version=3)
    world.advance(3_000)
    assert world.heartbeat(call.member_id) == ErrorCode.NONE


def test_a_beat_of_an_empty_group_is_of_nobody() -> None:
    assert GroupWorld().heartbeat("a", 0) == ErrorCode.UNKNOWN_MEMBER_ID


def test_the_last_member_that_leaves_empties_the_group_and_that_is_stored() -> None:
    world = GroupWorld()
    (a,) = world.start("a")
    assert [m.error_code for m in world.leave(a).members] == [ErrorCode.NONE]
    assert (world.group.state, world.group.generation, world.group.leader) == (ClassicState.EMPTY, 2, None)
    assert (world.group.protocol_type, world.group.protocol_name) == ("consumer", None)
    assert not world.timers
    world.fail_over()
    assert (world.group.state, world.group.generation, world.group.protocol_type) == (ClassicState.EMPTY, 2, "consumer")


def test_several_members_leave_with_one_request_and_each_is_told() -> None:
    world = GroupWorld()
    a, b, c = world.start("a", "b", "c")
    left = world.leave(b, "nobody", c, c)
    assert [(m.member_id, m.error_code) for m in left.members] == [
        (b, ErrorCode.NONE),
        ("nobody", ErrorCode.UNKNOWN_MEMBER_ID),
        (c, ErrorCode.NONE),
        (c, ErrorCode.UNKNOWN_MEMBER_ID),
    ]
    assert list(world.group.members) == [a] and world.group.state is ClassicState.PREPARING_REBALANCE


def test_all_members_leave_with_one_request() -> None:
    world = GroupWorld()
    world.leave(*world.start("a", "b", "c"))
    assert world.group.state is ClassicState.EMPTY and len(world.journal) == 2


@pytest.mark.parametrize("version", [0, 1, 2])
def test_old_versions_tell_of_one_member_in_the_error_code(version: int) -> None:
    world = GroupWorld()
    a, _ = world.start("a", "b")
    assert world.leave("nobody", version=version).error == ErrorCode.UNKNOWN_MEMBER_ID
    assert world.leave(a, version=version).error == ErrorCode.NONE
    assert a not in world.group.members


def test_who_left_is_answered_what_it_waited_for() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    waiting = world.join("a", a)
    world.leave(a)
    assert waiting.error == ErrorCode.UNKNOWN_MEMBER_ID
    world.join("b", b)
    calls = [world.join("c", version=3), world.join("b", b)]
    syncing = world.sync(calls[0].member_id)
    assert syncing.is_parked
    world.leave(calls[0].member_id)
    assert syncing.error == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_rebalance_that_waits_only_for_one_who_leaves_completes() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    waiting = world.join("a", a)
    world.leave(b)
    assert waiting.error == ErrorCode.NONE and waiting.generation_id == 2


def test_a_given_id_that_is_given_back_disturbs_nobody() -> None:
    world = GroupWorld()
    (a,) = world.start("a")
    pending = world.join("b").member_id
    assert [m.error_code for m in world.leave(pending).members] == [ErrorCode.NONE]
    assert world.group.state is ClassicState.STABLE and world.heartbeat(a) == ErrorCode.NONE


def test_members_come_back_stable_after_a_fail_over_with_whole_sessions() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b", session_timeout_ms=10_000, instances={"a": "ia"})
    world.advance(9_000)
    world.fail_over()
    assert world.group.state is ClassicState.STABLE and world.group.leader == a
    world.advance(9_999)
    assert [world.heartbeat(a, instance="ia"), world.heartbeat(b)] == [ErrorCode.NONE, ErrorCode.NONE]
    assert bytes(world.sync(b).assignment) == b.encode()


def test_a_rebalance_that_a_coordinator_forgot_begins_anew_at_the_stored_generation() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    world.join("b", b, protocols={"range": b"new"})
    world.join("a", a)
    assert world.group.generation == 2
    world.fail_over()
    assert world.group.generation == 1
    assert world.sync(a, 2).error == ErrorCode.ILLEGAL_GENERATION
    calls = [world.join("a", a), world.join("b", b)]
    assert world.complete(calls) == [a, b] and world.group.generation == 2


def test_commits_are_taken_of_members_of_the_generation() -> None:
    world = GroupWorld()

    def commit(member_id: str, generation: int, instance: str | None = None, transactional: bool = False) -> ErrorCode:
        return classic.commit_error(world.group, member_id, instance, generation, transactional=transactional)

    assert commit("", -1) == ErrorCode.NONE
    assert commit("a", 0) == ErrorCode.UNKNOWN_MEMBER_ID
    a, b = world.start("a", "b", instances={"a": "ia"})
    assert commit(a, 1, "ia") == commit(b, 1) == ErrorCode.NONE
    assert commit(a, 0) == commit(a, 2) == ErrorCode.ILLEGAL_GENERATION
    assert commit("nobody", 1) == commit("", -1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert commit("old", 1, "ia") == ErrorCode.FENCED_INSTANCE_ID
    assert commit("", -1, transactional=True) == ErrorCode.NONE
    world.join("a", a, instance="ia")
    assert commit(a, 1) == commit(b, 1) == ErrorCode.NONE, "what was consumed may be committed before joining"
    world.join("b", b)
    assert commit(b, 2) == ErrorCode.REBALANCE_IN_PROGRESS
    assert commit(b, 2, transactional=True) == ErrorCode.NONE
    world.dissolve()
    assert commit(b, 2) == ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_a_commit_prolongs_the_session() -> None:
    world = GroupWorld()
    (a,) = world.start("a", session_timeout_ms=10_000)
    key = ("classic", "g", "session", a)
    assert classic.session_timer(world.group, a, world.now_ms) == SetTimer(key, world.now_ms + 10_000)
    assert classic.session_timer(world.group, "nobody", world.now_ms) is None


def test_a_dissolved_group_answers_all_who_wait_and_forgets_its_timers() -> None:
    world = GroupWorld()
    a, _ = world.start("a", "b")
    pending = world.join("c")
    waiting = world.join("a", a)
    world.dissolve()
    assert waiting.error == ErrorCode.REBALANCE_IN_PROGRESS and waiting.member_id == a
    assert world.group.state is ClassicState.DEAD and not world.timers and pending.member_id
    other = GroupWorld()
    a, b = other.start("a", "b")
    other.join("b", b, protocols={"range": b"new"})
    other.join("a", a)
    syncing = other.sync(b)
    other.dissolve()
    classic.apply(other.group, None)  # the tombstone that a conversion writes
    other.check()
    assert syncing.error == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_group_is_made_of_members_of_the_other_protocol_and_kicked() -> None:
    world = GroupWorld()
    members = [
        ClassicMember("a", None, "ca", "/h", 10_000, 60_000, (("range", b"ra"), ("sticky", b"sa")), b"0"),
        ClassicMember("b", "ib", "cb", "/h", 10_000, 60_000, (("range", b"rb"),), b"1"),
    ]
    world.group = classic.group_of("g", members, generation=7, protocol_type="consumer", now_ms=world.now_ms)
    assert (world.group.protocol_name, world.group.leader, world.group.state) == ("range", "a", ClassicState.STABLE)
    record = classic.generation_record(world.group, world.now_ms)
    world.perform(classic.decide_loaded(world.group, world.settings, world.now_ms))
    world.kick()
    classic.apply(world.group, record.value)
    world.journal.append(record)
    world.check()
    assert world.group.state is ClassicState.PREPARING_REBALANCE
    assert world.heartbeat("a", 7) == ErrorCode.REBALANCE_IN_PROGRESS
    calls = [world.join("ca", "a", protocols={"range": b"", "sticky": b""}), world.join("cb", "b", instance="ib")]
    assert [call.generation_id for call in calls] == [8, 8]


def test_a_kick_begins_a_rebalance_and_does_nothing_to_one_that_waits_or_to_an_empty_group() -> None:
    world = GroupWorld()
    world.kick()
    assert world.group.state is ClassicState.EMPTY
    a, _ = world.start("a", "b")
    world.kick()
    assert world.heartbeat(a) == ErrorCode.REBALANCE_IN_PROGRESS
    waiting = world.join("a", a)
    world.kick()
    assert waiting.is_parked


def test_what_compaction_removed_is_not_missed() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    follower = world.join("b", b, protocols={"range": b"new"})
    world.complete([world.join("a", a), follower])
    assert len(world.journal) == 2
    world.fail_over()
    replayed = world.group
    del world.journal[:-1]
    world.fail_over()
    assert replayed.members == world.group.members and replayed.leader == world.group.leader
    assert [m.metadata("range") for m in replayed.members.values()] == [b"topics", b"new"]
