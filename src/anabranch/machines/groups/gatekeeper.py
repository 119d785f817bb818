"""The gates of a shard's groups: evaluated when something has changed, never because a heartbeat came (ADR 0033).

    a commit of a watched partition, a report, a leader's answer, a new lineage, another owner  ->  look, at once
    a gate is closed, or a member asks for positions                                            ->  look, every LOOK_MS

A look (`positions_asked.decide_look`) compares positions with those of the last one, evaluates the gates of topics in
which a position has passed the end of a segment, asks leaders for next records, and answers questions of members. It is
the decision of a timer, so that it sees what the decision that rang for it has changed. Everything here is soft state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from anabranch.machines.groups import classic, embedded
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup, Member
from anabranch.machines.groups.consumer.target import subscriptions
from anabranch.machines.groups.gates import OPEN, Evaluation, evaluate, segment_start, was_reopened
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.positions import Position, position_record
from anabranch.machines.groups.questions import Questions
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.regex import Regexes
from anabranch.machines.groups.standing import At, Standing
from anabranch.machines.groups.starts import Starts
from anabranch.machines.outcome import Draft

Group = ConsumerGroup | ClassicGroup
LOOK_MS = 500
"""Between two looks at positions that a gate or a member waits for: log starts and transactions tell of no change."""
LOOKED_AT_MAX = 500
"""Watched partitions that one look compares; the others follow in the next, `LOOK_ON_MS` later."""
LOOK_ON_MS = 20


class AskNextRecords(NamedTuple):
    """Effect: ask the leaders for next records of one topic; `Coordinator.next_records` takes the answer."""

    group_id: str
    topic_id: UUID
    topic: str
    offsets: Mapping[int, int]
    """By partition."""


class GateOpenedByTime(NamedTuple):
    """Effect: log and count a partition that was handed out although a position it waited on had records left."""

    group_id: str
    topic: str
    partition: int
    waited_on: int
    records_left: int


@dataclass(slots=True)
class Evaluated:
    """The newest evaluation of one topic, and its input."""

    topic: TopicImage
    found: Evaluation = OPEN
    raws: dict[int, int] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    is_outdated: bool = False

    def crosses(self, partition: int, position: int) -> bool:
        """Whether a position lies in another segment than the one that was evaluated."""
        lineage, before = self.topic.lineage, self.positions.get(partition)
        if before is None or lineage is None:
            return True
        return lineage.layout_at(partition, position) != lineage.layout_at(partition, before)


@dataclass(slots=True)
class GroupGates:
    """The soft state of one group."""

    standing: Standing = field(default_factory=Standing)
    questions: Questions = field(default_factory=Questions)
    evaluated: dict[UUID, Evaluated] = field(default_factory=dict)
    version: int = 0
    """Counts evaluations with another result."""
    is_due: bool = True
    """Whether a look is due."""
    touched: dict[At, None] = field(default_factory=dict)
    """Watched partitions whose position may have changed."""
    unsure: dict[At, None] = field(default_factory=dict)
    """Partitions that are withheld until the leader has said where their next record is."""
    asked_ms: dict[At, int] = field(default_factory=dict)
    """The time of the newest question to the leader of a partition."""
    waited: dict[At, tuple[int, int]] = field(default_factory=dict)
    """Partitions that waited and were not handed out since: their log end when they began to, and the time."""
    by_time: dict[At, tuple[int, int]] = field(default_factory=dict)
    """Partitions whose gate opened by time: the partition that it waited on, and the offsets left there."""
    idle: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """Members whose last reconciliation changed nothing: what it was based on."""
    names: tuple[object, frozenset[str]] = (None, frozenset())
    """The topics that the group subscribes to, and what that was computed from."""
    wanted: dict[At, int] = field(default_factory=dict)
    """Partitions that a gate or a member waits for: the largest offset that a gate waits for, or -1."""
    wanted_of: dict[str, list[At]] = field(default_factory=dict)
    """By owner."""
    inner: dict[At, None] = field(default_factory=dict)
    """Further partitions to look at: unsure ones, stalled ones, and those that may be taken away."""
    based_on: object = None
    """What `wanted` was computed from."""
    swept: object = None
    """The state in which all questions were last compared with the members' targets."""
    cursor: int = 0
    owners: tuple[object, dict[At, str]] = (None, {})
    """Of a classic group: the owner of each partition, and the generation."""

    def outdate(self, topic_ids: Iterable[UUID]) -> None:
        """Evaluate these topics anew when their gates are needed."""
        for topic_id in topic_ids:
            known = self.evaluated.get(topic_id)
            if known is not None:
                known.is_outdated = self.is_due = True


