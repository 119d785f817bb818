"""The key space: where a key lies within its family of partitions, and which interval of it a partition holds.

A family is the partitions with one remainder by the partition count at creation, N: its keys never leave it. Linear
hashing decides by the low bits of `placement hash div N` first, so after those bits are reversed each decision halves
an interval. The rules it keeps, for every partition count C >= N:

- the intervals of a family's partitions tile the space;
- partition p holds a key exactly if p is of the key's family and the key's `spread` lies in `interval(p, C, N)`;
- one partition more halves exactly one interval: the lower half stays, the upper half is the new partition's. One
  partition less puts the halves together again.

So the interval of p begins at the same place for every C, and of two intervals that overlap one holds the other.
`docs/hashing.md` has test vectors for implementations in other languages. `records.kernels` compute the same for the
records of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from anabranch.machines.placement import level_size
from anabranch.records.hashing import fmix64

SPACE_BITS = 63
SPACE_END = (1 << SPACE_BITS) - 1
"""The last place of the key space; the first is 0."""
_WEIGHT_MAX = 1 << 60
HOT_FROM = 4
"""A part of an interval with more than this multiple of the mean load has a hot key."""
_LOW_31 = 0x7FFF_FFFF
_LOW_32 = 0xFFFF_FFFF


class Interval(NamedTuple):
    """Places of the key space, both ends inclusive."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of places."""
        return self.end - self.start + 1

    def overlap(self, other: Interval) -> Interval | None:
        """The places of both, None if they have none in common."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Interval(start, end) if start <= end else None


SPACE = Interval(0, SPACE_END)


def spread(murmur: int, initial: int) -> int:
    """Say where a key lies in the key space of its family (keyspace.md, section 1).

    `murmur` is the key's murmur2 as an unsigned 32-bit number, `initial` the topic's partition count at creation.
    """
    return reverse_31((murmur & _LOW_31) // initial) << 32 | fmix64(murmur) & _LOW_32


def keyless_spread(offset: int, held: Interval) -> int:
    """Say where a record without a key counts, for readers that share a partition (keyspace.md, section 5).

    `held` is the interval of the record's partition in the layout that ruled when the record was appended.
    """
    return (fmix64(offset) & held.size - 1) + held.start


def reverse_31(value: int) -> int:
    """Reverse the order of the low 31 bits."""
    value = (value & 0x5555_5555) << 1 | value >> 1 & 0x5555_5555
    value = (value & 0x3333_3333) << 2 | value >> 2 & 0x3333_3333
    value = (value & 0x0F0F_0F0F) << 4 | value >> 4 & 0x0F0F_0F0F
    value = (value & 0x00FF_00FF) << 8 | value >> 8 & 0x00FF_00FF
    return ((value & 0xFFFF) << 16 | value >> 16) >> 1


def interval(partition: int, count: int, initial: int) -> Interval:
    """The keys that `partition` holds when its topic has `count` partitions (keyspace.md, section 2)."""
    assert 0 <= partition < count
    size = level_size(count, initial)
    bits = (size // initial).bit_length() - 1
    if partition >= size or partition < count - size:
        bits += 1
    start = reverse_31(partition // initial) << 32
    return Interval(start, start + (1 << SPACE_BITS - bits) - 1)


def cuts(held: Interval, readers: int) -> list[Interval]:
    """Cut a partition's interval evenly into shares for `readers` readers, ascending.

    The first share begins at the start of the space and the last one ends at its end, so that a key which another
    partitioner put into the partition belongs to exactly one reader, too.
    """
    return balanced_cuts([(held, 1)], readers)


def cuts_by_load(held: Interval, loads: Sequence[float], readers: int) -> list[Interval]:
    """Cut a partition's interval into shares of nearly equal load for exactly `readers` readers, ascending.

    `loads` are those of equal parts of `held`, ascending, in any unit: records, bytes, or a mix of them. Within a part
    the load counts as spread evenly, but where a part has `HOT_FROM` times the mean and more than half of a share: keys
    are spread by a hash, so that this is a hot key. Nobody knows where in the part it lies, and of two readers of that
    part one would be left without work; so the part is given whole, and the others share the rest.

    Without any load the cuts are even. As with `cuts`, the shares tile the key space; none is empty, as long as each
    part has a place for each reader. The same loads give the same cuts.
    """
    known = [load if isfinite(load) and load > 0 else 0.0 for load in loads]
    largest = max(known, default=0.0)
    if not largest:
        return cuts(held, readers)
    parts = _Parts(held, [int(load / largest * _WEIGHT_MAX) for load in known], readers)
    return _tiled(held, parts.points(0, len(known), readers), readers)


class _Parts:
    """The parts of an interval, by weight; those with a hot key are not divided."""

    def __init__(self, held: Interval, weights: Sequence[int], readers: int) -> None:
        self._weights = weights
        self._begins = [held.start + held.size * part // len(weights) for part in range(len(weights) + 1)]
        total = sum(weights)
        self._hot = [weight > max(total / len(weights) * HOT_FROM, total / readers / 2) for weight in weights]

    def points(self, first: int, after: int, readers: int) -> list[int]:
        """Where to cut the parts from `first` on, before `after`, for so many readers.

        The heaviest part, if it has more than a share, gets a reader of its own, and the two sides divide the others by
        their load, each for itself.
        """
        weights = self._weights[first:after]
        if readers < 2 or not sum(weights):
            return []
        heaviest = first + max(range(len(weights)), key=weights.__getitem__)
        if not self._hot[heaviest] or self._weights[heaviest] * readers <= sum(weights):
            return self._in_turn(first, after, readers)
        below, above = sum(self._weights[first:heaviest]), sum(self._weights[heaviest + 1 : after])
        if readers == 2 and below and above:
            return [self._begins[heaviest + (below < above)]]
        least, most = int(below > 0), readers - 1 - (above > 0)
        low, high = self._readers_max(first, heaviest, readers), self._readers_max(heaviest + 1, after, readers)

        def shares(left: int) -> tuple[float, float]:
            here, there = below / (min(left, low) or 1), above / (min(readers - 1 - left, high) or 1)
            return (here, there) if here > there else (there, here)

        left = min(range(least, most + 1), key=shares)
        found = self.points(first, heaviest, left) if below else []
        found += [self._begins[heaviest]] if below else []
        found += [self._begins[heaviest + 1]] if above else []
        return found + (self.points(heaviest + 1, after, readers - 1 - left) if above else [])

    def _readers_max(self, first: int, after: int, readers: int) -> int:
        """How many of so many readers have work in some parts: where all load is of hot keys, no more than these."""
        loaded = [hot for weight, hot in zip(self._weights[first:after], self._hot[first:after], strict=True) if weight]
        return len(loaded) if all(loaded) else readers

    def _in_turn(self, first: int, after: int, readers: int) -> list[int]:
        """Cut one share after the other: a part that is not divided comes to the nearer one."""
        found: list[int] = []
        left, part, used = sum(self._weights[first:after]), first, 0
        for reader in range(readers, 1, -1):
            wanted, passed = left // reader, 0
            while passed + self._weights[part] - used < wanted:
                passed, part, used = passed + self._weights[part] - used, part + 1, 0
            behind = passed + self._weights[part] - used
            if not self._hot[part]:
                used, left = used + wanted - passed, left - wanted
                size = self._begins[part + 1] - self._begins[part]
                found.append(self._begins[part] + size * used // (self._weights[part] or 1))
            elif passed and wanted - passed < behind - wanted:
                found.append(self._begins[part])
                left -= passed
            else:
                found.append(self._begins[part + 1])
                part, left = part + 1, left - behind
        return found


def _tiled(held: Interval, points: Iterable[int], readers: int) -> list[Interval]:
    """Make the shares that begin at some places, and halve the widest ones until there are enough."""
    starts = sorted({held.start, *(point for point in points if held.start < point <= held.end)})
    while len(starts) < readers:
        widths = [after - start for start, after in pairwise((*starts, held.end + 1))]
        widest = widths.index(max(widths))
        if widths[widest] == 1:
            break
        starts.insert(widest + 1, starts[widest] + widths[widest] // 2)
    return [Interval(start, after - 1) for start, after in pairwise((0, *starts[1:], SPACE_END + 1))]


def balanced_cuts(loads: Iterable[tuple[Interval, int]], readers: int) -> list[Interval]:
    """Cut the key space into at most `readers` shares of nearly equal load, ascending.

    A load is an interval and the number of records whose keys are spread over it evenly; loads may overlap. Shares
    tile the space. Fewer come back only if a share would hold no place at all.
    """
    steps: dict[int, int] = {}
    total = 0
    for held, records in loads:
        density = records * (1 << SPACE_BITS) // held.size
        steps[held.start] = steps.get(held.start, 0) + density
        steps[held.end + 1] = steps.get(held.end + 1, 0) - density
        total += density * held.size
    points: list[int] = []
    passed = density = at = 0
    bounds = sorted(steps)
    for reader in range(1, readers):
        wanted = total * reader
        while at < len(bounds) - 1:
            here = density + steps[bounds[at]]
            mass = here * (bounds[at + 1] - bounds[at])
            if (passed + mass) * readers >= wanted:
                break
            passed, density, at = passed + mass, here, at + 1
        if at < len(bounds) - 1 and (here := density + steps[bounds[at]]):
            points.append(bounds[at] + (wanted - passed * readers) // (here * readers))
    starts = sorted({0, *(point for point in points if point <= SPACE_END)})
    return [Interval(start, after - 1) for start, after in pairwise((*starts, SPACE_END + 1))]
