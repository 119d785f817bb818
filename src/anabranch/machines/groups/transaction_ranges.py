"""Commits by ranges in transactions: they wait for the marker, and count from a commit on (cooperative.md, section 1).

A commit by ranges is a change, not a state: what it makes of a position is decided when it counts. So it is a record of
its own in the transaction (`TransactionRangesKey`); when the transaction is committed it is folded into position and
ranges, and deleted. Folding it twice, after a crash in between, changes nothing: it says facts. A rewind of the group
voids it, as `ranges_since` of the position is another then.

A commit by offsets that leaves a gap below waits (the purgatory): until the gap is closed, by commits or by what open
transactions have committed, until its own transaction has ended, or until it is to be refused. It is looked at after
each decision that may bring any of these about: nothing else ends its wait. A commit by key range leaves none.

An offset is a state of all keys. It does not wait for its marker together with ranges of other transactions, as the
later of the two would take the place of the other: whichever comes second is to be sent again (`Offsets`; ADR 0048).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anabranch.base.ids import NO_TOPIC_ID
from anabranch.base.limits import FRONTIER_STEPS_MAX
from anabranch.machines.groups import individual, ranged_commits, shares
from anabranch.machines.groups.individual import OffsetRanges, Range
from anabranch.machines.groups.positions import Partition, Position
from anabranch.machines.groups.purgatory import Purgatory
from anabranch.machines.groups.ranged_commits import RangedCommit
from anabranch.machines.groups.records import (
    CommittedKeyRange,
    CommittedRange,
    CoordinatorRecord,
    TransactionRangesKey,
    TransactionRangesValue,
)
from anabranch.machines.groups.shared_commits import OFFSET_OF_SHARE
from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest

REACHED_MAX = 2_000
"""Offsets of which it is remembered how far changes lead: a frontier has half as many."""
Name = tuple[int, int]
"""A producer id, and the number of one of its commits."""


class Change(NamedTuple):
    """A commit by ranges in a transaction."""

    group_id: str
    partition: Partition
    name: Name
    value: TransactionRangesValue


class FoldedRanges(NamedTuple):
    """Effect: delete a change that is part of its position and of the ranges now (`RangedCommits.decide_durable`)."""

    group_id: str
    name: Name


class _Joined:
    """What changes make together, of those that go with one position."""

    __slots__ = ("_reached", "frontier", "ranges")

    def __init__(self) -> None:
        self.ranges = OffsetRanges()
        self.frontier = shares.constant(0)
        """How far they raise the frontier of a position."""
        self._reached: dict[int, int] = {}
        """By offset, how far its reader would be led, when that was last looked at."""

    def add(self, value: TransactionRangesValue) -> None:
        merge = self.ranges.merged(individual.checked((it.start, it.end) for it in value.offset_ranges))
        for start in merge.removed:
            self.ranges.remove(start)
        for start, end in merge.put:
            self.ranges.put(start, end)
        self.frontier = shares.raised(self.frontier, [(it.start, it.end, it.offset) for it in value.key_ranges])

    def reaches(self, offset: int, held: OffsetRanges) -> int:
        """Where these and the ranges that are held lead a reader at an offset.

        They only grow while the position keeps its name, so that the way is gone once, however often it is asked for.
        """
        reached = _led(self._reached.get(offset, offset), (held, self.ranges))
        if len(self._reached) >= REACHED_MAX:
            self._reached.clear()
        self._reached[offset] = reached
        return reached


def _led(offset: int, ranges: Sequence[OffsetRanges]) -> int:
    """Where ranges lead a reader at an offset."""
    while (further := max(it.reaches(offset) for it in ranges)) > offset:
        offset = further
    return offset


class _Changes:
    """The changes to one partition of a group."""

    __slots__ = ("_joined", "by_name", "places", "size")

    def __init__(self) -> None:
        self.by_name: dict[Name, Change] = {}
        self.places: Counter[int] = Counter()
        """Where steps of the frontier may begin with them."""
        self.size = 0
        """How many ranges they have."""
        self._joined: dict[int, _Joined] = {}
        """By the name of the position that they go with (`ranges_since`), as far as it was asked for."""

    def add(self, change: Change) -> None:
        self.remove(change.name)
        self.places.update(_places(change))
        self.by_name[change.name] = change
        self.size += _size(change)
        joined = self._joined.get(change.value.since)
        if joined is not None:
            joined.add(change.value)

    def remove(self, name: Name) -> None:
        change = self.by_name.pop(name, None)
        if change is None:
            return
        self.size -= _size(change)
        self._joined.pop(change.value.since, None)
        for place in _places(change):
            self.places[place] -= 1
            if not self.places[place]:
                del self.places[place]

    def joined(self, since: int) -> _Joined:
        """What those make together that go with a position."""
        found = self._joined.get(since)
        if found is None:
            found = _Joined()
            for change in self.by_name.values():
                if change.value.since == since:
                    found.add(change.value)
            if self.by_name:
                self._joined[since] = found
        return found

    def unjoined(self) -> int:
        """How many ranges the next look has to join."""
        return 0 if self._joined else self.size


def _size(change: Change) -> int:
    return 1 + len(change.value.offset_ranges) + len(change.value.key_ranges)


def _places(change: Change) -> Iterator[int]:
    for it in change.value.key_ranges:
        yield it.start
        yield it.end + 1


NO_CHANGES = _Changes()
WAITING_WEIGHT = 300
"""What a look at a request that waits takes beside its ranges, in looks at ranges: up to 4 ms."""


class TransactionRanges:
    """The commits by ranges of a shard's transactions that are not part of positions yet, and the purgatory."""

    def __init__(self) -> None:
        self._open: dict[int, dict[Name, Change]] = {}
        """By producer id: those of its open transaction."""
        self.decided: dict[Name, Change] = {}
        """Those that count, and are to be folded into positions."""
        self.folded: dict[Name, Change] = {}
        """Those that are, and are deleted when what they have made is durable."""
        self._tried: Name | None = None
        """The one that was given to be folded last: if it is asked for again, that has not come about."""
        self._in: dict[str, dict[Partition, _Changes]] = {}
        """All of them, by group and partition."""
        self.purgatory = Purgatory()
        self._number = 0
        """Of the last change: ascending, also after another coordinator has taken over."""

    def apply(self, key: TransactionRangesKey, value: TransactionRangesValue | None, producer_id: int) -> None:
        """Fold a record; one with a producer id is pending until that producer's marker."""
        name = (key.producer_id, key.number)
        if value is None:
            self._gone(self.decided.pop(name, None) or self.folded.pop(name, None))
            return
        change = Change(key.group, (key.topic, key.partition), name, value)
        self._in.setdefault(change.group_id, {}).setdefault(change.partition, _Changes()).add(change)
        if producer_id >= 0:
            self._open.setdefault(producer_id, {})[name] = change
        else:
            self.decided[name] = change

    def end(self, producer_id: int, *, committed: bool) -> None:
        """A producer's transaction has ended."""
        ended = self._open.pop(producer_id, {})
        if committed:
            self.decided |= ended
        else:
            for change in ended.values():
                self._gone(change)

    def next_decided(self) -> Change | None:
        """The next change to be folded: not the one before, if there is another, as a log has refused that.

        Changes may be folded in any order, as each says facts.
        """
        change = self.upcoming()
        if self._tried in self.decided:  # It is the first one: it comes after all others.
            self.decided[self._tried] = self.decided.pop(self._tried)
        self._tried = None if change is None else change.name
        return change

    def upcoming(self, folded: Name | None = None) -> Change | None:
        """What `next_decided` will give, as soon as the change `folded` is."""
        names = (name for name in self.decided if name != folded)
        name = next(names, None)
        if name is not None and name == self._tried:
            name = next(names, name)
        return None if name is None else self.decided[name]

    def set_folded(self, name: Name) -> None:
        """A change is part of its position, and of the ranges."""
        change = self.decided.pop(name, None)
        if change is not None:
            self.folded[name] = change

    def _gone(self, change: Change | None) -> None:
        if change is None:
            return
        partitions = self._in[change.group_id]
        partitions[change.partition].remove(change.name)
        if not partitions[change.partition].by_name:
            del partitions[change.partition]
        if not partitions:
            del self._in[change.group_id]

    def of(self, group_id: str, partition: Partition) -> Iterator[Change]:
        """The changes to a partition that are not part of its position, of open transactions and of committed ones."""
        yield from self._of(group_id, partition).by_name.values()

    def _of(self, group_id: str, partition: Partition) -> _Changes:
        return self._in.get(group_id, {}).get(partition, NO_CHANGES)

    def of_others(self, group_id: str, partition: Partition, producer_id: int) -> bool:
        """Whether a partition has changes that are not of the open transaction of a producer."""
        own = self._open.get(producer_id, {})
        return any(change.name not in own for change in self.of(group_id, partition))

    def open_weight(self, producer_id: int) -> int:
        """How much the open transaction of a producer holds: its commits, and their ranges of keys."""
        return sum(1 + len(change.value.key_ranges) for change in self._open.get(producer_id, {}).values())

    def weight_of(self, request: TxnOffsetCommitRequest) -> int:
        """How many ranges are looked at to tell whether a request waits: its own, and those not joined before."""
        return sum(
            len(part.offset_ranges) + self._of(request.group_id, (topic.name, part.partition_index)).unjoined()
            for topic in request.topics
            for part in topic.partitions
            if part.offset_ranges
        )

    def weight_of_waiting(self, group_id: str) -> int:
        """As `weight_of`, for all requests of a group that wait, each of which may look at many steps of a position."""
        return sum(WAITING_WEIGHT + self.weight_of(it.request) for it in self.purgatory.of(group_id))

    def leaves_gap(
        self, group_id: str, partition: Partition, position: Position, held: OffsetRanges, added: Sequence[Range]
    ) -> bool:
        """Whether offsets below the last of `added` would be left, with all that transactions have committed."""
        if not added:
            return False
        joined, ranges = self._of(group_id, partition).joined(position.ranges_since), OffsetRanges(added)
        frontier = shares.raised(position.stands, shares.shares(joined.frontier))

        def reaches(offset: int) -> int:
            return _led(joined.reaches(offset, held), (held, joined.ranges, ranges))

        return shares.stable(shares.through(frontier, reaches)) <= added[-1][1]

    def of_group(self, group_id: str) -> bool:
        """Whether there are changes for a group."""
        return group_id in self._in

    def would_be_many(self, group_id: str, partition: Partition, position: Position, commit: RangedCommit) -> bool:
        """Whether a partition could have too many steps, if all that transactions have committed, and this, counted."""
        if not commit.key_ranges:
            return False
        others = self._of(group_id, partition).places
        own = {*position.stands.starts, *position.passes.starts}
        own |= {place for start, end, _ in commit.key_ranges for place in (start, end + 1)}
        return len(others) + sum(place not in others for place in own) > FRONTIER_STEPS_MAX

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
        self._number = max(self._number + 1, now_ms * 1_000)
        topic, index = partition
        return CoordinatorRecord(
            TransactionRangesKey(
                group=group_id, topic=topic, partition=index, producer_id=producer_id, number=self._number
            ),
            TransactionRangesValue(
                base=OFFSET_OF_SHARE if commit.is_plain else commit.base,
                since=position.ranges_since,
                topic_id=position.topic_id,
                offset_ranges=[CommittedRange(start=start, end=end) for start, end in commit.offset_ranges],
                key_ranges=[CommittedKeyRange(start=a, end=b, offset=offset) for a, b, offset in commit.key_ranges],
                metadata=commit.metadata,
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
    if position is None or position.ranges_since != value.since or not is_one_topic(position, value):
        return None
    stable = position.offset
    ranges = [(max(it.start, stable), it.end) for it in value.offset_ranges if it.end >= stable]
    keys = [(it.start, it.end, it.offset) for it in value.key_ranges if it.offset >= stable]
    if not ranges and not keys and not value.metadata:
        return None
    commit = RangedCommit(-1, ranges, keys, metadata=value.metadata, is_plain=value.base == OFFSET_OF_SHARE)
    decided = ranged_commits.decide(position, held, commit, ranged_commits.NO_BOUND, position.topic_id, now_ms)
    return decided if isinstance(decided, ranged_commits.Counted) else None


def is_one_topic(position: Position, value: TransactionRangesValue) -> bool:
    """Whether a change is of the topic that the position is of, as far as both are known."""
    return NO_TOPIC_ID in (position.topic_id, value.topic_id) or position.topic_id == value.topic_id