class Gate:
    """The gates of one group as a decision about the group sees them."""

    __slots__ = ("_group", "_keeper", "_now_ms")

    def __init__(self, keeper: Gatekeeper, group: ConsumerGroup, now_ms: int) -> None:
        self._keeper = keeper
        self._group = group
        self._now_ms = now_ms

    def __call__(self, topic_id: UUID, partition: int) -> bool:
        """Whether a partition that nobody owns must not be handed out."""
        gates = self._keeper.of(self._group.group_id)
        return self._keeper.withholds(self._group, gates, (topic_id, partition), self._now_ms)

    @property
    def takes(self) -> Callable[[UUID, int], bool] | None:
        """Whether an owned partition must be taken away; None where none is."""
        gates = self._keeper.known(self._group.group_id)
        if gates is None or not any(made.found.reopened for made in gates.evaluated.values()):
            return None
        return lambda topic_id, partition: self._keeper.takes(gates, (topic_id, partition))

    def handed_out(self, before: Member, after: Member) -> Iterator[CoordinatorRecord | GateOpenedByTime]:
        """The positions to write when a member's assignment changes."""
        return self._keeper.handed_out(self._group, before, after, self._now_ms)

    def forget(self, member_id: str, *, but: Iterable[At] = ()) -> None:
        """Drop what is known of the partitions that a member no longer owns."""
        self._keeper.forget(self._group.group_id, member_id, but=but)

    def is_idle(self, member_id: str) -> bool:
        """Whether nothing has changed since a reconciliation of the member that changed nothing."""
        gates = self._keeper.known(self._group.group_id)
        return gates is not None and gates.idle.get(member_id) == self._basis(gates)

    def note_idle(self, member_id: str) -> None:
        """Note that a reconciliation of the member has changed nothing."""
        gates = self._keeper.of(self._group.group_id)
        gates.idle[member_id] = self._basis(gates)

    def _basis(self, gates: GroupGates) -> tuple[object, ...]:
        return self._group.changes, gates.version, self._keeper.offsets.image.version


