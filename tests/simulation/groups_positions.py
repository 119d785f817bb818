"""Rules for committed offsets: an acknowledged offset is never lost, and expired offsets are removed in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic import ClassicGroup, ClassicState, subscribed_topics
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.consumer.target import subscription
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.positions import layout_of
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.regex import Regexes
from anabranch.machines.outcome import Outcome
from anabranch.protocol.messages.offset_commit import OffsetCommitResponse
from anabranch.protocol.messages.offset_delete import OffsetDeleteRequest
from anabranch.protocol.messages.offset_fetch import OffsetFetchResponseGroup
from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest, TxnOffsetCommitResponse
from tests.simulation.groups_shard import Broker, Cause

if TYPE_CHECKING:
    from tests.simulation.groups_rules import Rules

ABSENT: Any = object()


class _Pending(NamedTuple):
    """An offset of an open transaction."""

    number: int
    """Of the commit, in their order."""
    topic_id: UUID
    offset: int
    committed_ms: int


class PositionRules:
    """The positions that were acknowledged, by whom and when."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._world = rules.world
        self._regexes = Regexes(1_000)
        self.committed: dict[tuple[str, str, int], tuple[UUID, int]] = {}
        """Group, topic, partition: the topic's id and the offset that was acknowledged last."""
        self.moved_ms: dict[tuple[str, str, int], int] = {}
        """The time of the last commit of another offset."""
        self.opened: dict[tuple[str, str, int], int] = {}
        """The newest layout whose gate was open when the coordinator handed the partition out."""
        self.highest: dict[tuple[str, str, int], int] = {}
        """Group, life of a topic, partition: the highest offset that was ever acknowledged."""
        self.begun: dict[tuple[str, str], Mapping[int, int]] = {}
        """Group, life of a topic: the partitions that existed when the group first subscribed, with their log ends."""
        self._pending: dict[tuple[int, str, str, int], _Pending] = {}
        """By producer, group, topic and partition: what open transactions have committed."""
        self._commits = 0
        self._committers: dict[tuple[str, str, int], tuple[str, bool]] = {}
        self._committed_ms: dict[tuple[str, str, int], int] = {}

    def committed_offset(self, group_id: str, life: str, partition: int) -> int | None:
        """Return the committed offset of a partition of a topic in one of its lives."""
        topic_id, offset = self.committed.get((group_id, life.partition("#")[0], partition), (None, -1))
        topic = None if topic_id is None else self._world.topic_of(topic_id)
        return offset if topic is not None and topic.life == life else None

    def begin(self, machine: Coordinator, group_id: str) -> None:
        """Note where a group begins in the topics that it subscribes to; nothing is left of a group that is gone."""
        group = machine.groups.get(group_id)
        if group is None and group_id not in machine.positions:
            for key in [key for key in self.begun if key[0] == group_id]:
                self._rules.change(self.begun, key, ABSENT)
                self._world.edges[group_id].is_gone(key[1])
        if isinstance(group, ClassicGroup) and group.state is not ClassicState.STABLE:
            return
        for name in self._read_by(machine, group_id):
            known = machine.image.by_name.get(name)
            topic = None if known is None else self._world.topic_of(known.topic_id)
            if known is None or topic is None:
                continue
            ends = self.begun.get((group_id, topic.life))
            if ends is None:
                self._rules.change(self.begun, (group_id, topic.life), {at: known.log_end(at) for at in known.readable})

    def topics_changed(self, machine: Coordinator) -> None:
        """A partition that was removed appears later if it is made again."""
        for key, ends in list(self.begun.items()):
            name, _, _ = key[1].partition("#")
            known = machine.image.by_name.get(name)
            topic = None if known is None else self._world.topic_of(known.topic_id)
            if known is None or topic is None or topic.life != key[1] or machine.groups.get(key[0]) is None:
                continue
            if not all(map(known.has, ends)):
                left = {number: end for number, end in ends.items() if known.has(number)}
                self._rules.change(self.begun, key, left)

    def after_step(self, machine: Coordinator, cause: Cause, outcome: Outcome[Any, Any]) -> None:
        request, reply = cause.request, outcome.reply
        if cause.kind == "topics":
            self.topics_changed(machine)
        if isinstance(reply, OffsetCommitResponse):
            by_id = cause.caller is not None and cause.caller.version >= 10
            for asked, answered in zip(request.topics, reply.topics, strict=True):
                name = machine.image.name_of(asked.topic_id) if by_id else asked.name
                for part, answer in zip(asked.partitions, answered.partitions, strict=True):
                    if answer.error_code == ErrorCode.NONE:
                        self._committed(machine, cause, name, part, by_id=by_id)
        if isinstance(reply, TxnOffsetCommitResponse):
            self._committed_later(machine, cause.request, reply)
            return
        for record in outcome.records:
            if type(record.key).__name__ == "OffsetCommitKey":
                self._overtake((record.key.group, record.key.topic, record.key.partition), self._commits)
            if type(record.key).__name__ == "OffsetCommitKey" and record.value is not None:
                self._written(machine, record)
                if cause.kind == "timer" and self._world.theme.sharing:
                    self._moved_by_ranges(record)
            if type(record.key).__name__ == "OffsetCommitKey" and record.value is None:
                key = (record.key.group, record.key.topic, record.key.partition)
                topic_id, _ = self.committed[key]
                self._rules.change(self.committed, key, ABSENT)
                topic = machine.image.by_name.get(key[1])
                gone = topic is None or topic.topic_id != topic_id
                old = self._rules.now_ms - self._committed_ms[key] >= self._world.theme.retention_ms
                expired = cause.key == ("expire",) and old and key[1] not in self._read_by(machine, key[0])
                assert gone or expired or cause.kind == "admin", (cause, record)
                if isinstance(cause.request, OffsetDeleteRequest):
                    assert key[1] not in self._read_by(machine, key[0]), (cause, record)

    def _committed_later(
        self, machine: Coordinator, request: TxnOffsetCommitRequest, reply: TxnOffsetCommitResponse
    ) -> None:
        """What a transaction commits counts from its marker on."""
        for asked, answered in zip(request.topics, reply.topics, strict=True):
            for part, answer in zip(asked.partitions, answered.partitions, strict=True):
                if answer.error_code == ErrorCode.NONE:
                    self._commits += 1
                    topic_id = machine.image.by_name[asked.name].topic_id
                    key = (request.producer_id, request.group_id, asked.name, part.partition_index)
                    pending = _Pending(self._commits, topic_id, part.committed_offset, self._rules.now_ms)
                    self._rules.change(self._pending, key, pending)

    def marked(self, machine: Coordinator, producer_id: int, *, committed: bool) -> None:
        """Of a transaction that ends well, what nobody has committed since counts."""
        for producer_key in [key for key in self._pending if key[0] == producer_id]:
            pending, key = self._pending[producer_key], producer_key[1:]
            self._rules.change(self._pending, producer_key, ABSENT)
            if committed:
                self._overtake(key, pending.number)
                self._put(machine, key, pending)

    def _put(self, machine: Coordinator, key: tuple[str, str, int], pending: _Pending) -> None:
        """An offset is the committed one from now on."""
        group_id, _, number = key
        before = self.committed.get(key)
        at = pending.topic_id, pending.offset
        if before != at:
            self._rules.change(self.moved_ms, key, self._rules.now_ms)
        position = machine.positions.get(*key)
        assert position is not None, (key, pending)
        self._rules.change(self.opened, key, position.opened)
        self._rules.change(self.committed, key, at)
        self._rules.change(self._committers, key, ("", False))
        self._rules.change(self._committed_ms, key, pending.committed_ms)
        topic = self._world.topic_of(pending.topic_id)
        if topic is not None:
            place = topic.life, number
            highest = max(pending.offset, self.highest.get((group_id, *place), 0))
            self._rules.change(self.highest, (group_id, *place), highest)
            if before != at:
                self._world.edges[group_id].progressed(place, self._rules.now_ms)
        self._rules.counts["commits"] += 1

    def _overtake(self, key: tuple[str, str, int], number: int) -> None:
        """What open transactions have committed before counts no more."""
        for producer_key, pending in list(self._pending.items()):
            if producer_key[1:] == key and pending.number <= number:
                self._rules.change(self._pending, producer_key, ABSENT)

    def _written(self, machine: Coordinator, record: CoordinatorRecord) -> None:
        """A record of a position: one that nobody has committed is where a partition begins, or tells of its gate."""
        key = (record.key.group, record.key.topic, record.key.partition)
        value = record.value
        assert value is not None
        before = self.committed.get(key)
        if before != (value.topic_id, value.offset):
            self._rules.change(self.moved_ms, key, self._rules.now_ms)
        self._rules.change(self.opened, key, layout_of(value.opened))
        topic = machine.image.by_id.get(value.topic_id)
        if before is None or before[0] != value.topic_id:
            group = machine.groups.get(key[0])
            if isinstance(group, ConsumerGroup) and topic is not None and _is_revoked(group, (value.topic_id, key[2])):
                is_open = not self._rules.opens_a_gate(group, topic, key[2], value.offset)
                assert is_open, ("it is taken away, and its position is behind a closed gate", record, topic)
            self._rules.change(self.committed, key, (value.topic_id, value.offset))
            self._rules.change(self._committers, key, ("", True))
            self._rules.change(self._committed_ms, key, self._rules.now_ms)
            known = self._world.topic_of(value.topic_id)
            if known is not None and record.key.group in self._world.latest:
                self._world.edges[record.key.group].written(known, key[2], value.offset)
            self._rules.counts["begun"] += topic is not None and value.offset == topic.log_start(key[2])
        elif topic is not None and before[1] < value.offset == topic.log_start(key[2]):
            # It waited, and records were deleted meanwhile. Any other change nobody has asked for (`after_fetch`).
            self._rules.change(self.committed, key, (value.topic_id, value.offset))
            self._rules.counts["moved"] += 1
            known = self._world.topic_of(value.topic_id)
            if known is not None:
                self._world.edges[record.key.group].progressed((known.life, key[2]), self._rules.now_ms)

    def after_loss(self, records: Iterable[CoordinatorRecord]) -> None:
        """A machine was discarded before it applied these records, which are in its log; nobody was answered."""
        for record in records:
            if type(record.key).__name__ != "OffsetCommitKey":
                continue
            self._overtake((record.key.group, record.key.topic, record.key.partition), self._commits)
            key, value = (record.key.group, record.key.topic, record.key.partition), record.value
            if value is None:
                self._rules.change(self.committed, key, ABSENT)
                continue
            if self.committed.get(key) != (value.topic_id, value.offset):
                self._rules.change(self.moved_ms, key, self._rules.now_ms)
            self._rules.change(self.opened, key, layout_of(value.opened))
            self._rules.change(self.committed, key, (value.topic_id, value.offset))
            self._rules.change(self._committers, key, ("", False))
            self._rules.change(self._committed_ms, key, self._rules.now_ms)
            topic = self._world.topic_of(value.topic_id)
            if topic is not None:
                place = topic.life, key[2]
                highest = max(value.offset, self.highest.get((key[0], *place), 0))
                self._rules.change(self.highest, (key[0], *place), highest)
                self._world.edges[key[0]].progressed(place, self._rules.now_ms)

    def _moved_by_ranges(self, record: CoordinatorRecord) -> None:
        """A position that ranges were found to touch when they were loaded."""
        key, value = (record.key.group, record.key.topic, record.key.partition), record.value
        assert value is not None
        topic_id, offset = self.committed[key]
        if topic_id == value.topic_id:
            assert value.offset >= offset, (record, offset)
            self._rules.change(self.committed, key, (topic_id, value.offset))

    def _read_by(self, machine: Coordinator, group_id: str) -> frozenset[str]:
        group = machine.groups.get(group_id)
        if isinstance(group, ConsumerGroup):
            return frozenset().union(
                *(subscription(member.described, machine.image, self._regexes) for member in group.members.values())
            )
        return frozenset() if group is None or not group.members else subscribed_topics(group) or frozenset()

    def _committed(self, machine: Coordinator, cause: Cause, name: str, part: Any, *, by_id: bool) -> None:
        """A new owner goes on from the committed offset of the former one; a commit by name may mean a deleted topic.

        A late commit may put the offset back: KIP-848 checks the member's epoch only, which need not have grown.
        """
        request = cause.request
        key = (request.group_id, name, part.partition_index)
        topic_id = machine.image.by_name[name].topic_id
        by_id = by_id and not self._means_another(machine, request, topic_id, part.partition_index)
        before, committer = self.committed.get(key), (request.member_id, by_id)
        offset = part.committed_offset
        in_part = self._stable_of_part(machine, request, topic_id, part, key)
        if in_part is not None:
            offset, by_id = in_part, False
        if before is not None and before[0] == topic_id and by_id:
            last, last_by_id = self._committers[key]
            known = self._world.topic_of(topic_id)
            log = None if known is None else known.logs.get(part.partition_index)
            is_real = log is not None and before[1] <= log.end  # a commit by name may be of a deleted topic's records
            others = last_by_id and last != request.member_id and self._world.is_open(cause.caller.connection)
            if others and is_real:
                assert part.committed_offset >= before[1], f"{key} goes back from {before} by {request}"
        self._rules.change(self.committed, key, (topic_id, offset))
        self._rules.change(self._committers, key, committer)
        topic = self._world.topic_of(topic_id)
        if topic is not None:
            place = topic.life, part.partition_index
            highest = max(offset, self.highest.get((request.group_id, *place), 0))
            self._rules.change(self.highest, (request.group_id, *place), highest)
            # A first commit of where it stands already, which its owner may have told before, is no progress.
            log = topic.logs.get(part.partition_index)
            stood = (topic_id, 0 if log is None else log.start) if before is None else before
            if stood != (topic_id, offset):
                self._world.edges[request.group_id].progressed(place, self._rules.now_ms)
        used_ms = self._rules.now_ms
        if in_part is not None:  # A commit that changes no position does not write it again, for an hour.
            used_ms = machine.positions.get(*key).committed_at_ms  # type: ignore[union-attr]
        self._rules.change(self._committed_ms, key, used_ms)
        self._rules.counts["commits"] += 1

    def _stable_of_part(
        self, machine: Coordinator, request: Any, topic_id: UUID, part: Any, key: tuple[str, str, int]
    ) -> int | None:
        """The committed offset after a commit by ranges, or one that may count for some keys; None after others."""
        if not self._world.theme.sharing:
            return None
        position = machine.positions.get(*key)
        assert position is not None, (request, key)
        group = machine.groups.get(request.group_id)
        shared = isinstance(group, ConsumerGroup) and (topic_id, part.partition_index) in group.sharers
        if part.offset_ranges or part.key_range_offsets or shared or position.offset != part.committed_offset:
            return position.offset
        return None

    def _means_another(self, machine: Coordinator, request: Any, topic_id: UUID, number: int) -> bool:
        """Whether a classic member of a group of the other protocol commits in a topic that was made again.

        It was given a partition by name, of the topic before: the coordinator may have another owner for the new one.
        """
        group = machine.groups.get(request.group_id)
        topic = self._world.topic_of(topic_id)
        member = group.members.get(request.member_id) if isinstance(group, ConsumerGroup) else None
        if not isinstance(group, ConsumerGroup) or member is None or member.described.classic is None or topic is None:
            return False
        return self._world.is_ambiguous(topic) and group.holders.get((topic_id, number)) != request.member_id

    def after_fetch(self, machine: Coordinator, answer: OffsetFetchResponseGroup, *, require_stable: bool) -> None:
        """The fetched offset is the one that was acknowledged last, and none that a transaction may change."""
        open_ = {key[1:] for key in self._pending} if require_stable else ()
        for topic in answer.topics:
            name = topic.name or machine.image.name_of(topic.topic_id)
            known = machine.image.by_name.get(name)
            for part in topic.partitions:
                if part.error_code or known is None:
                    continue
                assert (answer.group_id, name, part.partition_index) not in open_, (answer, self._pending)
                key = (answer.group_id, name, part.partition_index)
                topic_id, offset = self.committed.get(key, (None, -1))
                expected = offset if topic_id == known.topic_id else -1
                position = machine.positions.get(*key)
                if expected >= 0 and position is not None and not position.is_begun:
                    expected = max(expected, known.log_start(part.partition_index))
                assert part.committed_offset == expected, (answer, self.committed)

    def check(self, broker: Broker, machine: Coordinator) -> None:
        """Nothing that was acknowledged is lost."""
        for (group_id, name, partition), (topic_id, offset) in self.committed.items():
            if self._world.broker_of(group_id) is broker:
                topic = machine.image.by_name.get(name)
                if topic is not None and topic.topic_id == topic_id:
                    position = machine.positions.get(group_id, name, partition)
                    assert position is not None and position.offset == offset, (group_id, name, partition, position)

    def after_check(self, broker: Broker, machine: Coordinator) -> None:
        """After a check, offsets that were not used for the retention time are gone."""
        oldest_ms = self._rules.now_ms - self._world.settings.offsets_retention_ms
        broker.expired_ms = self._rules.now_ms
        for (group_id, name, partition), (topic_id, _) in self.committed.items():
            topic = machine.image.by_name.get(name)
            used_ms = self._committed_ms[group_id, name, partition]
            if self._world.broker_of(group_id) is not broker or topic is None or topic.topic_id != topic_id:
                continue
            group = machine.groups.get(group_id)
            if isinstance(group, ClassicGroup):
                used_ms = max(used_ms, group.state_changed_ms)
                if group.members and subscribed_topics(group) is None:
                    continue
            if used_ms <= oldest_ms:
                known = self._read_by(machine, group_id)
                assert name in known, f"{group_id} reads {known}, and still has a position in {name}-{partition}"


def _is_revoked(group: ConsumerGroup, partition: tuple[UUID, int]) -> bool:
    """Whether a member has yet to let go of a partition."""
    return any(
        topic_id == partition[0] and partition[1] in numbers
        for member in group.members.values()
        for topic_id, numbers in member.revoking
    )
