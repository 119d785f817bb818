"""JoinGroup, versions 0 to 9.

    member                      EMPTY           PREPARING     COMPLETING                   STABLE
    new, dynamic, v4+           gets an id and must join again with it, within its session timeout
    new                         first of all    waits         begins a rebalance           begins a rebalance
    static, without its id      -               replaces      replaces, begins             replaces, answered (1)
    leader                      -               waits         as below                     begins a rebalance
    known, unchanged            -               waits         answered as before           answered as before
    known, changed              -               waits         begins a rebalance           begins a rebalance

(1) unless its protocols change the group's choice, it subscribes to other topics, or it led, and a partition of the
group's topics is nobody's. The replaced member is fenced: FENCED_INSTANCE_ID (KIP-345).

The leader watches the topics for all. One that comes back knows what it sees then, not what it assigned (KIP-814):
a topic that grew, or was created again, while it was away would be left out until the next change. So the coordinator
compares, and has it assign again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import MEMBER_ID_PREFIX_MAX, PENDING_MEMBERS_PER_GROUP_MAX
from anabranch.machines.groups.classic.group import (
    NO_MEMBER_ID,
    ClassicGroup,
    ClassicMember,
    ClassicState,
    ParkedJoin,
    generation_record,
    leaves_out,
    subscribes_otherwise,
    was_giving_up,
)
from anabranch.machines.groups.classic.rebalance import go_on, let_go
from anabranch.machines.groups.classic.settings import ClassicSettings
from anabranch.machines.groups.classic.turn import Turn, join_error, joined, session_key, subscriptions
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.outcome import Outcome, Parked
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse

REBALANCE_TIMEOUT_SAID = 1
MEMBER_ID_REQUIRED = 4
SKIP_ASSIGNMENT = 9
"""Versions of JoinGroup that add the rebalance timeout, and so on."""


class Caller(Protocol):
    """The sender of the request; `member_id` is a fresh id for a new member."""

    @property
    def client_id(self) -> str: ...
    @property
    def client_host(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def member_id(self) -> str: ...
    @property
    def connection(self) -> int: ...


def decide_join(
    group: ClassicGroup,
    request: JoinGroupRequest,
    caller: Caller,
    ticket: Hashable,
    settings: ClassicSettings,
    image: Image,
    now_ms: int,
) -> Outcome[JoinGroupResponse | Parked, CoordinatorRecord]:
    """Let a member in, or let it take part in a rebalance; answered when that rebalance's join completes."""
    turn = Turn(group, now_ms)
    refusal = _refuse(turn, request, settings)
    if refusal is None and caller.connection < group.connections.get(request.member_id, 0):
        refusal = ErrorCode.REBALANCE_IN_PROGRESS  # it comes late: the member has joined anew since
    if refusal is not None:
        return turn.outcome(join_error(refusal, request.member_id, caller.version))
    outcome = _decide(turn, request, caller, ticket, settings, image)
    for member_id in (request.member_id, _fresh_id(request, caller)):
        if member_id in group.members:
            group.connections[member_id] = caller.connection
    return outcome


def _decide(
    turn: Turn, request: JoinGroupRequest, caller: Caller, ticket: Hashable, settings: ClassicSettings, image: Image
) -> Outcome[JoinGroupResponse | Parked, CoordinatorRecord]:
    group = turn.group
    said = _said(request, caller)
    parked = ParkedJoin(ticket, caller.version)
    if request.member_id in group.pending:
        if said.instance_id is not None:
            return turn.outcome(join_error(ErrorCode.UNKNOWN_MEMBER_ID, request.member_id, caller.version))
        return _add(turn, said, parked, request.protocol_type, settings)
    if request.member_id != NO_MEMBER_ID:
        error = member_error(group, request.member_id, request.group_instance_id)
        if error:
            return turn.outcome(join_error(error, request.member_id, caller.version))
        return _join_again(turn, said, parked)
    if said.instance_id in group.static:
        return _replace_static(turn, said, parked, image)
    if said.instance_id is None and caller.version >= MEMBER_ID_REQUIRED:
        return _give_id(turn, said, caller)
    return _add(turn, said, parked, request.protocol_type, settings)


def member_error(group: ClassicGroup, member_id: str, instance_id: str | None) -> ErrorCode:
    """Whether the id is a member's, and that of the named static member."""
    if instance_id is not None:
        current = group.static.get(instance_id)
        if current is not None and current != member_id:
            return ErrorCode.FENCED_INSTANCE_ID
        if current is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
    return ErrorCode.NONE if member_id in group.members else ErrorCode.UNKNOWN_MEMBER_ID


def _refuse(turn: Turn, request: JoinGroupRequest, settings: ClassicSettings) -> ErrorCode | None:
    group = turn.group
    if group.state is ClassicState.DEAD:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    if not settings.session_timeout_min_ms <= request.session_timeout_ms <= settings.session_timeout_max_ms:
        return ErrorCode.INVALID_SESSION_TIMEOUT
    if not _has_room(group, request, settings.size_max):
        if request.member_id in group.members or request.member_id in group.pending:
            let_go(turn, [request.member_id])
        return ErrorCode.GROUP_MAX_SIZE_REACHED
    if not group.supports(request.protocol_type, (protocol.name for protocol in request.protocols)):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    return None


