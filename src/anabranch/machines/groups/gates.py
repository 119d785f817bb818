"""Gates of a group in one topic: the partitions that wait for records of other partitions (ordering.md, 6.1 and 8).

`judge` decides one partition by positions that count as progress (`machines.progress`). A partition is closed when its
next record lies behind a closed gate, unless that gate was open once: the owners of all keys have come beyond the
segment's start, or the coordinator has handed the partition out at this gate before (`Position.opened`; ADR 0033).

A closed partition is withheld from every member. An owned one stays with its owner, as stock consumers cannot be
stopped within a partition (ADR 0018), except where the gate is of a layout that re-opened the partition: that one is
taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from itertools import pairwise
from typing import NamedTuple

from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.positions import Position
from anabranch.machines.lineage import Frontier, Gates, GateWait, Lineage


class Stand(NamedTuple):
    """Where a group stands in one partition."""

    raw: int
    """The committed offset, or what stands for one; -1 for the log start."""
    position: int
    """What it counts for."""
    passed: int
    """What it counts for in the gates of others: not the log start while the owner may hand out what lies below."""
    counted: int | Frontier
    """What it counts for in the gates of others, by key: more where they open by time, or where sharers are ahead."""
    committed: Position | None
    read: int | Frontier | None = None
    """`counted` as if no gate opened by time; None where none does on this partition."""


class Verdict(NamedTuple):
    """The gates of one partition."""

    is_closed: bool = False
    """Whether its next record lies behind a closed gate."""
    ahead: int = -1
    """The offset of the first closed gate of an open partition; -1 without one."""
    waits: tuple[GateWait, ...] = ()
    """What the first closed gate waits on."""
    is_reopened: bool = False
    """Whether the closed gate is of a layout that re-opened the partition."""


OPEN = Verdict()
COST = 2
"""What a decision about a partition costs, beside what each of its relatives does."""


def judge(topic: TopicImage, gates: Gates, partition: int, stand: Stand) -> Verdict:
    """Decide the gates of one partition."""
    lineage = topic.lineage
    limit = gates.limit(partition)
    if limit is None or lineage is None:
        return OPEN
    layout = lineage.layout_at(partition, stand.position)
    if gates.may_deliver(partition, layout):
        return Verdict(ahead=max(limit, stand.position), waits=gates.waits(partition))
    start, was = segment_start(topic, partition, layout), stand.committed
    if was is not None and (is_behind(lineage, partition, was, start) or was.opened >= layout):
        ahead = next_closed(topic, gates, partition, layout, was)
        return OPEN if ahead is None else Verdict(ahead=ahead, waits=gates.waits(partition))
    return Verdict(True, -1, gates.waits(partition), was_reopened(lineage, partition, layout, start))


def next_closed(topic: TopicImage, gates: Gates, partition: int, layout: int, was: Position) -> int | None:
    """Return where the first closed gate behind one of `layout` that was open once is; None without any."""
    assert topic.lineage is not None
    for segment in topic.lineage.segments(partition, topic.log_start(partition)):
        was_open = segment.layout <= max(layout, was.opened) or is_behind(topic.lineage, partition, was, segment.start)
        if not was_open and not gates.may_deliver(partition, segment.layout):
            return segment.start
    return None


def is_behind(lineage: Lineage, partition: int, was: Position, start: int) -> bool:
    """Whether a group has committed records of a segment; while the log is not open its begin is told as 0."""
    return was.gone_through > start and partition not in lineage.unknown


class Evaluated:
    """The gates of one topic, decided partition by partition: all of a large topic take longer than the loop may."""

    __slots__ = (
        "_gates",
        "_gates_by_reading",
        "by_time",
        "closed",
        "counted",
        "is_outdated",
        "left",
        "read",
        "stalled",
        "stands",
        "topic",
        "verdicts",
        "waiting",
    )

    def __init__(self, topic: TopicImage) -> None:
        self.topic = topic
        self.stands: dict[int, Stand] = {}
        self.counted: dict[int, int | Frontier] = {}
        self.verdicts: dict[int, Verdict] = {}
        """Of partitions that are closed, or have a closed gate ahead."""
        self.closed: dict[int, None] = {}
        self.waiting: dict[int, dict[int, None]] = {}
        """By partition that gates wait on, or have waited on that are open by time: the partitions behind them."""
        self.read: dict[int, int | Frontier] = {}
        """What positions count for as if no gate opened by time (`Stand.read`)."""
        self.stalled: dict[int, None] = {}
        """The partitions on which gates open by time."""
        self.by_time: dict[int, Verdict] = {}
        """Of partitions with a gate that is open only by time: the verdict as if it were not."""
        self.left: dict[int, None] = dict.fromkeys(topic.readable)
        """The partitions whose gates are to be decided."""
        self.is_outdated = False
        self._gates: Gates | None = None
        self._gates_by_reading: Gates | None = None

    def outdate(self) -> None:
        """Decide everything anew: a position may lie behind what it was."""
        self.stands.clear()
        self.counted.clear()
        self.read.clear()
        self.stalled.clear()
        self.left = dict.fromkeys(self.topic.readable)
        self.is_outdated = False
        self._gates = self._gates_by_reading = None

    def doubt(self, partition: int) -> None:
        """Decide a partition, and those that wait on it, by its position of now."""
        self.stands.pop(partition, None)
        self.counted.pop(partition, None)
        self.read.pop(partition, None)
        self.stalled.pop(partition, None)
        self._gates = self._gates_by_reading = None
        self.left[partition] = None
        self.left.update(self.waiting.get(partition, {}))

    def next(self, room: int, among: Iterable[int] | None = None) -> tuple[list[int], int]:
        """The partitions to decide next, and what is left of `room`: a decision costs by the partition's relatives.

        `among`: some of `left`; None for all.
        """
        assert self.topic.lineage is not None
        some: list[int] = []
        for partition in self.left if among is None else among:
            if room <= 0:
                break
            some.append(partition)
            room -= COST + len(self.topic.lineage.relatives(partition))
        return some, room

    def moved(self, partition: int, stand: Stand) -> None:
        """Take a position that is not behind the one before: the partition, and those that waited on it, are left."""
        self._take(partition, stand)
        self._gates = self._gates_by_reading = None
        self.left[partition] = None
        self.left.update(self.waiting.get(partition, {}))

    def decide(self, partitions: Iterable[int], stand_in: Callable[[int], Stand]) -> bool:
        """Decide the gates of some partitions; whether any verdict is another than before."""
        lineage, changed = self.topic.lineage, False
        assert lineage is not None
        if self._gates is None:
            self._gates = lineage.gates(self.counted)
        for partition in partitions:
            for number in (partition, *lineage.relatives(partition)):
                if number not in self.stands and self.topic.has(number):
                    self._take(number, stand_in(number))
            self.left.pop(partition, None)
            verdict = judge(self.topic, self._gates, partition, self.stands[partition])
            changed |= self._put(partition, verdict, self._by_reading(partition, verdict))
        return changed

    def _take(self, partition: int, stand: Stand) -> None:
        self.stands[partition], self.counted[partition] = stand, stand.counted
        if stand.read is None:
            self.read[partition] = stand.counted
            self.stalled.pop(partition, None)
        else:
            self.read[partition], self.stalled[partition] = stand.read, None

    def _by_reading(self, partition: int, verdict: Verdict) -> Verdict:
        """The verdict as if no gate opened by time, if it is another one; otherwise OPEN."""
        if not self.stalled:
            return OPEN
        if self._gates_by_reading is None:
            assert self.topic.lineage is not None
            self._gates_by_reading = self.topic.lineage.gates(self.read)
        otherwise = judge(self.topic, self._gates_by_reading, partition, self.stands[partition])
        return OPEN if (otherwise.is_closed, otherwise.ahead) == (verdict.is_closed, verdict.ahead) else otherwise

    def _put(self, partition: int, verdict: Verdict, by_reading: Verdict) -> bool:
        before = self.verdicts.pop(partition, OPEN)
        for number in {wait.partition for wait in (*before.waits, *self.by_time.pop(partition, OPEN).waits)}:
            behind = self.waiting[number]
            behind.pop(partition, None)
            if not behind:
                del self.waiting[number]
        self.closed.pop(partition, None)
        if verdict.is_closed:
            self.closed[partition] = None
        if verdict is not OPEN:
            self.verdicts[partition] = verdict
        if by_reading is not OPEN:
            self.by_time[partition] = by_reading
        for wait in (*verdict.waits, *by_reading.waits):
            self.waiting.setdefault(wait.partition, {})[partition] = None
        return verdict != before

    def needed(self, asked: Set[int]) -> dict[int, int]:
        """The partitions that are waited for, each with the largest offset that is.

        Gates of closed partitions wait, and gates ahead that wait on one of `asked`. Of a partition that is waited for
        itself what its gate ahead waits on is waited for, too: it holds up the others.
        """
        found: dict[int, int] = {}
        ahead = list(asked)

        def need(wait: GateWait) -> None:
            if wait.offset > found.get(wait.partition, -1):
                found[wait.partition] = wait.offset
                ahead.append(wait.partition)

        for verdict in self.verdicts.values():
            for wait in verdict.waits:
                if verdict.is_closed or wait.partition in asked:
                    need(wait)
        while ahead:
            for wait in self.verdicts.get(ahead.pop(), OPEN).waits:
                need(wait)
        return found

    def gate_of(self, partition: int) -> int:
        """Where the records begin that a closed partition waits with: nothing before them waits."""
        assert self.topic.lineage is not None
        layout = self.topic.lineage.layout_at(partition, self.stands[partition].position)
        return segment_start(self.topic, partition, layout)

    def own_gate(self, partition: int) -> int | None:
        """Where the first closed gate of a partition that is not withheld is; None without one."""
        verdict = self.verdicts.get(partition, OPEN)
        return None if verdict.is_closed or verdict.ahead < 0 else verdict.ahead

    def crosses(self, partition: int, position: int) -> bool:
        """Whether what a position counts for in the gates of others lies in another segment than at their decision."""
        before = self.stands.get(partition)
        assert self.topic.lineage is not None
        layout_at = self.topic.lineage.layout_at
        return before is not None and layout_at(partition, position) != layout_at(partition, before.passed)

    def is_behind(self, partition: int, raw: int) -> bool:
        """Whether a position lies before the one that the gates were decided with."""
        before = self.stands.get(partition)
        return before is not None and raw < before.raw


def can_go_on(topic: TopicImage, made: Evaluated | None, partition: int, position: int) -> bool:
    """Whether the owner of a partition can hand out more, whatever it reads: the time that it takes counts.

    It cannot where its next record lies behind a closed gate, unless it may hold some before that which are deleted, or
    compacted away; nor where its next record is of an open transaction. `position`: what it counts for in the gates of
    others.
    """
    if position >= topic.stable_end(partition):
        return False
    if made is None or partition not in made.closed:
        return True
    stand = made.stands.get(partition)
    return stand is not None and position < stand.position


def segment_start(topic: TopicImage, partition: int, layout: int) -> int:
    """Return the offset at which the records of a layout begin in a partition: at its log start at the earliest."""
    assert topic.lineage is not None
    return max(topic.lineage.start(partition, layout), topic.log_start(partition))


def was_reopened(lineage: Lineage, partition: int, layout: int, start: int) -> bool:
    """Whether a partition retired and came back between its record before `start` and its records of `layout`."""
    if start < 1:
        return False
    before = max(lineage.first, lineage.layout_at(partition, start - 1))
    counts = [lineage.count_in(number) for number in range(before, layout + 1)]
    return any(one <= partition < other for one, other in pairwise(counts))
