"""Where a group stands: what its positions count for, beside its committed offsets. All is soft state.

A partition is named by its topic's id and its number. `reports` are positions that members of ours have told of their
own partitions, `tenures` say since when an owner has had a partition without a committed offset, `answers` are the
leaders' answers about next records. A stall is a position with records left that has not changed for its owner's
rebalance timeout: gates open by time then, until the position or the owner changes. Time counts from when an owner has
learned of its partition: it has when it speaks again on the connection of the answer that gave it (`hear`). It is the
time of the records that were there when it began: a gate that waits for later ones waits again (`Watch.later`). It
counts while the owner can be given the next record (`gates.can_go_on`), and up to when the owner last spoke (`speak`):
of a member that is dead or stopped nobody knows whether it would have gone on, and its session says when others do.
While a classic group rebalances it stands still: a member may have let go of all by then, and who is next is not known.
So owners' times are not those of the clock, but of `Standing.time`, which leaves out all rebalances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from uuid import UUID

from anabranch.machines.groups.image import TopicImage
from anabranch.machines.lineage import BEYOND
from anabranch.machines.progress import NEVER_REWRITTEN, Rewritten, Tenure, is_stalled, may_hold, progress, start_of

At = tuple[UUID, int]
NEVER = -(1 << 62)
OPEN_END = 1 << 62
"""Behind every record."""
ASKED_AGAIN_MS = 10_000
"""A member whose question has ended asks again before this time is over, unless nothing is left to ask."""
Owner = Callable[[At], tuple[str, int]]
"""The member that owns a partition and its rebalance timeout; ("", 0) without one."""
Committed = Callable[[str, int], int | None]
"""The committed offset of a partition, by topic name and number."""


class Report(NamedTuple):
    """A position that a member of ours has told of its own partition."""

    owner: str
    position: int
    committed: int = -1
    """The committed offset that it was told with, -1 without one: the report follows from that, not from one below."""


class Given(NamedTuple):
    """What is known of the records that a member may hold since it was given a partition."""

    owner: str
    began: int
    """Where the partition began at the time; -1 if unknown."""
    stamp: int = -1
    """`Rewritten.stamp` at the time: the member has fetched nothing that was dropped before. -1 if unknown."""
    flushed: int = -1
    """Up to where it has told that its application has processed all; less again when it goes back."""

    @property
    def begins(self) -> int:
        """Below that it holds none."""
        return max(self.began, self.flushed)


UNKNOWN = Given("", -1)


class Answer(NamedTuple):
    """The leader's answer: no record that can be read lies from `offset` on below `next_record`."""

    offset: int
    next_record: int
    end: int
    """Where records that can be read ended when it was asked."""
    told: int
    """No record ever lay between `offset` and this; from here on to `next_record` compaction may have dropped some."""
    stamp: int = 0
    """`Rewritten.stamp` when it was given; 0 where nothing may have been dropped."""
    sure_from: int = OPEN_END
    """From here on to `next_record` no record ever lay either."""

    def after(self, before: Answer | None) -> Answer:
        """This answer together with one before it, which holds on: both in one where they meet."""
        if before is None or not before.offset <= self.offset <= before.next_record:
            return self
        told = max(before.told, self.told) if self.offset <= before.told else before.told
        sure_from = before.sure_from if self.next_record <= before.next_record else OPEN_END
        if self.told == self.next_record >= before.next_record:
            sure_from = min(before.sure_from, self.offset)
        next_record, stamp = max(before.next_record, self.next_record), max(before.stamp, self.stamp)
        return Answer(before.offset, next_record, self.end, told, stamp, sure_from)


def readable_end(topic: TopicImage, partition: int) -> int:
    """Where the records of a partition end that whoever reads what is committed can be given."""
    return min(topic.stable_end(partition), topic.log_end(partition))


class Stall(NamedTuple):
    """A position that has not changed for its owner's rebalance timeout."""

    owner: str
    raw: int
    """The position, or of a shared partition what is done below `reached` (`shares.done_below`)."""
    reached: int
    """The offset that the gates count as reached: `told` at the most."""
    told: int
    """Where the records end that the owner has had for its time; a gate that waits for later ones waits again."""


