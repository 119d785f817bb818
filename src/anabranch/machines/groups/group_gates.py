"""The soft state of one group's gates and questions: safe to lose, since every evaluation begins with what holds."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from typing import Any, NamedTuple
from uuid import UUID

from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.gate_effects import GateOpenedByTime
from anabranch.machines.groups.gates import Evaluated
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.questions import Questions
from anabranch.machines.groups.standing import At, Standing
from anabranch.machines.key_ranges import WHOLE, union
from anabranch.machines.lineage import GateWait

Group = ConsumerGroup | ClassicGroup


class OpenedByTime(NamedTuple):
    """A gate that has opened by time."""

    gate: int
    """The offset of the first record behind it."""
    waits: tuple[GateWait, ...]
    """What it waited on: positions with records left."""
    waited_ms: int
    """For how long its partition had waited."""


@dataclass(slots=True)
class GroupGates:
    """The soft state of one group."""

    standing: Standing = field(default_factory=Standing)
    questions: Questions = field(default_factory=Questions)
    evaluated: dict[UUID, Evaluated] = field(default_factory=dict)
    version: int = 0
    """Counts evaluations with another result."""
    freed: int = 0
    """Counts decisions after which a partition may be handed out, or must be taken away."""
    is_due: bool = True
    """Whether a look is due."""
    is_rung: bool = False
    """Whether a look is timed for now."""
    touched: dict[At, None] = field(default_factory=dict)
    """Watched partitions whose position may have changed."""
    unsure: dict[At, None] = field(default_factory=dict)
    """Partitions that are withheld until the leader has said where their next record is."""
    asked: dict[At, tuple[int, int]] = field(default_factory=dict)
    """The offset of the newest question to the leader of a partition, and its time."""
    asking: dict[At, int] = field(default_factory=dict)
    """The partitions whose leaders have not answered yet, and where readable records ended when they were asked."""
    unstable: dict[At, None] = field(default_factory=dict)
    """Partitions that are withheld until an open transaction, which has committed offsets of them, has ended."""
    begun: dict[UUID, set[int]] = field(default_factory=dict)
    """By topic: partitions handed out to be begun where the client's reset says, and not committed since."""
    to_note: dict[UUID, set[int]] = field(default_factory=dict)
    """By topic: partitions without a committed offset that began to wait, which is to be written down."""
    waited: dict[At, int] = field(default_factory=dict)
    """Partitions that waited and were not handed out since: the offset from which on their records wait.

    It says the same whenever, and wherever, the wait is found out.
    """
    closed_ms: dict[At, int] = field(default_factory=dict)
    """Partitions whose next record lies behind a closed gate: since when that is known."""
    by_time: dict[At, OpenedByTime] = field(default_factory=dict)
    """Partitions whose gate has opened by time, until it closes again or the positions before it have moved."""
    opened: list[GateOpenedByTime] = field(default_factory=list)
    """Gates that have opened by time since the last look, which logs and counts them."""
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
    unfinished: int = 0
    """Looks in a row after which gates were left to be decided, and `wanted` was not computed anew."""
    based_on: object = None
    """What `wanted` was computed from."""
    swept: tuple[object, ...] = ()
    """The state in which all questions were last compared with the members' targets."""
    taking: bool = False
    """Whether a partition may have to be taken away from its owner."""
    image_version: int = -1
    """Of the topics at the last look."""
    cursor: int = 0
    owners: tuple[object, dict[At, str]] = (None, {})
    """Of a classic group: the owner of each partition, and of which generation and members that is."""
    generation: int = -1
    """Of a classic group: the generation in which its members have told what they let go."""

    @property
    def topic_ids(self) -> set[UUID]:
        """The topics that something is known of."""
        standing = self.standing
        known = (standing.tenures, standing.reports, standing.answers, standing.given, self.waited)
        return {topic_id for entries in known for topic_id in topics_in(entries)} | {*self.evaluated, *self.begun}

    def forget_topics(self, topic_ids: Iterable[UUID]) -> None:
        """Drop everything that is known of deleted topics."""
        gone = set(topic_ids)
        if not gone:
            return
        standing = self.standing
        known: tuple[dict[At, Any], ...] = (
            self.waited,
            self.closed_ms,
            self.by_time,
            self.unsure,
            self.unstable,
            self.asked,
            self.asking,
            self.touched,
        )
        for entries in (
            *known,
            standing.reports,
            standing.tenures,
            standing.given,
            standing.answers,
            standing.stalls,
            standing.watches,
        ):
            for at in [at for at in entries if at[0] in gone]:
                del entries[at]
        standing.from_end -= gone
        for topic_id in gone:
            self.evaluated.pop(topic_id, None)
            self.begun.pop(topic_id, None)
            self.to_note.pop(topic_id, None)

    def begins(self, at: At) -> None:
        """Note that a partition is handed out, to be begun where the client's reset says."""
        self.begun.setdefault(at[0], set()).add(at[1])

    def has_begun(self, at: At) -> None:
        """Note that a partition has an offset, or is no more."""
        numbers = self.begun.get(at[0], set())
        numbers.discard(at[1])
        if not numbers:
            self.begun.pop(at[0], None)

    def forget_gates(self, topic_ids: Iterable[UUID]) -> None:
        """Drop what was decided of topics in which nothing waits any more: their order is not kept from now on.

        What has waited (`waited`) stays: it is begun where what is not yet read begins.
        """
        for topic_id in topic_ids:
            del self.evaluated[topic_id]
            self.forget_waits(lambda at, gone=topic_id: at[0] != gone)  # type: ignore[misc]
            for at in [at for at in self.unsure if at[0] == topic_id]:
                del self.unsure[at]
            self.version += 1
            self.freed += 1

    def forget_waits(self, is_kept: Callable[[At], bool]) -> None:
        """Drop since when partitions wait, and which gates have opened by time, but of these."""
        self.closed_ms = {at: since_ms for at, since_ms in self.closed_ms.items() if is_kept(at)}
        self.by_time = {at: opened for at, opened in self.by_time.items() if is_kept(at)}

    def take_opened(self) -> list[GateOpenedByTime]:
        """Take the gates that have opened by time since the last look."""
        found, self.opened = self.opened, []
        return found

    def forget_all_but(self, members: Container[str]) -> None:
        """Drop what was told to members that are in the group no longer, and when they spoke."""
        replied, spoken = self.questions.replied, self.standing.spoken
        self.questions.replied = {member: told for member, told in replied.items() if member in members}
        self.standing.spoken = {member: at_ms for member, at_ms in spoken.items() if member in members}

    def begin_generation(self, generation: int) -> None:
        """Forget what members of a classic group have let go in another generation than this one."""
        if generation != self.generation:
            self.generation = generation
            self.standing.begin_generation()

    def moved(self, topic: TopicImage, partition: int, offset: int) -> bool:
        """Note where a committed offset is, or is about to be; whether anything that was decided depends on it."""
        at, made = (topic.topic_id, partition), self.evaluated.get(topic.topic_id)
        is_looked_at = at in self.standing.watches or (made is not None and partition in made.verdicts)
        if is_looked_at:
            self.touched[at] = None
        is_behind = made is not None and made.is_behind(partition, offset)
        if is_behind:
            self.outdate([topic.topic_id])
        return is_looked_at or is_behind

    def take_touched(self, most: int) -> dict[At, None]:
        """Take some partitions whose position may have changed."""
        some = dict.fromkeys(islice(self.touched, most))
        for at in some:
            del self.touched[at]
        return some

    def outdate(self, topic_ids: Iterable[UUID]) -> None:
        """Evaluate these topics anew when their gates are needed."""
        for topic_id in topic_ids:
            known = self.evaluated.get(topic_id)
            if known is not None:
                known.is_outdated = self.is_due = True