class Gatekeeper:
    """The gates of all groups of a shard."""

    def __init__(self, groups: Mapping[str, Group], offsets: Offsets, starts: Starts, regexes: Regexes) -> None:
        self.groups = groups
        self.offsets = offsets
        self.starts = starts
        self._regexes = regexes
        self._of: dict[str, GroupGates] = {}

    # -- groups --------------------------------------------------------------------------------------------------------

    def of(self, group_id: str) -> GroupGates:
        """The soft state of a group."""
        return self._of.setdefault(group_id, GroupGates())

    def known(self, group_id: str) -> GroupGates | None:
        """The soft state of a group, if it has any."""
        return self._of.get(group_id)

    def ring(self, draft: Draft[CoordinatorRecord], group_id: str, now_ms: int, *, members_moved: bool = False) -> None:
        """Have the group looked at after this decision, if the decision changes anything that gates depend on.

        `members_moved`: a classic group may have begun a rebalance, which is no record.
        """
        gates = self._of.get(group_id)
        if gates is None:
            return
        if draft.records or gates.is_due or gates.touched or (members_moved and gates.questions.parked):
            draft.set_timer(("gates", group_id), now_ms)

    def drop(self, group_id: str) -> None:
        """Forget the soft state of a group."""
        self._of.pop(group_id, None)

    def owner(self, group: Group, gates: GroupGates) -> Callable[[At], tuple[str, int]]:
        """The function that finds the owner of a partition and its rebalance timeout."""
        if isinstance(group, ConsumerGroup):
            holders, members = group.holders, group.members

            def consumer(at: At) -> tuple[str, int]:
                member = members.get(holders.get(at, ""))
                return ("", 0) if member is None else (member.member_id, member.described.rebalance_timeout_ms)

            return consumer
        if gates.owners[0] != (group.generation, group.state):
            owners: dict[At, str] = {}
            for member_id, each in group.members.items():
                for topic_id, numbers in embedded.assigned(each.assignment, self.offsets.image):
                    owners.update(((topic_id, number), member_id) for number in numbers)
            gates.owners = (group.generation, group.state), owners
        known, classic_members = gates.owners[1], group.members

        def by_assignment(at: At) -> tuple[str, int]:
            member = classic_members.get(known.get(at, ""))
            return ("", 0) if member is None else (member.member_id, member.rebalance_timeout_ms)

        return by_assignment

    def topics_of(self, group: Group, gates: GroupGates) -> frozenset[str]:
        """The names of the topics that a group subscribes to; none where they cannot be read."""
        if isinstance(group, ClassicGroup):
            return classic.subscribed_topics(group) or frozenset()
        basis = (self.offsets.image.version, group.epoch)
        if gates.names[0] != basis:
            gates.names = basis, subscriptions(group, self.offsets.image, self._regexes)
        return gates.names[1]

    # -- evaluating ----------------------------------------------------------------------------------------------------

    def evaluation(self, group: Group, gates: GroupGates, topic: TopicImage, now_ms: int) -> Evaluated:
        """The gates of a topic; evaluated where the last evaluation is of another topic image or outdated."""
        known = gates.evaluated.get(topic.topic_id)
        if known is not None and known.topic is topic and not known.is_outdated:
            return known
        standing, owner = gates.standing, self.owner(group, gates)
        committed = self.offsets.of_topic(group.group_id, topic)
        made = Evaluated(topic)
        for number in topic.readable:
            was = committed.get(number)
            raw = standing.raw(topic, number, None if was is None else was.offset, owner, now_ms)
            made.raws[number] = raw
            made.positions[number] = standing.progress(topic, number, raw)
        counted = made.positions
        stalls = {number: stall for (topic_id, number), stall in standing.stalls.items() if topic_id == topic.topic_id}
        if stalls:
            counted = dict(made.positions)
            for number, stall in stalls.items():
                if number in counted and (stall.owner, stall.raw) == (
                    owner((topic.topic_id, number))[0],
                    made.raws[number],
                ):
                    counted[number] = max(counted[number], stall.reached)
        made.found = evaluate(topic, made.positions, counted, committed)
        if known is None or (known.found.closed, known.found.ahead) != (made.found.closed, made.found.ahead):
            gates.version += 1
        gates.evaluated[topic.topic_id] = made
        gates.is_due = True
        for number in made.found.closed:
            at = topic.topic_id, number
            gates.by_time.pop(at, None)
            if at not in gates.waited:
                gates.waited[at] = topic.log_end(number), now_ms
        return made

    def withholds(self, group: Group, gates: GroupGates, at: At, now_ms: int) -> bool:
        """Whether a partition that nobody owns must not be handed out.

        A missing partition waits, too: a target that a member computed may be older than the metadata.
        """
        topic = self.offsets.image.by_id.get(at[0])
        if topic is None or not topic.has(at[1]):
            return True
        if not topic.is_gated:
            return False
        made = self.evaluation(group, gates, topic, now_ms)
        if at[1] in made.found.closed:
            return True
        if at[1] not in made.found.ahead or self._is_sure(gates, made, at[1]):
            return False
        if at not in gates.unsure:
            gates.unsure[at] = None
            gates.is_due = True
        return True

    def _is_sure(self, gates: GroupGates, made: Evaluated, partition: int) -> bool:
        """Whether the leader has said where the next record of a partition is."""
        at = made.topic.topic_id, partition
        first = max(made.raws[partition], made.topic.log_start(partition))
        return gates.standing.next_record(at, first) is not None

    def takes(self, gates: GroupGates, at: At) -> bool:
        """Whether an owned partition must be taken away: it re-opened behind a closed gate."""
        made = gates.evaluated.get(at[0])
        return made is not None and at[1] in made.found.reopened

    # -- handing out ---------------------------------------------------------------------------------------------------

    def handed_out(
        self, group: ConsumerGroup, before: Member, after: Member, now_ms: int
    ) -> Iterator[CoordinatorRecord | GateOpenedByTime]:
        """Note a change of a member's assignment; the positions to write before the member learns of it."""
        gates = self.of(group.group_id)
        had = dict(before.assigned)
        for topic_id, numbers in after.assigned:
            topic = self.offsets.image.by_id.get(topic_id)
            known = frozenset(had.get(topic_id, ()))
            for number in numbers:
                if topic is not None and number not in known:
                    yield from self._handed_out(group, gates, topic, number, after, now_ms)
        for topic_id, numbers in after.revoking:
            for number in numbers:
                topic = self.offsets.image.by_id.get(topic_id)
                if topic is not None and self.takes(gates, (topic_id, number)):
                    yield from self._taken_away(group.group_id, gates, topic, number, now_ms)

    def _handed_out(
        self, group: ConsumerGroup, gates: GroupGates, topic: TopicImage, number: int, owner: Member, now_ms: int
    ) -> Iterator[CoordinatorRecord | GateOpenedByTime]:
        group_id = group.group_id
        at = topic.topic_id, number
        was = self.offsets.current(group_id, topic.name, number)
        timeout_ms = owner.described.rebalance_timeout_ms
        if was is None:
            gates.standing.begin_tenure(topic, number, owner.member_id, timeout_ms, now_ms)
        waited = gates.waited.pop(at, None)
        gates.unsure.pop(at, None)
        made = gates.evaluated.get(topic.topic_id)
        layout = -1
        if waited is not None and made is not None and topic.lineage is not None and number in made.positions:
            layout = topic.lineage.layout_at(number, made.positions[number])
        position: Position | None = None
        if was is None:
            offset = self._first_offset(group, gates, topic, number, None if waited is None else waited[0])
            if offset is not None:
                position = Position(offset, committed_at_ms=now_ms, topic_id=topic.topic_id, opened=layout)
        elif layout > was.opened and was.offset <= segment_start(topic, number, layout):
            position = was._replace(opened=layout)
        if position is not None:
            yield position_record(group_id, topic.name, number, position)
        cause = gates.by_time.pop(at, None)
        if cause is not None:
            yield GateOpenedByTime(group_id, topic.name, number, *cause)

    def _first_offset(
        self, group: ConsumerGroup, gates: GroupGates, topic: TopicImage, number: int, waited_from: int | None
    ) -> int | None:
        """The position to write for a partition without a committed offset; None leaves it to the client."""
        log_start = topic.log_start(number)
        if not topic.was_resized:
            return None
        if not self._existed(group, topic, number):
            return log_start
        if waited_from is None:
            return None
        noted = self.starts.noted_end(group.group_id, topic, number)
        noted = waited_from if noted < 0 else noted
        if topic.topic_id in gates.standing.from_end:
            return max(log_start, noted)
        # Whether the group reads from the end is not known. Where nothing was written while the partition waited the
        # client's own reset loses nothing either way.
        return None if topic.log_end(number) <= noted else log_start

    def _existed(self, group: ConsumerGroup, topic: TopicImage, number: int) -> bool:
        """Whether a partition existed when the group began in its topic, which may be with this decision."""
        begins = self.starts.get(group.group_id, topic.topic_id) is None and not (
            (group.members and topic.name in subscriptions(group, self.offsets.image, self._regexes))
            or self.offsets.of_topic(group.group_id, topic)
        )
        return begins or self.starts.existed(group.group_id, topic, number)

    def _taken_away(
        self, group_id: str, gates: GroupGates, topic: TopicImage, number: int, now_ms: int
    ) -> Iterator[CoordinatorRecord]:
        """Write the position of a partition that is taken from an owner that has committed nothing in it."""
        made = gates.evaluated[topic.topic_id]
        gates.waited.setdefault((topic.topic_id, number), (topic.log_end(number), now_ms))
        if self.offsets.current(group_id, topic.name, number) is None:
            position = Position(made.positions[number], committed_at_ms=now_ms, topic_id=topic.topic_id)
            yield position_record(group_id, topic.name, number, position)

    def forget(self, group_id: str, member_id: str, *, but: Iterable[At] = ()) -> None:
        """Drop what is known of the partitions that a member no longer owns."""
        gates = self._of.get(group_id)
        if gates is not None:
            gates.idle.pop(member_id, None)
            if not but:
                gates.questions.replied.pop(member_id, None)
            gates.outdate(gates.standing.forget(member_id, but=but))

    # -- changes -------------------------------------------------------------------------------------------------------

    def committed(self, group_id: str, topic: TopicImage, partition: int, offset: int) -> None:
        """Note that an offset is about to be committed."""
        gates = self._of.get(group_id)
        if gates is None:
            return
        at = topic.topic_id, partition
        gates.standing.tenures.pop(at, None)
        if gates.standing.stalls.pop(at, None) is not None:
            gates.outdate([topic.topic_id])
        if at in gates.standing.watches:
            gates.touched[at] = None
        made = gates.evaluated.get(topic.topic_id)
        if made is not None and offset < made.raws.get(partition, -1):
            gates.outdate([topic.topic_id])

    def positions_gone(self, group_id: str) -> None:
        """Note that committed offsets of a group were deleted."""
        gates = self._of.get(group_id)
        if gates is not None:
            gates.outdate(list(gates.evaluated))

    def answered(self, group_id: str, topic_id: UUID, asked: Mapping[int, int], found: Mapping[int, int]) -> None:
        """Take the leaders' answers; a partition without one is asked about again at a later look."""
        gates = self._of.get(group_id)
        if gates is None:
            return
        for number, next_record in found.items():
            at = topic_id, number
            if not gates.standing.answered(at, asked[number], next_record):
                continue
            gates.touched[at] = None
            if at in gates.unsure:
                del gates.unsure[at]
                gates.version += 1
            made = gates.evaluated.get(topic_id)
            if made is not None and number in made.raws:
                position = gates.standing.progress(made.topic, number, made.raws[number])
                if at in gates.inner or made.crosses(number, position):
                    gates.outdate([topic_id])

    # -- the work of a look --------------------------------------------------------------------------------------------

    def refresh(self, group: Group, gates: GroupGates, now_ms: int) -> None:
        """Evaluate the topics that the group subscribes to where that is due, and find out what is waited for."""
        by_id = self.offsets.image.by_id
        for topic_id in [topic_id for topic_id in gates.evaluated if topic_id not in by_id]:
            del gates.evaluated[topic_id]
        if isinstance(group, ConsumerGroup):
            for name in self.topics_of(group, gates):
                topic = self.offsets.image.by_name.get(name)
                if topic is not None and topic.is_gated:
                    self.evaluation(group, gates, topic, now_ms)
        basis = (gates.version, changes(group), gates.questions.changes, len(gates.unsure), len(gates.standing.stalls))
        if basis != gates.based_on:
            gates.based_on = basis
            self._find_wanted(group, gates)

    def _find_wanted(self, group: Group, gates: GroupGates) -> None:
        owner = self.owner(group, gates)
        wanted: dict[At, int] = dict.fromkeys(gates.questions.askers, -1)
        inner: dict[At, None] = dict.fromkeys((*gates.unsure, *gates.standing.stalls))
        holders = group.holders if isinstance(group, ConsumerGroup) else {}
        for topic_id, made in gates.evaluated.items():
            found, lineage = made.found, made.topic.lineage
            withheld = {p for p in found.closed if p in found.reopened or (topic_id, p) not in holders}
            for number, behind in found.waiting.items():
                if not withheld.isdisjoint(behind):
                    wanted[topic_id, number] = found.needs[number]
            for number, limit in found.ahead.items():
                assert lineage is not None
                layout = lineage.layout_at(number, limit)
                at = topic_id, number
                if at in holders and was_reopened(lineage, number, layout, limit):
                    inner[at] = None
        gates.wanted, gates.inner = wanted, inner
        gates.wanted_of = {}
        for at in wanted:
            member_id, _ = owner(at)
            if member_id:
                gates.wanted_of.setdefault(member_id, []).append(at)
        gates.standing.unwatch((*wanted, *inner))
        gates.asked_ms = {at: ms for at, ms in gates.asked_ms.items() if at in wanted or at in inner}

    def compare(self, group: Group, gates: GroupGates, now_ms: int) -> tuple[set[At], dict[UUID, dict[int, int]], bool]:
        """Compare watched positions with those of the last look: which changed, what to ask leaders, what is left."""
        everything = [*gates.wanted, *gates.inner]
        gates.cursor = gates.cursor if gates.cursor < len(everything) else 0
        some = everything[gates.cursor : gates.cursor + LOOKED_AT_MAX]
        gates.cursor += len(some)
        owner = self.owner(group, gates)
        moved: set[At] = set()
        asks: dict[UUID, dict[int, int]] = {}
        touched, gates.touched = gates.touched, {}
        for at in dict.fromkeys((*(at for at in touched if at in gates.wanted or at in gates.inner), *some)):
            topic = self.offsets.image.by_id.get(at[0])
            if topic is not None and topic.has(at[1]):
                if self._compare_one(group, gates, topic, at, owner, now_ms):
                    moved.add(at)
                self._ask(gates, topic, at, asks, now_ms, at_once=at in touched)
        return moved, asks, gates.cursor < len(everything)

    def _compare_one(
        self,
        group: Group,
        gates: GroupGates,
        topic: TopicImage,
        at: At,
        owner: Callable[[At], tuple[str, int]],
        now_ms: int,
    ) -> bool:
        standing, number = gates.standing, at[1]
        member_id, timeout_ms = owner(at)
        was = self.offsets.current(group.group_id, topic.name, number)
        if was is None and member_id and at not in standing.tenures and at not in standing.reports:
            standing.begin_tenure(topic, number, member_id, timeout_ms, now_ms)
        raw = standing.raw(topic, number, None if was is None else was.offset, owner, now_ms)
        position = standing.progress(topic, number, raw)
        stalled = at in standing.stalls
        moved = standing.look(at, raw, position, member_id, now_ms)
        if stalled and at not in standing.stalls:
            gates.outdate([at[0]])
        made = gates.evaluated.get(at[0])
        if moved and made is not None and (raw < made.raws.get(number, -1) or made.crosses(number, position)):
            gates.outdate([at[0]])
        need = gates.wanted.get(at, -1)
        if at not in gates.wanted or not standing.is_overdue(at, timeout_ms, topic.log_end(number), now_ms):
            return moved
        if standing.stall(at, max(need, position)):
            gates.outdate([at[0]])
            for behind in () if made is None else made.found.waiting.get(number, ()):
                gates.by_time[at[0], behind] = number, max(0, need - position)
            return True
        return moved

    def _ask(
        self,
        gates: GroupGates,
        topic: TopicImage,
        at: At,
        asks: dict[UUID, dict[int, int]],
        now_ms: int,
        *,
        at_once: bool,
    ) -> None:
        """Ask the leader for the next record where records may be left, at most once in LOOK_MS unless `at_once`."""
        watch = gates.standing.watches[at]
        need = gates.wanted.get(at, -1)
        if watch.position >= (topic.log_end(at[1]) if need < 0 else need) and at not in gates.unsure:
            return
        if not at_once and now_ms - gates.asked_ms.get(at, now_ms - LOOK_MS) < LOOK_MS:
            return
        gates.asked_ms[at] = now_ms
        asks.setdefault(at[0], {})[at[1]] = watch.position


def changes(group: Group) -> object:
    """A value that changes whenever the members' assignments do."""
    return group.changes if isinstance(group, ConsumerGroup) else (group.generation, group.state)
