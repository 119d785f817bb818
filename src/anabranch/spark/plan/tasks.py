"""Tasks of a batch: cut by key range, which keeps the order of keys, or by offset."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from anabranch.machines.lineage import Lineage, sequence_cuts
from anabranch.spark.plan.offsets import TopicSnapshot

KEY_RANGE_MAX = (1 << 63) - 1


class KeyRange(NamedTuple):
    """Keys by range hash (wire.md, section 4), both ends inclusive."""

    start: int
    end: int


WHOLE = KeyRange(0, KEY_RANGE_MAX)


@dataclass(frozen=True, slots=True)
class Read:
    """Read `topic`-`partition` from offset `start` to `end`, `end` exclusive."""

    topic: str
    partition: int
    start: int
    end: int
    cuts: tuple[int, ...] = ()
    """The ends of the closed segments within the range, ascending (`sequence_cuts`)."""
    layouts: tuple[int, ...] = (0,)

    @property
    def count(self) -> int:
        """The number of offsets in the range."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Task:
    """The offset ranges that one Spark task reads, in this order, restricted to the keys of `key_range`."""

    reads: tuple[Read, ...]
    key_range: KeyRange = WHOLE

    @property
    def count(self) -> int:
        """The number of offsets in all ranges, including offsets of keys outside `key_range`."""
        return sum(read.count for read in self.reads)


@dataclass(frozen=True, slots=True)
class Splitting:
    """The options that control how a batch is cut into tasks."""

    min_partitions: int = 0
    max_records_per_partition: int = 0
    """0: no limit."""
    by_key: bool = True


def plan_tasks(
    snapshots: Mapping[str, TopicSnapshot],
    start: Mapping[str, Mapping[int, int]],
    end: Mapping[str, Mapping[int, int]],
    splitting: Splitting,
    *,
    whole: bool = False,
) -> list[Task]:
    """Cut the offsets between two positions into tasks, ordered by topic.

    With `whole`, as in a batch query, the range may span layouts whose segments wait on each other. Without it, each
    partition is independent, as `extent` ensures. A partition without a start position begins at its log start.
    """
    units: list[tuple[Read, ...]] = []
    for topic, snapshot in sorted(snapshots.items()):
        reads = list(_reads(snapshot, start.get(topic, {}), end.get(topic, {})))
        if whole and splitting.by_key and snapshot.ordered and snapshot.lineage.current:
            units += _families(snapshot.lineage, reads)
        else:
            units += ((read,) for read in reads)
    counts = [sum(read.count for read in unit) for unit in units]
    tasks: list[Task] = []
    for unit, pieces in zip(units, _pieces(counts, splitting), strict=True):
        if pieces == 1:
            tasks.append(Task(unit))
        elif splitting.by_key:
            tasks += (Task(unit, keys) for keys in key_ranges(pieces))
        else:
            (read,) = unit
            tasks += (Task((part,)) for part in _by_offset(read, pieces))
    return tasks


def key_ranges(pieces: int) -> list[KeyRange]:
    """Cut the key space into ranges of nearly equal size."""
    bounds = [(KEY_RANGE_MAX + 1) * i // pieces for i in range(pieces + 1)]
    return [KeyRange(low, high - 1) for low, high in pairwise(bounds)]


def _reads(snapshot: TopicSnapshot, start: Mapping[int, int], end: Mapping[int, int]) -> Iterator[Read]:
    for partition in sorted(end):
        first = snapshot.starts.get(partition, 0)
        begin = max(first, start.get(partition, first))
        if begin < end[partition]:
            cuts, layouts = _cuts_between(snapshot.lineage, partition, begin, end[partition])
            yield Read(snapshot.topic, partition, begin, end[partition], cuts, layouts)


def _cuts_between(lineage: Lineage, partition: int, start: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    cuts, layouts = sequence_cuts(lineage, partition)
    low, high = bisect_right(cuts, start), bisect_right(cuts, end - 1)
    return tuple(cuts[low:high]), tuple(layouts[low : high + 1])


def _families(lineage: Lineage, reads: Sequence[Read]) -> Iterator[tuple[Read, ...]]:
    """Group partitions that share keys; yield each family as one run of reads in layout order."""
    families: dict[int, list[Read]] = {}
    for read in reads:
        families.setdefault(read.partition % lineage.initial, []).append(read)
    for _, family in sorted(families.items()):
        segments = [segment for read in family for segment in _by_segment(read)]
        segments.sort(key=lambda read: (read.layouts[0], read.partition))
        yield tuple(_joined(segments))


def _by_segment(read: Read) -> Iterator[Read]:
    bounds = (read.start, *read.cuts, read.end)
    for (low, high), layout in zip(pairwise(bounds), read.layouts, strict=True):
        yield Read(read.topic, read.partition, low, high, (), (layout,))


def _joined(segments: Iterable[Read]) -> Iterator[Read]:
    """Merge consecutive reads of the same partition."""
    last: Read | None = None
    for read in segments:
        if last is not None and last.partition == read.partition and last.end == read.start:
            last = Read(
                last.topic, last.partition, last.start, read.end, (*last.cuts, last.end), (*last.layouts, *read.layouts)
            )
            continue
        if last is not None:
            yield last
        last = read
    if last is not None:
        yield last


def _by_offset(read: Read, pieces: int) -> Iterator[Read]:
    bounds = [read.start + read.count * i // pieces for i in range(pieces + 1)]
    for low, high in pairwise(bounds):
        first, last = bisect_right(read.cuts, low), bisect_right(read.cuts, high - 1)
        yield Read(read.topic, read.partition, low, high, read.cuts[first:last], read.layouts[first : last + 1])


def _pieces(counts: Sequence[int], splitting: Splitting) -> list[int]:
    """Return the number of tasks for each run of reads: by size, then more for the largest pieces up to the minimum."""
    size = splitting.max_records_per_partition
    pieces = [max(1, -(-count // size)) if size else 1 for count in counts]
    missing = splitting.min_partitions - sum(pieces)
    if missing > 0:
        largest = [(-count / piece, i) for i, (count, piece) in enumerate(zip(counts, pieces, strict=True))]
        heapq.heapify(largest)
        while missing > 0 and largest:
            _, i = heapq.heappop(largest)
            if pieces[i] < counts[i]:
                pieces[i] += 1
                missing -= 1
                heapq.heappush(largest, (-counts[i] / pieces[i], i))
    return pieces
