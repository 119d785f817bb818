"""The gates of one group as a decision about the group sees them: a heartbeat, a join, a question.

Gates are decided by looks (`gatekeeper`). A decision of another kind decides those that it asks about by itself where
they are few, `room` says how few; otherwise it decides none, and all of them count as closed until looks have decided
them. So a heartbeat takes as long whatever the number of partitions that wait, and nobody is told of an open gate that
is not decided. A member whose reconciliation changed nothing is not reconciled again before something may be handed
out or taken away (`GroupGates.freed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from uuid import UUID

from anabranch.machines.groups.consumer.group import Assignment, ConsumerGroup, Member
from anabranch.machines.groups.gatekeeper import LOOK_ROOM, Gatekeeper
from anabranch.machines.groups.group_gates import GroupGates
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.standing import At
from anabranch.machines.outcome import Draft

HEARTBEAT_ROOM = 30
"""What the decisions of a heartbeat may cost (`Evaluated.next`), about 0.3 ms: 10 partitions of a resized topic."""


class Gate:
    """The gates of one group."""

    __slots__ = ("_group", "_keeper", "_now_ms", "_room")

    def __init__(self, keeper: Gatekeeper, group: ConsumerGroup, now_ms: int, room: int = LOOK_ROOM) -> None:
        """`room`: what decisions may cost."""
        self._keeper = keeper
        self._group = group
        self._now_ms = now_ms
        self._room = room

    def __call__(self, topic_id: UUID, partition: int) -> bool:
        """Whether a partition that nobody owns must not be handed out."""
        gates = self._keeper.of(self._group.group_id)
        return self._keeper.withholds(self._group, gates, (topic_id, partition), self._now_ms)

    def free(self, topic_id: UUID, numbers: Set[int]) -> Set[int]:
        """Those of some partitions that are not withheld, as far as that is decided: only these are asked for."""
        topic = self._keeper.offsets.image.by_id.get(topic_id)
        if topic is None or not topic.is_gated:
            return numbers
        made = self._keeper.evaluation(self._keeper.of(self._group.group_id), topic)
        decided = numbers - made.left.keys()
        undecided = sorted(numbers & made.left.keys())
        some, room = made.next(self._room, undecided)
        if len(some) < len(undecided):
            return decided - made.closed.keys()
        self._room = room
        return (decided - made.closed.keys()).union(undecided)

    @property
    def takes(self) -> Callable[[UUID, int], bool] | None:
        """Whether an owned partition must be taken away; None where none is."""
        gates = self._keeper.known(self._group.group_id)
        if gates is None or not gates.taking:
            return None
        return lambda topic_id, partition: self._keeper.takes(self._group, gates, (topic_id, partition))

    def handed_out(self, before: Member, after: Member) -> Iterator[CoordinatorRecord]:
        """The positions to write when a member's assignment changes."""
        return self._keeper.handed_out(self._group, before, after, self._now_ms)

    def speak(self, member_id: str, *, heard: bool = False) -> None:
        """Note that a member has spoken; `heard`: it has received the last answer."""
        standing = self._keeper.of(self._group.group_id).standing
        standing.speak(member_id, self._now_ms)
        if heard:
            standing.hear(member_id, self._now_ms)

    def forget(self, member_id: str, *, but: Iterable[At] = ()) -> None:
        """Drop what is known of the partitions that a member no longer owns."""
        self._keeper.forget(self._group.group_id, member_id, but=but)

    def begins_anew(self, member_id: str, assigned: Assignment) -> None:
        """Note that a member that joins again has fetched nothing of what it was assigned before."""
        gates = self._keeper.of(self._group.group_id)
        for topic_id, numbers in assigned:
            topic = self._keeper.offsets.image.by_id.get(topic_id)
            if topic is not None:
                for number in numbers:
                    gates.standing.give(topic, number, member_id)
        gates.outdate([topic_id for topic_id, _ in assigned])

    def ring(self, draft: Draft[CoordinatorRecord]) -> None:
        """Have the group looked at after this decision."""
        self._keeper.ring(draft, self._group.group_id, self._now_ms)

    def is_idle(self, member_id: str) -> bool:
        """Whether nothing has changed since a reconciliation of the member that changed nothing."""
        return is_idle(self._keeper, self._group, member_id)

    def note_idle(self, member_id: str) -> None:
        """Note that a reconciliation of the member has changed nothing."""
        gates = self._keeper.of(self._group.group_id)
        gates.idle[member_id] = _basis(self._keeper, self._group, gates)


def is_idle(keeper: Gatekeeper, group: ConsumerGroup, member_id: str) -> bool:
    """Whether nothing has changed since a reconciliation of the member that changed nothing."""
    gates = keeper.known(group.group_id)
    return gates is not None and gates.idle.get(member_id) == _basis(keeper, group, gates)


def _basis(keeper: Gatekeeper, group: ConsumerGroup, gates: GroupGates) -> tuple[object, ...]:
    return group.changes, gates.freed, keeper.offsets.image.version
