"""The course of a rebalance: it begins, members join, the join completes, and the leader's assignment ends it.

    begun by        a join, a leave, a lost session, members that did not sync, `kick`
    join completes  when every known member has joined; at the latest after the longest rebalance timeout, without the
                    dynamic members that did not; a first rebalance after `InitialDelay` alone
    none joined     static members are waited for until their sessions end, in turns of the rebalance timeout
    no member left  the empty generation is stored

Joined members have the rebalance timeout again to sync; members that do not are removed, and a new rebalance begins.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic.group import ClassicEvent, ClassicGroup, ClassicState, InitialDelay
from anabranch.machines.groups.classic.turn import Turn, join_key, joined, subscriptions, sync_key
from anabranch.machines.groups.records import CoordinatorRecord, GroupMetadataKey, GroupMetadataValue


def go_on(turn: Turn, initial_delay_ms: int = 0) -> None:
    """After a change of members: begin a rebalance, or complete the join that waited for this change.

    `initial_delay_ms` is needed where the group may have been empty before.
    """
    group = turn.group
    match group.state:
        case ClassicState.EMPTY if group.members:
            _begin_initial(turn, initial_delay_ms)
        case ClassicState.STABLE | ClassicState.COMPLETING_REBALANCE:
            _begin(turn)
        case ClassicState.PREPARING_REBALANCE if group.initial is None and group.is_joined:
            complete_join(turn)
        case _:
            pass


def let_go(turn: Turn, member_ids: Iterable[str]) -> None:
    """Take out members, pending or joined, and go on without them."""
    group = turn.group
    size = len(group.members)
    for member_id in member_ids:
        turn.forget(member_id)
    if len(group.members) < size or group.state is ClassicState.PREPARING_REBALANCE:
        go_on(turn)


def _begin(turn: Turn) -> None:
    group = turn.group
    for member_id in list(group.syncing):
        turn.refuse_sync(member_id, ErrorCode.REBALANCE_IN_PROGRESS)
        turn.prolong(group.members[member_id])
    _stop_waiting_for_syncs(turn)
    turn.stop_answering()
    group.move(ClassicEvent.BEGUN, turn.now_ms)
    if group.is_joined:
        complete_join(turn)
    else:
        turn.set_timer(join_key(group.group_id), group.rebalance_timeout_ms)


def _begin_initial(turn: Turn, delay_ms: int) -> None:
    group = turn.group
    group.move(ClassicEvent.BEGUN, turn.now_ms)
    group.initial = InitialDelay(delay_ms, delay_ms, max(group.rebalance_timeout_ms - delay_ms, 0))
    turn.set_timer(join_key(group.group_id), delay_ms)


def join_time_is_up(turn: Turn) -> None:
    """On the join timer: extend the delay of an initial rebalance that grows, or complete the join."""
    group = turn.group
    if group.state is not ClassicState.PREPARING_REBALANCE:
        return
    initial = group.initial
    if initial is None or not initial.someone_came or initial.remaining_ms == 0:
        complete_join(turn)
        return
    waited_ms = initial.waiting_ms
    initial.someone_came = False
    initial.waiting_ms = min(initial.delay_ms, initial.remaining_ms)
    initial.remaining_ms = max(initial.remaining_ms - waited_ms, 0)
    turn.set_timer(join_key(group.group_id), initial.waiting_ms)


def sync_time_is_up(turn: Turn) -> None:
    """On the sync timer: remove the joined members that did not sync."""
    group = turn.group
    if group.state not in (ClassicState.COMPLETING_REBALANCE, ClassicState.STABLE) or not group.unsynced:
        return
    let_go(turn, list(group.unsynced))


def complete_join(turn: Turn) -> None:
    """Begin a generation of the joined members, and of the static members with a session."""
    group = turn.group
    group.initial = None
    for member in list(group.members.values()):
        if member.member_id not in group.joining and member.instance_id is None:
            turn.forget(member.member_id)
    if not group.members:
        turn.cancel_timer(join_key(group.group_id))
        turn.draft.write(_emptied(group, turn.now_ms))
    elif not _elect_leader(group):
        turn.set_timer(join_key(group.group_id), group.rebalance_timeout_ms)
    else:
        turn.cancel_timer(join_key(group.group_id))
        _begin_generation(turn)


def _begin_generation(turn: Turn) -> None:
    group = turn.group
    group.generation += 1
    group.protocol_name = group.select_protocol()
    group.move(ClassicEvent.JOINED, turn.now_ms)
    group.new.clear()
    group.unsynced = dict.fromkeys(group.members)
    for member in group.members.values():
        known = subscriptions(group) if member.member_id == group.leader else ()
        turn.answer_join(member.member_id, joined(group, member.member_id, known))
        turn.prolong(member)
    turn.set_timer(sync_key(group.group_id), group.rebalance_timeout_ms)


def _elect_leader(group: ClassicGroup) -> bool:
    """Elect a joined member leader, the former one if possible; False if no member has joined."""
    if group.leader not in group.joining:
        group.leader = next((member_id for member_id in group.members if member_id in group.joining), group.leader)
    return group.leader in group.joining


def _emptied(group: ClassicGroup, now_ms: int) -> CoordinatorRecord:
    value = GroupMetadataValue(
        protocol_type=group.protocol_type or "", generation=group.generation + 1, current_state_timestamp=now_ms
    )
    return CoordinatorRecord(GroupMetadataKey(group=group.group_id), value)


def synced(turn: Turn, member_id: str) -> None:
    """The member's SyncGroup came; with the last one the waiting ends."""
    group = turn.group
    if group.unsynced.pop(member_id, member_id) is None and not group.unsynced:
        turn.cancel_timer(sync_key(group.group_id))


def _stop_waiting_for_syncs(turn: Turn) -> None:
    turn.group.unsynced.clear()
    turn.cancel_timer(sync_key(turn.group.group_id))
