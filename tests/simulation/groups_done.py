"""What a coordinator says is done of each partition, record by record: the rules of commits by ranges and by keys.

What is done is a set of offsets: those below the frontier of their keys, and those in ranges of offsets. A commit that
is accepted adds what it names, and nothing else; it names no key that its sender does not hold, and no record that no
application has processed. What was acknowledged stays done, whatever the coordinator or its logs go through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.positions import Position
from anabranch.machines.groups.ranged import TooManyRanges
from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, ranges_of, without
from anabranch.machines.keyspace import Interval
from anabranch.machines.outcome import Outcome
from anabranch.protocol.messages.offset_commit import OffsetCommitResponse
from tests.simulation.groups_keys import keys_of
from tests.simulation.groups_shard import Broker, Cause
from tests.simulation.groups_shared_topics import SharedEdge, SharedTopic, below

if TYPE_CHECKING:
    from tests.simulation.groups_rules import Rules

At = tuple[str, str, int]
"""A group, a life of a topic, a partition."""


class DoneRules:
    """What is done, and what was acknowledged."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._world = rules.world
        self._done: dict[At, int] = {}
        self._stable: dict[At, int] = {}
        self._ever: dict[At, int] = {}
        self._told: dict[At, int] = {}
        self.put_back: set[At] = set()
        """Partitions in which a late commit of a member has put the group back, and with it ranges above."""
        self._replies: dict[int, tuple[Any, dict[At, int]]] = {}
        """Replies to commits that have not left, and what was done when they were decided."""

    def done(self, group_id: str, place: tuple[str, int]) -> int:
        """Return what is done of a partition, as bits of offsets."""
        return self._done.get((group_id, *place), 0)

    def ever(self, group_id: str, place: tuple[str, int]) -> int:
        """Return what ever was."""
        return self._ever.get((group_id, *place), 0)

    def after_step(self, machine: Coordinator, cause: Cause, outcome: Outcome[Any, Any]) -> None:
        """Check what a decision has made of what was done."""
        commits = self._commits(machine, cause, outcome)
        if any(isinstance(effect, TooManyRanges) for effect in outcome.effects):
            self._world.upheavals += 1  # The group is assigned anew.
            self._rules.counts["too many ranges"] += 1
        for at, part in commits.items():
            self._accepted(machine, at, part, cause)
        touched = set()
        for record in outcome.records:
            if type(record.key).__name__ in ("OffsetCommitKey", "IndividualCommitKey"):
                touched.add((record.key.group, record.key.topic, record.key.partition))
        for group_id, name, number in sorted(touched):
            topic = self._topic(machine, name)
            if topic is None or (group_id, topic.life, number) in commits:
                continue
            at = (group_id, topic.life, number)
            before, now = self._done.get(at, 0), self._look(machine, at, topic)
            position = machine.offsets.current(group_id, name, number)
            if position is None:
                self._told.pop(at, None)
            elif before and (at in self._stable):
                assert self._same(topic, number, before, now), (at, bin(before), bin(now), outcome.records)
        if commits:
            self._replies[id(outcome.reply)] = outcome.reply, {at: self._done.get(at, 0) for at in commits}

    def _commits(self, machine: Coordinator, cause: Cause, outcome: Outcome[Any, Any]) -> dict[At, Any]:
        request, reply = cause.request, outcome.reply
        if not isinstance(reply, OffsetCommitResponse):
            return {}
        found: dict[At, Any] = {}
        by_id = cause.caller is not None and cause.caller.version >= 10
        for asked, answered in zip(request.topics, reply.topics, strict=True):
            name = machine.image.name_of(asked.topic_id) if by_id else asked.name
            for part, answer in zip(asked.partitions, answered.partitions, strict=True):
                topic = self._topic(machine, name)
                if answer.error_code == ErrorCode.NONE and topic is not None:
                    found[request.group_id, topic.life, part.partition_index] = part
        return found

    def _accepted(self, machine: Coordinator, at: At, part: Any, cause: Cause) -> None:
        group_id, _, number = at
        topic = self._world.topics_by_life[at[1]]
        assert isinstance(topic, SharedTopic)
        keys = self._held(machine, at, topic, cause.request.member_id)
        named = ranges_of((it.start, it.end) for it in part.key_range_offsets)
        assert not without(named, keys), f"{cause.request.member_id} commits {named} of {at}, and holds {keys}"
        before, stable = self._done.get(at, 0), self._stable.get(at)
        now = self._look(machine, at, topic)
        position = machine.offsets.current(group_id, topic.name, number)
        assert position is not None
        ranged = part.offset_ranges or part.key_range_offsets
        if not ranged and stable is not None and part.committed_offset < stable:
            expected = now if without(WHOLE, keys) else below(part.committed_offset)  # a late commit puts it back
            self._rules.counts["put back"] += 1
            self.put_back.add(at)
            self._told[at] = self._told.get(at, 0) & now
        elif not ranged:
            expected = before | below(part.committed_offset) & topic.offsets_of(number, keys)
        else:
            expected = before if stable is not None else below(part.committed_offset)
            for it in part.key_range_offsets:
                expected |= below(it.offset) & topic.offsets_of(number, (Interval(it.start, it.end),))
            for it in part.offset_ranges:
                expected |= below(it.end + 1) & ~below(it.start)
        assert self._same(topic, number, expected, now), (
            f"{at}: {offsets(before)} were done, {offsets(now)} are, by {part}, at {position}"
        )
        log = topic.logs.get(number)
        fresh = 0 if log is None else now & ~before & topic.offsets_of(number, WHOLE)
        if stable is None:
            fresh &= ~below(max(0, part.committed_offset if ranged else 0))
        if not self._world.is_ambiguous(topic):
            edge = self._world.edges[group_id]
            assert isinstance(edge, SharedEdge)
            assert edge.is_finished(topic, number, fresh), (
                f"{cause.request.member_id} commits {offsets(fresh)} of {at} by {part}: not all of them is processed"
            )
        self._rules.counts["commits by key"] += bool(part.key_range_offsets)
        self._rules.counts["commits by offset"] += bool(part.offset_ranges)

    def _held(self, machine: Coordinator, at: At, topic: SharedTopic, member_id: str) -> Ranges:
        """The keys that a commit of a member may be of."""
        group = machine.groups.get(at[0])
        place = topic.topic_id, at[2]
        if not isinstance(group, ConsumerGroup) or member_id not in group.members:
            return WHOLE
        held = keys_of(group.members[member_id]).get(place, NONE)
        return held if place in group.sharers else WHOLE

    def told(self, reply: Any) -> None:
        """Note that the reply to a commit leaves the broker."""
        for at, done in self._replies.pop(id(reply), (None, {}))[1].items():
            self._told[at] = self._told.get(at, 0) | done & self._done.get(at, 0)

    def after_load(self, broker: Broker, machine: Coordinator) -> None:
        """Check that nothing is lost that was acknowledged; a deletion that was not written is undone."""
        for at in [at for at in self._ever if self._world.broker_of(at[0]) is broker]:
            topic = self._world.topics_by_life[at[1]]
            assert isinstance(topic, SharedTopic)
            if machine.image.by_name.get(topic.name) is None or self._topic(machine, topic.name) is not topic:
                continue
            told, now = self._told.get(at, 0), self._look(machine, at, topic)
            if machine.offsets.current(at[0], topic.name, at[2]) is None:
                self._told.pop(at, None)
                continue
            start = self._bounds(topic, at[2])
            if start is None:
                continue  # The partition was removed: nobody knows which keys its offsets are of.
            lost = told & ~now & ~below(start)
            assert not lost, f"{offsets(lost)} of {at} were acknowledged, and are not done after loading"

    def _look(self, machine: Coordinator, at: At, topic: SharedTopic) -> int:
        """Look at what the machine says is done."""
        group_id, _, number = at
        position = machine.offsets.current(group_id, topic.name, number)
        if position is None:
            self._done.pop(at, None)
            self._stable.pop(at, None)
            return 0
        now = self._said(machine, group_id, topic, number, position)
        self._done[at], self._stable[at] = now, position.offset
        self._ever[at] = self._ever.get(at, 0) | now
        return now

    def _said(self, machine: Coordinator, group_id: str, topic: SharedTopic, number: int, position: Position) -> int:
        found = below(position.offset)
        log = topic.logs.get(number)
        if log is not None and position.frontier is not None:
            for offset, (_, record) in log.entries.items():
                if record is not None:
                    place = topic.places_of_keys[record.key]
                    if position.frontier.lowest(Interval(place, place)) > offset:
                        found |= 1 << offset
        held = machine.offsets.individual._held.get(group_id, {}).get((topic.name, number))
        if held is not None and held.since == position.ranges_since:
            for start, end in held.ranges:
                found |= below(end + 1) & ~below(start)
        return found

    def _same(self, topic: SharedTopic, number: int, one: int, other: int) -> bool:
        """Whether two sets have the same records that are there."""
        return not (one ^ other) & topic.offsets_of(number, WHOLE)

    def _bounds(self, topic: SharedTopic, number: int) -> int | None:
        log = topic.logs.get(number)
        return None if log is None else log.start

    def _topic(self, machine: Coordinator, name: str) -> SharedTopic | None:
        known = machine.image.by_name.get(name)
        topic = None if known is None else self._world.topic_of(known.topic_id)
        assert topic is None or isinstance(topic, SharedTopic)
        return topic


def offsets(bits: int) -> list[int]:
    """The offsets of a set."""
    return [at for at in range(bits.bit_length()) if bits >> at & 1]
