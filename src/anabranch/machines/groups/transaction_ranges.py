"""Commits by ranges in transactions: they wait for the marker, and count from a commit on (cooperative.md, section 1).

A commit by ranges is a change, not a state: what it makes of a position is decided when it counts. So it is a record of
its own in the transaction (`TransactionRangesKey`); when the transaction is committed it is folded into position and
ranges, and deleted. Folding it twice, after a crash in between, changes nothing: it says facts. A rewind of the group
voids it, as `ranges_since` of the position is another then.

A commit by offsets that leaves a gap below waits (the purgatory): until the gap is closed, by commits or by what open
transactions have committed, or until its own transaction has ended. A commit by key range leaves none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from anabranch.machines.groups import individual, ranged_commits, shares
from anabranch.machines.groups.individual import OffsetRanges, Range
from anabranch.machines.groups.positions import Partition, Position
from anabranch.machines.groups.ranged_commits import RangedCommit
from anabranch.machines.groups.records import (
    CommittedKeyRange,
    CommittedRange,
    CoordinatorRecord,
    TransactionRangesKey,
    TransactionRangesValue,
)
from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest

NO_BOUND = 1 << 62
"""Room for ranges: what a transaction has committed is never refused."""
Name = tuple[int, int]
"""A producer id, and the number of one of its commits."""


class Change(NamedTuple):
    """A commit by ranges in a transaction."""

    group_id: str
    partition: Partition
    name: Name
    value: TransactionRangesValue


class Waiting(NamedTuple):
    """A request in the purgatory."""

    ticket: Hashable
    request: TxnOffsetCommitRequest


class TransactionRanges:
    """The commits by ranges of a shard's transactions that are not part of positions yet, and the purgatory."""

    def __init__(self) -> None:
        self._open: dict[int, dict[Name, Change]] = {}
        """By producer id: those of its open transaction."""
        self.decided: dict[Name, Change] = {}
        """Those that count, and are to be folded into positions."""
        self.waiting: dict[str, list[Waiting]] = {}
        """By group, the requests of the purgatory, oldest first."""
        self._numbers = 0

    def apply(self, key: TransactionRangesKey, value: TransactionRangesValue | None, producer_id: int) -> None:
        """Fold a record; one with a producer id is pending until that producer's marker."""
        name = (key.producer_id, key.number)
        if value is None:
            self.decided.pop(name, None)
            return
        change = Change(key.group, (key.topic, key.partition), name, value)
        if producer_id >= 0:
            self._open.setdefault(producer_id, {})[name] = change
        else:
            self.decided[name] = change

    def end(self, producer_id: int, *, committed: bool) -> None:
        """A producer's transaction has ended."""
        ended = self._open.pop(producer_id, {})
        if committed:
            self.decided |= ended

    def of(self, group_id: str, partition: Partition) -> Iterator[Change]:
        """The changes to a partition that are not part of its position, of open transactions and of committed ones."""
        for changes in (*self._open.values(), self.decided):
            for change in changes.values():
                if change.partition == partition and change.group_id == group_id:
                    yield change

    def of_group(self, group_id: str) -> bool:
        """Whether there are changes for a group."""
        return any(it.group_id == group_id for each in (*self._open.values(), self.decided) for it in each.values())

    def record(
        self,
        group_id: str,
        partition: Partition,
        producer_id: int,
        commit: RangedCommit,
        position: Position,
        now_ms: int,
    ) -> CoordinatorRecord:
        """The record of a commit."""
        self._numbers += 1
        topic, index = partition
        number = now_ms * 1_000 + self._numbers % 1_000
        return CoordinatorRecord(
            TransactionRangesKey(group=group_id, topic=topic, partition=index, producer_id=producer_id, number=number),
            TransactionRangesValue(
                base=commit.base,
                since=position.ranges_since,
                topic_id=position.topic_id,
                offset_ranges=[CommittedRange(start=start, end=end) for start, end in commit.offset_ranges],
                key_ranges=[CommittedKeyRange(start=a, end=b, offset=offset) for a, b, offset in commit.key_ranges],
            ),
        )


def tombstone(change: Change) -> CoordinatorRecord:
    """The record that deletes a change."""
    topic, partition = change.partition
    producer_id, number = change.name
    return CoordinatorRecord(
        TransactionRangesKey(
            group=change.group_id, topic=topic, partition=partition, producer_id=producer_id, number=number
        )
    )


def fold(position: Position | None, held: OffsetRanges, change: Change, now_ms: int) -> ranged_commits.Counted | None:
    """What a change makes of a position; None where it changes nothing any more."""
    value = change.value
    if position is None or position.ranges_since != value.since:
        return None
    stable = position.offset
    ranges = [(max(it.start, stable), it.end) for it in value.offset_ranges if it.end >= stable]
    keys = [(it.start, it.end, it.offset) for it in value.key_ranges if it.offset >= stable]
    if not ranges and not keys:
        return None
    commit = RangedCommit(-1, ranges, keys)
    decided = ranged_commits.decide(position, held, commit, NO_BOUND, position.topic_id, now_ms)
    return decided if isinstance(decided, ranged_commits.Counted) else None


def leaves_gap(position: Position, held: OffsetRanges, changes: Iterator[Change], added: Sequence[Range]) -> bool:
    """Whether offsets below the last of `added` would be left, with all that open transactions have committed."""
    if not added:
        return False
    frontier = position.stands
    others = OffsetRanges(added)
    for change in changes:
        if change.value.since == position.ranges_since:
            _add(others, [(it.start, it.end) for it in change.value.offset_ranges])
            keys = [(it.start, it.end, it.offset) for it in change.value.key_ranges]
            frontier = shares.raised(frontier, keys)

    def reaches(offset: int) -> int:
        while (further := max(held.reaches(offset), others.reaches(offset))) > offset:
            offset = further
        return offset

    frontier = shares.through(frontier, reaches)
    return shares.stable(frontier) <= added[-1][1]


def _add(ranges: OffsetRanges, added: list[Range]) -> None:
    merge = ranges.merged(individual.checked(added))
    for start in merge.removed:
        ranges.remove(start)
    for start, end in merge.put:
        ranges.put(start, end)
