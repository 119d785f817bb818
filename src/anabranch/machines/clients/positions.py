"""What a group's member reports of its partitions, and asks of others' (ConsumerGroupPosition; ordering.md, 6.2).

A closed gate of a member waits on partitions. Of those of other members the member asks the coordinator, and keeps the
question open. A partition is claimed if the coordinator wants its position, or a gate of this member waits on it. The
rule: only a committed position is reported, and before it is, the application flushes its state of the partition, so
that a member with an open gate loads all of it. Of a shared partition nothing is reported: commits say how far each
of its members is. Reports are due

    (a) once since the member started, or since its connection to the coordinator was made;
    (b) when the position grew, and equals the high watermark;
    (c) when the position passed the end of a segment.

The same conditions make a flush due, measured by the records handed out; with automatic commits, the commit follows.
Without, a member reports by these conditions, too, up to where the application has flushed its state: of records below
that are compacted away later it holds none, though nothing is committed. It takes that back where the application goes
back to an earlier record, and says it again under each epoch: the coordinator of a classic group cannot tell whether
its members have begun again where the group has committed.
What a gate waits on is flushed as soon as the application has all of it. A partition is not reported any longer once a
position behind all ends was: the coordinator says so if it still wants more.

A question says what the fetcher knows (`KnownOf`), and nothing else: the coordinator keeps silent until it knows more,
so what the fetcher has forgotten, with a topic that was revoked and granted again, must not be said to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching.gating import Standing
from anabranch.machines.lineage import UNKNOWN_END

NOTHING = -1
"""A position that is not known, or not worth a report."""
StandingOf = Callable[[TopicPartition], Standing | None]
"""How far this member is in a partition; None if it does not own the partition, or the topic is without order."""
KnownOf = Callable[[TopicPartition], int | None]
"""The progress that this member's gates count for a partition it asks about; None while none is known."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question for the coordinator."""

    asks: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The partitions whose progress is needed, and the progress known."""
    needs: Mapping[TopicPartition, int] = field(default_factory=dict)
    """For each of them, the offset that the gates of this member wait for."""
    reports: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The wanted partitions of this member, with a position to report or `NOTHING`."""
    flushed: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Of the partitions of this member among all these: up to where the application has flushed, if it is news."""
    epoch: int = field(default=NOTHING, compare=False)
    """Under which it is asked: what it says was flushed is to be said again under another."""
    final: frozenset[TopicPartition] = frozenset()
    """Those with a position behind the ends of all ended segments."""

    def adds_to(self, other: Question) -> bool:
        """Whether this question has an ask or a report that the other has not, or knows less than the other said."""
        return (
            any(tp not in other.asks or known < other.asks[tp] for tp, known in self.asks.items())
            or any(position != NOTHING and other.reports.get(tp) != position for tp, position in self.reports.items())
            or any(other.flushed.get(tp) != offset for tp, offset in self.flushed.items())
        )


class Answer(NamedTuple):
    """The coordinator's answer for one partition."""

    partition: TopicPartition
    need_position: bool
    """Whether this member shall report its position; otherwise `position` is the group's progress."""
    position: int = NOTHING
    overdue: bool = False
    """The gates that wait on the partition may open by time."""
    overdue_to: int = NOTHING
    """If they may: up to which offset; `NOTHING`: for all records."""


class Lift(NamedTuple):
    """A partition counts as read up to an offset, as gates open by time."""

    offset: int
    is_bound: bool = False
    """Whether the coordinator has said that it counts no further."""


@dataclass(frozen=True, slots=True)
class News:
    """The effect of an answer on the fetcher."""

    told: Mapping[TopicPartition, int]
    """The group's progress."""
    lifted: Mapping[TopicPartition, Lift | None]
    """Up to where a partition counts as read because its gates open by time; None where they do not."""
    missing: frozenset[TopicPartition]
    """Partitions that the coordinator does not know: emptied and removed since this member's metadata is of."""
    is_new: bool
    """Whether the answer, or the reports that it confirms, is news: the next question may follow at once."""


