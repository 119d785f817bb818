"""Commits by ranges of offsets and of keys: what becomes of a group's position and its ranges (cooperative.md, 1).

    ranges of offsets   processed out of turn, each above the stable offset; they join, and move the frontier they touch
    ranges of keys      the next offset to read of the keys that the member owns; it raises the frontier there
    plain, by a member  raises the frontier to the offset for all keys; below the stable offset it is a rewind
    plain, by no member the group stands at exactly that offset, for all keys; ranges above it are forgotten, and gates
                        that were open are closed again, as everything from there is to be delivered in order again

So a plain commit does what its sender expects, who knows nothing of all this: what others did above the offset of a
stock member that has read on from the stable offset is kept, and a tool that sets the offset of a group has every
record from there delivered again. What counts is a fact: no commit by ranges undoes it, and it may be committed again.

A position behind the end of a segment says to members that the gate there was open once (ordering.md, 6.1). A range of
offsets says no such thing: it does not say of which keys it is, and who waits at a gate is moved behind it by what
another member has finished there. So `Position.passed` keeps how far owners of the keys have come: what plain commits
and those of ranges of keys have said. Only that counts as having gone through gates. A plain commit of the offset at
which the group stands already does not say it: a member does that which begins there, and has read nothing. Nor does a
commit with the mark of a member that a reset, or a seek, made begin there (`BEGUN_HERE`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import BEGUN_HERE, NO_LEADER_EPOCH, OFFSET_NOT_SAID
from anabranch.base.limits import FRONTIER_STEPS_MAX
from anabranch.machines.groups import individual, shares
from anabranch.machines.groups.individual import OffsetRanges, Range
from anabranch.machines.groups.positions import Position
from anabranch.machines.groups.shares import KeyRange

NOTHING_PASSED = shares.constant(0)
NO_BOUND = 1 << 62
"""Room for ranges, and for steps: what a transaction has committed is never refused."""
REFRESHED_AFTER_MS = 3_600_000
"""A position that ranges are committed above is written again after this time, so that it does not expire."""


class RangedCommit(NamedTuple):
    """A commit by ranges in one partition, checked."""

    base: int
    """The offset at which a group begins that has committed nothing in the partition."""
    offset_ranges: Sequence[Range]
    key_ranges: Sequence[KeyRange]
    leader_epoch: int = NO_LEADER_EPOCH
    metadata: str = ""
    is_plain: bool = False
    """Whether the member has said an offset of the partition, which counts for its keys."""

    @property
    def lowest(self) -> int | None:
        """The lowest offset that it speaks of; None where there is only metadata."""
        starts = (start for start, _ in self.offset_ranges[:1])
        return min((*(offset for _, _, offset in self.key_ranges), *starts), default=None)


class Counted(NamedTuple):
    """A commit that counts."""

    position: Position
    is_changed: bool
    """Whether the position is to be written."""
    put: Sequence[Range] = ()
    """Ranges to be written."""
    removed: Sequence[int] = ()
    """Starts of ranges that went into those."""
    repeated: Range | None = None
    """Offsets that were committed before."""


class Refused(NamedTuple):
    """A commit of which nothing counts."""

    code: ErrorCode
    stable: int
    message: str


Decided: TypeAlias = Counted | Refused


def checked(
    base: int,
    offset_ranges: Sequence[Range],
    key_ranges: Sequence[KeyRange],
    leader_epoch: int = NO_LEADER_EPOCH,
    metadata: str = "",
    *,
    is_plain: bool = False,
) -> RangedCommit:
    """Make a commit. WrongRangesError, with a sentence, where its ranges cannot be."""
    ranges, keys = individual.checked(offset_ranges), shares.checked(key_ranges)
    said = [it for it in keys if it[2] != OFFSET_NOT_SAID]
    return RangedCommit(base, ranges, said, leader_epoch, metadata, is_plain)


def begun_at(offset: int, topic_id: UUID) -> Position:
    """The position of a group that begins at an offset: nobody is known to have come there, through which gates."""
    return Position(offset, topic_id=topic_id).at(shares.constant(offset), NOTHING_PASSED)


def decide(
    before: Position | None, held: OffsetRanges, commit: RangedCommit, room: int, topic_id: UUID, now_ms: int
) -> Decided:
    """Decide a commit above a position. `room`: how many ranges more may be held; `NO_BOUND`: anything may."""
    position = before or begun_at(max(0, commit.base), topic_id)
    stable, has_begun_here = position.offset, commit.metadata == BEGUN_HERE
    lowest = commit.lowest
    if lowest is not None and lowest < stable:
        message = f"Offset {lowest} lies below the stable offset {stable}: all before it is processed."
        return Refused(ErrorCode.INDIVIDUAL_COMMIT_TOO_OLD, stable, message)
    merge = held.merged(commit.offset_ranges)
    frontier, passed = position.stands, position.passes
    if commit.key_ranges:
        if room < NO_BOUND and len(commit.key_ranges) > FRONTIER_STEPS_MAX:
            return _too_many(stable, f"{len(commit.key_ranges)} ranges of keys are committed at once")
        if not has_begun_here:
            came = shares.rising(frontier, commit.key_ranges) if commit.is_plain else commit.key_ranges
            passed = shares.raised(passed, came)
        frontier = shares.raised(frontier, commit.key_ranges)
    if merge.put or held:
        starts = [start for start, _ in merge.put]

        def reaches(offset: int) -> int:
            at = bisect_right(starts, offset) - 1
            return max(held.reaches(offset), merge.put[at][1] + 1 if at >= 0 else 0)

        frontier = shares.through(frontier, reaches)
    if room < NO_BOUND and max(len(frontier.starts), len(passed.starts)) > FRONTIER_STEPS_MAX:
        return _too_many(stable, f"the keys of the partition have {len(frontier.starts)} offsets of their own")
    moved = shares.stable(frontier)
    put = [it for it in merge.put if it[1] >= moved]
    removed = [start for start in merge.removed if start >= moved]
    if put and len(put) > room:
        growth = sum(start not in held for start, _ in put) - len(removed) - held.count_below(moved)
        if growth > max(0, room):
            return _too_many(stable, f"the group has {len(held)} ranges above the stable offset {stable}")
    since = position.ranges_since or (max(1, now_ms) if put else 0)
    after = position.at(frontier, passed)._replace(ranges_since=since, is_begun=True)
    if after.offset != stable or commit.leader_epoch != NO_LEADER_EPOCH:
        after = after._replace(leader_epoch=commit.leader_epoch)
    if commit.metadata and not has_begun_here:
        after = after._replace(metadata=commit.metadata)
    is_changed = before is None or after != before or now_ms - before.committed_at_ms >= REFRESHED_AFTER_MS
    return Counted(after._replace(committed_at_ms=now_ms), is_changed, put, removed, merge.repeated)


def _too_many(stable: int, reason: str) -> Refused:
    return Refused(ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED, stable, f"Too many individual commits: {reason}.")


def plain(before: Position | None, held: OffsetRanges, after: Position, *, by_member: bool) -> Position:
    """Decide a plain commit of the offset of `after`: the position that the group has then."""
    has_begun_here = after.metadata == BEGUN_HERE
    if has_begun_here:
        after = after._replace(metadata="")
    if before is not None and by_member:
        after = after._replace(opened=before.opened)
    if before is None or not by_member or after.offset < before.offset:
        return after.at(after.stands, NOTHING_PASSED) if has_begun_here else after
    if before.frontier is None and before.passed is None and not before.ranges_since and not has_begun_here:
        return after
    frontier = shares.through(shares.at_least(before.stands, after.offset), held.reaches)
    passed = before.passes
    if after.offset > before.offset and not has_begun_here:
        passed = shares.at_least(passed, after.offset)
    return after.at(frontier, passed)._replace(ranges_since=before.ranges_since)
