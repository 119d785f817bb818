"""Sets of places of the key space, as ranges: the algebra of what members of a group hold of one partition.

A set is a tuple of intervals, ascending, disjoint and not adjacent, so that equal sets are equal values. The empty
tuple is the empty set, and `WHOLE` is everything: a partition that nobody shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from anabranch.machines.keyspace import SPACE, SPACE_END, Interval

Ranges: TypeAlias = tuple[Interval, ...]
NONE: Ranges = ()
WHOLE: Ranges = (SPACE,)
RANGES_MAX = 1_000
"""Ranges of one partition that a member or an assignor can name."""
RANGES_IN_ALL_MAX = 1_000
"""Ranges of all partitions that are named of one member, those of whole partitions left out."""


class WrongKeyRangesError(ValueError):
    """Ranges of keys that are no set: one ends before it starts, or two overlap; with a sentence."""


def ranges_of(intervals: Iterable[tuple[int, int]]) -> Ranges:
    """Make a set of ranges in any order, which may be neighbors. WrongKeyRangesError where they are no set."""
    found = sorted(intervals)
    if len(found) > RANGES_MAX:
        raise WrongKeyRangesError(f"{len(found)} ranges of keys are named of one partition; {RANGES_MAX} can be.")
    last = -1
    for start, end in found:
        if not 0 <= start <= end <= SPACE_END:
            raise WrongKeyRangesError(f"the keys {start}-{end} are none: they end before they start, or out of bounds")
        if start <= last:
            raise WrongKeyRangesError(f"the keys {start}-{end} overlap those that end at {last}")
        last = end
    return joined(found)


def size(ranges: Ranges) -> int:
    """The number of places."""
    return sum(it.size for it in ranges)


def union(one: Ranges, other: Ranges) -> Ranges:
    """The places of either."""
    if not one or not other:
        return one or other
    return joined((*one, *other))


def common(one: Ranges, other: Ranges) -> Ranges:
    """The places of both."""
    if one == other or other == WHOLE:
        return one
    found: list[Interval] = []
    mine, theirs = 0, 0
    while mine < len(one) and theirs < len(other):
        both = one[mine].overlap(other[theirs])
        if both is not None:
            found.append(both)
        if one[mine].end < other[theirs].end:
            mine += 1
        else:
            theirs += 1
    return tuple(found)


def without(one: Ranges, other: Ranges) -> Ranges:
    """The places of `one` that are not of `other`."""
    return common(one, complement(other)) if one and other else one


def complement(ranges: Ranges) -> Ranges:
    """All other places."""
    found, start = [], 0
    for it in ranges:
        if start < it.start:
            found.append(Interval(start, it.start - 1))
        start = it.end + 1
    if start <= SPACE_END:
        found.append(Interval(start, SPACE_END))
    return tuple(found)


def joined(intervals: Iterable[tuple[int, int]]) -> Ranges:
    """The places of any of some intervals, in any order, which may overlap."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1].end + 1:
            found[-1] = Interval(found[-1].start, max(found[-1].end, end))
        else:
            found.append(Interval(start, end))
    return tuple(found)
