"""Slices: how a leader divides a partition between the members of a group that fetch it without keys (ADR 0053).

A claim is answered with the lowest offsets that the group has not committed and that no member has. So what becomes
free again, because its member is gone or took too long, is offered before what is new, oldest first:

    open -- claim --> held by one member -- its commit --> committed           never offered again
     ^                   |
     '-------------------'   the member is gone, begins a new session, or holds it for longer than `hold_ms`

What is committed in a transaction that is still to be decided is not open either, whoever holds it: it is committed, or
open again, when that has ended.

The rule: an offset is held by at most one member, and a commit counts only where no other member holds anything of it
(`holders_of`). What is committed is not kept here but asked of the group's coordinator at each claim (`Progress`), so
the two cannot differ; and a new leader begins with an empty book: what was out is offered again, and a commit of it
counts until it is handed to another member.

Claims look for open offsets in two places: the spans that became free, and behind the frontier, before which all else
is held or committed. So a claim takes as long beside 200,000 slices as beside ten.

No step frees, or passes, more than some hundreds of slices. One that is over (overdue, or of an ended session) stays in
the book until its turn comes, and counts for nothing but room. A claim that could not find out what is open
`is_behind`, and is to be made again.

A member numbers its claims within a session. The same number again gets the same slice, as the answer was lost; a
number of the past, an older session or an older epoch gets nothing and moves nothing.

Nothing here is of our wire: any request that names a group's member can claim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import filterfalse, islice
from typing import NamedTuple, Protocol

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import SLICES_SIZE_MAX
from anabranch.machines.groups.individual import OffsetRanges

NO_SEQUENCE = -1
"""The number of the last claim of a session without any."""
DROPPED_AT_A_TIME = 250
"""Slices below the stable offset that one claim forgets: a millisecond."""
FREED_AT_A_TIME = 250
"""Slices that one claim frees: a millisecond."""
PASSED_AT_A_TIME = 500
"""Ranges that one claim passes over in search of an open offset: a millisecond."""
GATHERED_COST = 8
"""A slice of others is as much work, where these are gathered, as so many that are passed."""
SLICE_SIZE = 400
"""Bytes of memory of a slice."""
SESSION_SIZE = 600
"""Bytes of memory of a session without any."""
LOOKED_AT = 50
"""Slices of the member that a claim looks at, whether they are committed."""
LOOKED_AT_WHERE_FULL = 500
"""The same where there is no room for another one."""


class Progress(Protocol):
    """What a group has committed of a partition, as its coordinator has it now."""

    @property
    def stable(self) -> int:
        """All offsets below it are committed."""

    @property
    def version(self) -> Hashable:
        """Another one where something that was passed may be open now: a reset, a lost commit, an aborted one."""

    def reaches(self, offset: int) -> int:
        """The lowest offset, at or above this one, that is not committed as far as one range tells."""

    def passes(self, offset: int) -> int:
        """The lowest one that is neither committed nor in a transaction, as far as one range tells."""

    def next_passed(self, offset: int) -> int | None:
        """The first offset of the first range behind an offset that is committed, or in a transaction."""


@dataclass(frozen=True, slots=True)
class SliceSettings:
    """The bounds of one group and partition."""

    hold_ms: int = 300_000
    """After this long a slice is offered again, though its member lives."""
    records_max: int = 10_000
    """Offsets of one slice."""
    per_member_max: int = 10_000
    """Slices of one member that are not committed."""
    slices_max: int = 200_000
    """Slices that members hold together."""
    size_max: int = 256 * 1024 * 1024
    """Bytes of records that members hold together; beyond it no further slice is claimed."""
    members_max: int = 1_000
    """Members with a session."""


@dataclass(slots=True)
class SliceRoom:
    """The memory of many books together."""

    size_max: int = SLICES_SIZE_MAX
    size: int = 0

    @property
    def is_full(self) -> bool:
        """Whether nobody can have another slice, or begin a session."""
        return self.size >= self.size_max


class Claimant(NamedTuple):
    """The member that claims, and the number of its claim."""

    member_id: str
    epoch: int
    session: int
    """Of two sessions of a member, the later one has the larger number."""
    sequence: int
    """The number of the claim within the session: 0, or one more than that of the last slice that it got."""


@dataclass(slots=True, eq=False)
class Session:
    """The claims of one member."""

    number: int
    epoch: int
    sequence: int = NO_SEQUENCE
    """The number of the last claim that got a slice."""
    last: int = -1
    """The start of that slice."""
    starts: dict[int, None] = field(default_factory=dict)
    """Of its slices; those that were looked at last at the end."""
    is_over: bool = False
    """Whether its slices are to be freed, and are nobody's by now."""


