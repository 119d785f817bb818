"""The positions that the coordinator writes as partitions are handed out, or taken away (ADR 0033).

of a partition that is     | and has                               | the position that is written
handed out                 | no committed offset                   | `first_offsets`, at its first closed gate at most
handed out                 | one before a gate that has opened     | the same one, which says so from now on
handed out after a wait    | one of which the records are deleted  | the log start
taken away                 | no committed offset                   | the closed gate

Who finds a commit behind a closed gate takes the gate for one that was open; so nothing is written behind one.
What is written here must not overtake what an open transaction has committed: such a partition waits for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from anabranch.machines.groups.consumer.group import ConsumerGroup, Member
from anabranch.machines.groups.first_offsets import FirstOffsets
from anabranch.machines.groups.gates import OPEN, Evaluated, segment_start
from anabranch.machines.groups.group_gates import GroupGates
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.positions import Position, position_record
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.regex import Regexes
from anabranch.machines.groups.standing import At
from anabranch.machines.groups.starts import NOT_NOTED, Starts, start_record


class HandOuts:
    """What follows from changes of assignments in a shard's groups."""

    def __init__(self, offsets: Offsets, starts: Starts, regexes: Regexes) -> None:
        self._offsets = offsets
        self._starts = starts
        self._first_offsets = FirstOffsets(offsets, starts, regexes)

    def changed(
        self,
        group: ConsumerGroup,
        gates: GroupGates,
        before: Member,
        after: Member,
        takes: Callable[[At], bool],
        now_ms: int,
    ) -> Iterator[CoordinatorRecord]:
        """Note a change of a member's assignment; what to write before the member learns of it.

        `takes`: whether a partition is revoked because it re-opened behind a closed gate.
        """
        had, by_id = dict(before.assigned), self._offsets.image.by_id
        for topic_id, numbers in after.assigned:
            topic = by_id.get(topic_id)
            known = frozenset(had.get(topic_id, ()))
            for number in numbers:
                if topic is not None and number not in known:
                    yield from self._handed_out(group, gates, topic, number, after, now_ms)
        for topic_id, numbers in after.revoking:
            topic = by_id.get(topic_id)
            for number in numbers:
                if topic is not None and takes((topic_id, number)):
                    yield from self._taken_away(group, gates, topic, number, now_ms)

    def awaits_transaction(self, group_id: str, gates: GroupGates, topic: TopicImage, number: int) -> bool:
        """Whether a position may have to be written, and would overtake what an open transaction has committed."""
        was = self._offsets.current(group_id, topic.name, number)
        if was is not None and was.offset >= topic.log_start(number):
            return False
        if not self._offsets.positions.unstable(group_id, topic.name, number):
            return False
        at = topic.topic_id, number
        if at not in gates.unstable:
            gates.unstable[at] = None
            gates.is_due = True
        return True

    def awaits_log(self, group_id: str, gates: GroupGates, topic: TopicImage, number: int) -> bool:
        """Whether it depends on the log start where a partition begins, and that is not known: its log is not open."""
        if topic.is_open(number):
            return False
        was = self._offsets.current(group_id, topic.name, number)
        waits = (topic.topic_id, number) in gates.waited
        if was is not None:
            return waits or not was.is_begun or _may_stand_at_gate(topic, number, was)
        return (
            waits or self._starts.waited(group_id, topic, number) or not self._starts.existed(group_id, topic, number)
        )

    def look_at_transactions(self, group_id: str, gates: GroupGates) -> None:
        """Have partitions handed out that waited for a transaction which has ended."""
        for at in list(gates.unstable):
            name = self._offsets.image.name_of(at[0])
            if not name or not self._offsets.positions.unstable(group_id, name, at[1]):
                del gates.unstable[at]
                gates.freed += 1

    def note_waits(self, group_id: str, gates: GroupGates) -> Iterator[CoordinatorRecord]:
        """Write down which partitions without a commit wait, as another coordinator may hand them out.

        With them, where no log end was noted, the gate. In one record for a topic: with all its ends it is long.
        """
        for topic_id, numbers in list(gates.to_note.items()):
            made, start = gates.evaluated.get(topic_id), self._starts.get(group_id, topic_id)
            if made is not None and (made.left or start is None):
                continue
            del gates.to_note[topic_id]
            waited = {} if start is None else {n: gates.waited.get((topic_id, n)) for n in numbers & start.ends.keys()}
            if made is None or start is None or waited.keys() <= start.waited:
                continue
            ends = {n: it for n, it in waited.items() if it is not None and start.ends[n] == NOT_NOTED}
            noted = start._replace(ends=start.ends | ends, waited=start.waited | waited.keys())
            yield start_record(group_id, topic_id, noted)

    def _handed_out(
        self, group: ConsumerGroup, gates: GroupGates, topic: TopicImage, number: int, owner: Member, now_ms: int
    ) -> Iterator[CoordinatorRecord]:
        group_id, at = group.group_id, (topic.topic_id, number)
        was = self._offsets.current(group_id, topic.name, number)
        gates.standing.give(topic, number, owner.member_id)
        if owner.described.classic is None:
            gates.standing.unlearned.setdefault(owner.member_id, set()).add(at)
        if was is None and not self._starts.reads_from_beginning(group_id, topic.topic_id):
            gates.standing.begin_tenure(topic, number, owner.member_id, owner.described.rebalance_timeout_ms, now_ms)
        waited = gates.waited.pop(at, None)
        gates.unsure.pop(at, None)
        layout = _opened_at(gates, topic, number) if waited is not None else -1
        position: Position | None = None
        if was is None:
            position = self._first(group, gates, topic, number, waited, layout, now_ms)
            if position is None and topic.is_gated:
                gates.begins(at)
        else:
            passed = layout > was.opened and was.gone_through <= segment_start(topic, number, layout)
            if passed and not self._offsets.positions.unstable(group_id, topic.name, number):
                position = was._replace(opened=layout)
            has_waited = waited is not None or not was.is_begun or _never_opened(topic, number, was)
            if has_waited and was.frontier is None and was.offset < topic.log_start(number):
                # What was deleted while it waited would be out of range, and the reset of its client take the rest.
                position = (position or was)._replace(offset=topic.log_start(number))
        if position is not None:
            yield position_record(group_id, topic.name, number, position)

    def _first(
        self,
        group: ConsumerGroup,
        gates: GroupGates,
        topic: TopicImage,
        number: int,
        waited: int | None,
        layout: int,
        now_ms: int,
    ) -> Position | None:
        """The position of a partition without a commit; None leaves it to the client."""
        stands_late = topic.topic_id in gates.standing.from_end
        offset = self._first_offsets.of(group, topic, number, waited, stands_late=stands_late)
        if offset is None:
            return None
        made = gates.evaluated.get(topic.topic_id)
        ahead = made.verdicts.get(number, OPEN).ahead if made is not None and made.topic is topic else -1
        if ahead >= 0:
            offset = max(min(offset, ahead), topic.log_start(number))
        return Position(offset, committed_at_ms=now_ms, topic_id=topic.topic_id, opened=layout, is_begun=False)

    def _taken_away(
        self, group: ConsumerGroup, gates: GroupGates, topic: TopicImage, number: int, now_ms: int
    ) -> Iterator[CoordinatorRecord]:
        """Write the position of a partition that is taken from an owner that has committed nothing in it.

        At the closed gate, however far behind that the owner's reset may have put it, as at a hand-out.
        """
        gate = segment_start(topic, number, _opened_at(gates, topic, number))
        gates.waited.setdefault((topic.topic_id, number), gate)
        if self._offsets.current(group.group_id, topic.name, number) is None:
            position = Position(gate, committed_at_ms=now_ms, topic_id=topic.topic_id, is_begun=False)
            yield position_record(group.group_id, topic.name, number, position)

    def is_read_to(self, group_id: str, gates: GroupGates, made: Evaluated, number: int) -> bool:
        """Whether it is known that the owner of a partition stands where its gates were decided.

        An owner without a commit for all of its time counts as one that reads from the end. That opens gates of others;
        but what is taken away from it is skipped up to the gate, and one that is slow to commit has not read that yet.
        """
        topic, tenure = made.topic, gates.standing.tenures.get((made.topic.topic_id, number))
        return (
            self._offsets.current(group_id, topic.name, number) is not None
            or (topic.topic_id, number) in gates.standing.reports
            or gates.standing.progress(topic, number, -1) >= made.stands[number].position  # There was nothing to read.
            or (
                tenure is not None
                and tenure.is_whole  # Otherwise its owner may have been given what came before the end that it has.
                and self._first_offsets.reads_from_end(
                    group_id, topic, stands_late=topic.topic_id in gates.standing.from_end
                )
            )
        )


def _never_opened(topic: TopicImage, number: int, was: Position) -> bool:
    """Whether the partition may have waited at the gate where a group stands, under another coordinator, say."""
    if topic.lineage is None:
        return False
    layout = topic.lineage.layout_at(number, was.offset)
    return layout > max(topic.lineage.first, was.opened) and was.gone_through <= topic.lineage.start(number, layout)


def _may_stand_at_gate(topic: TopicImage, number: int, was: Position) -> bool:
    """Whether the partition may have waited where a group stands: while its log is not open, that is not known."""
    if topic.lineage is not None and number in topic.lineage.unknown:
        return topic.lineage.current > max(topic.lineage.first, was.opened)
    return _never_opened(topic, number, was)


def _opened_at(gates: GroupGates, topic: TopicImage, number: int) -> int:
    """The layout of the next record by which the gates of a partition were decided; -1 where they were not."""
    made = gates.evaluated.get(topic.topic_id)
    if made is None or made.topic is not topic or topic.lineage is None or number not in made.stands:
        return -1
    return topic.lineage.layout_at(number, made.stands[number].position)
