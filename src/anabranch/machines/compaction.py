"""Compacted topics through resizes: what may be removed from partitions that share keys, and when (ordering.md, 7).

A resize moves keys from a partition to its descendants by linear hashing, or back to an ancestor, so records of one key
lie in several logs: its *family*, always a partition, ancestors and descendants. A record is *newer* than another of
its key if it comes later in the same log, or if its segment is of a later layout. Two records in different logs of one
layout have no order: only producers that place keys by an older count write them, and neither counts as newer.

    a record goes       when a newer, committed, durable record of its key is anywhere in the family
    a tombstone goes    after `delete.retention.ms`, when no other record of its key is left that may be older
    a record of a retiring partition is folded back:
        SUPERSEDED      a newer record is anywhere in the family; nothing is appended
        UNDECIDED       an open transaction wrote the key elsewhere; its end decides, and the partition waits
        FOLD            appended to the survivor once more, under its append lock, before the key's next write

So whoever reads the family in layout order ends with the last value of each key at any time: only records with a newer
one are removed; a tombstone outlives the records that it hides; a folded copy repeats the key's last value, in a later
layout than the original and in front of all later writes. Every step may be repeated after a crash: a copy is itself a
newer record, so a repeated fold finds the key superseded. While a log of the family cannot be read, the others are
cleaned, but no older record may be assumed gone: tombstones stay, and nothing is folded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.lineage import Lineage
from anabranch.machines.placement import ancestor, level_size

NONE_SEEN = -1
PAIRS_MAX = 1_000
"""Pairs of layouts that are compared to find that two partitions share no key; with more they count as sharing."""


class Place(NamedTuple):
    """The place of one record."""

    partition: int
    layout: int
    """The layout of the segment with the record."""
    offset: int


class Trace(NamedTuple):
    """The records of one key in one log, without those of aborted transactions."""

    partition: int
    newest: int = NONE_SEEN
    """Offset of the newest record that is committed and durable."""
    newest_layout: int = NONE_SEEN
    oldest: int = NONE_SEEN
    """Offset of the oldest record, whether or not its transaction is decided."""
    oldest_layout: int = NONE_SEEN
    undecided: bool = False
    """Whether a transaction that is open, or not durably ended, wrote the key."""

    def with_record(self, offset: int, layout: int, *, decided: bool) -> Trace:
        """Add a record behind those seen so far."""
        first = self.oldest == NONE_SEEN
        oldest, oldest_layout = (offset, layout) if first else (self.oldest, self.oldest_layout)
        if not decided:
            return self._replace(oldest=oldest, oldest_layout=oldest_layout, undecided=True)
        return Trace(self.partition, offset, layout, oldest, oldest_layout, self.undecided)


class Fold(Enum):
    """The fate of a record of a retiring partition."""

    SUPERSEDED = "superseded"
    UNDECIDED = "undecided"
    FOLD = "fold"


# -- records ---------------------------------------------------------------------------------------------------------


def superseded_by(record: Place, traces: Iterable[Trace]) -> Trace | None:
    """Find the log of the family with a newer record of the key, the record's own if it is one of several; or None."""
    found: Trace | None = None
    for trace in traces:
        if trace.partition == record.partition:
            if trace.newest > record.offset:
                return trace
        elif trace.newest_layout > record.layout:
            found = trace
    return found


def may_hide_older(tombstone: Place, traces: Iterable[Trace]) -> bool:
    """Whether a record of the tombstone's key is left that may be older: then the tombstone stays."""
    return any(
        NONE_SEEN < trace.oldest < tombstone.offset
        if trace.partition == tombstone.partition
        else NONE_SEEN < trace.oldest_layout <= tombstone.layout
        for trace in traces
    )


def decide_fold(record: Place, traces: Collection[Trace]) -> Fold:
    """Decide the fate of a committed record of a retiring partition whose log is final."""
    if superseded_by(record, traces) is not None:
        return Fold.SUPERSEDED
    if any(trace.undecided for trace in traces if trace.partition != record.partition):
        return Fold.UNDECIDED
    return Fold.FOLD


# -- partitions ------------------------------------------------------------------------------------------------------


def may_fold(retiring: Leadership | None, survivor: Leadership | None) -> bool:
    """Whether records of a retiring partition may be appended to a survivor now: both serve the same layout.

    Between two phases of a resize one of them is a layout behind, and the keys may be about to move on.
    """
    return (
        retiring is not None
        and survivor is not None
        and retiring.retiring
        and not survivor.retiring
        and retiring.topic_id == survivor.topic_id
        and retiring.layout == survivor.layout
        and retiring.undeleted_partition_count == survivor.undeleted_partition_count
        and retiring.survivor == survivor.partition
    )


def share_keys(one: int, one_count: int, other: int, other_count: int, initial: int) -> bool:
    """Whether some key is placed in `one` among `one_count` partitions and in `other` among `other_count`."""
    if one_count <= other_count:
        return ancestor(other, one_count, initial) == one
    return ancestor(one, other_count, initial) == other


def relatives(partition: int, existing: int, initial: int) -> Iterator[int]:
    """The others of `existing` partitions that may share keys with one in some layout: its ancestors, its descendants.

    A partition's ancestors are it without its highest levels; so its descendants are those that are congruent to it
    modulo the first level size above it, and not all that are congruent modulo `initial`. All partitions together have
    as many relatives as ancestors, at most one for each level.
    """
    older = partition
    while older >= initial:
        older -= level_size(older, initial)
        if older < existing:
            yield older
    size = initial if partition < initial else 2 * level_size(partition, initial)
    yield from range(partition + size, existing, size)


def family_of(
    partition: int, dirty: Collection[int], layouts_of: Mapping[int, Sequence[int]], lineage: Lineage
) -> tuple[int, ...]:
    """Find the other partitions that a cleaning of `partition` must look into, ascending.

    They may hold a record of a key with a record in a `dirty` layout of `partition`, or one that a tombstone in
    `partition` hides. `layouts_of`: for every partition the layouts of its segments with records. A partition may also
    hold keys by the count before, of producers that had not heard of the new one.
    """
    own = _placed_by(partition, layouts_of[partition], lineage)
    found: list[int] = []
    for other in sorted(layouts_of):
        if other == partition or (other - partition) % lineage.initial:
            continue
        theirs = _placed_by(other, layouts_of[other], lineage)
        if len(own) * len(theirs) > PAIRS_MAX or any(
            (layout in dirty or earlier <= layout) and share_keys(partition, count, other, other_count, lineage.initial)
            for layout, count in own
            for earlier, other_count in theirs
        ):
            found.append(other)
    return tuple(found)


def _placed_by(partition: int, layouts: Iterable[int], lineage: Lineage) -> list[tuple[int, int]]:
    """The layouts of a partition's records, each with the counts by which producers may have placed them."""
    said = ((layout, at - lineage.first) for layout in layouts for at in (layout, layout - 1))
    placed = ((layout, lineage.counts[index]) for layout, index in said if index >= 0)
    return [(layout, count) for layout, count in placed if partition < count]