@dataclass(slots=True, eq=False)
class Slice:
    """Offsets `start` to `end`, both inclusive, that a member holds; committed ones among them count no more."""

    start: int
    end: int
    member_id: str
    sequence: int
    due_ms: int
    session: Session
    size: int = 0
    """Bytes of its records."""
    is_answered: bool = False
    """Whether a claim was answered with it."""


class Refused(NamedTuple):
    """A claim that moves nothing, with a sentence for the client."""

    code: ErrorCode
    message: str


class Slices:
    """The slices of one group and partition at its leader."""

    def __init__(self, settings: SliceSettings, room: SliceRoom | None = None) -> None:
        """`room`: what all books have together."""
        self.settings = settings
        self.size = 0
        """Bytes that members hold."""
        self.offered_again = 0
        """Slices that became free without having been committed."""
        self.work = 0
        """Slices and ranges that the last claim, or the last sweep, has freed, dropped or passed over."""
        self.is_behind = False
        """Whether the last claim has looked at a part only, and is to be made again."""
        self._room = SliceRoom() if room is None else room
        self._held: dict[int, Slice] = {}
        """By start, those that were claimed first at the front."""
        self._spans = OffsetRanges()
        """Their offsets."""
        self._sessions: dict[str, Session] = {}
        self._over: deque[Session] = deque()
        """Sessions that have ended and have slices yet."""
        self._frontier = 0
        """No offset between the stable one and it is open, but in `_freed`."""
        self._freed: list[tuple[int, int]] = []
        """A heap of spans, first and last offset, that were held and became free; some of them may be held again."""
        self._seen: tuple[int, Hashable] = (0, None)
        """The stable offset and the version at the last claim."""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Slice]:
        """The slices in the book, ascending."""
        return (self._held[start] for start, _ in self._spans)

    def held(self) -> list[Slice]:
        """The slices in the book, in any order: of 200,000 in a millisecond."""
        return list(self._held.values())

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to remember."""
        return not self._sessions and not self._held

    # -- claiming ------------------------------------------------------------------------------------------------------

    def claim(
        self,
        by: Claimant,
        progress: Progress,
        limit: int,
        records_max: int,
        is_live: Callable[[str], bool],
        now_ms: int,
        log_start: int = 0,
    ) -> Slice | Refused | None:
        """Reserve the next open offsets below `limit`, at most `records_max`, for a member; None while there are none.

        Below `log_start` are no records: there the bound does not count. A number that was answered before gets the
        slice that it got. `is_live` tells whether a member is still one.
        """
        self.is_behind = False
        more = self.sweep(is_live, now_ms)
        session = self._session_of(by)
        more = more or bool(self._over)
        if session is None or isinstance(session, Refused):
            return session
        if by.sequence == session.sequence:
            held = self._held.get(session.last)
            if held is not None and held.session is session:
                return held
        if more:  # The lowest of what is free is not known yet.
            self.is_behind = True
            return None
        if not self._has_room(session, progress):
            return None
        start = self._first_open(progress, limit)
        if start is None or start >= limit:
            self.is_behind = start is None
            return None
        behind_it = start + max(1, min(records_max, self.settings.records_max))
        end = min(limit, log_start if start < log_start else behind_it) - 1
        behind = self._spans.after(start)
        if behind is not None:
            end = min(end, behind[0] - 1)
        passed = progress.next_passed(start)
        if passed is not None:
            end = min(end, passed - 1)
        found = Slice(start, end, by.member_id, by.sequence, now_ms + self.settings.hold_ms, session)
        self._held[start] = found
        self._spans.put(start, end)
        self._room.size += SLICE_SIZE
        session.starts[start] = None
        session.sequence, session.last = by.sequence, start
        self._frontier = max(self._frontier, end + 1)
        return found

    def _session_of(self, by: Claimant) -> Session | Refused | None:
        """The session of a claim, begun if it is a new one; the member's slices of an older session become free.

        None while there is no room for one.
        """
        known = self._sessions.get(by.member_id)
        if known is not None and by.epoch < known.epoch:
            return Refused(
                ErrorCode.STALE_MEMBER_EPOCH,
                f"Member {by.member_id} has claimed at epoch {known.epoch}; {by.epoch} is over.",
            )
        if known is not None and by.session == known.number:
            if by.sequence not in (known.sequence, known.sequence + 1) or by.sequence < 0:
                return Refused(
                    ErrorCode.INVALID_SHARE_SESSION_EPOCH,
                    f"Claim {by.sequence} of member {by.member_id} is not the next one: the last one that was answered "
                    f"with a slice is {known.sequence}.",
                )
            known.epoch = by.epoch
            return known
        if known is not None and by.session < known.number:
            return Refused(
                ErrorCode.INVALID_SHARE_SESSION_EPOCH,
                f"Session {by.session} of member {by.member_id} is over: it has begun session {known.number}.",
            )
        if by.sequence != 0:
            return Refused(
                ErrorCode.SHARE_SESSION_NOT_FOUND,
                f"Member {by.member_id} has no session {by.session} here: the leader is new, or has dropped its "
                "slices. Begin another session.",
            )
        if known is None and len(self._sessions) >= self.settings.members_max:
            return Refused(
                ErrorCode.SHARE_SESSION_LIMIT_REACHED, f"{len(self._sessions)} members claim slices: no more can."
            )
        self._end(by.member_id)
        self._free_those_over()
        if self._room.is_full:
            return None
        self._room.size += SESSION_SIZE
        made = self._sessions[by.member_id] = Session(by.session, by.epoch)
        return made

    def _has_room(self, session: Session, progress: Progress) -> bool:
        """Forget slices that are committed, as many as one claim may; return whether the member can have another."""
        self._drop_below(progress.stable)
        self._drop_committed(session, progress, LOOKED_AT)
        settings = self.settings
        if len(session.starts) >= settings.per_member_max:
            self._drop_committed(session, progress, LOOKED_AT_WHERE_FULL)
        if self._is_full:  # One member after the other, at each claim.
            member_id = next(iter(self._sessions))
            self._sessions[member_id] = self._sessions.pop(member_id)
            self._drop_committed(self._sessions[member_id], progress, LOOKED_AT_WHERE_FULL)
        return len(session.starts) < settings.per_member_max and not self._is_full

    def may_have_open(self, limit: int) -> bool:
        """Whether there may be open offsets below a limit: if not, no claim gets any."""
        return bool(self._freed) or self._frontier < limit

    @property
    def _is_full(self) -> bool:
        settings = self.settings
        return self.size >= settings.size_max or len(self._held) >= settings.slices_max or self._room.is_full

    def _first_open(self, progress: Progress, limit: int) -> int | None:
        """The lowest offset that is open; `limit`, or one above, without one. None where that was not found out."""
        stable, version = progress.stable, progress.version
        if stable < self._seen[0] or version != self._seen[1]:
            self._frontier, self._freed = stable, []
        self._seen = stable, version
        most = self.work + PASSED_AT_A_TIME
        while self._freed and self._freed[0][0] < self._frontier:
            first, last = self._freed[0]
            at = self._passed(max(first, stable), min(last + 1, limit), progress, most)
            if at <= last:
                heapreplace(self._freed, (at, last))
                return None if self.work >= most else at
            heappop(self._freed)
        self._frontier = self._passed(max(self._frontier, stable), limit, progress, most)
        return None if self.work >= most else self._frontier

    def _passed(self, at: int, end: int, progress: Progress, most: int) -> int:
        """The lowest open offset from one on; `end`, or one above, without one below it.

        With as much work as may be done, an offset before which none is open.
        """
        while at < end and self.work < most:
            self.work += 1
            onward = max(self._spans.reaches(at), progress.passes(at))
            if onward <= at:
                break
            at = onward
        return at

    def shrink(self, found: Slice, end: int, size: int) -> bool:
        """Answer with a claimed slice: it ends at an offset at most, and has records of `size` bytes.

        False if it is not held. What is left out is open.
        """
        if self._held.get(found.start) is not found or found.session.is_over:
            return False
        if end < found.end:
            whole, found.end = found.end, max(found.start, end)
            self._spans.put(found.start, found.end)
            self._open(found.end + 1, whole)
        self.size += size - found.size
        found.size = size
        found.is_answered = True
        return True

    def cancel(self, found: Slice) -> None:
        """Undo a claim that was not answered; a repeated one of the same number may have been."""
        session = found.session
        if found.is_answered or self._held.get(found.start) is not found:
            return
        self._free(found)
        if session.last == found.start and session.sequence == found.sequence:
            session.sequence, session.last = found.sequence - 1, -1

    # -- the end of slices ---------------------------------------------------------------------------------------------

    def end_session(self, member_id: str) -> None:
        """Forget a member; what it has not committed is open, as soon as a step comes to it."""
        self.work = 0
        self._end(member_id)
        self._free_those_over()

    def _end(self, member_id: str) -> None:
        session = self._sessions.pop(member_id, None)
        if session is None:
            return
        self._room.size -= SESSION_SIZE
        session.is_over = True
        self.offered_again += len(session.starts)
        if session.starts:
            self._over.append(session)

    def sweep(self, is_live: Callable[[str], bool], now_ms: int) -> bool:
        """Free slices of members that are gone, and those that were held for too long; whether more are left."""
        self.work = 0
        for member_id in [member_id for member_id in self._sessions if not is_live(member_id)]:
            self._end(member_id)
        self._free_those_over()
        for found in list(islice(self._held.values(), max(0, FREED_AT_A_TIME - self.work))):
            if found.due_ms > now_ms:
                break
            self.offered_again += not found.session.is_over
            self._free(found)
        return bool(self._over) or (bool(self._held) and next(iter(self._held.values())).due_ms <= now_ms)

    def _free_those_over(self) -> None:
        """Free slices of sessions that have ended, as many as one step may."""
        while self._over and self.work < FREED_AT_A_TIME:
            session = self._over[0]
            for start in list(islice(session.starts, FREED_AT_A_TIME - self.work)):
                self._free(self._held[start])
            if not session.starts:
                self._over.popleft()

    def _drop_below(self, stable: int) -> None:
        """Forget the slices below the stable offset, as many as one claim may."""
        for _ in range(DROPPED_AT_A_TIME):
            first = self._spans.first()
            if first is None or first[1] >= stable:
                break
            found = self._held[first[0]]
            self._drop(found)
            del found.session.starts[found.start]

    def _drop_committed(self, session: Session, progress: Progress, count: int) -> None:
        """Look at so many slices of a session, each time at the next ones, and forget those that are committed."""
        for start in list(islice(session.starts, count)):
            self.work += 1
            del session.starts[start]
            found = self._held[start]
            if self._is_committed(found, progress):
                self._drop(found)
            else:
                session.starts[start] = None

    def _is_committed(self, found: Slice, progress: Progress) -> bool:
        at = max(found.start, progress.stable)
        while at <= found.end and (onward := progress.reaches(at)) > at:
            at = onward
        return at > found.end

    def _free(self, found: Slice) -> None:
        """Hold a slice no more; what of it is not committed is open."""
        self._drop(found)
        del found.session.starts[found.start]
        self._open(found.start, found.end)

    def _open(self, first: int, last: int) -> None:
        """Have offsets that were held looked at again."""
        if last + 1 >= self._frontier:
            self._frontier = min(self._frontier, first)
        else:
            heappush(self._freed, (first, last))

    def _drop(self, found: Slice) -> None:
        del self._held[found.start]
        self._spans.remove(found.start)
        self._room.size -= SLICE_SIZE
        self.size -= found.size
        self.work += 1

    def clear(self) -> None:
        """Forget everything."""
        self._room.size -= SLICE_SIZE * len(self._held) + SESSION_SIZE * len(self._sessions)
        self._held, self._spans, self._sessions, self._freed = {}, OffsetRanges(), {}, []
        self._over.clear()
        self.size = self._frontier = 0

    # -- commits -------------------------------------------------------------------------------------------------------

    def holders_of(
        self, member_id: str, ranges: Sequence[tuple[int, int]], is_live: Callable[[str], bool], now_ms: int
    ) -> Iterator[Slice | None]:
        """Of each range of a member's commits, the first slice in it of another member; None where it may count.

        The ranges, first and last offset, ascend by the first. Nothing is looked at twice, however often it is named.
        """
        if not ranges:
            return
        starts_within = self._of_others(member_id, ranges[0][0], max(last for _, last in ranges))
        at, found = 0, None  # Of others is nothing between the first offset and `at`, where `found` begins.
        for first, last in ranges:
            if found is None or found.end < first:
                at = max(at, first)
                slices = map(self._held.__getitem__, starts_within(at, last) if at <= last else ())
                found = next((it for it in slices if self._counts(it, is_live, now_ms)), None)
                at = max(at, last + 1) if found is None else found.start
            yield found if found is not None and max(found.start, first) <= last else None

    def _of_others(self, member_id: str, first: int, last: int) -> Callable[[int, int], Iterator[int]]:
        """A function as `OffsetRanges.starts_within` for the slices of other members; it is asked between two offsets.

        It passes what is between them, or gathers what the others have: whichever is less work.
        """
        own = self._sessions.get(member_id)
        mine: Collection[int] = () if own is None else own.starts
        others = len(self._held) - len(mine) - sum(len(it.starts) for it in self._over) + len(self._sessions)
        if others * GATHERED_COST >= self._spans.count_below(last + 1) - self._spans.count_below(first):
            return lambda first, last: filterfalse(mine.__contains__, self._spans.starts_within(first, last))
        sessions = [it for it in self._sessions.values() if it is not own and it.starts]
        held = self._held
        return OffsetRanges((start, held[start].end) for it in sessions for start in it.starts).starts_within

    def _counts(self, found: Slice, is_live: Callable[[str], bool], now_ms: int) -> bool:
        """Whether a slice in the book is its member's still."""
        return not found.session.is_over and found.due_ms > now_ms and is_live(found.member_id)
