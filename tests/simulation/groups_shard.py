"""Coordinator shards on a log that is a list of encoded records: decide, append, apply, answer; crash, load, compact.

Records are durable when they are appended. Beside the machine stands `durable`, which is told nothing but the records:
after every step what is durable of the machine must equal it, so no decision changes durable state but by records.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.classic import ClassicGroup, State
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.records import Record, decode_record, encode_record
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.outcome import CancelTimer, Outcome, Parked, SetTimer
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from anabranch.protocol.messages.consumer_group_install_assignment import ConsumerGroupInstallAssignmentRequest
from anabranch.protocol.messages.consumer_group_prepare_assignment import ConsumerGroupPrepareAssignmentRequest
from anabranch.protocol.messages.heartbeat import HeartbeatRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest
from anabranch.protocol.messages.leave_group import LeaveGroupRequest
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
)
from anabranch.protocol.messages.sync_group import SyncGroupRequest
from anabranch.protocol.registry import api_of

if TYPE_CHECKING:
    from tests.simulation.groups_world import World

LOAD_STEP_MS = 40


class Entry(NamedTuple):
    """A record in the log, and as it is read."""

    offset: int
    key: bytes
    value: bytes | None
    record: Record


class Status(Enum):
    """What a shard can do, and how it answers where it can do nothing."""

    ACTIVE = ErrorCode.NONE
    LOADING = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    FAILED = ErrorCode.COORDINATOR_NOT_AVAILABLE
    DOWN = ErrorCode.NOT_COORDINATOR
    """Its broker is not there: nobody answers."""


class Cause(NamedTuple):
    """What made a coordinator decide."""

    kind: str
    """request, timer, topics, loaded, or admin."""
    group: str | None = None
    """None: it may concern all groups."""
    request: Any = None
    key: Any = None
    caller: Caller | None = None


@dataclass(slots=True)
class Seen:
    """A group as it was before a step."""

    group: ConsumerGroup | ClassicGroup | None
    kind: type | None
    epoch: int
    target_epoch: int
    members: dict[str, Any]
    joining: frozenset[str] = frozenset()
    unsynced: frozenset[str] = frozenset()
    state: Any = None


def see(group: ConsumerGroup | ClassicGroup | None) -> Seen:
    """Take down what may change."""
    if group is None:
        return Seen(None, None, 0, 0, {})
    if isinstance(group, ConsumerGroup):
        return Seen(group, ConsumerGroup, group.epoch, group.target_epoch, dict(group.members))
    return Seen(
        group,
        ClassicGroup,
        group.generation,
        0,
        dict(group.members),
        frozenset(group.joining),
        frozenset(group.unsynced),
        group.state,
    )


class Shard:
    """One partition of `__consumer_offsets`, on a broker of its own."""

    def __init__(self, world: World, number: int, settings: GroupSettings, image: Image) -> None:
        self.world = world
        self.number = number
        self.settings = settings
        self.entries: list[Entry] = []
        self.end = 0
        self.clean_to = 0
        """Everything below was clean after the last compaction: older tombstones may go with the next one."""
        self.machine: Coordinator | None = Coordinator(settings, image)
        self.durable = Coordinator(settings, image)
        self.status = Status.ACTIVE
        self.life = 0
        """Counts machines: a timer of an earlier one does not ring."""
        self.broker_life = 0
        """Counts brokers: connections to an earlier one are dead."""
        self.former = 0
        """Connections up to this one may bring what was meant for an earlier machine of the same broker."""
        self.timers: dict[Hashable, int] = {}
        self.refuse_append = False
        """The disk takes no more: the next append fails."""
        self.lost: dict[str, Seen] = {}
        """The groups of the last machine when it was thrown away."""
        self._reading: tuple[Coordinator, int, list[Entry] | None] | None = None
        self._act(Cause("loaded"), lambda machine: machine.loaded(world.now_ms))

    # -- the shell -----------------------------------------------------------------------------------------------------

    def submit(self, cause: Cause, decide: Callable[[Coordinator], Outcome[Any, Record]]) -> Any:
        """Decide, append, apply, set timers, answer; an error code where that cannot be."""
        if self.status is not Status.ACTIVE:
            return self.status.value
        return self._act(cause, decide)

    def _act(self, cause: Cause, decide: Callable[[Coordinator], Outcome[Any, Record]]) -> Any:
        machine, world = self.machine, self.world
        assert machine is not None
        touched = list(machine.groups) if cause.group is None else [cause.group]
        before = {group_id: see(machine.groups.get(group_id)) for group_id in touched}
        outcome = decide(machine)
        encoded = [encode_record(record) for record in outcome.records]
        if encoded and self.refuse_append:
            self.refuse_append = False
            world.say("%s: the log refuses %d records", self, len(encoded))
            if world.chance.random() < 0.5:  # they are in the log all the same, but nobody is told
                world.rules.not_told(self, lambda: self._append(encoded), outcome.records)
            self.fail()
            return Status.FAILED.value
        self._append(encoded)
        for record in outcome.records:
            machine.apply(record)
        for timer in outcome.timers:
            match timer:
                case SetTimer(key, at_ms):
                    self._set_timer(key, at_ms)
                case CancelTimer(key):
                    self.timers.pop(key, None)
        if encoded:
            for record in outcome.records:
                world.say("    %s", record)
        world.rules.after_step(self, cause, before, outcome)
        for answer in outcome.answers:
            world.answer(answer.ticket, answer.reply)
        return outcome.reply

    def _append(self, encoded: list[tuple[bytes, bytes | None]]) -> None:
        for key, value in encoded:
            record = _decoded(key, value)
            self.entries.append(Entry(self.end, key, value, record))
            self.end += 1
            self.durable.apply(record)

    def _set_timer(self, key: Hashable, at_ms: int) -> None:
        self.timers[key] = at_ms
        self.world.at(max(at_ms, self.world.now_ms), self._ring, key, at_ms, self.life)

    def _ring(self, key: Hashable, at_ms: int, life: int) -> None:
        if life == self.life and self.timers.get(key) == at_ms:
            del self.timers[key]
            group = key[0] if isinstance(key, tuple) else None
            assert isinstance(key, tuple)
            group = None if len(key) == 1 else key[1]
            self.world.say("%s: timer %s", self, key)
            self._act(Cause("timer", group, key=key), lambda machine: machine.on_timer(key, self.world.now_ms))

    # -- requests ------------------------------------------------------------------------------------------------------

    def handle(self, request: Any, version: int, caller: Caller, ticket: int) -> Any:
        """The reply to a request, or `Parked`."""
        caller = caller._replace(version=version)
        group = group_of(request)
        cause = Cause("request", group, request, caller=caller)
        if isinstance(request, OffsetFetchRequest):
            if self.status is not Status.ACTIVE:
                return error_response(request, self.status.value)
            return self._fetch(request, version)
        now_ms = self.world.now_ms
        decide: Callable[[Coordinator], Outcome[Any, Record]]
        match request:
            case ConsumerGroupHeartbeatRequest():
                decide = lambda machine: machine.consumer_group_heartbeat(request, caller, now_ms)  # noqa: E731
            case ConsumerGroupPrepareAssignmentRequest():
                decide = lambda machine: machine.prepare_assignment(request, caller, now_ms)  # noqa: E731
            case ConsumerGroupInstallAssignmentRequest():
                decide = lambda machine: machine.install_assignment(request, caller, now_ms)  # noqa: E731
            case JoinGroupRequest():
                decide = lambda machine: machine.join_group(request, caller, ticket, now_ms)  # noqa: E731
            case SyncGroupRequest():
                decide = lambda machine: machine.sync_group(request, caller, ticket, now_ms)  # noqa: E731
            case HeartbeatRequest():
                decide = lambda machine: machine.heartbeat(request, caller, now_ms)  # noqa: E731
            case LeaveGroupRequest():
                decide = lambda machine: machine.leave_group(request, caller, now_ms)  # noqa: E731
            case OffsetCommitRequest():
                decide = lambda machine: machine.offset_commit(request, caller, now_ms)  # noqa: E731
            case _:
                raise AssertionError(request)
        reply = self.submit(cause, decide)
        return error_response(request, reply) if isinstance(reply, ErrorCode) else reply

    def _fetch(self, request: OffsetFetchRequest, version: int) -> OffsetFetchResponse:
        machine = self.machine
        assert machine is not None
        answers = [
            machine.offset_fetch(asked, request.require_stable, version, self.world.now_ms) for asked in request.groups
        ]
        for answer in answers:
            self.world.rules.after_fetch(self, answer)
        return OffsetFetchResponse(groups=answers)

    # -- failing and loading -------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """The machine is thrown away, its broker goes on: connections stay, those who wait are told."""
        self.world.say("%s: fails", self)
        self._stop(Status.FAILED)
        self.world.answer_parked(self)
        self.world.after(self.world.chance.randint(10, 1_000), self._load_again, self.life)

    def crash(self) -> None:
        """The broker dies: what is on the way to it is lost with its connections."""
        self.world.say("%s: crashes", self)
        self._stop(Status.DOWN)
        self.broker_life += 1
        self.world.cut_off(self)
        self.world.after(self.world.chance.randint(10, 5_000), self._load, self.life)

    def _stop(self, status: Status) -> None:
        self.world.rules.before_stop(self)
        self.status = status
        self.life += 1
        self.machine = None
        self._reading = None
        self.timers.clear()

    def _load_again(self, life: int) -> None:
        if life == self.life:
            self.former = self.world.newest_connection
            self._load(life)

    def _load(self, life: int) -> None:
        if life == self.life:
            self.status = Status.LOADING
            self.world.say("%s: loads %d records", self, len(self.entries))
            # The files that are being read stay what they were, or are opened one after the other, perhaps compacted.
            files = list(self.entries) if self.world.chance.random() < 0.3 else None
            self._reading = Coordinator(self.settings), 0, files
            self._read_on(life)

    def _read_on(self, life: int) -> None:
        if life != self.life:
            return
        assert self._reading is not None
        machine, position, files = self._reading
        ahead = [entry for entry in (self.entries if files is None else files) if entry.offset >= position]
        count = self.world.chance.randint(1, max(1, len(ahead)))
        for entry in ahead[:count]:
            machine.apply(_decoded(entry.key, entry.value))
        if count < len(ahead):
            self._reading = machine, ahead[count].offset, files
            if self.world.chance.random() < 0.3:
                self.compact()
            self.world.after(self.world.chance.randint(0, LOAD_STEP_MS), self._read_on, life)
            return
        self._reading = None
        assert_durable_equal(machine, self.durable)
        machine.image = self.durable.image = self.world.image
        self.machine, self.status = machine, Status.ACTIVE
        self.world.rules.after_load(self)
        self._act(Cause("loaded"), lambda machine: machine.loaded(self.world.now_ms))

    # -- compaction ----------------------------------------------------------------------------------------------------

    def compact(self) -> None:
        """Clean the log up to somewhere: of each key the last record stays, and tombstones go a turn later."""
        end = self.world.chance.randint(0, self.end)
        last = {entry.key: entry.offset for entry in self.entries if entry.offset < end}
        before = len(self.entries)
        forget_below = 0 if self._reading is not None else self.clean_to
        self.entries = [
            entry
            for entry in self.entries
            if entry.offset >= end
            or (last[entry.key] == entry.offset and not (entry.value is None and entry.offset < forget_below))
        ]
        self.clean_to = max(self.clean_to, end)
        self.world.say("%s: compacts up to %d, %d of %d records stay", self, end, len(self.entries), before)

    def check_replay(self) -> None:
        """Replay equals live: of the log as it stands, as if it were compacted, and as if it were meanwhile."""
        last = {entry.key: entry.offset for entry in self.entries}
        overtaken = self.world.chance.randint(0, self.end)
        for compacted_from in (0, overtaken, self.end):
            machine = Coordinator(self.settings, self.world.image)
            for entry in self.entries:
                if entry.offset < compacted_from or last[entry.key] == entry.offset:
                    machine.apply(entry.record)
            assert_durable_equal(machine, self.durable)

    def check_durable(self, group_id: str) -> None:
        """What is durable of a group is what its records say."""
        assert self.machine is not None
        assert_same_group(self.machine.groups.get(group_id), self.durable.groups.get(group_id), live=True)

    def __str__(self) -> str:
        return f"shard {self.number}"


def _decoded(key: bytes, value: bytes | None) -> Record:
    record = decode_record(key, value)
    assert record is not None
    return record


def assert_durable_equal(one: Coordinator, other: Coordinator) -> None:
    """Two machines that have read the same records are the same."""
    assert one.positions == other.positions
    for group_id in one.groups.keys() | other.groups.keys():
        assert_same_group(one.groups.get(group_id), other.groups.get(group_id))


def assert_same_group(
    one: ConsumerGroup | ClassicGroup | None, other: ConsumerGroup | ClassicGroup | None, *, live: bool = False
) -> None:
    """The same durable state; `live`: the first one may have more that is not durable."""
    if live and isinstance(one, ClassicGroup):
        if not one.is_stored:
            assert other is None, (one, other)
            return
        assert isinstance(other, ClassicGroup), (one, other)
        assert one.generation >= other.generation
        if one.state is State.STABLE:
            assert stored(one) == stored(other)
        return
    if isinstance(one, ClassicGroup) and isinstance(other, ClassicGroup):
        assert stored(one) == stored(other)
        return
    assert one == other, f"\n{one}\n{other}"


def stored(group: ClassicGroup) -> tuple[object, ...]:
    """What the log says of a classic group."""
    members = [
        (
            member.member_id,
            member.instance_id,
            member.assignment,
            member.session_timeout_ms,
            member.metadata(group.protocol_name),
        )
        for member in group.members.values()
    ]
    return group.generation, group.protocol_type, group.protocol_name, group.leader, members


def group_of(request: Any) -> str:
    """The group that a request concerns."""
    if isinstance(request, OffsetFetchRequest):
        return request.groups[0].group_id
    group_id = request.group_id
    assert isinstance(group_id, str)
    return group_id


def error_response(request: Any, error: ErrorCode) -> Any:
    """How the handlers answer for a shard that does not."""
    match request:
        case OffsetCommitRequest():
            return OffsetCommitResponse(
                topics=[
                    OffsetCommitResponseTopic(
                        name=topic.name,
                        topic_id=topic.topic_id,
                        partitions=[
                            OffsetCommitResponsePartition(partition_index=part.partition_index, error_code=error)
                            for part in topic.partitions
                        ],
                    )
                    for topic in request.topics
                ]
            )
        case OffsetFetchRequest():
            return OffsetFetchResponse(
                groups=[OffsetFetchResponseGroup(group_id=asked.group_id, error_code=error) for asked in request.groups]
            )
        case JoinGroupRequest():
            return api_of(type(request)).response(error_code=error, member_id=request.member_id, protocol_name="")
        case _:
            return api_of(type(request)).response(error_code=error)


__all__ = ["Cause", "Entry", "Parked", "Seen", "Shard", "Status", "group_of", "see"]
