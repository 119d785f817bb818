"""What transactions have committed of a partition, or are about to: nobody else is handed it meanwhile (ADR 0053).

A commit in a transaction counts from its marker on, and is part of the position a little later. Until then the offsets
are neither committed nor open: whoever was handed them would process them a second time, in a transaction that counts,
too. They are taken by

    requests that wait in the purgatory -> open transactions -> those that are committed and not folded yet -> committed

The rule: from each of these to the next nothing becomes open. What goes another way has lapsed (an abort, a refused
request, a position that was set anew): it is open again, and whoever has passed over it looks again (`lapses`).

What is taken is joined as it comes, some ranges at each look, and is only joined anew after a lapse: what became
committed may stay.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence

from anabranch.machines.groups import individual, shares
from anabranch.machines.groups.individual import OffsetRanges, Range, WrongRangesError
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.positions import Partition, Position
from anabranch.machines.groups.purgatory import Waiting
from anabranch.machines.groups.transaction_ranges import Change

JOINED_AT_A_TIME = 64
"""Ranges that one look joins: 0.2 ms."""
COMPARED_MAX = 1_000
"""Ranges that are compared with what is committed; more have lapsed, which costs their readers a look."""
NO_MEMBER = -1


class Taken:
    """What is taken of a partition of a group."""

    def __init__(self) -> None:
        self.ranges = OffsetRanges()
        """As far as it was joined; also some that were committed since."""
        self.lapses = 0
        """How often something that was taken became open."""
        self._goes_with: tuple[Hashable, int] = (None, 0)
        """What names the position that ranges go with, and its offset, at the last look."""
        self._sources: dict[Hashable, list[Range]] = {}
        self._unjoined: deque[list[Range]] = deque()

    def look(
        self,
        offsets: Offsets,
        group_id: str,
        partition: Partition,
        position: Position,
        members: Container[str],
    ) -> bool:
        """Follow what was taken, and what is no more; whether all of it is joined. `position` is the group's.

        A request of a member that is none of `members` any more waits to be refused.
        """
        held = offsets.individual.of(group_id, partition, position)
        present = _present(offsets, group_id, partition, position, members)
        added = {name: _ranges_of(present[name], partition) for name in present.keys() - self._sources.keys()}
        gone = self._sources.keys() - present.keys()
        moved = {tuple(ranges) for ranges in added.values()} if gone else ()
        goes_with = position.ranges_since, position.topic_id
        has_lapsed = goes_with != self._goes_with[0] or position.offset < self._goes_with[1]
        self._goes_with = goes_with, position.offset
        for name in gone:
            ranges = self._sources.pop(name)
            has_lapsed |= tuple(ranges) not in moved and not _are_committed(ranges, position.offset, held)
        self._sources |= added
        if has_lapsed:
            self.lapses += 1
            self.ranges = OffsetRanges()
            self._unjoined = deque(ranges for ranges in self._sources.values() if ranges)
        else:
            self._unjoined.extend(ranges for ranges in added.values() if ranges)
        self._join()
        self.ranges.remove_below(position.offset)
        return not self._unjoined

    def _join(self) -> None:
        room = JOINED_AT_A_TIME
        while self._unjoined and room > 0:
            ranges = self._unjoined.popleft()
            if len(ranges) > room:
                self._unjoined.appendleft(ranges[room:])
            for joined in ranges[:room]:  # One by one: of a request they may overlap.
                merge = self.ranges.merged([joined])
                for start in merge.removed:
                    self.ranges.remove(start)
                for start, end in merge.put:
                    self.ranges.put(start, end)
            room -= len(ranges)


def _present(
    offsets: Offsets, group_id: str, partition: Partition, position: Position, members: Container[str]
) -> Mapping[Hashable, object]:
    """All that takes something of a partition, by what names it."""
    found: dict[Hashable, object] = {}
    changes = offsets.in_transactions
    sinces = {position.ranges_since}
    for producer_id in offsets.positions.pending_in(group_id, *partition):
        pending = offsets.positions.pending(group_id, *partition, producer_id)
        if pending is not None:
            found["offset", producer_id, pending.offset] = pending
            sinces.add(pending.ranges_since)
    for change in changes.of(group_id, partition):
        if change.value.since in sinces:
            found[change.name] = change
    for it in changes.purgatory.of(group_id):
        if it.request.generation_id == NO_MEMBER or it.request.member_id in members:
            found["waits", it.ticket] = it
    return found


def _ranges_of(source: object, partition: Partition) -> list[Range]:
    match source:
        case Position():
            return _below(source.offset)
        case Change():
            of_keys = [(it.start, it.end, it.offset) for it in source.value.key_ranges]
            all_below = _below(shares.stable(shares.raised(shares.constant(0), of_keys))) if of_keys else []
            return [*all_below, *((it.start, it.end) for it in source.value.offset_ranges)]
        case Waiting():
            return list(_asked(source, partition))
    raise AssertionError(source)


def _asked(waiting: Waiting, partition: Partition) -> Iterator[Range]:
    name, index = partition
    for topic in waiting.request.topics:
        for part in topic.partitions if topic.name == name else ():
            if part.partition_index == index:
                with contextlib.suppress(WrongRangesError):  # Of ranges that are none nothing counts.
                    ranges = [(it.start, it.end) for it in part.offset_ranges]
                    yield from individual.checked(ranges) if ranges else _below(part.committed_offset)


def _below(offset: int) -> list[Range]:
    return [(0, offset - 1)] if offset > 0 else []


def _are_committed(ranges: Sequence[Range], stable: int, held: OffsetRanges) -> bool:
    """Whether all that was taken is committed by now."""
    if len(ranges) > COMPARED_MAX:
        return False
    return all(_is_committed(max(start, stable), end, held.reaches) for start, end in ranges)


def _is_committed(at: int, end: int, reaches: Callable[[int], int]) -> bool:
    while at <= end and (onward := reaches(at)) > at:
        at = onward
    return at > end
