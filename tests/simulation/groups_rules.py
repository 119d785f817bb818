"""The invariants of a world of groups, checked after every step.

A client owns a partition from the moment its assignment arrives until its application has revoked the partition, or
until the coordinator rightly ends its session: after a silence of the session timeout, a revocation later than the
rebalance timeout, or an order to leave. A member removed in this way is void: neither its partitions nor its commits
count any more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import (
    LEFT_FOR_A_WHILE,
    Assignment,
    ConsumerGroup,
    Member,
    MemberState,
    sets_of,
)
from anabranch.machines.groups.consumer.target import client_assignor, offers_of, subscription
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.embedded import assigned_by_name
from anabranch.machines.groups.gatekeeper import LOOK_MS
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.regex import Regexes
from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, common, union, without
from anabranch.machines.keyspace import SPACE_END, Interval
from anabranch.machines.lineage import BEYOND, Frontier
from anabranch.machines.outcome import Outcome
from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from anabranch.protocol.messages.consumer_group_install_assignment import ConsumerGroupInstallAssignmentRequest
from anabranch.protocol.messages.consumer_group_position import ConsumerGroupPositionRequest
from anabranch.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from anabranch.protocol.messages.leave_group import LeaveGroupRequest
from anabranch.protocol.messages.offset_commit import OffsetCommitRequest, OffsetCommitResponse
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitResponse
from tests.simulation.groups_client import Client, Standing
from tests.simulation.groups_done import DoneRules
from tests.simulation.groups_keys import assigned_keys, keys_of, target_keys
from tests.simulation.groups_positions import ABSENT, PositionRules
from tests.simulation.groups_shard import Broker, Cause, Seen, see
from tests.simulation.groups_shared_topics import SharedTopic

if TYPE_CHECKING:
    from tests.simulation.groups_world import World

COMMITTED = (OffsetCommitResponse, TxnOffsetCommitResponse)
STRICT = frozenset(
    {
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.FENCED_MEMBER_EPOCH,
        ErrorCode.STALE_MEMBER_EPOCH,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.UNRELEASED_INSTANCE_ID,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_ASSIGNMENT,
        ErrorCode.UNSUPPORTED_ASSIGNOR,
        ErrorCode.INVALID_REGULAR_EXPRESSION,
    }
)
"""Errors after which the state must be unchanged."""
TIMER_SLACK_MS = 50
PACKET_MAX_MS = 10
"""The longest time that a packet takes."""
ANSWERED_IN_MS = 8_000
"""The same when the network is bad."""
Partition = tuple[UUID, int]
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class _Decided:
    """A reply that is based on the records of the log below `end`."""

    reply: Any
    broker: Broker
    end: int
    note: Any
    is_void: bool = False
    """Whether the log has lost records on which the reply is based."""


class _Held(NamedTuple):
    """The owner of a partition."""

    owner: str
    since_ms: int
    joined_ms: int
    """When the owner last began anew, or got the partition."""


class Rules:
    """Observes all brokers and clients."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.incarnations: Counter[tuple[str, str]] = Counter()
        """By group and member id: the number of times the coordinator has removed such a member."""
        self._heard_ms: dict[tuple[str, str], int] = {}
        """The time of the last request of a member, or of the last reply that the member had waited for."""
        self._revoking_ms: dict[tuple[str, str], int] = {}
        """The time since which a member has had partitions to revoke."""
        self._client_side: dict[str, bool] = {}
        """Whether a group's target assignment was computed by a member."""
        self._subscribed: dict[str, dict[str, frozenset[str]]] = {}
        self.positions = PositionRules(self)
        self.done = DoneRules(self) if world.theme.sharing else None
        self._held: dict[tuple[str, UUID, int], _Held] = {}
        self._parted: dict[tuple[str, UUID, int], str] = {}
        """By partition that is nobody's: the member that had it last."""
        self._waits_idly: dict[tuple[str, UUID, int], int] = {}
        """Free partitions that wait although everything before them is committed: since when."""
        self._owners_seen: dict[str, tuple[object, object]] = {}
        """By group: the stored group, and the basis, of the last check of its owners."""
        self._checked: dict[tuple[str, str], tuple[object, object]] = {}
        """By check and group: the stored group, and the basis, of the last such check."""
        self._removals = 0
        self._decided: dict[int, _Decided] = {}
        """By the reply's identity: replies that have not left their broker yet."""
        self._tickets: dict[int, Any] = {}
        """The parked requests."""
        self._undo: dict[Broker, deque[tuple[int, list[Callable[[], None]]]]] = {}
        """Undo functions for decisions that are not durable yet, by the log end at the time."""
        self._changes: list[Callable[[], None]] = []
        self._regexes = Regexes(1_000)
        self.decided_ms: int | None = None
        """While a decision is checked: when it was made."""
        self.counts: Counter[str] = Counter()

    # -- the coordinator's side ----------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """The time of the decision that is checked, or now."""
        return self.world.now_ms if self.decided_ms is None else self.decided_ms

    def after_step(self, broker: Broker, cause: Cause, before: dict[str, Seen], outcome: Outcome[Any, Any]) -> None:
        """Check everything that a decision has touched."""
        machine = broker.machine
        assert machine is not None
        self._changes = []
        if cause.ticket is not None:
            self._tickets[cause.ticket] = cause.request
        self._refused(cause, outcome)
        self._listen(cause, outcome, None if cause.group is None else before[cause.group].kind)
        self._begin_anew(cause, outcome)
        for group_id, seen in before.items():
            group = machine.groups.get(group_id)
            now = see(group)
            self._members_gone(cause, group_id, seen, now)
            self._left_behind(group_id, seen, now, outcome)
            self._epochs(group_id, seen, now, cause)
            changed = bool(outcome.records) or cause.kind in ("topics", "loaded")
            if changed and isinstance(group, ConsumerGroup):
                self._whose_target(cause, group, seen, outcome)
                basis = group.changes, machine.image.version, self._client_side.get(group_id)
                if self._is_new("consistent", group, basis):
                    self._consistent(machine, group)
                self._granted(machine, group, seen)
            if changed or isinstance(group, ClassicGroup) or self.world.chance.random() < 0.1:
                broker.check_stored(machine, group_id)
            if isinstance(group, ConsumerGroup):
                self._overdue(group)
                self._silence(machine, group)
            if now.epoch != seen.epoch:
                self.counts["epochs"] += 1
            if seen.kind is not now.kind and seen.kind is not None and now.kind is not None:
                self.counts["upgrades" if now.kind is ConsumerGroup else "downgrades"] += 1
                self._look_anew(group_id)
            elif now.kind is ConsumerGroup and not machine.groups[group_id].members:
                self._look_anew(group_id)
            if changed:
                self.positions.begin(machine, group_id)
                if not isinstance(group, ConsumerGroup) or self._is_new("hold", group, group.changes):
                    self._hold(machine, group_id)
            self.check_owners(group_id)
        self._told_what_is(machine, cause, outcome)
        self.positions.after_step(machine, cause, outcome)
        if self.done is not None:
            self.done.after_step(machine, cause, outcome)
        if cause.key == ("expire",):
            self.positions.after_check(broker, machine)
        if self._changes and broker.log.end > broker.log.high_watermark:
            self._undo.setdefault(broker, deque()).append((broker.log.end, self._changes))
        self._decide(broker, cause.request, outcome.reply)
        for answer in outcome.answers:
            self._decide(broker, self._tickets.pop(answer.ticket), answer.reply)

    def _is_new(self, check: str, group: ConsumerGroup, basis: object) -> bool:
        """Whether a group, or the basis of a check, is not what it was when the check was last made."""
        at = check, group.group_id
        last = self._checked.get(at)
        if last is not None and last[0] is group and last[1] == basis:
            return False
        self._checked[at] = group, basis
        return True

    def change(self, mapping: MutableMapping[Key, Value], key: Key, value: Value) -> None:
        """Set an entry that is undone if the log loses the decision; `ABSENT` removes the key."""
        former = mapping.get(key, ABSENT)

        def put(value: Value) -> None:
            if value is ABSENT:
                mapping.pop(key, None)
            else:
                mapping[key] = value

        put(value)
        self._changes.append(lambda: put(former))

    def after_marker(self, broker: Broker, machine: Coordinator, producer_id: int, *, committed: bool) -> None:
        """The end of a transaction was applied."""
        self._changes = []
        self.positions.marked(machine, producer_id, committed=committed)
        if self._changes and broker.log.end > broker.log.high_watermark:
            self._undo.setdefault(broker, deque()).append((broker.log.end, self._changes))

    # -- durability, and replies ---------------------------------------------------------------------------------------

    def durable(self, broker: Broker) -> None:
        """Handle a move of a broker's high watermark."""
        undo = self._undo.get(broker)
        while undo and undo[0][0] <= broker.log.high_watermark:
            undo.popleft()

    def cut(self, broker: Broker, end: int) -> None:
        """Undo the changes of a log's lost records from `end` on; no reply may be based on them."""
        self.counts["cuts"] += 1
        undo = self._undo.get(broker)
        while undo and undo[-1][0] > end:
            self.counts["undone"] += 1
            for change in reversed(undo.pop()[1]):
                change()
        for decided in self._decided.values():
            if decided.broker is broker and decided.end > end:
                decided.is_void = True
        self._owners_seen.clear()

    def _decide(self, broker: Broker, request: Any, reply: Any) -> None:
        if (request is not None and hasattr(reply, "error_code")) or isinstance(reply, COMMITTED):
            note = self._note(broker, request, reply)
            self._decided[id(reply)] = _Decided(reply, broker, broker.log.end, note)

    def told(self, reply: Any) -> Any:
        """Check a reply that leaves its broker: its records must be durable. Returns the note for the client."""
        decided = self._decided.pop(id(reply), None)
        if decided is None:
            return None
        assert not decided.is_void, f"the log has lost what {reply} is based upon"
        assert decided.broker.log.high_watermark >= decided.end, f"{reply} is based upon what is not durable yet"
        if self.done is not None:
            self.done.told(reply)
        return decided.note

    def _refused(self, cause: Cause, outcome: Outcome[Any, Any]) -> None:
        error = ErrorCode.of(getattr(outcome.reply, "error_code", 0))
        if error in STRICT:
            assert not outcome.records, (cause, outcome)
            assert all(timer.key[0] == "gates" for timer in outcome.timers), (cause, outcome)
            assert not outcome.answers, (cause, outcome)

    def _listen(self, cause: Cause, outcome: Outcome[Any, Any], kind: type | None) -> None:
        """Note the members that sent requests, or got replies that they had waited for."""
        now_ms, request, group_id = self.now_ms, cause.request, cause.group
        if request is None or group_id is None:
            pass
        elif isinstance(
            request, JoinGroupRequest | SyncGroupRequest | HeartbeatRequest | ConsumerGroupHeartbeatRequest
        ):
            error = getattr(outcome.reply, "error_code", 0)
            called = isinstance(request, HeartbeatRequest) and error == ErrorCode.REBALANCE_IN_PROGRESS
            if error == ErrorCode.NONE or called:
                member_id = getattr(outcome.reply, "member_id", "") or request.member_id
                self._heard_ms[group_id, member_id] = now_ms
        elif (
            isinstance(request, OffsetCommitRequest)
            and kind is ClassicGroup
            and any(not part.error_code for topic in outcome.reply.topics for part in topic.partitions)
        ):
            self._heard_ms[group_id, request.member_id] = now_ms
        for answer in outcome.answers:
            asked = self._tickets[answer.ticket]
            if not answer.reply.error_code and not isinstance(asked, ConsumerGroupPositionRequest):
                member_id = getattr(answer.reply, "member_id", "") or asked.member_id
                self._heard_ms[asked.group_id, member_id] = now_ms

    def _members_gone(self, cause: Cause, group_id: str, before: Seen, now: Seen) -> None:
        now_ms = self.now_ms
        for member_id, member in before.members.items():
            if member_id not in now.members:
                self._assert_rightly(cause, group_id, before, member_id, member)
                self._forget(group_id, member_id, cause.kind)
            elif before.kind is not now.kind:
                self._heard_ms[group_id, member_id] = now_ms
        for member_id, member in now.members.items():
            if member_id not in before.members:
                self._heard_ms[group_id, member_id] = now_ms
            if now.kind is ConsumerGroup and member.state is MemberState.UNREVOKED_PARTITIONS:
                known = before.members.get(member_id)
                had = getattr(known, "revoking", None), getattr(known, "revoking_shares", None)
                if before.kind is not now.kind or had != (member.revoking, member.revoking_shares):
                    self._revoking_ms[group_id, member_id] = now_ms

    def _forget(self, group_id: str, member_id: str, why: str) -> None:
        self._removals += 1
        self.change(self.incarnations, (group_id, member_id), self.incarnations[group_id, member_id] + 1)
        self._revoking_ms.pop((group_id, member_id), None)
        self.counts["removed"] += 1
        self.world.say("  %s forgets %s (%s)", group_id, member_id, why)
        self.world.upheavals += 1

    def _assert_rightly(self, cause: Cause, group_id: str, before: Seen, member_id: str, member: Any) -> None:
        """Check that a removed member was removed rightly."""
        now_ms, request = self.now_ms, cause.request
        silent_ms = now_ms - self._heard_ms[group_id, member_id]
        why = (cause, before, member_id)
        if cause.kind == "timer" and before.kind is ConsumerGroup:
            kind, _, whose = cause.key
            assert whose == member_id, why
            classic = member.described.classic
            if kind == "session":
                timeout_ms = 3 * self.world.theme.heartbeat_interval_ms  # whatever the group's config was meanwhile
                assert silent_ms >= (timeout_ms if classic is None else classic.session_timeout_ms), why
            elif kind == "rebalance":
                waited_ms = now_ms - self._revoking_ms[group_id, member_id]
                assert waited_ms >= member.described.rebalance_timeout_ms, why
            else:
                assert classic is not None, why
        elif cause.kind == "timer":
            _, _, kind, *whose = cause.key
            if kind == "session" and [member_id] == whose:
                assert silent_ms >= member.session_timeout_ms, why
            elif kind == "sync":
                assert member_id in before.unsynced, why
            else:
                assert kind in ("join", "session") and member_id not in before.joining, why
        elif isinstance(request, ConsumerGroupHeartbeatRequest):
            instance = member.described.instance_id if before.kind is ConsumerGroup else member.instance_id
            leaves = request.member_epoch in (-1, -2) and request.member_id == member_id
            replaces = request.member_epoch == 0 and instance is not None and request.instance_id == instance
            assert leaves or replaces, why
        elif isinstance(request, LeaveGroupRequest):
            named = {(one.member_id, one.group_instance_id) for one in request.members} | {(request.member_id, None)}
            assert any(member_id == one or (not one and instance) for one, instance in named), why
        elif isinstance(request, JoinGroupRequest):
            instance = member.described.instance_id if before.kind is ConsumerGroup else member.instance_id
            assert instance is not None and instance == request.group_instance_id and not request.member_id, why
        else:
            raise AssertionError(why)

    def _left_behind(self, group_id: str, before: Seen, now: Seen, outcome: Outcome[Any, Any]) -> None:
        """Void the members that a new classic generation lacks: their commits do not count from now on."""
        if now.kind is not ClassicGroup or before.kind is not ClassicGroup or now.epoch <= before.epoch:
            return
        replies = [answer.reply for answer in outcome.answers] + [outcome.reply]
        joined = {reply.member_id for reply in replies if isinstance(reply, JoinGroupResponse) and not reply.error_code}
        for member_id in now.members.keys() - joined:
            self._forget(group_id, member_id, "left behind")

    def _epochs(self, group_id: str, before: Seen, now: Seen, cause: Cause) -> None:
        """Check that epochs never go back; a deleted group starts again."""
        if before.kind is None or now.kind is None:
            return
        assert now.epoch >= before.epoch, (cause, before, now)
        if before.kind is not now.kind or now.kind is not ConsumerGroup:
            return
        assert now.target_epoch >= before.target_epoch, (cause, before, now)
        for member_id, member in now.members.items():
            known = before.members.get(member_id)
            if known is not None and LEFT_FOR_A_WHILE not in (member.epoch, known.epoch):
                assert member.epoch >= known.epoch, (cause, known, member)

    def _whose_target(self, cause: Cause, group: ConsumerGroup, before: Seen, outcome: Outcome[Any, Any]) -> None:
        if before.kind is not ConsumerGroup or group.target_epoch != before.target_epoch:
            installs = isinstance(cause.request, ConsumerGroupInstallAssignmentRequest)
            last = client_assignor(offers_of(member.described) for member in group.members.values())
            by_member = installs and (last is not None or group.target_epoch != group.epoch)
            self.change(self._client_side, group.group_id, by_member)
            self.counts["installed" if installs else "assigned"] += 1

    def _consistent(self, machine: Coordinator, group: ConsumerGroup) -> None:
        assert group.target_epoch <= group.epoch, group
        held: dict[Partition, dict[str, Ranges]] = {}
        for member_id, member in group.members.items():
            assert member.epoch <= group.target_epoch, member
            assert member.previous_epoch <= max(member.epoch, group.target_epoch), member
            for partition, keys in keys_of(member).items():
                of = held.setdefault(partition, {})
                assert not any(common(keys, others) for others in of.values()), (partition, of, member_id, keys)
                of[member_id] = keys
            assert bool(member.revoking) == (member.state is MemberState.UNREVOKED_PARTITIONS), member
            assert member.described.allow_key_share or not member.shares, f"{member} takes no parts, and has some"
            if member.state is MemberState.STABLE and member.epoch == group.target_epoch:
                assert sets_of(member.assigned) == sets_of(group.target(member_id)), (member, group.targets)
                assert member.shares == group.target_shares.get(member_id, ()), (member, group.target_shares)
            instance = member.described.instance_id
            if instance is not None:
                assert group.static_members[instance] == member_id, group
        firsts = {partition: min(of, key=lambda one: of[one][0]) for partition, of in held.items()}
        assert firsts == group.holders, (held, group.holders)
        parts = {partition: of for partition, of in held.items() if any(keys != WHOLE for keys in of.values())}
        assert parts == group.sharers, (held, group.sharers)
        assert all(member_id in group.members for member_id in group.static_members.values()), group
        assert group.targets.keys() <= group.members.keys(), group
        targeted: dict[Partition, Ranges] = {}
        for member_id in group.targets:
            for partition, keys in target_keys(group, member_id).items():
                assert not common(targeted.get(partition, NONE), keys), (partition, group.targets, group.target_shares)
                targeted[partition] = union(targeted.get(partition, NONE), keys)
        if group.members and group.target_epoch == group.epoch and not self._client_side.get(group.group_id):
            assert all(keys == WHOLE for keys in targeted.values()), (targeted, group.targets)
            self._whole(machine.image, group, set(targeted))

    def _whole(self, image: Image, group: ConsumerGroup, targeted: set[Partition]) -> None:
        """Check that assigned partitions are subscribed and exist, and that all such partitions are assigned."""
        wanted: set[Partition] = set()
        for member_id, member in group.members.items():
            topics = [
                topic
                for name in subscription(member.described, image, self._regexes)
                if (topic := image.by_name.get(name)) is not None
            ]
            mine = {(topic.topic_id, number) for topic in topics for number in (*topic.partitions, *topic.retiring)}
            assert set(_each(group.target(member_id))) <= mine, (member, group.target(member_id))
            wanted |= mine
        assert targeted == wanted, (wanted - targeted, targeted - wanted)

    def _granted(self, machine: Coordinator, group: ConsumerGroup, before: Seen) -> None:
        """Check that a member's granted partitions are in its target and exist."""
        if before.kind is not ConsumerGroup:
            return
        for member_id, member in group.members.items():
            known = before.members.get(member_id)
            if known is member or known is None:
                continue
            had, target = keys_of(known), target_keys(group, member_id)
            for at, keys in keys_of(member).items():
                more = without(keys, had.get(at, NONE))
                if not more:
                    continue
                topic_id, number = at
                assert not without(more, target.get(at, NONE)), (known, member)
                if keys != WHOLE:
                    assert member.described.allow_key_share, member
                    self.counts["parts"] += 1
                    continue
                topic = machine.image.by_id.get(topic_id)
                assert topic is not None and topic.has(number), (known, member)
                assert self._may_deliver(group, topic, number), ("a gate is closed", known, member, topic)
                assert not self._opens(group, topic, number), ("its position is behind a closed gate", known, topic)
                self.counts["gated"] += topic.lineage is not None and topic.lineage.current > 0

    def _may_deliver(
        self, group: ConsumerGroup, topic: TopicImage, partition: int, *, committed_only: bool = False
    ) -> bool:
        """Whether all records before the next one of a partition have been read, as far as commits show.

        A late commit may have put the offset back, which the owner that reports it does not know. Without a commit, a
        partition has been read up to the end at which its owner, as its reset says, began. Gates open by time,
        where a partition's position and owner have been the same for long. None of this counts where `committed_only`
        says so: what a member knows may take long to arrive. Then both its own position and the next record
        behind that must be deliverable: no leader is asked whether a record lies there.
        """
        lineage = topic.lineage
        if lineage is None:
            return True
        positions: dict[int, Any] = {}
        counted: dict[int, Any] = {}
        edge = self.world.edges[group.group_id]
        for number in (*topic.partitions, *topic.retiring):
            key = (group.group_id, topic.name, number)
            topic_id, offset = self.positions.committed.get(key, (None, 0))
            offset = offset if topic_id == topic.topic_id else 0
            frontier = self._frontier(group.group_id, topic, number)
            if number != partition and not committed_only:
                offset = max(offset, edge.read_up_to(topic.topic_id, number, is_committed=topic_id == topic.topic_id))
            positions[number] = self._next_record(topic, number, offset)
            if committed_only and (topic.topic_id, number) in group.holders and self._is_gone(topic, number, offset):
                positions[number] = offset  # What was deleted, or dropped, its owner may have fetched before.
            if frontier is not None:
                positions[number] = self._next_by_key(topic, number, frontier, offset, of_keys=not committed_only)
            since_ms = self.positions.moved_ms.get(key, 0) if topic_id == topic.topic_id else 0
            still = number != partition and self._is_still(group, (topic.topic_id, number), since_ms)
            still = still and not committed_only
            counted[number] = BEYOND if still else positions[number]
        topic_id, offset = self.positions.committed.get((group.group_id, topic.name, partition), (None, 0))
        first = offset if topic_id == topic.topic_id else 0

        def is_open(at: int) -> bool:
            layout = lineage.layout_at(partition, at)
            was_open = topic_id == topic.topic_id and (
                offset > max(lineage.start(partition, layout), topic.log_start(partition))
                or self.positions.opened.get((group.group_id, topic.name, partition), -1) >= layout
            )
            return was_open or lineage.may_deliver(partition, layout, counted)

        own = self._next_record(topic, partition, first)
        if committed_only:
            return is_open(own) and is_open(max(first, topic.log_start(partition)))
        told = self._told(group, topic, partition, max(first, topic.log_start(partition)))
        return is_open(own) or (told is not None and is_open(told))

    def _told(self, group: ConsumerGroup, topic: TopicImage, number: int, offset: int) -> int | None:
        """What the leader has told as the next record, where compaction has dropped it since.

        Members that keep to gates stop at the one behind it; those that do not would have come there from it, too.
        """
        machine, known = self.world.broker_of(group.group_id).machine, self.world.topic_of(topic.topic_id)
        gates = None if machine is None else machine.keeper.known(group.group_id)
        log = None if known is None else known.logs.get(number)
        told = None if gates is None else gates.standing.next_record((topic.topic_id, number), offset)
        return None if told is None or log is None or not log.is_compacted_away(told) else told

    def _opens(self, group: ConsumerGroup, topic: TopicImage, number: int) -> bool:
        """Whether a position that is written with a hand-out opens a gate for good."""
        machine = self.world.broker_of(group.group_id).machine
        assert machine is not None
        position = machine.positions.get(group.group_id, topic.name, number)
        topic_id, _ = self.positions.committed.get((group.group_id, topic.name, number), (None, 0))
        if position is None or position.topic_id != topic.topic_id or topic_id == topic.topic_id:
            return False
        return self.opens_a_gate(group, topic, number, position.offset)

    def opens_a_gate(self, group: ConsumerGroup, topic: TopicImage, number: int, offset: int) -> bool:
        """Whether a position that nobody has committed lies behind the first record behind a closed gate.

        Nothing shows that the gate was ever open.
        """
        lineage = topic.lineage
        if lineage is None:
            return False
        layout = lineage.layout_at(number, offset)
        if offset <= max(lineage.start(number, layout), topic.log_start(number)):
            return False
        return not lineage.may_deliver(number, layout, self._read_up_to(group, topic))

    def _read_up_to(self, group: ConsumerGroup, topic: TopicImage) -> dict[int, int]:
        """How far a group has read each partition at the most: what stands still for long counts as read."""
        edge = self.world.edges[group.group_id]
        found: dict[int, int] = {}
        for number in topic.readable:
            key = (group.group_id, topic.name, number)
            topic_id, offset = self.positions.committed.get(key, (None, 0))
            is_committed = topic_id == topic.topic_id
            offset = max(
                offset if is_committed else 0, edge.read_up_to(topic.topic_id, number, is_committed=is_committed)
            )
            since_ms = self.positions.moved_ms.get(key, 0) if is_committed else 0
            still = self._is_still(group, (topic.topic_id, number), since_ms)
            found[number] = BEYOND if still else self._next_record(topic, number, offset)
        return found

    def _frontier(self, group_id: str, topic: TopicImage, number: int) -> Frontier | None:
        """Where a group is by key, in a partition that members share or have shared."""
        machine = self.world.broker_of(group_id).machine
        position = None if machine is None else machine.positions.get(group_id, topic.name, number)
        return position.frontier if position is not None and position.topic_id == topic.topic_id else None

    def _is_still(self, group: ConsumerGroup, partition: Partition, moved_ms: int) -> bool:
        """Whether the position of a partition, and its owner, have been the same for the rebalance timeout."""
        held = self._held.get((group.group_id, *partition))
        still_ms = 0 if held is None else self.now_ms - max(moved_ms, held.since_ms)
        return still_ms >= self.world.theme.poll_interval_ms

    def _is_gone(self, topic: TopicImage, number: int, offset: int) -> bool:
        """Whether some records between an offset and the next record were deleted, or compaction has dropped them."""
        known = self.world.topic_of(topic.topic_id)
        log = None if known is None else known.logs.get(number)
        dropped = log is not None and any(map(log.is_compacted_away, range(offset, log.next_record(offset))))
        return dropped or offset < topic.log_start(number)

    def _next_record(self, topic: TopicImage, number: int, offset: int) -> int:
        """The next offset with a record, from a committed one on."""
        known = self.world.topic_of(topic.topic_id)
        log = None if known is None else known.logs.get(number)
        return max(offset, topic.log_start(number)) if log is None else log.next_record(offset)

    def _next_by_key(
        self, topic: TopicImage, number: int, frontier: Frontier, offset: int, *, of_keys: bool
    ) -> Frontier:
        """The next offset from `offset` on with a record, for each step: `of_keys` with one of its keys.

        Of some keys there may be no record any more: who is given them learns that, and reports it.
        """
        known = self.world.topic_of(topic.topic_id)
        log = None if known is None else known.logs.get(number)
        if log is None or not isinstance(known, SharedTopic) or not of_keys:
            steps = tuple(max(offset, self._next_record(topic, number, at)) for at in frontier.offsets)
            return Frontier(frontier.starts, steps)
        ends = (*(start - 1 for start in frontier.starts[1:]), SPACE_END)
        parts = zip(frontier.starts, ends, frontier.offsets, strict=True)
        found = (log.next_record(at, partial(known.has, (Interval(start, end),))) for start, end, at in parts)
        return Frontier(frontier.starts, tuple(max(offset, at) for at in found))

    def _begin_anew(self, cause: Cause, outcome: Outcome[Any, Any]) -> None:
        """Reset a joining member's partitions: those that stay assigned count from now on."""
        request, reply = cause.request, outcome.reply
        if isinstance(request, ConsumerGroupHeartbeatRequest) and request.member_epoch == 0 and not reply.error_code:
            for at, held in self._held.items():
                if at[0] == request.group_id and held.owner == reply.member_id:
                    self._held[at] = held._replace(joined_ms=self.now_ms)

    def _silence(self, machine: Coordinator, group: ConsumerGroup) -> None:
        """Time an owner without commits from its last grant of the partition or its last join."""
        gates = machine.keeper.known(group.group_id)
        for partition, tenure in () if gates is None else gates.standing.tenures.items():
            if group.holders.get(partition) == tenure.owner:
                held = self._held.get((group.group_id, *partition))
                is_new = held is None or tenure.since_ms >= held.joined_ms
                assert is_new, f"{partition}: {tenure} is counted from before the owner had it"

    def _hold(self, machine: Coordinator, group_id: str) -> None:
        """Note the owner of each partition, and the start of the ownership."""
        owners = _owners(machine, group_id)
        for held in [held for held in self._held if held[0] == group_id and held[1:] not in owners]:
            self._parted[held] = self._held.pop(held).owner
            self._show_owner(held, is_owned=False)
        for partition, owner in owners.items():
            held = (group_id, *partition)
            if held not in self._held or self._held[held].owner != owner:
                again = self._parted.pop(held, None) == owner and isinstance(machine.groups[group_id], ClassicGroup)
                self._held[held] = _Held(owner, self.now_ms, self.now_ms)
                self._waits_idly.pop(held, None)
                self._show_owner(held, is_owned=True, again=again)

    def _show_owner(self, held: tuple[str, UUID, int], *, is_owned: bool, again: bool = False) -> None:
        topic = self.world.topic_of(held[1])
        if topic is not None:
            self.world.edges[held[0]].owned((topic.life, held[2]), is_owned=is_owned, again=again)

    def _told_what_is(self, machine: Coordinator, cause: Cause, outcome: Outcome[Any, Any]) -> None:
        """Check that a reply gives a member's assignment as the coordinator holds it."""
        reply, request = outcome.reply, cause.request
        if cause.group is None or getattr(reply, "error_code", 1) != ErrorCode.NONE:
            return
        group = machine.groups.get(cause.group)
        if isinstance(reply, ConsumerGroupHeartbeatResponse) and reply.member_epoch >= 0:
            assert isinstance(group, ConsumerGroup)
            member = group.members[reply.member_id]
            assert reply.member_epoch == member.epoch
            if reply.assignment is not None:
                told = {(topic.topic_id, n) for topic in reply.assignment.topic_partitions for n in topic.partitions}
                waits = {
                    (topic.topic_id, n) for topic in reply.assignment.pending_topic_partitions for n in topic.partitions
                }
                assert told == set(_each(member.assigned)), (reply, member)
                in_part = {at for at, _ in member.shares}
                assert not (told & waits) - in_part and waits <= set(_each(group.target(member.member_id))), (
                    reply,
                    member,
                )
                self.counts["waits"] += len(waits)
            self._waits_rightly(machine, group, member)
        elif isinstance(reply, SyncGroupResponse) and isinstance(group, ClassicGroup):
            assert bytes(reply.assignment) == group.members[request.member_id].assignment

    def _waits_rightly(self, machine: Coordinator, group: ConsumerGroup, member: Member) -> None:
        """Check that a heartbeat brings a free partition in time once everything before it is committed."""
        if member.state is not MemberState.UNRELEASED_PARTITIONS or group.sharers or group.target_shares:
            return
        for topic_id, number in set(_each(group.target(member.member_id))) - set(member.holds):
            at, topic = (group.group_id, topic_id, number), machine.image.by_id.get(topic_id)
            is_free = topic is not None and topic.has(number) and (topic_id, number) not in group.holders
            if topic is None or not is_free or not self._may_deliver(group, topic, number, committed_only=True):
                self._waits_idly.pop(at, None)
                known = self.world.topic_of(topic_id)
                if topic is not None and is_free and known is not None and not self._may_deliver(group, topic, number):
                    self.world.edges[group.group_id].waits(known, number)
                continue
            waited_ms = self.now_ms - self._waits_idly.setdefault(at, self.now_ms)
            assert waited_ms <= self._looked_at_in_ms(at), f"{at} waits since {waited_ms} ms for nothing: {member}"

    def _look_anew(self, group_id: str) -> None:
        """Forget since when partitions of a group wait: its coordinator has forgotten what leaders have answered."""
        for at in [at for at in self._waits_idly if at[0] == group_id]:
            del self._waits_idly[at]

    def _looked_at_in_ms(self, waits: tuple[str, UUID, int]) -> int:
        """The time in which a coordinator notices that nothing is left before a partition that waits.

        It looks at what gates wait on every `LOOK_MS`, and asks a leader one question at a time: a question of before
        the last commit may have to be answered first, and then the one that counts.
        """
        is_quiet = self._waits_idly[waits] >= self.world.quiet_since_ms + ANSWERED_IN_MS
        return 2 * (LOOK_MS + (PACKET_MAX_MS if is_quiet else ANSWERED_IN_MS)) + LOOK_MS + TIMER_SLACK_MS

    def _overdue(self, group: ConsumerGroup) -> None:
        """Check that the coordinator does not wait for a revocation beyond the member's rebalance timeout."""
        for member_id, member in group.members.items():
            if member.state is MemberState.UNREVOKED_PARTITIONS:
                waited_ms = self.now_ms - self._revoking_ms[group.group_id, member_id]
                timeout_ms = member.described.rebalance_timeout_ms
                assert waited_ms <= timeout_ms + TIMER_SLACK_MS, f"{member} is waited for since {waited_ms} ms"

    # -- loading -------------------------------------------------------------------------------------------------------

    def before_stop(self, broker: Broker) -> None:
        """Keep the groups of a machine that is about to be discarded."""
        if broker.machine is not None:
            broker.lost = {group_id: see(group) for group_id, group in broker.machine.groups.items()}
        written, broker.written = broker.written, None
        if written is not None and written.end <= broker.log.end:
            self._changes = []
            self.positions.after_loss(written.records)
            if written.end > broker.log.high_watermark:
                self._undo.setdefault(broker, deque()).append((written.end, self._changes))

    def after_load(self, broker: Broker, machine: Coordinator) -> None:
        """Restart all sessions; classic members that were not stored are removed."""
        self.counts["loads"] += 1
        self._changes = []
        for group_id in {at[0] for at in self._waits_idly if self.world.broker_of(at[0]) is broker}:
            self._look_anew(group_id)
        broker.expired_ms = self.now_ms
        for group_id, before in broker.lost.items():
            now = see(machine.groups.get(group_id))
            for member_id in before.members:
                if member_id not in now.members:
                    self._forget(group_id, member_id, "lost")
        broker.lost = {}
        if self.done is not None:
            self.done.after_load(broker, machine)
        for group_id, group in machine.groups.items():
            for member_id, member in group.members.items():
                self._heard_ms[group_id, member_id] = self.now_ms
                if isinstance(member, Member) and member.state is MemberState.UNREVOKED_PARTITIONS:
                    self._revoking_ms[group_id, member_id] = self.now_ms

    def check_machine(self, broker: Broker, machine: Coordinator) -> None:
        """Check the invariants of one machine."""
        self.positions.check(broker, machine)
        late_ms = self.now_ms - broker.expired_ms - self.world.settings.offsets_retention_check_interval_ms
        assert late_ms <= TIMER_SLACK_MS, f"{broker} checks for expired offsets {late_ms} ms late"
        for group in machine.groups.values():
            if isinstance(group, ConsumerGroup):
                self._overdue(group)

    # -- the clients' side ---------------------------------------------------------------------------------------------

    def before_send(self, client: Client, request: Any) -> None:
        """Check that a joining or leaving member has revoked everything, unless its application is stuck."""
        leaves = isinstance(request, LeaveGroupRequest)
        if isinstance(request, ConsumerGroupHeartbeatRequest):
            leaves = request.member_epoch < 0
            if request.member_epoch == 0:
                assert not client.holds, (client.name, request, client.holds)
                client.has_given_up = False
        if leaves and client.is_closing:
            assert not client.holds, (client.name, request, client.holds)
        elif leaves:
            client.has_given_up = True

    def _note(self, broker: Broker, request: Any, reply: Any) -> Any:
        """Return the note for a reply: the member's identity, its assignment at the coordinator, topic ids."""
        answers = ConsumerGroupHeartbeatResponse | JoinGroupResponse | SyncGroupResponse | HeartbeatResponse
        machine = broker.machine
        if not isinstance(reply, answers) or reply.error_code or machine is None:
            return None
        if isinstance(reply, ConsumerGroupHeartbeatResponse) and reply.member_epoch < 0:
            return None
        member_id = getattr(reply, "member_id", "") or request.member_id
        standing = Standing(member_id, self.incarnations[request.group_id, member_id])
        group = machine.groups.get(request.group_id)
        if isinstance(reply, ConsumerGroupHeartbeatResponse) and isinstance(group, ConsumerGroup):
            member = group.members.get(member_id)
            return standing, None if member is None else frozenset(assigned_keys(member).items()), {}
        return standing, None, {topic.name: topic.topic_id for topic in machine.image.by_name.values()}

    def after_reply(self, client: Client, reply: Any) -> None:
        """Check that the member's target equals the coordinator's at the time of the reply."""
        target = getattr(client.machine, "_target", None)
        if (
            client.given is not None
            and isinstance(reply, ConsumerGroupHeartbeatResponse)
            and target is not None
            and client.is_in
        ):
            shares = getattr(client.machine, "_shares", {})
            assert frozenset(((*one,), shares.get(one, ())) for one in target) == client.given, (
                client.name,
                reply,
                target,
                client.given,
            )
        self.check_owners(client.group)

    def after_assign(self, client: Client) -> None:
        """Handle an assignment taken by a client."""
        self.counts["taken"] += len(client.assigning)
        self.check_owners(client.group)

    def check_owners(self, group_id: str) -> None:
        """Check that no partition has two owners, and that owners match the coordinator's state."""
        broker = self.world.broker_of(group_id)
        group = broker.fold.groups.get(group_id)
        clients = [client for client in self.world.clients if client.group == group_id]
        seen = (
            group.changes if isinstance(group, ConsumerGroup) else 0,
            broker.fold.image.version,
            self._removals,
            [
                (
                    client,
                    client.machine.owned,
                    client.assigning,
                    client.stamps.copy(),
                    client.standing,
                    client.has_given_up,
                )
                for client in clients
            ],
        )
        last = self._owners_seen.get(group_id)
        if last is not None and last[0] is group and last[1] == seen:
            return
        self._owners_seen[group_id] = group, seen
        owners: dict[Partition, list[tuple[Client, Ranges]]] = {}
        for client in clients:
            holds = client.keys
            if not holds or client.is_void:
                continue
            for partition, keys in holds.items():
                for other, others in owners.setdefault(partition, []):
                    both = common(keys, others)
                    assert not both, f"{both} of {partition} are owned by {other.name} and {client.name}"
                owners[partition].append((client, keys))
                # For a classic client, a partition of a deleted topic has a name without a meaning.
                exists = not client.is_classic or partition[0] in broker.fold.image.by_id
                if isinstance(group, ConsumerGroup) and exists:
                    member = group.members.get(client.standing.member_id)
                    down = NONE if member is None else keys_of(member).get(partition, NONE)
                    assert not without(keys, down), (
                        f"{client.name} owns {keys} of {partition}, of which the coordinator has {down} down for it"
                    )


def _owners(machine: Coordinator, group_id: str) -> dict[Partition, str]:
    """The owners of partitions of existing topics, as the coordinator knows them."""
    group = machine.groups.get(group_id)
    if isinstance(group, ConsumerGroup):
        return group.holders
    members = {} if group is None else group.members
    found = {}
    for member_id, member in members.items():
        for name, numbers in assigned_by_name(member.assignment).items():
            topic = machine.image.by_name.get(name)
            found.update({} if topic is None else {(topic.topic_id, number): member_id for number in numbers})
    return found


def _each(assignment: Assignment | Iterable[tuple[UUID, Iterable[int]]]) -> Iterator[Partition]:
    for topic_id, numbers in assignment:
        for number in numbers:
            yield topic_id, number


__all__ = ["Rules"]
