"""The recursive rule of ordering.md, section 3: a second model of the gates, which knows no intervals.

    may_deliver(p, v)  =  for all j in 1..v, for all q in before(p, j):  done(q, j-1)
    done(q, w)         =  pos(q) >= end(q, w)  and  may_deliver(q, w)

`before(p, j)` are the partitions whose keys layout j moved into p. The rule of `anabranch.machines.lineage` is exact,
so wherever it closes a gate, this one does too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping

from anabranch.machines.lineage import NO_CUTS, Lineage
from anabranch.machines.placement import ancestor


def moves(old: int, new: int, initial: int) -> dict[int, tuple[int, ...]]:
    """Say of a change from `old` to `new` partitions whose keys, some or all, it moves into which partition.

    Growing, every new partition takes from one that was there; shrinking, a survivor may take from several.
    """
    if new > old:
        return {partition: (ancestor(partition, old, initial),) for partition in range(old, new)}
    taken: dict[int, tuple[int, ...]] = {}
    for gone in range(new, old):
        survivor = ancestor(gone, new, initial)
        taken[survivor] = (*taken.get(survivor, ()), gone)
    return taken


def before(lineage: Lineage, partition: int, layout: int) -> tuple[int, ...]:
    """The partitions whose keys `layout` moved into `partition`."""
    if layout == lineage.first:
        return ()
    return moves(lineage.count_in(layout - 1), lineage.count_in(layout), lineage.initial).get(partition, ())


def end_of(lineage: Lineage, partition: int, layout: int) -> int:
    """Where a partition's records of a layout and of those before end; 0 for a partition that was removed."""
    layouts, ends = lineage.cuts.get(partition, NO_CUTS)
    index = bisect_right(layouts, layout)
    return ends[index - 1] if index else 0


def direct_parent_rule(lineage: Lineage, positions: Mapping[int, int]) -> Callable[[int, int], bool]:
    """The proposal's rule: only the partitions that keys came from directly are looked at."""
    return lambda partition, layout: all(
        positions.get(q, 0) >= end_of(lineage, q, j - 1)
        for j in range(lineage.first + 1, layout + 1)
        for q in before(lineage, partition, j)
    )


def recursive_rule(lineage: Lineage, positions: Mapping[int, int]) -> Callable[[int, int], bool]:
    """The rule above, in one pass over the moves of each layout, oldest first."""
    closed: dict[int, int] = {}

    def done(partition: int, layout: int) -> bool:
        read = positions.get(partition, 0) >= end_of(lineage, partition, layout)
        return read and closed.get(partition, layout + 1) > layout

    for layout in range(lineage.first + 1, lineage.current + 1):
        moved = moves(lineage.count_in(layout - 1), lineage.count_in(layout), lineage.initial)
        for partition, sources in moved.items():
            if partition not in closed and not all(done(q, layout - 1) for q in sources):
                closed[partition] = layout
    return lambda partition, layout: closed.get(partition, layout + 1) > layout