class PositionReports:
    """The reports and questions of one member."""

    def __init__(self, *, auto_commit: bool) -> None:
        self._auto_commit = auto_commit
        self._wanted: set[TopicPartition] = set()
        self._reported: dict[TopicPartition, int] = {}
        self._told_flushed: dict[TopicPartition, int] = {}
        self._epoch = NOTHING
        self._begins = False
        """Whether the next question is the first one of a connection: it says of no position that it is known."""

    def restart(self) -> None:
        """Report and ask everything again: the connection to the coordinator, or the coordinator, is a new one."""
        self._reported.clear()
        self._told_flushed.clear()
        self._begins = True

    def begin_epoch(self, epoch: int) -> None:
        """Say again what the application has flushed, if this is another epoch, or generation, than before."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._told_flushed.clear()

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget partitions that were revoked or lost."""
        for tp in partitions:
            self._wanted.discard(tp)
            self._reported.pop(tp, None)
            self._told_flushed.pop(tp, None)

    # -- the application's state ---------------------------------------------------------------------------------------

    def flush_due(self, needs: Mapping[TopicPartition, int], standing_of: StandingOf) -> tuple[TopicPartition, ...]:
        """Return the claimed partitions to flush now, and with automatic commits to commit, in order.

        `needs`: what closed gates of this member wait on (`Fetcher.needs`).
        """
        if not needs and not self._wanted:
            return ()
        found: list[TopicPartition] = []
        for tp in sorted(self._wanted | needs.keys()):
            standing = standing_of(tp)
            if standing is not None and self._is_due(tp, standing, needs.get(tp)):
                found.append(tp)
        return tuple(found)

    def _is_due(self, tp: TopicPartition, standing: Standing, need: int | None) -> bool:
        position, progress = standing.position, standing.progress
        if position is None or progress is None:
            return False
        since = progress if self._auto_commit else standing.flushed
        if position > since:
            if need is not None and since < need <= position:
                return True
            if tp in self._wanted and (position == standing.high_watermark or standing.passes(since, position)):
                return True
        is_behind = standing.flushed < min(progress, position)
        return is_behind and self._is_report_due(tp, standing, progress)

    # -- the coordinator ----------------------------------------------------------------------------------------------

    def question(self, needs: Mapping[TopicPartition, int], standing_of: StandingOf, known_of: KnownOf) -> Question:
        """Return the question to keep open now."""
        asks: dict[TopicPartition, int] = {}
        for tp, need in needs.items():
            standing = standing_of(tp)
            # An own partition is asked for when the application has all of it, and commits by hand: a transaction may
            # have committed, or nothing that can be read may follow the commit, or the gate may open by time.
            # Of a shared one others may have the keys that are needed.
            if standing is None or standing.is_shared or (not self._auto_commit and (standing.position or 0) >= need):
                known = None if self._begins else known_of(tp)
                asks[tp] = NOTHING if known is None else known
        reports: dict[TopicPartition, int] = {}
        owned = (
            (tp, standing) for tp in sorted(self._wanted | asks.keys()) if (standing := standing_of(tp)) is not None
        )
        flushed = {tp: standing.flushed for tp, standing in owned if self._is_flushed_due(tp, standing)}
        final: set[TopicPartition] = set()
        for tp in sorted(self._wanted - asks.keys()):
            standing = standing_of(tp)
            if standing is None:  # Granted, and not taken over yet: listed, so that nobody asks for it again.
                reports[tp] = NOTHING
                continue
            reports[tp] = self._report(tp, standing)
            if standing.ends and reports[tp] >= standing.ends[-1]:
                final.add(tp)
        return Question(asks, {tp: needs[tp] for tp in asks}, reports, flushed, self._epoch, frozenset(final))

    def _report(self, tp: TopicPartition, standing: Standing) -> int:
        progress = standing.progress
        if standing.is_shared or progress is None or not self._is_report_due(tp, standing, progress):
            return NOTHING
        unflushed = standing.position is not None and standing.flushed < min(progress, standing.position)
        return NOTHING if unflushed else progress

    def _is_flushed_due(self, tp: TopicPartition, standing: Standing) -> bool:
        if self._auto_commit or standing.is_shared or standing.position is None:
            return False
        told, flushed = self._told_flushed.get(tp), standing.flushed
        if told is None or flushed < told:
            return True
        is_final = bool(standing.ends) and told >= standing.ends[-1]
        return not is_final and _is_news(standing, flushed, told)

    def _is_report_due(self, tp: TopicPartition, standing: Standing, progress: int) -> bool:
        return tp in self._wanted and _is_news(standing, progress, self._reported.get(tp))

    def answered(self, question: Question, answers: Iterable[Answer]) -> News:
        """Note the coordinator's answer to a question: its reports have arrived."""
        reported = {tp: position for tp, position in question.reports.items() if position != NOTHING}
        wanted = frozenset(self._wanted)
        self._reported.update(reported)
        if question.epoch == self._epoch:
            self._told_flushed.update(question.flushed)
        self._begins = False
        self._wanted -= question.final
        told: dict[TopicPartition, int] = {}
        lifted: dict[TopicPartition, Lift | None] = {}
        for tp, need_position, position, overdue, overdue_to in answers:
            if need_position:
                self._wanted.add(tp)
            elif tp in question.asks:
                lifted[tp] = _lift(question.needs[tp], overdue_to) if overdue else None
                if position != NOTHING:
                    told[tp] = position
        grew = any(position != question.asks[tp] for tp, position in told.items())
        news = bool(reported) or grew or any(lift is not None for lift in lifted.values())
        missing = frozenset(tp for tp in question.asks.keys() - told.keys() if tp in lifted)
        return News(told, lifted, missing, news or not self._wanted <= wanted)


def _is_news(standing: Standing, offset: int, reported: int | None) -> bool:
    """Whether an offset is to be reported, after the one that was."""
    if reported is None:
        return True
    return offset > reported and (offset == standing.high_watermark or standing.passes(reported, offset))


def _lift(need: int, to: int) -> Lift | None:
    if to != NOTHING:
        return Lift(to, is_bound=True)
    return Lift(need) if need < UNKNOWN_END else None
