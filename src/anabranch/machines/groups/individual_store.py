"""The individual commits of a shard's groups, as the log of `__individual_commit_offsets` has them.

Ranges go with a position (`Position.ranges_since`): where it is deleted, rewound or made anew, they are void at once,
whatever is left of them in their log. Ranges that the position has passed, or that are void, are buried: they leave the
state at once, and their tombstones are written when the position that buries them is durable (`BuriedRanges`). So the
log may be behind at any time, or gone, and the worst that follows is that records are delivered again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.machines.groups.individual import OffsetRanges
from anabranch.machines.groups.positions import Partition, Position
from anabranch.machines.groups.records import CoordinatorRecord, IndividualCommitKey, IndividualCommitValue

NONE = OffsetRanges()
"""The ranges of a partition without any; never changed."""


@dataclass(slots=True)
class Held:
    """The ranges of one group and partition."""

    since: int
    ranges: OffsetRanges = field(default_factory=OffsetRanges)


class BuriedRanges(NamedTuple):
    """Effect: write the tombstones of the ranges buried by the positions applied up to a number (`applied`)."""

    group_id: str
    """One of the shard's groups."""
    number: int


@dataclass(slots=True)
class _Grave:
    number: int
    group: str
    partition: Partition
    starts: list[int]
    """Descending."""


class IndividualCommits:
    """All ranges of a shard; `apply` and `follow` change them, decisions look."""

    def __init__(self) -> None:
        self.count = 0
        """Ranges that are held."""
        self._held: dict[str, dict[Partition, Held]] = {}
        self.applied = 0
        """Counts the positions that were applied."""
        self._graves: deque[_Grave] = deque()
        self.unchecked: dict[tuple[str, Partition], None] = {}
        """Partitions whose loaded ranges were not compared with their positions yet."""

    def __eq__(self, other: object) -> bool:
        """Whether the same ranges are held."""
        return isinstance(other, IndividualCommits) and self._held == other._held

    __hash__ = None  # type: ignore[assignment]

    # -- looking -------------------------------------------------------------------------------------------------------

    def of(self, group_id: str, partition: Partition, position: Position | None) -> OffsetRanges:
        """The ranges above a group's position; not to be changed."""
        held = self._held.get(group_id, {}).get(partition)
        if held is None or position is None:
            return NONE
        if self.unchecked and (group_id, partition) in self.unchecked:
            self.follow(group_id, partition, position)
            held = self._held.get(group_id, {}).get(partition)
        return NONE if held is None or held.since != position.ranges_since else held.ranges

    def count_of(self, group_id: str, partition: Partition) -> int:
        """The number of ranges that a group has in a partition, also of those that do not go with its position."""
        held = self._held.get(group_id, {}).get(partition)
        return 0 if held is None else len(held.ranges)

    def partitions(self, group_id: str) -> Iterator[Partition]:
        """The partitions in which a group has ranges."""
        yield from self._held.get(group_id, {})

    def __bool__(self) -> bool:
        """Whether there are ranges, or tombstones to be written."""
        return bool(self._held) or bool(self._graves)

    # -- the fold ------------------------------------------------------------------------------------------------------

    def apply(self, key: IndividualCommitKey, value: IndividualCommitValue | None) -> None:
        """Fold a record."""
        partition = (key.topic, key.partition)
        held = self._held.get(key.group, {}).get(partition)
        if value is None:
            if held is not None and key.start in held.ranges:
                held.ranges.remove(key.start)
                self.count -= 1
                self._drop_empty(key.group, partition, held)
            return
        if held is not None and value.since < held.since:
            self._bury(key.group, partition, [key.start])
            return
        if held is None or held.since < value.since:
            self._forget(key.group, partition)
            held = self._held.setdefault(key.group, {})[partition] = Held(value.since)
        self.count += key.start not in held.ranges
        held.ranges.put(key.start, value.end)

    def loaded(self) -> None:
        """All records of the log are applied."""
        self.unchecked = {(group, partition): None for group, held in self._held.items() for partition in held}

    def follow(self, group_id: str, partition: Partition, position: Position | None) -> None:
        """Bury what a position has passed, or does not go with."""
        held = self._held.get(group_id, {}).get(partition)
        if held is None:
            return
        if position is None or position.ranges_since != held.since:
            self._forget(group_id, partition)
            return
        gone = held.ranges.remove_below(position.offset)
        if gone:
            self.count -= len(gone)
            self._bury(group_id, partition, gone)
            self._drop_empty(group_id, partition, held)

    def _forget(self, group_id: str, partition: Partition) -> None:
        held = self._held.get(group_id, {}).get(partition)
        if held is not None:
            self.count -= len(held.ranges)
            self._bury(group_id, partition, [start for start, _ in held.ranges])
            held.ranges = OffsetRanges()
            self._drop_empty(group_id, partition, held)

    def _drop_empty(self, group_id: str, partition: Partition, held: Held) -> None:
        if not held.ranges:
            of_group = self._held[group_id]
            del of_group[partition]
            if not of_group:
                del self._held[group_id]

    # -- tombstones ----------------------------------------------------------------------------------------------------

    def _bury(self, group_id: str, partition: Partition, starts: Iterable[int]) -> None:
        self._graves.append(_Grave(self.applied, group_id, partition, sorted(starts, reverse=True)))

    def tombstones(self, number: int, most: int) -> list[CoordinatorRecord]:
        """At most `most` tombstones of ranges buried up to a number; each is given once."""
        found: list[CoordinatorRecord] = []
        while self._graves and self._graves[0].number <= number and len(found) < most:
            grave = self._graves[0]
            held = self._held.get(grave.group, {}).get(grave.partition)
            while grave.starts and len(found) < most:
                start = grave.starts.pop()
                if held is None or start not in held.ranges:  # It may have been committed again since.
                    found.append(range_record(grave.group, grave.partition, start))
            if not grave.starts:
                self._graves.popleft()
        return found

    def buried(self) -> BuriedRanges | None:
        """The effect for all tombstones that are to be written; None where there are none."""
        return BuriedRanges(self._graves[0].group, self.applied) if self._graves else None

    def has_graves(self, number: int) -> bool:
        """Whether tombstones of ranges buried up to a number are left."""
        return bool(self._graves) and self._graves[0].number <= number


def range_record(
    group_id: str, partition: Partition, start: int, end: int | None = None, since: int = 0
) -> CoordinatorRecord:
    """A range; without an end: it is no more."""
    key = IndividualCommitKey(group=group_id, topic=partition[0], partition=partition[1], start=start)
    return CoordinatorRecord(key, None if end is None else IndividualCommitValue(end=end, since=since))
