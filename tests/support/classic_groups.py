"""A world of one classic group: its clock, timers, log, and pending requests. Checked after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import classic
from anabranch.machines.groups.classic import ClassicGroup, ClassicSettings, ClassicState
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.records import CoordinatorRecord, decode_record, encode_record
from anabranch.machines.outcome import CancelTimer, Outcome, Parked
from anabranch.protocol.messages.heartbeat import HeartbeatRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from anabranch.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment

RANGE = {"range": b"topics"}


@dataclass(frozen=True)
class Caller:
    client_id: str
    client_host: str
    version: int
    member_id: str
    connection: int = 0


@dataclass(eq=False)
class Call:
    """A request and, once sent, its response."""

    response: Any = None

    @property
    def is_parked(self) -> bool:
        return self.response is None

    @property
    def error(self) -> ErrorCode:
        return ErrorCode(self.response.error_code)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.response, name)


class GroupWorld:
    """Runs decisions as the shard does: records, apply, timers, answers."""

    def __init__(self, **settings: int) -> None:
        self.settings = ClassicSettings(**settings)
        self.group = ClassicGroup("g")
        self.image = Image()
        self.now_ms = 1_000_000
        self.timers: dict[Hashable, int] = {}
        self.journal: list[CoordinatorRecord] = []
        self.parked: dict[Hashable, Call] = {}
        self.tickets = 0

    # Requests to the group

    def join(
        self,
        client: str = "a",
        member_id: str = "",
        *,
        instance: str | None = None,
        protocols: Mapping[str, bytes] = RANGE,
        protocol_type: str = "consumer",
        session_timeout_ms: int = 10_000,
        rebalance_timeout_ms: int = 60_000,
        version: int = 9,
        connection: int = 0,
    ) -> Call:
        request = JoinGroupRequest(
            group_id="g",
            session_timeout_ms=session_timeout_ms,
            rebalance_timeout_ms=rebalance_timeout_ms,
            member_id=member_id,
            group_instance_id=instance,
            protocol_type=protocol_type,
            protocols=[JoinGroupRequestProtocol(name=name, metadata=data) for name, data in protocols.items()],
        )
        call, ticket = self._call(), self.tickets
        caller = Caller(client, "/127.0.0.1", version, str(ticket), connection)
        outcome = classic.decide_join(self.group, request, caller, ticket, self.settings, self.image, self.now_ms)
        return self.perform(outcome, call)

    def sync(
        self,
        member_id: str,
        generation: int | None = None,
        assignments: Mapping[str, bytes] | None = None,
        *,
        instance: str | None = None,
        protocol_type: str | None = "consumer",
        protocol_name: str | None = "range",
        version: int = 5,
    ) -> Call:
        request = SyncGroupRequest(
            group_id="g",
            generation_id=self.group.generation if generation is None else generation,
            member_id=member_id,
            group_instance_id=instance,
            protocol_type=protocol_type,
            protocol_name=protocol_name,
            assignments=[
                SyncGroupRequestAssignment(member_id=name, assignment=given)
                for name, given in (assignments or {}).items()
            ],
        )
        call, ticket = self._call(), self.tickets
        caller = Caller("", "", version, "")
        return self.perform(classic.decide_sync(self.group, request, caller, ticket, self.now_ms), call)

    def heartbeat(self, member_id: str, generation: int | None = None, *, instance: str | None = None) -> ErrorCode:
        beat = HeartbeatRequest(
            group_id="g",
            generation_id=self.group.generation if generation is None else generation,
            member_id=member_id,
            group_instance_id=instance,
        )
        return self.perform(classic.decide_heartbeat(self.group, beat, self.now_ms)).error

    def leave(self, *leaving: str | MemberIdentity, version: int = 5) -> Call:
        members = [who if isinstance(who, MemberIdentity) else MemberIdentity(member_id=who) for who in leaving]
        request = LeaveGroupRequest(group_id="g", members=members)
        if version < 3:
            request = LeaveGroupRequest(group_id="g", member_id=members[0].member_id)
        return self.perform(classic.decide_leave(self.group, request, version, self.now_ms))

    def kick(self) -> None:
        self.perform(classic.decide_kick(self.group, self.now_ms))

    def dissolve(self) -> None:
        self.perform(classic.decide_dissolve(self.group, self.now_ms))

    def delete(self) -> ErrorCode:
        reply = self.perform(classic.decide_delete(self.group, self.now_ms)).response
        return ErrorCode(reply)

    def advance(self, duration_ms: int) -> None:
        """Advance the time; due timers fire in order."""
        until = self.now_ms + duration_ms
        while True:
            key, at_ms = min(self.timers.items(), key=lambda timer: timer[1], default=(None, until + 1))
            if at_ms > until:
                break
            self.now_ms = max(self.now_ms, at_ms)
            del self.timers[key]
            self.perform(classic.decide_timer(self.group, key, self.now_ms))
        self.now_ms = until

    def fail_over(self) -> None:
        """Move the group to another coordinator, with the log and without pending requests."""
        self.timers.clear()
        self.parked.clear()
        self.group = ClassicGroup("g")
        for record in self.journal:
            classic.apply(self.group, record.value)
        self.perform(classic.decide_loaded(self.group, self.settings, self.now_ms))

    # Whole stories

    def start(self, *clients: str, instances: Mapping[str, str] | None = None, **said: Any) -> list[str]:
        """Form a STABLE group of these clients; the first leads, and assigns everyone its own id."""
        calls = []
        for client in clients:
            instance = (instances or {}).get(client)
            call = self.join(client, instance=instance, **said)
            calls.append(self.join(client, call.member_id, **said) if not call.is_parked else call)
        while self.group.state is ClassicState.PREPARING_REBALANCE:
            self.advance(self.timers["classic", "g", "join"] - self.now_ms)
        return self.complete(calls)

    def complete(self, joins: Iterable[Call]) -> list[str]:
        """Send SyncGroup for all joined members, the leader last; return their ids."""
        joined = list(joins)
        assert [call.error for call in joined] == [ErrorCode.NONE] * len(joined)
        ids = [call.member_id for call in joined]
        leader = self.group.leader
        assert leader in ids
        syncs = [
            self.sync(member_id, protocol_name=self.group.protocol_name) for member_id in ids if member_id != leader
        ]
        plan = {member_id: member_id.encode() for member_id in self.group.members}
        syncs.append(self.sync(leader, assignments=plan, protocol_name=self.group.protocol_name))
        assert {call.error for call in syncs} == {ErrorCode.NONE}
        return ids

    # The shard

    def _call(self) -> Call:
        self.tickets += 1
        call = Call()
        self.parked[self.tickets] = call
        return call

    def perform(self, outcome: Outcome[Any, CoordinatorRecord], call: Call | None = None) -> Call:
        for record in outcome.records:
            self.journal.append(record)
            classic.apply(self.group, written_and_read(record).value)
        for timer in outcome.timers:
            if isinstance(timer, CancelTimer):
                self.timers.pop(timer.key, None)
            else:
                self.timers[timer.key] = timer.at_ms
        answered = call or Call()
        if isinstance(outcome.reply, Parked):
            assert outcome.reply.ticket == self.tickets
        else:
            if call is not None:
                del self.parked[self.tickets]
            answered.response = outcome.reply
        for answer in outcome.answers:
            self.parked.pop(answer.ticket).response = answer.reply
        self.check()
        return answered

    def check(self) -> None:
        """Check the invariants of the group after every step."""
        group = self.group
        members, pending = set(group.members), set(group.pending)
        assert not members & pending
        assert set(self.parked) == {parked.ticket for parked in group.joining.values()} | set(group.syncing.values())
        assert group.new <= set(group.joining)
        assert group.supported == Counter(name for member in group.members.values() for name, _ in member.protocols)
        assert group.static == {m.instance_id: m.member_id for m in group.members.values() if m.instance_id is not None}
        if group.state is ClassicState.DEAD:
            assert not self.timers and not self.parked
            return
        assert group.leader in members if members else group.leader is None
        assert set(group.joining) <= (members if group.state is ClassicState.PREPARING_REBALANCE else set())
        syncs = group.state is ClassicState.COMPLETING_REBALANCE or group.answers_later
        assert set(group.syncing) <= (members if syncs else set())
        assert not group.answers_later or group.state is ClassicState.STABLE
        assert set(group.unsynced) <= members
        assert not group.unsynced or group.state in (ClassicState.COMPLETING_REBALANCE, ClassicState.STABLE)
        assert not members or group.state is not ClassicState.EMPTY
        self._check_timers()
        if group.state in (ClassicState.STABLE, ClassicState.EMPTY) and group.is_stored:
            last = self.journal[-1].value
            assert last is not None
            restored = classic.restore("g", last)
            assert classic.generation_record(restored, 0) == classic.generation_record(group, 0)
            assert (restored.state, restored.state_changed_ms) == (group.state, group.state_changed_ms)

    def _check_timers(self) -> None:
        group = self.group
        sessions = {("classic", "g", "session", member_id) for member_id in [*group.members, *group.pending]}
        waiting = (set(group.joining) - group.new) | set(group.syncing)
        silent = {("classic", "g", "session", member_id) for member_id in waiting}
        others = set()
        if group.state is ClassicState.PREPARING_REBALANCE:
            others.add(("classic", "g", "join"))
        if group.unsynced:
            others.add(("classic", "g", "sync"))
        if group.answers_later:
            others.add(("classic", "g", "answers"))
        assert others | (sessions - silent) <= set(self.timers) <= others | sessions


def written_and_read(record: CoordinatorRecord) -> CoordinatorRecord:
    """The record as it comes back from the log."""
    read = decode_record(*encode_record(record))
    assert read is not None
    return read