def topics_in(places: Iterable[At]) -> Iterator[UUID]:
    """The topics of partitions, some more than once: the hash of an id takes longer than all else here."""
    before = None
    for topic_id, _ in places:
        if topic_id is not before:
            before = topic_id
            yield topic_id


def held_of(holders: Iterable[At]) -> Mapping[UUID, Set[int]]:
    """Partitions that are held, by topic."""
    found: dict[UUID, set[int]] = {}
    before, numbers = None, set[int]()
    for topic_id, number in holders:
        if topic_id is not before:  # The hash of an id takes longer than all else here.
            before, numbers = topic_id, found.setdefault(topic_id, set())
        numbers.add(number)
    return found


def is_ours(group: Group, gates: GroupGates, member_id: str) -> bool:
    """Whether a member of a classic group is one of ours: it says where it stands, and nothing is guessed of it."""
    return isinstance(group, ClassicGroup) and gates.questions.has_asked(member_id)


def has_free_keys(group: Group, at: At) -> bool:
    """Whether some members hold a part of a partition, and nobody the rest of it."""
    sharers = group.sharers.get(at) if isinstance(group, ConsumerGroup) else None
    return sharers is not None and reduce(union, sharers.values()) != WHOLE


def changes(group: Group) -> object:
    """A value that changes whenever the members' assignments do."""
    return group.changes if isinstance(group, ConsumerGroup) else (group.generation, group.state, group.renames)
