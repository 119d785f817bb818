"""Sessions of members: Heartbeat (0-4), LeaveGroup (0-5), the timers, and commands for a group.

A member that waits for an answer need not beat; its session begins anew with the answer. A first JoinGroup, which
waits without a session, is given up after `new_member_join_timeout_ms`.
"""

from __future__ import annotations

from collections.abc import Hashable

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic.group import NO_MEMBER_ID, ClassicEvent, ClassicGroup, ClassicState, tombstone
from anabranch.machines.groups.classic.join import member_error
from anabranch.machines.groups.classic.rebalance import go_on, join_time_is_up, let_go, sync_time_is_up
from anabranch.machines.groups.classic.settings import ClassicSettings
from anabranch.machines.groups.classic.sync import answer_more
from anabranch.machines.groups.classic.turn import Turn, join_key, session_key, sync_key
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.outcome import Outcome, SetTimer
from anabranch.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from anabranch.protocol.messages.leave_group import (
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
    MemberResponse,
)

LEAVES_IN_BATCHES = 3
"""Version of LeaveGroup from which several members leave with one request."""


def decide_heartbeat(
    group: ClassicGroup, request: HeartbeatRequest, now_ms: int
) -> Outcome[HeartbeatResponse, CoordinatorRecord]:
    """Prolong the member's session, and answer REBALANCE_IN_PROGRESS during one."""
    turn = Turn(group, now_ms)
    if group.state is ClassicState.DEAD:
        return turn.outcome(HeartbeatResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE))
    error = member_error(group, request.member_id, request.group_instance_id)
    if not error and request.generation_id != group.generation:
        error = ErrorCode.ILLEGAL_GENERATION
    if not error:
        turn.prolong(group.members[request.member_id])
        if group.state is ClassicState.PREPARING_REBALANCE:
            error = ErrorCode.REBALANCE_IN_PROGRESS
    return turn.outcome(HeartbeatResponse(error_code=error))


def decide_leave(
    group: ClassicGroup, request: LeaveGroupRequest, version: int, now_ms: int
) -> Outcome[LeaveGroupResponse, CoordinatorRecord]:
    """Let members go at once; one rebalance for all of them."""
    turn = Turn(group, now_ms)
    if group.state is ClassicState.DEAD:
        return turn.outcome(LeaveGroupResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE))
    batched = version >= LEAVES_IN_BATCHES
    leaving = request.members if batched else [MemberIdentity(member_id=request.member_id)]
    left: list[MemberResponse] = []
    gone: dict[str, None] = {}
    for identity in leaving:
        member_id, error = _leaver(group, identity, gone)
        if not error:
            gone[member_id] = None
        left.append(
            MemberResponse(member_id=identity.member_id, group_instance_id=identity.group_instance_id, error_code=error)
        )
    if gone:
        let_go(turn, gone)
    if not batched:
        return turn.outcome(LeaveGroupResponse(error_code=left[0].error_code))
    return turn.outcome(LeaveGroupResponse(members=left))


def _leaver(group: ClassicGroup, identity: MemberIdentity, gone: dict[str, None]) -> tuple[str, ErrorCode]:
    """The member that a LeaveGroup names, and the error if it cannot leave."""
    member_id, instance_id = identity.member_id, identity.group_instance_id
    if member_id == NO_MEMBER_ID and instance_id is not None:  # an administrator names a static member by its instance
        member_id = group.static.get(instance_id, NO_MEMBER_ID)
    if member_id in gone:
        return member_id, ErrorCode.UNKNOWN_MEMBER_ID
    if member_id in group.pending:
        return member_id, ErrorCode.NONE
    return member_id, member_error(group, member_id, instance_id)


def decide_timer(group: ClassicGroup, key: Hashable, now_ms: int) -> Outcome[None, CoordinatorRecord]:
    """A timer rang."""
    turn = Turn(group, now_ms)
    match key:
        case ("classic", group.group_id, "join"):
            join_time_is_up(turn)
        case ("classic", group.group_id, "sync"):
            sync_time_is_up(turn)
        case ("classic", group.group_id, "answers"):
            answer_more(turn)
        case ("classic", group.group_id, "session", str(member_id)):
            _session_is_over(turn, member_id)
        case _:
            raise AssertionError(key)
    return turn.outcome(None)


