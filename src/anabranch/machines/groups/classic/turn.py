"""One decision about a classic group in the making: its records, its timers, its answers.

A parked request is answered once: `park_*` refuses an older request of the same member, `answer_*` forgets the one it
answers. Of several orders for one timer the last one counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic.group import ClassicGroup, ClassicMember, ParkedJoin
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.outcome import Draft, Outcome
from anabranch.protocol.messages.join_group import JoinGroupResponse, JoinGroupResponseMember
from anabranch.protocol.messages.sync_group import SyncGroupResponse

Reply = TypeVar("Reply")

PROTOCOL_NAME_MAY_BE_NULL = 7
"""JoinGroup's version."""


def session_key(group_id: str, member_id: str) -> Hashable:
    """The timer of a member's session, or of the time in which a pending member must join."""
    return ("classic", group_id, "session", member_id)


def join_key(group_id: str) -> Hashable:
    """The timer after which a rebalance continues without the missing members."""
    return ("classic", group_id, "join")


def sync_key(group_id: str) -> Hashable:
    """The timer at which members that joined and did not sync are removed."""
    return ("classic", group_id, "sync")


def answers_key(group_id: str) -> Hashable:
    """The timer at which more members are given their assignments."""
    return ("classic", group_id, "answers")


def join_error(error: ErrorCode, member_id: str, version: int) -> JoinGroupResponse:
    """A JoinGroup that did not succeed."""
    name = None if version >= PROTOCOL_NAME_MAY_BE_NULL else ""
    return JoinGroupResponse(error_code=error, member_id=member_id, protocol_name=name)


def joined(
    group: ClassicGroup, member_id: str, members: Sequence[JoinGroupResponseMember] = (), *, leader: str | None = None
) -> JoinGroupResponse:
    """The answer to JoinGroup: the present generation."""
    return JoinGroupResponse(
        generation_id=group.generation,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol_name or "",
        leader=(leader if leader is not None else group.leader) or "",
        member_id=member_id,
        members=members,
    )


def subscriptions(group: ClassicGroup) -> list[JoinGroupResponseMember]:
    """The subscriptions of all members, for the leader."""
    return [
        JoinGroupResponseMember(
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            metadata=member.metadata(group.protocol_name),
        )
        for member in group.members.values()
    ]


class Turn:
    """A decision under way."""

    __slots__ = ("draft", "group", "now_ms")

    def __init__(self, group: ClassicGroup, now_ms: int) -> None:
        self.group = group
        self.now_ms = now_ms
        self.draft: Draft[CoordinatorRecord] = Draft()

    def outcome(self, reply: Reply) -> Outcome[Reply, CoordinatorRecord]:
        """All that was gathered, and this reply."""
        assert len(self.draft.records) <= 1, self.draft.records
        return self.draft.outcome(reply)

    def outcome_for(self, ticket: Hashable) -> Outcome[Any, CoordinatorRecord]:
        """All that was gathered; the reply is what was answered to `ticket`, if it was, and else `Parked`."""
        assert len(self.draft.records) <= 1, self.draft.records
        return self.draft.outcome_for(ticket)

    def set_timer(self, key: Hashable, delay_ms: int) -> None:
        """Wake the group after `delay_ms`."""
        self.draft.set_timer(key, self.now_ms + max(delay_ms, 0))

    def cancel_timer(self, key: Hashable) -> None:
        """Forget a timer, set or not."""
        self.draft.cancel_timer(key)

    def stop_answering(self) -> None:
        """Cancel the timer of those who wait for their assignments, if it is set."""
        if self.group.answers_later:
            self.group.answers_later = False
            self.cancel_timer(answers_key(self.group.group_id))

    def prolong(self, member: ClassicMember) -> None:
        """Begin the member's session anew."""
        at_ms = self.now_ms + max(member.session_timeout_ms, 0)
        self.draft.set_timer(session_key(self.group.group_id, member.member_id), at_ms)

    def park_join(self, member_id: str, parked: ParkedJoin) -> None:
        """Answer this JoinGroup when the join completes."""
        self.refuse_join(member_id, ErrorCode.REBALANCE_IN_PROGRESS)
        self.group.joining[member_id] = parked

    def park_sync(self, member_id: str, ticket: Hashable) -> None:
        """Answer this SyncGroup when the leader's came."""
        self.refuse_sync(member_id, ErrorCode.REBALANCE_IN_PROGRESS)
        self.group.syncing[member_id] = ticket

    def answer_join(self, member_id: str, response: JoinGroupResponse) -> None:
        """Answer the member's parked JoinGroup, if any."""
        parked = self.group.joining.pop(member_id, None)
        if parked is not None:
            self.draft.answer(parked.ticket, response)

    def answer_sync(self, member_id: str, response: SyncGroupResponse) -> bool:
        """Answer the member's parked SyncGroup; False without one."""
        if member_id not in self.group.syncing:
            return False
        self.draft.answer(self.group.syncing.pop(member_id), response)
        return True

    def refuse_join(self, member_id: str, error: ErrorCode) -> None:
        """Answer the member's parked JoinGroup, if any, with an error."""
        parked = self.group.joining.get(member_id)
        if parked is not None:
            known_as = "" if error == ErrorCode.UNKNOWN_MEMBER_ID else member_id
            self.answer_join(member_id, join_error(error, known_as, parked.version))

    def refuse_sync(self, member_id: str, error: ErrorCode) -> bool:
        """Answer the member's parked SyncGroup with an error; False without one."""
        return self.answer_sync(member_id, SyncGroupResponse(error_code=error))

    def forget(self, member_id: str) -> None:
        """Remove a member, pending or joined; its parked requests are answered UNKNOWN_MEMBER_ID."""
        self.cancel_timer(session_key(self.group.group_id, member_id))
        self.refuse_join(member_id, ErrorCode.UNKNOWN_MEMBER_ID)
        self.refuse_sync(member_id, ErrorCode.UNKNOWN_MEMBER_ID)
        self.group.pending.pop(member_id, None)
        if member_id in self.group.members:
            self.group.remove(member_id)
