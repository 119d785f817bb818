"""Tasks of a batch: cut by key range, which keeps the order of keys, or by offset.

Keys of a partition lie in its interval of the key space (keyspace.md). So key ranges are cut inside the intervals of
the partitions and layouts that are read, where their records are; the first one begins at the start of the space and
the last one ends at its end, so that keys which another partitioner placed are read exactly once, too.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from anabranch.machines.keyspace import SPACE, Interval, balanced_cuts, spread
from anabranch.machines.lineage import BEYOND, Lineage, sequence_cuts
from anabranch.records.hashing import murmur2
from anabranch.spark.plan.offsets import TopicSnapshot

KeyRange = Interval
"""Keys by their place in the key space, both ends inclusive."""
WHOLE = SPACE


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
    held: tuple[Interval, ...] = (SPACE,)
    """For each of `layouts`, the partition's interval of the key space."""
    initial: int = 1
    """The topic's partition count at creation."""
    topic_id: str = ""
    """Of the topic that was planned: another of this name has other records at these offsets."""
    folds_back: bool = False
    """Whether the query reads elsewhere what is gone of these offsets (`TopicSnapshot.folded_to`)."""
    may_fold_back: bool = False
    """Whether that is so once the partition retires, or is removed, though it had not when this was planned."""

    @property
    def count(self) -> int:
        """The number of offsets in the range."""
        return self.end - self.start

    def spans(self) -> Iterator[tuple[int, int, int, Interval]]:
        """Cut the range by layout: the first offset, the end, the layout, and the partition's interval in it."""
        bounds = (self.start, *self.cuts, self.end)
        for (low, high), layout, held in zip(pairwise(bounds), self.layouts, self.held, strict=True):
            yield low, high, layout, held


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
    assigned: Mapping[str, frozenset[int]] | None = None,
) -> list[Task]:
    """Cut the offsets between two positions into tasks, ordered by topic.

    With `whole`, as in a batch query, the range may span layouts whose segments wait on each other. Without it, each
    partition is independent, as `extent` ensures. A partition without a start position begins at its log start, one
    that was removed is left out. What is folded back meanwhile, the next micro-batches read, if it goes to partitions
    that are `assigned`; nothing does with `whole`.
    """
    units: list[tuple[Read, ...]] = []
    for topic, snapshot in sorted(snapshots.items()):
        read_on = None if assigned is None else assigned[topic]
        reads = list(_reads(snapshot, start.get(topic, {}), end.get(topic, {}), frozenset() if whole else read_on))
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
            tasks += (Task(unit, keys) for keys in key_ranges(unit, pieces))
        else:
            (read,) = unit
            tasks += (Task((part,)) for part in _by_offset(read, pieces))
    return tasks


def key_ranges(reads: Sequence[Read], pieces: int) -> list[KeyRange]:
    """Cut the key space into at most `pieces` ranges that hold nearly equal numbers of the reads' records."""
    return balanced_cuts(((held, high - low) for read in reads for low, high, _, held in read.spans()), pieces)


def keys_within(task: Task, keys: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return those of some keys whose records a task may have, sorted: not all partitions lay in its key range."""
    initials = {read.initial for read in task.reads}
    low, high = task.key_range
    return tuple(
        sorted(key for key in keys if any(low <= spread(murmur2(key), initial) <= high for initial in initials))
    )


def _reads(
    snapshot: TopicSnapshot, start: Mapping[int, int], end: Mapping[int, int], read_on: frozenset[int] | None
) -> Iterator[Read]:
    """`read_on`: the partitions that the query goes on to read; None for all."""
    current = snapshot.lineage.current + 1
    for partition in sorted(end.keys() & snapshot.starts.keys()):
        first = snapshot.starts[partition]
        begin = max(first, start.get(partition, first))
        if begin < end[partition]:
            lineage = snapshot.lineage
            cuts, layouts = _cuts_between(lineage, partition, begin, end[partition])
            held = lineage.held_in(partition, layouts)
            yield Read(
                snapshot.topic,
                partition,
                begin,
                end[partition],
                cuts,
                layouts,
                held,
                lineage.initial,
                snapshot.topic_id,
                snapshot.folded_to(partition, current, read_on) == BEYOND,
                snapshot.may_fold_back(partition, read_on),
            )


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
    for low, high, layout, held in read.spans():
        yield replace(read, start=low, end=high, cuts=(), layouts=(layout,), held=(held,))


def _joined(segments: Iterable[Read]) -> Iterator[Read]:
    """Merge consecutive reads of the same partition."""
    last: Read | None = None
    for read in segments:
        if last is not None and last.partition == read.partition and last.end == read.start:
            last = replace(
                last,
                end=read.end,
                cuts=(*last.cuts, last.end),
                layouts=(*last.layouts, *read.layouts),
                held=(*last.held, *read.held),
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
        layouts, held = read.layouts[first : last + 1], read.held[first : last + 1]
        yield replace(read, start=low, end=high, cuts=read.cuts[first:last], layouts=layouts, held=held)


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
