"""What may be delivered when, through every resize of a topic: the one module that decides it (ordering.md, section 3).

A topic's lineage is the list of its layouts. Layout v has a partition count and, once it has ended, the leader epoch
that ended with it on every partition that then existed (`machines.controller.layouts`); the leaders turn those epochs
into offsets (`Lineage`), which cut every partition's log into segments (p, v), the records appended to p while layout v
ruled:

    start(p, v) .. end(p, v)        any may be empty; the last layout's segments have no end yet

The rule (keyspace.md, section 4), for a reader of the keys K that has read partition q up to F_q: records of (p, v)
may be delivered when, for every earlier layout j < v and every other partition q of the family,

    F_q(x) >= end(q, j)        for all x in  interval(q, count[j]) ∩ interval(p, count[v]) ∩ K

A key's whole past is looked at directly, so a parent without records hides nothing of the grandparent. Empty segments
ask for nothing. The rule never gets stuck, because the oldest unread segment of a family is always deliverable.

Two intervals overlap exactly if one partition is an ancestor of the other (`placement.ancestor`) in one of the two
layouts, so a partition waits on few others, and only on those with an unread segment: a caught-up reader's gates cost
one comparison for each partition. Positions are progress (ordering.md, section 6.1).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

from anabranch.base.limits import LATE_LAYOUT, LATE_OFFSET_BITS, SEQUENCE_OFFSET_BITS
from anabranch.machines.keyspace import SPACE, Interval, interval
from anabranch.machines.placement import level_size

BEYOND = 1 << 62
"""A position behind every end: of a partition that is not read, or in which there is nothing left to read."""
UNKNOWN_END = 1 << 61
"""The end of a segment whose log cannot be opened: behind every offset, so no position but BEYOND reaches it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The records of `partition` appended while layout `layout` ruled: offsets `start` to `end`, `end` exclusive."""

    partition: int
    layout: int
    start: int
    end: int | None
    """None while the layout rules."""


class GateWait(NamedTuple):
    """What a closed gate waits on: the reader's position of `partition` must reach `offset`.

    The offset is `UNKNOWN_END` if the log of `partition` cannot be opened.
    """

    partition: int
    offset: int


class Cuts(NamedTuple):
    """The non-empty ended segments of a partition: their layouts, and the offsets at which they end; both ascending."""

    layouts: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Cuts:
        """Take (layout, end) in the order of the layouts; a segment that ends where the one before ended is empty."""
        layouts, ends = array("q"), array("q")
        last = 0
        for layout, end in pairs:
            if end > last:
                layouts.append(layout)
                ends.append(end)
                last = end
        return cls(layouts, ends)


NO_CUTS = Cuts((), ())


@dataclass(frozen=True, slots=True)
class Frontier:
    """A reader's progress in one partition, by key: a step function from the key space to offsets (keyspace.md, 3)."""

    starts: tuple[int, ...]
    """Where each step begins, ascending from 0."""
    offsets: tuple[int, ...]
    """The position of the keys of each step."""

    def __post_init__(self) -> None:
        assert self.starts[:1] == (0,) and len(self.starts) == len(self.offsets)

    def lowest(self, keys: Interval) -> int:
        """The lowest position of any of `keys`."""
        first, last = bisect_right(self.starts, keys.start) - 1, bisect_right(self.starts, keys.end)
        return min(self.offsets[first:last])


Position = int | Frontier
"""The next offset to read, the same for all keys or by key."""


class _Relative(NamedTuple):
    """Another partition that holds keys of one partition in some layouts: those with `low < count <= high`.

    The younger of the two, by index, does not exist in these layouts, and the older one holds its keys.
    """

    partition: int
    low: int
    high: int
    last: int
    """The newest of these layouts."""
    is_older: bool

    def matters(self, oldest_unread: int) -> bool:
        """Whether a gate may wait for the partition's segments from `oldest_unread` on.

        An older partition held the keys in its own segments; a younger one gave them away in a later layout.
        """
        return oldest_unread <= self.last if self.is_older else oldest_unread < self.last