def _has_room(group: ClassicGroup, request: JoinGroupRequest, size_max: int) -> bool:
    """While members join, only joined ones count: a group above its maximum refuses the last ones."""
    instance = request.group_instance_id
    static = group.static.get(instance) if instance is not None and request.member_id == NO_MEMBER_ID else None
    member_id = static or request.member_id
    match group.state:
        case ClassicState.PREPARING_REBALANCE:
            return member_id in group.joining or len(group.joining) < size_max
        case ClassicState.COMPLETING_REBALANCE | ClassicState.STABLE:
            return member_id in group.members or len(group.members) < size_max
        case _:
            return True


def _said(request: JoinGroupRequest, caller: Caller) -> ClassicMember:
    instance_id = request.group_instance_id
    says_timeout = caller.version >= REBALANCE_TIMEOUT_SAID and request.rebalance_timeout_ms > 0
    return ClassicMember(
        member_id=request.member_id or _fresh_id(request, caller),
        instance_id=instance_id,
        client_id=caller.client_id,
        client_host=caller.client_host,
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=request.rebalance_timeout_ms if says_timeout else request.session_timeout_ms,
        protocols=tuple((protocol.name, bytes(protocol.metadata)) for protocol in request.protocols),
    )


def _fresh_id(request: JoinGroupRequest, caller: Caller) -> str:
    """The id of a new member. Of a long name it has the beginning: an id is a string, and the uuid tells them apart."""
    instance_id = request.group_instance_id
    name = caller.client_id if instance_id is None else instance_id
    return f"{name[:MEMBER_ID_PREFIX_MAX]}-{caller.member_id}"


def _give_id(turn: Turn, said: ClassicMember, caller: Caller) -> Outcome[JoinGroupResponse | Parked, CoordinatorRecord]:
    group = turn.group
    if len(group.pending) >= PENDING_MEMBERS_PER_GROUP_MAX:
        return turn.outcome(join_error(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, NO_MEMBER_ID, caller.version))
    group.pending[said.member_id] = None
    turn.set_timer(session_key(group.group_id, said.member_id), said.session_timeout_ms)
    return turn.outcome(join_error(ErrorCode.MEMBER_ID_REQUIRED, said.member_id, caller.version))


def _add(
    turn: Turn, said: ClassicMember, parked: ParkedJoin, protocol_type: str, settings: ClassicSettings
) -> Outcome[JoinGroupResponse | Parked, CoordinatorRecord]:
    group = turn.group
    group.pending.pop(said.member_id, None)
    if not group.members:
        group.protocol_type = protocol_type
    group.put(said)
    group.new.add(said.member_id)
    if group.initial is not None:
        group.initial.someone_came = True
    turn.park_join(said.member_id, parked)
    turn.set_timer(session_key(group.group_id, said.member_id), settings.new_member_join_timeout_ms)
    go_on(turn, settings.initial_rebalance_delay_ms)
    return turn.outcome_for(parked.ticket)


def _join_again(
    turn: Turn, said: ClassicMember, parked: ParkedJoin
) -> Outcome[JoinGroupResponse | Parked, CoordinatorRecord]:
    group = turn.group
    member = group.members[said.member_id]
    leads = group.leader == said.member_id
    rests = (group.state is ClassicState.STABLE and not leads) or group.state is ClassicState.COMPLETING_REBALANCE
    if rests and member.protocols == said.protocols:
        turn.prolong(member)
        return turn.outcome(joined(group, said.member_id, subscriptions(group) if leads else ()))
    _update(turn, said, parked)
    go_on(turn)
    return turn.outcome_for(parked.ticket)


def _update(turn: Turn, said: ClassicMember, parked: ParkedJoin) -> None:
    group = turn.group
    member = group.members[said.member_id]
    group.put(
        member._replace(
            client_id=said.client_id,
            client_host=said.client_host,
            session_timeout_ms=said.session_timeout_ms,
            rebalance_timeout_ms=said.rebalance_timeout_ms,
            protocols=said.protocols,
        )
    )
    turn.park_join(said.member_id, parked)


def _replace_static(
    turn: Turn, said: ClassicMember, parked: ParkedJoin, image: Image
) -> Outcome[JoinGroupResponse | Parked, CoordinatorRecord]:
    """Put a static member that was started anew into its former self's place, and fence that."""
    group = turn.group
    assert said.instance_id is not None
    former_id = group.static[said.instance_id]
    led = group.leader == former_id
    former = group.members[former_id]
    turn.cancel_timer(session_key(group.group_id, former_id))
    turn.refuse_join(former_id, ErrorCode.FENCED_INSTANCE_ID)
    turn.refuse_sync(former_id, ErrorCode.FENCED_INSTANCE_ID)
    group.rename(former_id, said.member_id)
    _update(turn, said, parked)
    turn.prolong(group.members[said.member_id])
    moves = subscribes_otherwise(group, former, said) or was_giving_up(group, former)
    moves = moves or (led and leaves_out(group, image))
    if moves or group.state is not ClassicState.STABLE or group.select_protocol() != group.protocol_name:
        go_on(turn)
        return turn.outcome_for(parked.ticket)
    turn.draft.write(generation_record(group, turn.now_ms))
    if parked.version >= SKIP_ASSIGNMENT:
        response = joined(group, said.member_id, subscriptions(group) if led else ())
        response.skip_assignment = led
    else:  # it must not think that it leads, or it would assign
        response = joined(group, said.member_id, leader=former_id if led else None)
    turn.answer_join(said.member_id, response)
    return turn.outcome_for(parked.ticket)
