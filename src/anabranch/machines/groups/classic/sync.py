"""SyncGroup, versions 0 to 5: the leader hands in the assignment of its generation, the others wait for it.

Those of a large group are answered `ANSWERED_AT_A_TIME` in a decision, on a timer: the group is STABLE meanwhile, and a
rebalance that begins refuses those who wait still.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic.group import ClassicGroup, ClassicState, generation_record
from anabranch.machines.groups.classic.join import Caller, member_error
from anabranch.machines.groups.classic.rebalance import synced
from anabranch.machines.groups.classic.turn import Turn, answers_key
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.outcome import Outcome, Parked
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

PROTOCOL_SAID = 5
"""Version of SyncGroup that adds the group's protocol."""
ANSWERED_AT_A_TIME = 200
"""Members of a group that are given their assignments in one decision: 1 ms, beside the record of the generation."""


def decide_sync(
    group: ClassicGroup, request: SyncGroupRequest, caller: Caller, ticket: Hashable, now_ms: int
) -> Outcome[SyncGroupResponse | Parked, CoordinatorRecord]:
    """Store the leader's assignment and answer the parked SyncGroups; the group is STABLE once that is applied."""
    turn = Turn(group, now_ms)
    error = _error(group, request, caller)
    if error:
        return turn.outcome(SyncGroupResponse(error_code=error))
    synced(turn, request.member_id)
    if group.state is ClassicState.STABLE:
        turn.prolong(group.members[request.member_id])
        return turn.outcome(_assigned(group, group.members[request.member_id].assignment))
    turn.park_sync(request.member_id, ticket)
    if request.member_id == group.leader:
        _assign(turn, request)
    return turn.outcome_for(ticket)


def _error(group: ClassicGroup, request: SyncGroupRequest, caller: Caller) -> ErrorCode:
    if group.state is ClassicState.DEAD:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    unsaid = request.protocol_type is None or request.protocol_name is None
    if caller.version >= PROTOCOL_SAID and unsaid:
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    error = member_error(group, request.member_id, request.group_instance_id)
    if error:
        return error
    if request.generation_id != group.generation:
        return ErrorCode.ILLEGAL_GENERATION
    if _differs(request.protocol_type, group.protocol_type) or _differs(request.protocol_name, group.protocol_name):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if group.state is ClassicState.PREPARING_REBALANCE:
        return ErrorCode.REBALANCE_IN_PROGRESS
    return ErrorCode.NONE


def _differs(said: str | None, known: str | None) -> bool:
    return said is not None and known is not None and said != known


def _assign(turn: Turn, request: SyncGroupRequest) -> None:
    """Give each member the leader's assignment for it, empty where the leader names none."""
    group = turn.group
    assignments = {given.member_id: bytes(given.assignment) for given in request.assignments}
    turn.draft.write(generation_record(group, turn.now_ms, assignments))
    for member_id in list(islice(group.syncing, ANSWERED_AT_A_TIME)):
        turn.answer_sync(member_id, _assigned(group, assignments.get(member_id, b"")))
        turn.prolong(group.members[member_id])
    _answer_later(turn)


def answer_more(turn: Turn) -> None:
    """Give more of those who wait what the generation's record has for them."""
    group = turn.group
    group.answers_later = False
    assert group.state is ClassicState.STABLE, group.state
    for member_id in list(islice(group.syncing, ANSWERED_AT_A_TIME)):
        member = group.members[member_id]
        turn.answer_sync(member_id, _assigned(group, member.assignment))
        turn.prolong(member)
    _answer_later(turn)


def _answer_later(turn: Turn) -> None:
    group = turn.group
    if group.syncing:
        group.answers_later = True
        turn.set_timer(answers_key(group.group_id), 0)


def _assigned(group: ClassicGroup, assignment: bytes) -> SyncGroupResponse:
    return SyncGroupResponse(
        protocol_type=group.protocol_type, protocol_name=group.protocol_name, assignment=assignment
    )