@dataclass(frozen=True)
class Lineage:
    """The layouts of a topic, cut into offsets. Immutable; made anew when metadata says there is a new layout."""

    initial: int
    """Partition count at the topic's creation."""
    counts: tuple[int, ...]
    """Partition count of each layout, oldest first; the last one rules now."""
    cuts: Mapping[int, Cuts] = field(default_factory=dict)
    """By existing partition; one without an entry has no ended segment that is not empty, or was removed: it is done.
    """
    first: int = 0
    """The number of the oldest layout in `counts`; no log holds a record of those before."""
    unknown: Mapping[int, int] = field(default_factory=dict)
    """Partitions that exist and whose log cannot be opened, to the first layout whose end is not known."""

    def __post_init__(self) -> None:
        assert self.counts and self.initial >= 1 and min(self.counts) >= self.initial and self.first >= 0

    @classmethod
    def flat(cls, count: int) -> Self:
        """The lineage of a topic that was never resized, or whose broker does not know of resizing."""
        return cls(initial=count, counts=(count,))

    @classmethod
    def of_cuts(
        cls,
        initial: int,
        counts: Sequence[int],
        cuts: Mapping[int, Iterable[tuple[int, int]]],
        *,
        first: int = 0,
        unknown: Mapping[int, int] | None = None,
    ) -> Self:
        """Make a lineage of each existing partition's (layout, end), in the order of the layouts; empty ones may be
        left out. `first` is the layout of `counts[0]`; `unknown` as in the field.
        """
        found = {partition: Cuts.of(pairs) for partition, pairs in cuts.items()}
        return cls(initial, tuple(counts), found, first, {} if unknown is None else unknown)

    @classmethod
    def of_ends(
        cls,
        initial: int,
        counts: Sequence[int],
        ends: Sequence[Mapping[int, int]] = (),
        *,
        first: int = 0,
        unknown: Mapping[int, int] | None = None,
    ) -> Self:
        """Make a lineage of every ended layout's ends by partition, oldest first: those that exist now."""
        assert len(ends) == len(counts) - 1
        cuts: dict[int, list[tuple[int, int]]] = {}
        for layout, known in enumerate(ends, first):
            for partition, end in known.items():
                cuts.setdefault(partition, []).append((layout, end))
        return cls.of_cuts(initial, counts, cuts, first=first, unknown=unknown)

    @property
    def current(self) -> int:
        """The number of the layout that rules now."""
        return self.first + len(self.counts) - 1

    @property
    def count(self) -> int:
        """The partition count that rules now."""
        return self.counts[-1]

    def count_in(self, layout: int) -> int:
        """The partition count of a layout from `first` on."""
        return self.counts[layout - self.first]

    def layout_at(self, partition: int, offset: int) -> int:
        """The layout that ruled when the record at `offset` was, or will be, appended to `partition`."""
        cuts = self.cuts.get(partition, NO_CUTS)
        index = bisect_right(cuts.ends, offset)
        return cuts.layouts[index] if index < len(cuts.ends) else self.current

    def start(self, partition: int, layout: int) -> int:
        """The offset at which segment (`partition`, `layout`) starts; 0 if nothing was appended before."""
        cuts = self.cuts.get(partition, NO_CUTS)
        index = bisect_left(cuts.layouts, layout)
        return cuts.ends[index - 1] if index else 0

    def segments(self, partition: int, log_start: int) -> Iterator[Segment]:
        """The segments of a partition, oldest first, from `log_start` on; empty ones are left out, the last one not."""
        start = log_start
        for layout, end in zip(*self.cuts.get(partition, NO_CUTS), strict=True):
            if end > start:
                yield Segment(partition, layout, start, end)
                start = end
        yield Segment(partition, self.current, start, None)

    def held(self, partition: int, layout: int) -> Interval:
        """The keys of a partition in a layout; all where the partition was retiring, and took none by itself."""
        count = self.count_in(layout)
        return interval(partition, count, self.initial) if partition < count else SPACE

    def held_in(self, partition: int, layouts: Iterable[int]) -> tuple[Interval, ...]:
        """The keys of a partition in each of some layouts, as `held` says; computed once for each width."""
        known: dict[int, Interval] = {}
        found: list[Interval] = []
        for layout in layouts:
            count, size, halvings = self._levels[layout - self.first]
            if partition >= count:
                found.append(SPACE)
                continue
            if partition >= size or partition < count - size:
                halvings += 1
            held = known.get(halvings)
            if held is None:
                held = known[halvings] = interval(partition, count, self.initial)
            found.append(held)
        return tuple(found)

    @cached_property
    def _levels(self) -> Sequence[tuple[int, int, int]]:
        """For each layout its count, the level's size, and the halvings of its widest intervals (keyspace.interval)."""
        sizes = [level_size(count, self.initial) for count in self.counts]
        halvings = [(size // self.initial).bit_length() - 1 for size in sizes]
        return list(zip(self.counts, sizes, halvings, strict=True))

    def gates(self, positions: Mapping[int, Position]) -> Gates:
        """Decide gates for a reader that stands at `positions` (every existing partition that it reads)."""
        return Gates(self, positions)

    def may_deliver(self, partition: int, layout: int, positions: Mapping[int, Position]) -> bool:
        """Whether a reader that stands at `positions` may be given records of segment (`partition`, `layout`)."""
        return self.gates(positions).may_deliver(partition, layout)

    def deliverable(
        self, positions: Mapping[int, Position], among: Iterable[int] | None = None
    ) -> dict[int, int | None]:
        """Say for every partition in `positions` up to which offset its gates are open; None where none is closed.

        Records below it may be delivered now, without waiting for a record of any other partition. `among`: for some.
        """
        gates = self.gates(positions)
        return {partition: gates.limit(partition) for partition in (positions if among is None else among)}

    def waits(self, partition: int, positions: Mapping[int, Position]) -> tuple[GateWait, ...]:
        """What the first closed gate of `partition` waits on, in partition order; empty where no gate is closed."""
        return self.gates(positions).waits(partition)

    def sequence(self, partition: int, offset: int) -> int:
        """A number that grows with every record of a key, across resizes (spark.md, section 1)."""
        return sequence_base(self.layout_at(partition, offset)) + offset

    # -- relatives -----------------------------------------------------------------------------------------------------

    def relatives(self, partition: int) -> tuple[int, ...]:
        """The partitions with ended segments that hold keys of `partition` in some layout; ancestors come first.

        Only their positions decide the gates of `partition`.
        """
        return tuple(relative.partition for relative in self._relatives_of(partition))

    def _relatives_of(self, partition: int) -> Sequence[_Relative]:
        known = self._relatives.get(partition)
        if known is None:
            ended, found = self._ended, self._ancestors_of.get(partition) or self._ancestors(partition)
            ancestors = (other for other in found if other.partition in ended)
            known = self._relatives[partition] = (*ancestors, *self._descendants.get(partition, ()))
        return known

    def _ancestors(self, partition: int) -> Iterator[_Relative]:
        sizes, initial = self._sizes, self.initial
        high = partition
        while high >= sizes[0]:
            low = high - (initial << (high // initial).bit_length() - 1)
            first = bisect_right(sizes, low)
            if first < len(sizes) and sizes[first] <= high:
                last = max(self._newest[first : bisect_right(sizes, high)])
                yield _Relative(low, low, high, last, True)
            high = low

    @cached_property
    def _relatives(self) -> dict[int, Sequence[_Relative]]:
        """By partition; filled when first asked for."""
        return {}

    @cached_property
    def _sizes(self) -> Sequence[int]:
        """The partition counts of all layouts, ascending, each once."""
        return sorted(set(self.counts))

    @cached_property
    def _newest(self) -> Sequence[int]:
        """The newest layout of each of `_sizes`."""
        newest = dict(zip(self.counts, range(self.first, self.current + 1), strict=True))
        return [newest[size] for size in self._sizes]

    @cached_property
    def _ended(self) -> Mapping[int, int]:
        """The partitions with ended segments, to the end of the last one; UNKNOWN_END where it is not known."""
        ends = {partition: cuts.ends[-1] for partition, cuts in self.cuts.items() if cuts.ends}
        return ends | dict.fromkeys(self.unknown, UNKNOWN_END)

    @cached_property
    def _descendants(self) -> Mapping[int, Sequence[_Relative]]:
        """By partition, the younger ones with ended segments."""
        found: dict[int, list[_Relative]] = {}
        for partition, ancestors in self._ancestors_of.items():
            for ancestor, low, high, last, _ in ancestors:
                found.setdefault(ancestor, []).append(_Relative(partition, low, high, last, False))
        return found

    @cached_property
    def _ancestors_of(self) -> Mapping[int, Sequence[_Relative]]:
        """By partition with ended segments, ascending, the ancestors."""
        return {partition: tuple(self._ancestors(partition)) for partition in sorted(self._ended)}


class Gates:
    """The rule for one set of positions; each gate is decided when it is first asked for.

    `keys` restricts a question to a reader of a share of the partition's keys; None: the reader has all of them.
    """

    def __init__(self, lineage: Lineage, positions: Mapping[int, Position]) -> None:
        self._lineage = lineage
        self._positions = positions
        self._oldest: dict[int, int] = {}
        self._closed: dict[tuple[int, Interval | None], tuple[int, int] | None] = {}

    def may_deliver(self, partition: int, layout: int, keys: Interval | None = None) -> bool:
        """Whether the reader may be given records of segment (`partition`, `layout`)."""
        return not self._is_closed(partition, layout, keys, self._unread(partition))

    def limit(self, partition: int, keys: Interval | None = None) -> int | None:
        """The offset at which the reader meets the first closed gate of `partition`; None where none is closed."""
        closed = self._first_closed(partition, keys)
        return None if closed is None else closed[0]

    def waits(self, partition: int, keys: Interval | None = None) -> tuple[GateWait, ...]:
        """What the first closed gate of `partition` waits on, in partition order; empty where no gate is closed."""
        closed = self._first_closed(partition, keys)
        return () if closed is None else tuple(sorted(self._waits(partition, closed[1], keys, self._unread(partition))))

    def _first_closed(self, partition: int, keys: Interval | None) -> tuple[int, int] | None:
        """The first closed gate at or after the reader's position: its offset, and its layout."""
        known = (partition, keys)
        if known not in self._closed:
            self._closed[known] = self._find_closed(partition, keys)
        return self._closed[known]

    def _find_closed(self, partition: int, keys: Interval | None) -> tuple[int, int] | None:
        """Look at the gate in front of the reader first: in a backlog that one is closed, mostly by the parent."""
        behind = self._behind
        if not behind:
            return None
        lineage = self._lineage
        position = self._lowest(partition, SPACE if keys is None else keys)
        layouts, ends = lineage.cuts.get(partition, NO_CUTS)
        index = bisect_right(ends, position)
        layout = layouts[index] if index < len(ends) else lineage.current
        unread, oldest = [], lineage.current
        for other in lineage._relatives_of(partition):
            if other.partition in behind:
                since = self._oldest_unread(other.partition)
                if other.matters(since):
                    unread.append(other)
                    if since < layout and self._is_closed(partition, layout, keys, unread[-1:]):
                        return position, layout
                    if since < oldest:
                        oldest = since
        for after in range(max(index + 1, bisect_right(layouts, oldest)), len(ends) + 1) if unread else ():
            layout = layouts[after] if after < len(ends) else lineage.current
            if self._is_closed(partition, layout, keys, unread):
                return ends[after - 1], layout
        return None

    def _unread(self, partition: int) -> Sequence[_Relative]:
        """The relatives of a partition with segments that its gates may wait for."""
        behind = self._behind
        if not behind:
            return ()
        return [
            other
            for other in self._lineage._relatives_of(partition)
            if other.partition in behind and other.matters(self._oldest_unread(other.partition))
        ]

    @cached_property
    def _behind(self) -> frozenset[int]:
        """The partitions with ended segments that are not read: none, as a rule, and then no gate is looked at."""
        ended = self._lineage._ended
        return frozenset(partition for partition, end in ended.items() if self._lowest(partition, SPACE) < end)

    def _oldest_unread(self, partition: int) -> int:
        """The layout of the oldest ended segment that is not read by all keys; the current one where there is none."""
        oldest = self._oldest.get(partition)
        if oldest is None:
            lineage = self._lineage
            layouts, ends = lineage.cuts.get(partition, NO_CUTS)
            position = self._lowest(partition, SPACE)
            index = bisect_right(ends, position)
            oldest = layouts[index] if index < len(ends) else lineage.current
            if position < UNKNOWN_END:
                oldest = min(oldest, lineage.unknown.get(partition, oldest))
            self._oldest[partition] = oldest
        return oldest

    def _is_closed(self, partition: int, layout: int, keys: Interval | None, unread: Sequence[_Relative]) -> bool:
        """Whether the gate of one segment waits on any of some relatives."""
        count = self._lineage.count_in(layout)
        held: Interval | None = None
        for other in unread if partition < count else ():
            if other.is_older or other.low < count <= other.high:
                held = held or self._read_keys(partition, layout, keys)
                if held is None:
                    return False
                if self._unread_end(other, layout, held) is not None:
                    return True
        return False

    def _waits(
        self, partition: int, layout: int, keys: Interval | None, unread: Sequence[_Relative]
    ) -> Iterator[GateWait]:
        """Yield what the gate of one segment waits on."""
        held = self._read_keys(partition, layout, keys)
        for other in unread if held is not None else ():
            assert held is not None
            end = self._end_to_wait_for(other, layout, held)
            if end is not None:
                yield GateWait(other.partition, end)

    def _read_keys(self, partition: int, layout: int, keys: Interval | None) -> Interval | None:
        """The keys of a segment that the reader reads. A partition beyond the layout's count holds none."""
        count = self._lineage.count_in(layout)
        if partition >= count:
            return None
        held = interval(partition, count, self._lineage.initial)
        return held if keys is None else held.overlap(keys)

    def _end_to_wait_for(self, other: _Relative, layout: int, keys: Interval) -> int | None:
        """The end that a relative of the segment's partition must be read up to; none for a younger one in it."""
        if not other.is_older and not other.low < self._lineage.count_in(layout) <= other.high:
            return None
        return self._unread_end(other, layout, keys)

    def _unread_end(self, other: _Relative, layout: int, keys: Interval) -> int | None:
        """The last end below `layout` that the reader of `keys` has not reached, of segments that can hold them."""
        lineage, partition = self._lineage, other.partition
        position = self._lowest(partition, keys)
        if position < UNKNOWN_END and partition in lineage.unknown:
            unknown = range(max(lineage.unknown[partition], lineage.first), layout)
            if any(self._held(other, j, keys) is not None for j in unknown):
                return UNKNOWN_END
        layouts, ends = lineage.cuts.get(partition, NO_CUTS)
        last = min(layout, other.last + 1) if other.is_older else layout
        for index in range(bisect_left(layouts, last) - 1, bisect_right(ends, position) - 1, -1):
            held = self._held(other, layouts[index], keys)
            if held is not None and self._lowest(partition, held) < ends[index]:
                return ends[index]
        return None

    def _held(self, other: _Relative, layout: int, keys: Interval) -> Interval | None:
        """Which of `keys`, of its relative, a partition held in a layout."""
        count = self._lineage.count_in(layout)
        if other.is_older:
            return keys if other.low < count <= other.high else None
        if other.partition >= count:
            return None
        return interval(other.partition, count, self._lineage.initial).overlap(keys)

    def _lowest(self, partition: int, keys: Interval) -> int:
        """The reader's lowest position of any of `keys`; 0 if the position is not known."""
        position = self._positions.get(partition, 0)
        return position.lowest(keys) if isinstance(position, Frontier) else position


def sequence_base(layout: int) -> int:
    """The `sequence` of offset 0 in a layout; that of another offset is as much larger.

    The layout's number stands above 48 bits of the offset; from LATE_LAYOUT on, behind a leading one, above 44 of them.
    """
    if layout < LATE_LAYOUT:
        return layout << SEQUENCE_OFFSET_BITS
    return 1 << 62 | (layout - LATE_LAYOUT) << LATE_OFFSET_BITS


def sequence_cuts(lineage: Lineage, partition: int) -> tuple[Sequence[int], Sequence[int]]:
    """The ends of a partition's ended segments, ascending, and the layouts of the segments: one more than ends.

    The layout of `offset` is `layouts[bisect_right(ends, offset)]`: a column of offsets is cut in one search.
    """
    layouts, ends = lineage.cuts.get(partition, NO_CUTS)
    return ends, (*layouts, lineage.current)
