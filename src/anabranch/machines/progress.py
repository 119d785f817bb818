"""What counts as read (ordering.md, section 6.1): the one module that turns positions into progress.

    progress(g, q) = next_record(q, max(committed(g, q), log_start(q)))

`next_record(q, o)` is the first offset >= o of a record that a reader can still be given; the log end where none is
left. The leader answers it (`storage.interface.PartitionLog.next_record`). A caller that does not know the answer yet
gets the lower bound max(committed, log start): progress is never above what is known.

Records that were deleted after an owner had fetched them are still handed out by it, and records of their keys in other
partitions come after them. So in the gates of others the log start counts only as far as the owner cannot have fetched
what lies below (`may_hold`): to where it was when the owner was given the partition, and beyond when the owner has
committed or reported a position there, or the leader had told, before the deletion, that no record was left up to
there. A position that stays behind opens gates by time, as any other.

So do records that compaction drops, which leave no mark in the log: `next_record` passes over them. The leader tells
how far its log has been rewritten (`Rewritten`). What an answer passes over above that was never a record; what it
passes over below counts as read when the owner was given the partition after the last rewriting that the answer may
have seen, and otherwise as deleted records do.

Where a group has committed nothing in q, its owner's start counts (`start_of`): the start that a consumer of ours has
reported; for a stock consumer the log start, and from its rebalance timeout on the log end at the moment at which it
was given q. Nothing is remembered as read: every evaluation begins with what holds at the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

NextRecord = Callable[[int], int | None]
"""The leader's answer for an offset; None while it is not known."""


def unknown_next(offset: int) -> None:
    """The `NextRecord` of a caller that knows no answers."""
    del offset


class Rewritten(NamedTuple):
    """Which records of a log compaction may have dropped."""

    stamp: int = 0
    """Ascending: grows with every rewriting, and when the log is opened."""
    to: int = 0
    """The offset from which on it has dropped nothing."""


NEVER_REWRITTEN = Rewritten()


class Tenure(NamedTuple):
    """The time that one member has owned a partition, which the group has not committed in."""

    owner: str
    since_ms: int
    log_end: int
    """The log end when the member was given the partition, or when this began to be counted, which may be later."""
    timeout_ms: int
    """The rebalance timeout of the owner."""
    is_whole: bool = True
    """Whether `log_end` is the one when the member was given the partition."""

    def is_over(self, now_ms: int) -> bool:
        """Whether the owner has had the partition for its rebalance timeout."""
        return now_ms - self.since_ms >= self.timeout_ms


def progress(committed: int, log_start: int, next_record: NextRecord = unknown_next) -> int:
    """Return the offset up to which a group has read a partition, given its committed offset or its start."""
    at = max(committed, log_start)
    found = next_record(at)
    return at if found is None else max(at, found)


def may_hold(position: int, log_start: int, given_at: int) -> bool:
    """Return whether an owner may hand out records below the log start: it may have fetched them before.

    `position`: what it has committed or reported, or the next record from there on, if the leader has told that before
    the deletion; -1 for nothing. `given_at`: the log start when it was given the partition; -1 if unknown.
    """
    return max(position, given_at) < log_start


def start_of(log_start: int, reported: int | None, tenure: Tenure | None, now_ms: int) -> int:
    """Return the position of a partition without a committed offset.

    `reported` is the start that an owner of ours has told, `tenure` that of any other owner.
    """
    if reported is not None:
        return max(reported, log_start)
    if tenure is not None and tenure.is_over(now_ms):
        return max(tenure.log_end, log_start)
    return log_start


def is_stalled(since_ms: int, timeout_ms: int, now_ms: int) -> bool:
    """Whether a gate opens by time: a position with records left has not changed for its owner's rebalance timeout."""
    return now_ms - since_ms >= timeout_ms