@dataclass(slots=True)
class Watch:
    """A partition whose position a gate or a member waits for."""

    owner: str
    raw: int
    """The position before the leader's answer, -1 for the log start; of a shared partition what is done."""
    since_ms: int
    """The owners' time since which neither has changed."""
    position: int
    began_ms: int
    began_at: int
    """The position when the watch began: the rate is taken from there."""
    end: int
    """The log end at `since_ms`: of records that came later the owner has not had the time."""
    later: tuple[int, int] | None = None
    """Of the records between `end` and another log end: since when a gate waits for them, and that end."""
    until: int = OPEN_END
    """Where the owner's own next closed gate is: it is given nothing from there on."""
    unwanted_ms: int | None = None
    """The time since which nothing waits for the partition; None while something does."""
    division: object = None
    """Which members have which of its keys; None of one that is not shared."""

    def begin(self, since_ms: int, log_end: int) -> None:
        """Have the time of the owner begin anew."""
        self.since_ms, self.end, self.later = since_ms, log_end, None

    def rate(self, now_ms: int) -> float:
        """Offsets per second since the watch began."""
        return (self.position - self.began_at) * 1_000 / max(1, now_ms - self.began_ms)


@dataclass(slots=True)
class Standing:
    """The soft state of one group's positions."""

    reports: dict[At, Report] = field(default_factory=dict)
    tenures: dict[At, Tenure] = field(default_factory=dict)
    given: dict[At, Given] = field(default_factory=dict)
    answers: dict[At, Answer] = field(default_factory=dict)
    stalls: dict[At, Stall] = field(default_factory=dict)
    watches: dict[At, Watch] = field(default_factory=dict)
    spoken: dict[str, int] = field(default_factory=dict)
    """By member: the owners' time at which it spoke last."""
    heard: set[str] = field(default_factory=set)
    """The members that have received an answer of this coordinator: they spoke again after it."""
    unlearned: dict[str, set[At]] = field(default_factory=dict)
    """By member: the partitions that it was given in an answer after which it has not spoken again."""
    stood_ms: int = 0
    """For how long the owners' time has stood still, but for the last time if that is not over."""
    still_ms: int | None = None
    """The time since which it stands still; None while it goes on."""
    from_end: set[UUID] = field(default_factory=set)
    """The topics in which an owner without a commit was found behind a log start, as one that reads from the end is."""
    noted: dict[str, set[At]] = field(default_factory=dict)
    """By member: the partitions of which something was noted of it as their owner, perhaps not any more."""

    # -- the owners' time ----------------------------------------------------------------------------------------------

    def stand_still(self, is_still: bool, now_ms: int) -> None:
        """Have the owners' time stand still, or go on: whatever began before goes on with it."""
        if not is_still and self.still_ms is not None:
            self.stood_ms += now_ms - self.still_ms
            self.still_ms = None
        elif is_still and self.still_ms is None:
            self.still_ms = now_ms

    def time(self, now_ms: int) -> int:
        """The owners' time: that of the clock, less that in which it stood still."""
        return (now_ms if self.still_ms is None else self.still_ms) - self.stood_ms

    # -- positions -----------------------------------------------------------------------------------------------------

    def raw(self, topic: TopicImage, partition: int, committed: int | None, owner: Owner) -> int:
        """The committed offset, or what stands for one: the owner's start. -1 stands for the log start."""
        at = topic.topic_id, partition
        report = self.reports.get(at)
        if report is not None and (
            owner(at)[0] != report.owner or (-1 if committed is None else committed) < report.committed
        ):
            del self.reports[at]
            report = None
        reported = None if report is None else report.position
        if committed is not None:
            return committed if reported is None else max(committed, reported)
        tenure = self.tenures.get(at)
        if tenure is not None and owner(at)[0] != tenure.owner:
            del self.tenures[at]
            tenure = None
        if tenure is not None and at in self.unlearned.get(tenure.owner, ()):
            tenure = None
        start = start_of(-1, reported, tenure, NEVER if tenure is None else self.spoken.get(tenure.owner, NEVER))
        if start > topic.log_start(partition):
            self.from_end.add(topic.topic_id)
        return start

    def progress(self, topic: TopicImage, partition: int, raw: int) -> int:
        """What the position `raw` of a partition counts for."""
        return progress(
            raw, topic.log_start(partition), lambda offset: self.next_record((topic.topic_id, partition), offset)
        )

    def passed(self, topic: TopicImage, partition: int, raw: int, owner: Owner) -> int:
        """What the position `raw` counts for in the gates of others: its progress, but for what its owner may hold."""
        at, log_start = (topic.topic_id, partition), topic.log_start(partition)
        answer = self.answers.get(at)
        is_known = raw >= log_start and (answer is None or answer.told >= answer.next_record)
        member_id = "" if is_known else owner(at)[0]
        if not member_id:
            return self.progress(topic, partition, raw)
        given = self.given.get(at, UNKNOWN)
        given = given if given.owner == member_id else UNKNOWN
        next_record = partial(self._next_not_held, at, given)
        if raw < log_start:
            first = progress(raw, max(given.begins, 0), next_record)
            if may_hold(first, log_start, given.begins):
                return first
        return progress(raw, log_start, next_record)

    def _next_not_held(self, at: At, given: Given, offset: int) -> int | None:
        """The next record from an offset on, or the offset where one may have been dropped that the owner still has."""
        found, answer = self.next_record(at, offset), self.answers.get(at)
        if found is None or answer is None or given.stamp >= answer.stamp:
            return found
        may_be = max(offset, answer.told, given.begins)
        return found if may_be >= answer.sure_from else min(found, may_be)

    def next_record(self, at: At, offset: int) -> int | None:
        """The leader's answer for an offset, if it is known."""
        answer = self.answers.get(at)
        if answer is None or not answer.offset <= offset <= answer.next_record:
            return None
        return answer.next_record

    def is_sure(self, at: At, offset: int) -> bool:
        """Whether the leader has said where the next record is: at the end there may come a marker, or aborted ones."""
        found, answer = self.next_record(at, offset), self.answers.get(at)
        return found is not None and answer is not None and found < answer.end

    def answered(
        self,
        at: At,
        offset: int,
        next_record: int,
        end: int = BEYOND,
        rewritten: Rewritten = NEVER_REWRITTEN,
    ) -> bool:
        """Take a leader's answer; whether it says anything new.

        `end`: where records that can be read ended when it was asked. `rewritten`: of the log, not before it answered.
        """
        before = self.answers.get(at)
        if offset >= rewritten.to:
            answer = Answer(offset, next_record, end, next_record)
        else:
            answer = Answer(offset, next_record, end, offset, rewritten.stamp)
        self.answers[at] = answer.after(before)
        return before != self.answers[at]

    # -- owners --------------------------------------------------------------------------------------------------------

    def begin_tenure(
        self,
        topic: TopicImage,
        partition: int,
        member_id: str,
        timeout_ms: int,
        now_ms: int,
        *,
        is_whole: bool = True,
    ) -> None:
        """Note the end, the lower of the two, at which a member is given a partition without a committed offset.

        `is_whole`: it is given it now.
        """
        at = topic.topic_id, partition
        end = min(topic.log_end(partition), topic.stable_end(partition))
        self.tenures[at] = Tenure(member_id, self.time(now_ms), end, timeout_ms, is_whole)
        self._note(member_id, at)

    def give(self, topic: TopicImage, partition: int, member_id: str) -> None:
        """Note that a member is given a partition, and where that begins; what was noted of another owner is over."""
        at, log_start = (topic.topic_id, partition), topic.log_start(partition)
        self.tenures.pop(at, None)
        self.given.pop(at, None)
        rewritten = topic.rewritten(partition)
        if log_start > 0 or rewritten.to > 0:
            self.given[at] = Given(member_id, log_start, rewritten.stamp)
            self._note(member_id, at)

    def report(self, at: At, report: Report) -> bool:
        """Take a position that the owner of a partition tells; whether that is new."""
        is_new = self.reports.get(at) != report
        self.reports[at] = report
        self._note(report.owner, at)
        return is_new

    def let_go(self, at: At, member_id: str, flushed: int) -> int:
        """Note that the owner of a partition holds nothing below `flushed`; return what it had told before."""
        given = self.given.get(at, UNKNOWN)
        if given.owner != member_id:
            given = UNKNOWN._replace(owner=member_id)
        self.given[at] = given._replace(flushed=flushed)
        self._note(member_id, at)
        return given.flushed

    def begin_generation(self) -> None:
        """Forget what members of a classic group have let go: each may begin again where the group has committed."""
        self.given.clear()
        self.noted.clear()

    def _note(self, member_id: str, at: At) -> None:
        if member_id:
            self.noted.setdefault(member_id, set()).add(at)

    def speak(self, member_id: str, now_ms: int) -> None:
        """Note that a member has spoken."""
        self.spoken[member_id] = self.time(now_ms)

    def hear(self, member_id: str, now_ms: int) -> None:
        """Note that a member has received the last answer: its time in the partitions of that answer begins."""
        self.heard.add(member_id)
        for at in self.unlearned.pop(member_id, ()):
            tenure = self.tenures.get(at)
            if tenure is not None and tenure.owner == member_id:
                self.tenures[at] = tenure._replace(since_ms=self.time(now_ms))

    def has_learned(self, member_id: str, at: At) -> bool:
        """Whether a member is known to have received the answer that gave it a partition."""
        return member_id in self.heard and at not in self.unlearned.get(member_id, ())

    def forget(self, member_id: str, *, but: Iterable[At] = ()) -> set[UUID]:
        """Drop what is known of the partitions that a member no longer owns; return their topics."""
        kept, topics = set(but), set()
        unlearned = self.unlearned.pop(member_id, set()) & kept
        if unlearned:
            self.unlearned[member_id] = unlearned
        if not kept:
            self.heard.discard(member_id)
            self.spoken.pop(member_id, None)
        noted = self.noted.pop(member_id, set())
        if noted & kept:
            self.noted[member_id] = noted & kept
        for at in noted - kept:
            watch = self.watches.get(at)
            if watch is not None and watch.owner == member_id:
                watch.owner = ""  # Its time begins anew where it comes back before the next look, under the same id.
            if at in self.given and self.given[at].owner == member_id:
                del self.given[at]
            for known in (self.reports, self.tenures, self.stalls):
                entry = known.get(at)
                if entry is not None and entry.owner == member_id:
                    del known[at]
                    topics.add(at[0])
        return topics

    def begin_anew(self, partitions: Iterable[At]) -> None:
        """Drop what owners have said of partitions, or is guessed of them."""
        for at in partitions:
            for known in (self.reports, self.tenures, self.stalls):
                known.pop(at, None)

    # -- watching ------------------------------------------------------------------------------------------------------

    def look(
        self,
        at: At,
        raw: int,
        position: int,
        owner: str,
        now_ms: int,
        *,
        log_end: int,
        until: int | None = None,
        division: object = None,
    ) -> bool:
        """Note the position of a watched partition; whether it, or its owner, is another than at the last look.

        So is the owner of one that is shared when any of its keys have moved: their next owner has time for them.
        `until`: the owner's own next closed gate; None while that is not decided. When it is further on, the time for
        the records before it begins. While the owners' time stands still nobody knows the next owner; that of the
        former one goes on if that is the next one, too.
        """
        watch, time_ms = self.watches.get(at), self.time(now_ms)
        if self.still_ms is not None:
            owner = "" if watch is None else watch.owner
        if watch is None:
            self.watches[at] = Watch(owner, raw, time_ms, position, now_ms, position, log_end, division=division)
            self._note(owner, at)
        elif until is not None and until > watch.until:
            watch.begin(time_ms, log_end)
        self.watches[at].until = self.watches[at].until if until is None else until
        if watch is None:
            return True
        if (watch.owner, watch.raw, watch.division) != (owner, raw, division):
            watch.owner, watch.raw, watch.division = owner, raw, division
            self._note(owner, at)
            watch.begin(time_ms, log_end)
            self.stalls.pop(at, None)
        elif watch.position == position:
            return False
        watch.position = position
        return True

    def is_overdue(self, at: At, timeout_ms: int, need: int, log_end: int, now_ms: int) -> bool:
        """Whether gates that wait on this partition, up to `need` (-1: nobody knows how far), open by time."""
        watch = self.watches[at]
        if self.still_ms is not None:
            return False
        spoke_ms = self.spoken.get(watch.owner, NEVER)
        if watch.later is not None and is_stalled(watch.later[0], timeout_ms, spoke_ms):
            (watch.since_ms, watch.end), watch.later = watch.later, None
        if watch.later is None and (log_end if need < 0 else need) > watch.end:
            watch.later = self.time(now_ms), log_end
        return bool(watch.owner) and watch.position < log_end and is_stalled(watch.since_ms, timeout_ms, spoke_ms)

    def stall(self, at: At, reached: int, done_below: Callable[[int], int]) -> bool:
        """Count `reached` as the position of an overdue partition; whether that is new.

        No further than to its own next closed gate, and to the log end when the time of its owner began.
        `done_below`: a number that moves with what is done below an offset, and with nothing else.
        """
        watch, before = self.watches[at], self.stalls.get(at)
        told = min(watch.until, watch.end)
        reached = max(min(reached, told), 0 if before is None else before.reached)
        now = Stall(watch.owner, done_below(reached), reached, told)
        self.stalls[at] = now
        return now != before

    def unwatch(self, wanted: Iterable[At], now_ms: int) -> None:
        """Watch these partitions only.

        Any other is kept for a while: between two questions of a member nothing waits, and the time for which the
        position has not changed must not begin anew with every question.
        """
        kept, time_ms = {*wanted, *self.stalls}, self.time(now_ms)
        for at, watch in list(self.watches.items()):
            if at in kept:
                watch.unwanted_ms = None
            elif watch.unwanted_ms is None:
                watch.unwanted_ms = time_ms
            elif time_ms - watch.unwanted_ms >= ASKED_AGAIN_MS:
                del self.watches[at]
