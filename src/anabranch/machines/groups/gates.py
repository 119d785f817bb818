"""Gates of a group in one topic: the partitions that wait for records of other partitions (ordering.md, 6.1 and 8).

`evaluate` is a function of positions that count as progress (`machines.progress`). A partition is closed when its next
record lies behind a closed gate, unless that gate was open once: the committed offset is above the segment's start, or
the coordinator has handed the partition out at this gate before (`Position.opened`; ADR 0033).

A closed partition is withheld from every member. An owned one stays with its owner, as stock consumers cannot be
stopped within a partition (ADR 0018), except where the gate is of a layout that re-opened the partition: that one is
taken away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.positions import Position
from anabranch.machines.lineage import GateWait, Lineage


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The gates of one topic for one set of positions."""

    closed: Mapping[int, tuple[GateWait, ...]] = field(default_factory=dict)
    """By closed partition: the offsets that positions of other partitions must reach."""
    needs: Mapping[int, int] = field(default_factory=dict)
    """By partition that a gate waits on: the largest offset that is waited for."""
    waiting: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By partition that gates wait on: the closed partitions behind them."""
    ahead: Mapping[int, int] = field(default_factory=dict)
    """By open partition with a closed gate further on: the offset of that gate."""
    reopened: frozenset[int] = frozenset()
    """The closed partitions whose gate is of a layout that re-opened them."""


OPEN = Evaluation()


def evaluate(
    topic: TopicImage, positions: Mapping[int, int], counted: Mapping[int, int], committed: Mapping[int, Position]
) -> Evaluation:
    """Decide which partitions are closed at `positions`, which are progress.

    `counted` are the positions that other partitions' gates count with: larger where a gate opens by time.
    """
    lineage = topic.lineage
    if lineage is None or not lineage.current:
        return OPEN
    gates = lineage.gates(counted)
    closed: dict[int, tuple[GateWait, ...]] = {}
    ahead: dict[int, int] = {}
    reopened: set[int] = set()
    for partition, position in positions.items():
        limit = gates.limit(partition)
        if limit is None:
            continue
        limit = max(limit, position)
        layout = lineage.layout_at(partition, position)
        if gates.may_deliver(partition, layout):
            ahead[partition] = limit
            continue
        start = segment_start(topic, partition, layout)
        was = committed.get(partition)
        if was is not None and (was.offset > start or was.opened >= layout):
            continue
        closed[partition] = gates.waits(partition)
        if was_reopened(lineage, partition, layout, start):
            reopened.add(partition)
    needs: dict[int, int] = {}
    waiting: dict[int, list[int]] = {}
    for partition, waits in closed.items():
        for wait in waits:
            needs[wait.partition] = max(needs.get(wait.partition, 0), wait.offset)
            waiting.setdefault(wait.partition, []).append(partition)
    behind = {number: tuple(those) for number, those in waiting.items()}
    return Evaluation(closed, needs, behind, ahead, frozenset(reopened))


def segment_start(topic: TopicImage, partition: int, layout: int) -> int:
    """Return the offset at which the records of a layout begin in a partition: at its log start at the earliest."""
    assert topic.lineage is not None
    return max(topic.lineage.start(partition, layout), topic.log_start(partition))


def was_reopened(lineage: Lineage, partition: int, layout: int, start: int) -> bool:
    """Whether a partition retired and came back between its record before `start` and its records of `layout`."""
    if start < 1:
        return False
    before = max(lineage.first, lineage.layout_at(partition, start - 1))
    counts = [lineage.count_in(number) for number in range(before, layout + 1)]
    return any(one <= partition < other for one, other in pairwise(counts))
