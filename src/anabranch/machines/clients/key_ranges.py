"""Ranges of keys: what of a partition a member of a group has, and up to where which of them are read.

A share is a set of places (`machines.key_ranges`), but that no range, `WHOLE`, stands for a whole partition, as on the
wire; where a set may be empty, too, functions take and return *places*, and a whole partition is `SPACE`.
A frontier (`lineage.Frontier`) is a function from the key space to offsets, constant on few intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from anabranch.machines.key_ranges import Ranges, complement
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval
from anabranch.machines.lineage import Frontier

KeyRanges = Ranges
"""The ranges of a share; none: the whole partition."""
Piece = tuple[int, int, int]
"""The first and the last place of keys, and an offset."""
WHOLE: KeyRanges = ()
NOWHERE = Frontier((0,), (0,))
"""The frontier of which nothing is read."""


def places(ranges: KeyRanges) -> KeyRanges:
    """The places of a share."""
    return ranges or (SPACE,)


def share(found: KeyRanges) -> KeyRanges:
    """The share that has some places, of which there are some."""
    assert found
    return WHOLE if found == (SPACE,) else found


def has(ranges: Iterable[Interval], place: int) -> bool:
    """Whether a place lies in some ranges."""
    return any(start <= place <= end for start, end in ranges)


# -- frontiers --------------------------------------------------------------------------------------------------------


def pieces(frontier: Frontier, ranges: Iterable[Interval]) -> list[Piece]:
    """The steps of a frontier within some ranges."""
    ends = (*(start - 1 for start in frontier.starts[1:]), SPACE_END)
    return [
        (max(start, one), min(end, two), offset)
        for one, two in ranges
        for start, end, offset in zip(frontier.starts, ends, frontier.offsets, strict=True)
        if start <= two and one <= end
    ]


def frontier_of(steps: Iterable[Piece], outside: int = 0) -> Frontier:
    """A frontier of pieces that do not overlap; `outside`: the offset of all other keys."""
    starts, offsets = [0], [outside]
    for start, end, offset in sorted(steps):
        _step(starts, offsets, start, offset)
        if end < SPACE_END:
            _step(starts, offsets, end + 1, outside)
    return Frontier(tuple(starts), tuple(offsets))


def _step(starts: list[int], offsets: list[int], start: int, offset: int) -> None:
    if starts[-1] == start:
        starts.pop()
        offsets.pop()
    if not offsets or offsets[-1] != offset:
        starts.append(start)
        offsets.append(offset)


def set_to(frontier: Frontier, ranges: KeyRanges, steps: Iterable[Piece]) -> Frontier:
    """Replace a frontier in some ranges by pieces that lie in them; 0 where no piece does."""
    return frontier_of([*pieces(frontier, complement(ranges)), *steps])


def raised(frontier: Frontier, ranges: KeyRanges, offset: int) -> Frontier:
    """Raise a frontier to an offset in some ranges, where it is below."""
    return set_to(frontier, ranges, ((s, e, max(at, offset)) for s, e, at in pieces(frontier, ranges)))


def lowest(frontier: Frontier, ranges: Iterable[Interval]) -> int:
    """The lowest offset of any place of some ranges."""
    return min(frontier.lowest(each) for each in ranges)


def at_least(frontier: Frontier, offset: int) -> Frontier:
    """Raise a frontier to an offset for all keys."""
    return raised(frontier, (SPACE,), offset)


def ranges_in(given: Iterable[tuple[int, int]]) -> Iterator[Interval]:
    """Read ranges from the wire. ValueError for one that ends before it starts, or is out of bounds."""
    for start, end in given:
        if not 0 <= start <= end <= SPACE_END:
            raise ValueError(f"the keys {start}-{end} are none")
        yield Interval(start, end)
