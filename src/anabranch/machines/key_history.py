"""Where the records of one key lie: in every layout that is left of a topic, the one partition that held the key.

It follows from linear hashing alone (`placement.place`) which partition that was; the lineage says at which offsets,
and the runs of leader epochs under which of them. Records of other keys lie between those offsets, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from anabranch.machines.controller.layouts import Layout, Runs, ended_epoch
from anabranch.machines.keyspace import Interval, interval, spread
from anabranch.machines.lineage import Cuts, Lineage
from anabranch.machines.placement import place
from anabranch.records.hashing import murmur2, placement_hash

NO_CUTS = Cuts((), ())


class Log(NamedTuple):
    """A partition that exists: the offsets of its log, `end` exclusive, and its leader epoch."""

    start: int
    end: int
    leader_epoch: int


class State(StrEnum):
    """What became of a segment."""

    CURRENT = "current"
    """The partition holds the key now."""
    ENDED = "ended"
    EMPTY = "empty"
    """No record is left of it, or there never was one."""
    REMOVED = "removed"
    """Its partition was empty, and was removed."""
    OFFLINE = "offline"
    """The log of its partition cannot be opened."""


class Stay(NamedTuple):
    """One layout in the life of a key. None for what nobody knows, or what has gone."""

    layout: int
    partition_count: int
    partition: int
    state: State
    start: int | None
    end: int | None
    """The offsets that are left of the segment; exclusive, and growing where it is the current one."""
    first_epoch: int | None
    last_epoch: int | None


@dataclass(frozen=True, slots=True)
class KeyHistory:
    """A key of a topic: its place in the key space, and where it lived."""

    key: bytes
    hash: int
    """`murmur2(key) & 0x7fffffff`, which chooses the partition."""
    family: int
    """The partition that held the key when the topic was created; its family holds it ever after."""
    spread: int
    """Where the key lies in the key space of its family."""
    partition: int
    """The partition that holds it now."""
    interval: Interval
    """The part of the key space that this partition holds."""
    stays: tuple[Stay, ...]
    """One for each layout that is left, oldest first."""


def homes(key: bytes, initial: int, layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The partition that holds a key in each layout."""
    placed = placement_hash(key)
    return tuple(place(placed, initial, layout.count) for layout in layouts)


def history_of(
    key: bytes, lineage: Lineage, layouts: Sequence[Layout], logs: Mapping[int, Log], epochs: Mapping[int, Runs]
) -> KeyHistory:
    """Tell the history of a key. `logs` and `epochs` of the partitions in `homes`; one without a log was removed."""
    where = homes(key, lineage.initial, layouts)
    stays = tuple(
        _stay(lineage, layout, partition, logs.get(partition), epochs.get(partition, ()))
        for layout, partition in zip(layouts, where, strict=True)
    )
    return KeyHistory(
        key=key,
        hash=placement_hash(key),
        family=placement_hash(key) % lineage.initial,
        spread=spread(murmur2(key), lineage.initial),
        partition=where[-1],
        interval=interval(where[-1], lineage.count, lineage.initial),
        stays=stays,
    )


def _stay(lineage: Lineage, layout: Layout, partition: int, log: Log | None, runs: Runs) -> Stay:
    rules = layout.number == lineage.current
    before, last = ended_epoch(runs, layout.number - 1), ended_epoch(runs, layout.number)
    if rules and log is not None:
        last = log.leader_epoch
    first = last if before is None else before + 1
    found = Stay(layout.number, layout.count, partition, State.REMOVED, None, None, first, last)
    if partition in lineage.unknown:
        return found._replace(state=State.OFFLINE)
    if log is None:
        return found
    start, end = _offsets(lineage.cuts.get(partition, NO_CUTS), layout.number, log, rules=rules)
    state = State.CURRENT if rules else State.ENDED if end > start else State.EMPTY
    return found._replace(state=state, start=start, end=end)


def _offsets(cuts: Cuts, layout: int, log: Log, *, rules: bool) -> tuple[int, int]:
    """What is left of a segment: (start, end), equal where nothing is."""
    at = bisect_left(cuts.layouts, layout)
    start = max(cuts.ends[at - 1] if at else 0, log.start)
    if rules:
        return start, max(start, log.end)
    cut = at < len(cuts.layouts) and cuts.layouts[at] == layout
    return start, max(start, cuts.ends[at]) if cut else start
