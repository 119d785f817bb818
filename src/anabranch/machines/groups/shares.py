"""Frontiers: how far a group is in one partition, by key (keyspace.md, section 3; cooperative.md, section 1).

A frontier is a function from the key space to offsets that is constant on a few intervals: every record whose key is at
x and whose offset is below F(x) is processed. The rules, for frontiers of `lineage.Frontier` form:

- a commit by key range raises F there and nowhere else, and never lowers it;
- a range of offsets that holds or touches F(x) raises it to the range's end, for all such x (`through`);
- the stable offset is min F: where a reader begins that knows nothing of all this.

Steps with the same offset are one step, so that equal functions are equal values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise

from anabranch.base.ids import OFFSET_NOT_SAID
from anabranch.base.limits import RANGES_PER_COMMIT_MAX
from anabranch.machines.groups.individual import OFFSET_MAX, WrongRangesError
from anabranch.machines.keyspace import SPACE_END
from anabranch.machines.lineage import Frontier

KeyRange = tuple[int, int, int]
"""The first and the last place of keys, and the next offset to read of them."""


def constant(offset: int) -> Frontier:
    """The frontier of a plain commit."""
    return Frontier((0,), (offset,))


def frontier_of(starts: Sequence[int], offsets: Sequence[int], stable: int) -> Frontier:
    """Read a frontier from a record; one that cannot be is the stable offset for all keys, which loses nothing."""
    sound = len(starts) == len(offsets) and starts[0] == 0 and min(offsets) >= stable if starts else False
    ascending = sound and all(one < other for one, other in pairwise(starts))
    return _of(zip(starts, offsets, strict=True)) if ascending else constant(stable)


def stable(frontier: Frontier) -> int:
    """The stable offset: the lowest of any key."""
    return min(frontier.offsets)


def is_constant(frontier: Frontier) -> bool:
    """Whether all keys have the same offset, as after a plain commit."""
    return len(frontier.starts) == 1


def raised(frontier: Frontier, ranges: Iterable[KeyRange]) -> Frontier:
    """Raise the frontier to the offset of each range of keys, where it is below. The ranges are `checked`."""
    starts, offsets = list(frontier.starts), list(frontier.offsets)
    for start, end, offset in ranges:
        first = _cut(starts, offsets, start)
        last = _cut(starts, offsets, end + 1) if end < SPACE_END else len(starts)
        for step in range(first, last):
            offsets[step] = max(offsets[step], offset)
    return _of(zip(starts, offsets, strict=True))


def rising(frontier: Frontier, ranges: Iterable[KeyRange]) -> list[KeyRange]:
    """The parts of some ranges of keys in which the frontier is below their offset. The ranges are `checked`."""
    steps, found, step = shares(frontier), [], 0
    for start, end, offset in ranges:
        while steps[step][1] < start:
            step += 1
        for one, two, at in islice(steps, step, None):
            if one > end:
                break
            if at < offset:
                found.append((max(start, one), min(end, two), offset))
    return found


def at_least(frontier: Frontier, offset: int) -> Frontier:
    """Raise the frontier to an offset for all keys."""
    return through(frontier, lambda step: max(step, offset))


def through(frontier: Frontier, reaches: Callable[[int], int]) -> Frontier:
    """Move each step to where `reaches` says that a reader at its offset is."""
    return _of((start, reaches(offset)) for start, offset in zip(frontier.starts, frontier.offsets, strict=True))


def shares(frontier: Frontier) -> list[KeyRange]:
    """The steps, each with its last place: what a client is told."""
    ends = [*(start - 1 for start in frontier.starts[1:]), SPACE_END]
    return list(zip(frontier.starts, ends, frontier.offsets, strict=True))


def checked(ranges: Iterable[KeyRange]) -> list[KeyRange]:
    """Sort ranges of keys. WrongRangesError where one is none, or two overlap, or they are many."""
    found = sorted(ranges)
    if len(found) > RANGES_PER_COMMIT_MAX:
        raise WrongRangesError(f"{len(found)} ranges are committed at once; {RANGES_PER_COMMIT_MAX} can be.")
    last = -1
    for start, end, offset in found:
        if not 0 <= start <= end <= SPACE_END:
            raise WrongRangesError(f"The keys {start}-{end} are none: they end before they start, or out of bounds.")
        if start <= last:
            raise WrongRangesError(f"The keys {start}-{end} overlap those that end at {last}.")
        if not OFFSET_NOT_SAID <= offset <= OFFSET_MAX + 1:
            raise WrongRangesError(f"The keys {start}-{end} have the offset {offset}, which is none.")
        last = end
    return found


def _cut(starts: list[int], offsets: list[int], at: int) -> int:
    """Have a step begin at a place; return its number."""
    step = bisect_left(starts, at)
    if step == len(starts) or starts[step] != at:
        starts.insert(step, at)
        offsets.insert(step, offsets[step - 1])
    return step


def _of(steps: Iterable[tuple[int, int]]) -> Frontier:
    starts: list[int] = []
    offsets: list[int] = []
    for start, offset in steps:
        if not offsets or offsets[-1] != offset:
            starts.append(start)
            offsets.append(offset)
    return Frontier(tuple(starts), tuple(offsets))


def done_below(offset: int, position: int, frontier: Frontier | None) -> int:
    """Return a number that grows with what is done of any key below an offset: of all of it where that is -1.

    It is the position where that is the same for all keys.
    """
    if frontier is None:
        return position
    ends = (*frontier.starts[1:], SPACE_END + 1)
    return sum(
        (end - start) * (max(at, position) if offset < 0 else min(max(at, position), offset))
        for start, end, at in zip(frontier.starts, ends, frontier.offsets, strict=True)
    )
