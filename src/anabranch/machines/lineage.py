"""What may be delivered when, through every resize of a topic: the one module that decides it (ordering.md, section 3).

A topic's lineage is the list of its layouts. Layout v has a partition count and, once it has ended, the leader epoch
that ended with it on every partition that then existed (`Layout`); the leaders turn those epochs into offsets
(`Lineage`), which cut every partition's log into segments (p, v), the records appended to p while layout v ruled:

    start(p, v) .. end(p, v)        any may be empty; the last layout's segments have no end yet

`before(p, v)` are the partitions whose keys layout v moved into p. The rule, for a reader's positions `pos`:

    may_deliver(p, v)  =  for all j in 1..v, for all q in before(p, j):  done(q, j-1)
    done(q, w)         =  pos(q) >= end(q, w)  and  may_deliver(q, w)

The recursion matters: a parent without records proves nothing about the grandparent. It always ends, because it only
ever looks at lower layouts, and it never gets stuck, because the lowest unfinished segment is always deliverable.

Positions are committed progress (the next offset to read). A partition that was never read stands at its log start; a
partition that was removed has nothing left to read, so it is done by itself, but what came before it still counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from anabranch.base.limits import SEQUENCE_OFFSET_BITS
from anabranch.machines.placement import moves

BEYOND = 1 << 62
"""A position behind every end: of a partition that is not read, or in which there is nothing left to read."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One partition count that ruled a topic, and the leader epoch that ended with it on each partition."""

    count: int
    ended_epochs: Mapping[int, int] = field(default_factory=dict)
    """Partition to epoch, for every partition that existed when this layout ended; empty while it rules."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The records of `partition` appended while layout `layout` ruled: offsets `start` to `end`, `end` exclusive."""

    partition: int
    layout: int
    start: int
    end: int | None
    """None while the layout rules."""


class GateWait(NamedTuple):
    """What a closed gate waits on: the reader's position of `partition` must reach `offset`."""

    partition: int
    offset: int


@dataclass(frozen=True)
class Lineage:
    """The layouts of a topic, cut into offsets. Immutable; made anew when metadata says there is a new layout."""

    initial: int
    """Partition count at the topic's creation."""
    counts: tuple[int, ...]
    """Partition count of each layout, oldest first; the last one rules now."""
    ends: tuple[Mapping[int, int], ...] = ()
    """`ends[v][p]` is end(p, v): for each ended layout, the partitions that then existed and still exist."""

    def __post_init__(self) -> None:
        assert self.counts and len(self.ends) == len(self.counts) - 1
        assert self.initial >= 1 and min(self.counts) >= self.initial

    @classmethod
    def flat(cls, count: int) -> Lineage:
        """The lineage of a topic that was never resized, or whose broker does not know of resizing."""
        return cls(initial=count, counts=(count,))

    @property
    def current(self) -> int:
        """The number of the layout that rules now."""
        return len(self.counts) - 1

    @property
    def count(self) -> int:
        """The partition count that rules now."""
        return self.counts[-1]

    def before(self, partition: int, layout: int) -> tuple[int, ...]:
        """The partitions whose keys `layout` moved into `partition`."""
        return self._moves[layout].get(partition, ())

    @cached_property
    def _moves(self) -> tuple[Mapping[int, tuple[int, ...]], ...]:
        """For each layout, `before` of the partitions that have any."""
        pairs = zip(self.counts, self.counts[1:], strict=False)
        return ({}, *(moves(old, new, self.initial) for old, new in pairs))

    def layout_at(self, partition: int, offset: int) -> int:
        """The layout that ruled when the record at `offset` was, or will be, appended to `partition`."""
        for layout, ends in enumerate(self.ends):
            if offset < ends.get(partition, -1):
                return layout
        return self.current

    def segments(self, partition: int, log_start: int) -> Iterator[Segment]:
        """The segments of a partition, oldest first, from `log_start` on; empty ones are left out, the last one not."""
        start = log_start
        for layout, ends in enumerate(self.ends):
            end = ends.get(partition, start)
            if end > start:
                yield Segment(partition, layout, start, end)
                start = end
        yield Segment(partition, self.current, start, None)

    def gates(self, positions: Mapping[int, int]) -> Gates:
        """Decide every gate for a reader that stands at `positions` (every existing partition that it reads)."""
        return Gates(self, positions)

    def may_deliver(self, partition: int, layout: int, positions: Mapping[int, int]) -> bool:
        """Whether a reader that stands at `positions` may be given records of segment (`partition`, `layout`)."""
        return self.gates(positions).may_deliver(partition, layout)

    def deliverable(self, positions: Mapping[int, int]) -> dict[int, int | None]:
        """Say for every partition in `positions` up to which offset its gates are open; None where none is closed.

        Records below it may be delivered now, without waiting for a record of any other partition.
        """
        gates = self.gates(positions)
        return {partition: gates.limit(partition) for partition in positions}

    def waits(self, partition: int, positions: Mapping[int, int]) -> tuple[GateWait, ...]:
        """What the first closed gate of `partition` waits on, in partition order; empty where no gate is closed."""
        return self.gates(positions).waits(partition)

    def sequence(self, partition: int, offset: int) -> int:
        """A number that grows with every record of a key, across resizes (spark.md, section 1)."""
        return self.layout_at(partition, offset) << SEQUENCE_OFFSET_BITS | offset


