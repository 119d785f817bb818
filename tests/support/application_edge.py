"""What the applications of one group were handed, and the promise read off it (ordering.md, section 1).

An observer outside of every client and broker. Each application tells the partitions it is given, the records it is
handed, and its commits; producers number the records of each key. The promise, for every producer and key:

- first deliveries come in the order of sending, and none is left out;
- a record whose predecessor lies in another partition is handed out only after that predecessor was committed;
- a record is handed out again only to an owner that began when the record was not committed;
- one that was deleted after a member had fetched it may be left out, and is not handed out after a later one;
- no two applications have a partition at the same time.

Members of whom no order is promised may share a group with others. What they are handed is taken as it comes; a record
that another member is handed still waits until all that comes before it was handed out and, in other partitions,
committed. Only where a member without order had read on in the same partition was its gate passed already.

A commit may be in doubt: of `committing` and not yet `committed` nobody knows whether a coordinator has seen it. Doubt
never counts against the clients: a violation is reported only where no outcome of the commits in doubt explains it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

PLACES_MAX = 5_000
"""The newest records of a key whose places are kept: older ones that were appended twice are not recognized."""
Partition = tuple[str, int]
"""A topic and a partition. A topic that is made again is another topic: tests give each life a name of its own."""
Stream = tuple[str, str]
"""A producer and one of its keys."""


class Handed(NamedTuple):
    """One record as an application gets it."""

    producer: str
    key: str
    number: int
    """The place of the record among those of its producer and key, from 0."""
    partition: Partition
    offset: int

    @property
    def stream(self) -> Stream:
        return self.producer, self.key

    def __str__(self) -> str:
        topic, number = self.partition
        return f"{self.producer}/{self.key} #{self.number} ({topic}-{number} @ {self.offset})"


class OrderError(AssertionError):
    """The promise is broken."""

    def __init__(self, text: str, *, partition: Partition | None = None, members: Sequence[str] = ()) -> None:
        """`partition` and `members`: those concerned, if not all of them are."""
        super().__init__(text)
        self.partition = partition
        self.members = members


def _nothing_is_deleted(partition: Partition, offset: int) -> bool:
    return False


class ApplicationEdge:
    """The deliveries and commits of one group."""

    def __init__(
        self,
        *,
        deleted: Callable[[Partition, int], bool] = _nothing_is_deleted,
        place_of: Callable[[Stream, int], tuple[Partition, int] | None] = lambda stream, number: None,
        begins_late: bool = False,
        patience_ms: int | None = None,
        resizes: Sequence[tuple[int, int]] = (),
        keeps_order: Callable[[str], bool] = lambda member: True,
    ) -> None:
        """`deleted`: whether the record at an offset was removed by retention or DeleteRecords. `place_of`: where the
        log has a record that was not handed out; None where nobody knows. `begins_late`: the group reads from `latest`,
        so the first record of a key may be any. `patience_ms`: the rebalance timeout, for applications that leave
        records uncommitted; a gate opens by time when the position before it has not changed for so long (6.1).
        `resizes`: the partition counts of the topic, the first one included, each with the time at which it was asked
        for; the caller may add to them. `keeps_order`: whether order is promised of what a member is handed.
        """
        self._deleted = deleted
        self._place_of = place_of
        self._begins_late = begins_late
        self._patience_ms = patience_ms
        self._resizes = resizes
        self._keeps_order = keeps_order
        self._free: dict[Stream, dict[int, Partition]] = defaultdict(dict)
        """Where the records were that members without order were handed, of each key the numbers after `_last`."""
        self._overtaken: set[tuple[Stream, int]] = set()
        """Records left behind in other partitions when a member without order had read on."""
        self._last: dict[Stream, Handed] = {}
        """The newest record of each key that was handed out for the first time."""
        self._places: dict[Stream, dict[int, tuple[Partition, int]]] = defaultdict(dict)
        """Where the records of a key were that may be handed out again."""
        self._surely: dict[Partition, int] = {}
        """The committed offset that is known to be written."""
        self._doubtful: dict[Partition, list[int]] = defaultdict(list)
        """Offsets of commits without an outcome."""
        self._changed_ms: dict[Partition, int] = {}
        """When the committed offset changed, or the partition was first given to a member."""
        self._stalled_ms: dict[Partition, int] = {}
        """When the committed offset was last the same for the rebalance timeout, and then changed."""
        self._owners: dict[Partition, str] = {}
        self._floors: dict[tuple[str, Partition], int] = {}
        """The committed offset when a member was given a partition."""
        self.skipped = 0
        """Records that were deleted before they were handed out."""
        self.first_deliveries = 0
        self.repetitions = 0
        self.moves = 0
        """First deliveries of records whose predecessor lies in another partition: each had to wait for a commit."""
        self.by_partition: dict[Partition, int] = defaultdict(int)
        """The number of first deliveries."""

    # -- what applications tell ----------------------------------------------------------------------------------------

    def assigned(self, member: str, partitions: Iterable[Partition], now_ms: int = 0) -> None:
        """Note that a member begins with these partitions: what is committed by now must not come again."""
        for partition in partitions:
            self._changed_ms.setdefault(partition, now_ms)
            owner = self._owners.setdefault(partition, member)
            if owner != member:
                text = f"{member} was given {partition[0]}-{partition[1]}, which {owner} still has"
                raise OrderError(text, partition=partition, members=(member, owner))
            self._floors[member, partition] = self.committed_offset(partition) or 0

    def revoked(self, member: str, partitions: Iterable[Partition]) -> None:
        """Note that a member has let go of these partitions."""
        for partition in partitions:
            if self._owners.get(partition) == member:
                del self._owners[partition]

    def gone(self, member: str) -> None:
        """Note that a member has ended, or was removed from its group."""
        self._owners = {partition: owner for partition, owner in self._owners.items() if owner != member}

    def committing(self, offsets: Mapping[Partition, int]) -> None:
        """Note commits that have no outcome yet."""
        for partition, offset in offsets.items():
            self._doubtful[partition].append(offset)

    def committed(self, offsets: Mapping[Partition, int], now_ms: int = 0) -> None:
        """Note commits that the coordinator acknowledged, or that it was asked for."""
        for partition, offset in offsets.items():
            if offset in self._doubtful[partition]:
                self._doubtful[partition].remove(offset)
            if self._surely.get(partition) != offset:
                self._surely[partition] = offset
                self.progressed(partition, now_ms)

    def refused(self, offsets: Mapping[Partition, int]) -> None:
        """Note commits that the coordinator refused."""
        for partition, offset in offsets.items():
            if offset in self._doubtful[partition]:
                self._doubtful[partition].remove(offset)

    def delivered(self, member: str, record: Handed, now_ms: int = 0) -> None:
        """Check one record at the moment an application is handed it. OrderError."""
        self._changed_ms.setdefault(record.partition, now_ms)
        last = self._last.get(record.stream)
        if last is not None and record.number <= last.number:
            self._delivered_again(member, record, now_ms)
            return
        if not self._keeps_order(member):
            self._delivered_freely(member, record)
            return
        free = self._free[record.stream]
        between = {number: at for number, at in free.items() if number < record.number}
        if record.number in free:  # Of a member without order, which has not committed it.
            self._above_floor(member, record)
            self.repetitions += 1
        else:
            self.first_deliveries += 1
            self.by_partition[record.partition] += 1
        self._nothing_left_out(member, record, last, now_ms)
        for number in [number for number in free if number <= record.number]:
            del free[number]
        before = self._predecessor(record, last)
        newest = between[max(between)] if between else None if before is None else before[0]
        self.moves += newest not in (None, record.partition)
        was_passed = record.partition in between.values()
        if before is not None and before[0] != record.partition and not was_passed:
            self._predecessor_committed(member, record, *before, now_ms)
        places = self._places[record.stream]
        places[record.number] = record.partition, record.offset
        places.pop(record.number - PLACES_MAX, None)
        self._last[record.stream] = record

    def _delivered_freely(self, member: str, record: Handed) -> None:
        """Take a record as it comes to a member without order."""
        free = self._free[record.stream]
        if record.number in free:
            self._above_floor(member, record)
            self.repetitions += 1
            return
        free[record.number] = record.partition
        self._places[record.stream][record.number] = record.partition, record.offset
        self.first_deliveries += 1
        self.by_partition[record.partition] += 1

    # -- the promise ---------------------------------------------------------------------------------------------------

    def _delivered_again(self, member: str, record: Handed, now_ms: int) -> None:
        known = self._places[record.stream].get(record.number)
        if known is not None and known != (record.partition, record.offset):
            raise OrderError(f"{member} was handed {record}, which is at {known}, too: appended twice")
        self._above_floor(member, record)
        last = self._last[record.stream]
        if known is None and (record.stream, record.number) in self._overtaken:
            self._overtaken.remove((record.stream, record.number))
            self._places[record.stream][record.number] = record.partition, record.offset
            self.first_deliveries += 1
            self.by_partition[record.partition] += 1
            return
        if known is None and not self._is_late_by_right(record, last, now_ms):
            raise OrderError(f"{member} was handed {record} for the first time, after {last}")
        self.repetitions += 1

    def _above_floor(self, member: str, record: Handed) -> None:
        floor = self._floors.get((member, record.partition), 0)
        if record.offset < floor:
            raise OrderError(f"{member} was handed {record} again; {floor} was committed before it began there")

    def _is_late_by_right(self, record: Handed, last: Handed, now_ms: int) -> bool:
        """Whether a record may be handed out for the first time after a later one of its key."""
        is_old = record.number <= last.number - PLACES_MAX
        return is_old or self._begins_late or self._opened_by_time(record.partition, last, now_ms)

    def _nothing_left_out(self, member: str, record: Handed, last: Handed | None, now_ms: int) -> None:
        if last is None and self._begins_late:
            return
        free = self._free[record.stream]
        here = [number for number, at in free.items() if at == record.partition and number < record.number]
        passed = max(here, default=-1)
        for number in range(0 if last is None else last.number + 1, record.number):
            if number < passed:
                if number not in free:
                    self._overtaken.add((record.stream, number))
                continue
            place = self._place_of(record.stream, number)
            if number in free:
                partition, offset = self._places[record.stream][number]
                if partition != record.partition:
                    self._predecessor_committed(member, record, partition, offset, now_ms)
                continue
            if place is None or not (self._deleted(*place) or self._opened_by_time(place[0], record, now_ms)):
                since = "nothing" if last is None else str(last)
                raise OrderError(f"{member} was handed {record} after {since}: #{number} at {place} is left out")
            self.skipped += 1

    def _predecessor(self, record: Handed, last: Handed | None) -> tuple[Partition, int] | None:
        """The place of the record before, or of the newest before it that was not deleted unread."""
        return None if last is None else (last.partition, last.offset)

    def _predecessor_committed(
        self, member: str, record: Handed, partition: Partition, offset: int, now_ms: int
    ) -> None:
        if self._deleted(partition, offset):
            return
        if self.highest_commit(partition) > offset:
            return
        if self._opened_by_time(partition, record, now_ms):
            return
        raise OrderError(
            f"{member} was handed {record} before what precedes it was committed, {partition[0]}-{partition[1]} @ "
            f"{offset}: it is at {self.committed_offset(partition)}, in doubt {self._doubtful[partition]}, "
            f"unchanged for {now_ms - self._changed_ms.get(partition, now_ms)} ms"
        )

    def committed_offset(self, partition: Partition) -> int | None:
        """Return the committed offset that is known to be written."""
        return self._surely.get(partition)

    def highest_commit(self, partition: Partition) -> int:
        """Return the highest offset that may have been committed."""
        return max([self._surely.get(partition, 0), *self._doubtful[partition]])

    def progressed(self, partition: Partition, now_ms: int) -> None:
        """Note that the committed offset of a partition, or its owner, has changed."""
        if self._is_quiet(partition, now_ms):
            self._stalled_ms[partition] = now_ms
        self._changed_ms[partition] = now_ms

    def _is_quiet(self, partition: Partition, now_ms: int) -> bool:
        quiet_ms = now_ms - self._changed_ms.get(partition, now_ms)
        return self._patience_ms is not None and quiet_ms >= self._patience_ms

    def _opened_by_time(self, partition: Partition, record: Handed, now_ms: int) -> bool:
        """Whether the gate of a record may have opened by time, as far as it waits on a partition.

        It opens while the partition's position stands still, and stays open. Where that was before the layout of the
        record began, it opened the gates of former layouts only.
        """
        if self._is_quiet(partition, now_ms):
            return True
        stalled_ms, began_ms = self._stalled_ms.get(partition), self._gate_began_ms(record)
        return stalled_ms is not None and began_ms is not None and stalled_ms >= began_ms

    def _gate_began_ms(self, record: Handed) -> int | None:
        """Return the earliest time at which a gate may have been before a record; None if none ever was.

        Keys were moved into its partition when the partition appeared, or when others retired.
        """
        number = record.partition[1]
        for (_, before), (at_ms, count) in pairwise(self._resizes):
            if before <= number < count or number < count < before:
                return at_ms
        return None

    # -- the end -------------------------------------------------------------------------------------------------------

    def last(self, stream: Stream) -> Handed | None:
        """Return the newest record of a key that was handed out."""
        return self._last.get(stream)

    def reached(self, stream: Stream) -> int:
        """Return the number of the next record of a key that was never handed out."""
        last = self._last.get(stream)
        return 0 if last is None else last.number + 1

    def missing(self, sent: Mapping[Stream, int], since: Mapping[Stream, int] | None = None) -> dict[Stream, list[int]]:
        """Return the numbers from `since` (0) up to `sent` that were neither handed out nor deleted, by key."""
        found: dict[Stream, list[int]] = {}
        for stream, count in sent.items():
            first = max(self.reached(stream), 0 if since is None else since.get(stream, 0))
            free = self._free[stream]
            left = [n for n in range(first, count) if n not in free and not self._is_deleted(stream, n)]
            left += [number for of, number in self._overtaken if of == stream]
            if left:
                found[stream] = left
        return found

    def _is_deleted(self, stream: Stream, number: int) -> bool:
        place = self._place_of(stream, number)
        return place is not None and self._deleted(*place)

    def check_complete(self, sent: Mapping[Stream, int], since: Mapping[Stream, int] | None = None) -> None:
        """Check that every record from `since` (0) on was handed out. OrderError."""
        missing = self.missing(sent, since)
        if missing:
            some = {stream: numbers[:5] for stream, numbers in sorted(missing.items())[:5]}
            raise OrderError(f"{sum(map(len, missing.values()))} records were never handed out: {some}")