def _session_is_over(turn: Turn, member_id: str) -> None:
    group = turn.group
    waits = member_id in group.syncing or (member_id in group.joining and member_id not in group.new)
    if waits or (member_id not in group.members and member_id not in group.pending):
        return
    let_go(turn, [member_id])


def decide_loaded(group: ClassicGroup, settings: ClassicSettings, now_ms: int) -> Outcome[None, CoordinatorRecord]:
    """Begin the sessions of a group that came from the log or from the other protocol.

    A group above its maximum shrinks; one without a leader, just converted from the other protocol, rebalances.
    """
    turn = Turn(group, now_ms)
    for member in group.members.values():
        turn.prolong(member)
    if len(group.members) > settings.size_max or (group.members and group.leader is None):
        go_on(turn)
    return turn.outcome(None)


def decide_kick(group: ClassicGroup, now_ms: int) -> Outcome[None, CoordinatorRecord]:
    """Begin a rebalance, unless one waits for members to join or the group is empty."""
    turn = Turn(group, now_ms)
    go_on(turn)
    return turn.outcome(None)


def decide_dissolve(
    group: ClassicGroup, now_ms: int, error: ErrorCode = ErrorCode.REBALANCE_IN_PROGRESS
) -> Outcome[None, CoordinatorRecord]:
    """End the group without a record: parked requests are answered `error`, all timers are canceled."""
    turn = Turn(group, now_ms)
    for member_id in list(group.joining):
        turn.refuse_join(member_id, error)
    for member_id in list(group.syncing):
        turn.refuse_sync(member_id, error)
    for member_id in [*group.members, *group.pending]:
        turn.cancel_timer(session_key(group.group_id, member_id))
    turn.cancel_timer(join_key(group.group_id))
    turn.cancel_timer(sync_key(group.group_id))
    turn.stop_answering()
    group.pending.clear()
    group.unsynced.clear()
    group.new.clear()
    group.initial = None
    group.move(ClassicEvent.DISSOLVED, now_ms)
    return turn.outcome(None)


def decide_delete(group: ClassicGroup, now_ms: int) -> Outcome[ErrorCode, CoordinatorRecord]:
    """Remove an empty group (DeleteGroups)."""
    turn = Turn(group, now_ms)
    if group.state is ClassicState.DEAD:
        return turn.outcome(ErrorCode.GROUP_ID_NOT_FOUND)
    if group.state is not ClassicState.EMPTY:
        return turn.outcome(ErrorCode.NON_EMPTY_GROUP)
    for member_id in list(group.pending):
        turn.forget(member_id)
    turn.draft.write(tombstone(group.group_id))
    return turn.outcome(ErrorCode.NONE)


def commit_error(
    group: ClassicGroup, member_id: str, instance_id: str | None, generation: int, *, transactional: bool
) -> ErrorCode:
    """Whether offsets may be committed: by a member of this generation, or by anyone while the group is empty."""
    if group.state is ClassicState.DEAD:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    if generation < 0 and group.state is ClassicState.EMPTY:
        return ErrorCode.NONE
    if generation >= 0 or member_id != NO_MEMBER_ID or instance_id is not None:
        error = member_error(group, member_id, instance_id)
        if error:
            return error
        if generation != group.generation:
            return ErrorCode.ILLEGAL_GENERATION
    elif not transactional and group.state is not ClassicState.EMPTY:
        return ErrorCode.UNKNOWN_MEMBER_ID
    if not transactional and group.state is ClassicState.COMPLETING_REBALANCE:
        return ErrorCode.REBALANCE_IN_PROGRESS
    return ErrorCode.NONE


def session_timer(group: ClassicGroup, member_id: str, now_ms: int) -> SetTimer | None:
    """Return the timer that restarts the member's session, as a heartbeat would; None for an unknown member."""
    member = group.members.get(member_id)
    if member is None:
        return None
    return SetTimer(session_key(group.group_id, member_id), now_ms + member.session_timeout_ms)