class Gates:
    """The rule for one set of positions: for each partition, the first layout whose gate is closed.

    A gate that is closed at layout v is closed at every later one, so one pass over the moves of each layout, oldest
    first, decides all: (p, v) is closed if some q of before(p, v) has not been read up to end(q, v-1), or is itself
    closed at v-1.
    """

    def __init__(self, lineage: Lineage, positions: Mapping[int, int]) -> None:
        self._lineage = lineage
        self._positions = positions
        self._closed: dict[int, int] = {}
        for layout, moved in enumerate(lineage._moves):
            for partition, sources in moved.items():
                if partition not in self._closed and not all(self._done(q, layout - 1) for q in sources):
                    self._closed[partition] = layout

    def may_deliver(self, partition: int, layout: int) -> bool:
        """Whether the reader may be given records of segment (`partition`, `layout`)."""
        return self._closed.get(partition, layout + 1) > layout

    def limit(self, partition: int) -> int | None:
        """The offset at which the reader meets the first closed gate of `partition`; None where none is closed."""
        closed = self._closed.get(partition)
        if closed is None:
            return None
        position = self._positions[partition]
        return max(position, *(self._lineage.ends[layout].get(partition, position) for layout in range(closed)))

    def waits(self, partition: int) -> tuple[GateWait, ...]:
        """What the first closed gate of `partition` waits on, in partition order; empty where no gate is closed."""
        found: set[GateWait] = set()
        pending = [partition]
        seen = {partition}
        while pending:
            p = pending.pop()
            if p not in self._closed:
                continue
            layout = self._closed[p]
            for q in self._lineage.before(p, layout):
                if not self._read_up(q, layout - 1):
                    found.add(GateWait(q, self._lineage.ends[layout - 1][q]))
                if not self.may_deliver(q, layout - 1) and q not in seen:
                    seen.add(q)
                    pending.append(q)
        return tuple(sorted(found))

    def _done(self, partition: int, layout: int) -> bool:
        return self.may_deliver(partition, layout) and self._read_up(partition, layout)

    def _read_up(self, partition: int, layout: int) -> bool:
        end = self._lineage.ends[layout].get(partition)
        position = self._positions.get(partition)
        return end is None or (position is not None and position >= end)


def sequence_cuts(lineage: Lineage, partition: int) -> tuple[Sequence[int], Sequence[int]]:
    """The ends of a partition's ended segments, ascending, and the layouts of the segments: one more than ends.

    The layout of `offset` is `layouts[bisect_right(ends, offset)]`: a column of offsets is cut in one search.
    """
    ends: list[int] = []
    layouts: list[int] = []
    for segment in lineage.segments(partition, -1):
        layouts.append(segment.layout)
        if segment.end is not None:
            ends.append(segment.end)
    return ends, layouts
