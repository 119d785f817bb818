"""The end of a query's next batch: the log ends, the first closed gates, the layout that they wait for, or the limit.

While a gate of a topic is closed with records behind it, no partition is read beyond the layouts before that gate:
else the partitions without a closed gate would be whole layouts ahead of the others, and the watermark of a query with
them, so that the records behind the gate would be late when they come. Only a gate before which nothing can be read now
(an open transaction holds it back) does not hold the others: they are read up to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from anabranch.base.ids import TopicPartition
from anabranch.machines.lineage import BEYOND
from anabranch.spark.plan.offsets import Loss, Offsets, QueryPositions, TopicOffsets, TopicSnapshot, query_positions


@dataclass(frozen=True, slots=True)
class Extent:
    """The end of the next batch, and the records lost before it."""

    end: Offsets
    losses: tuple[Loss, ...]
    advances: bool
    """False if no record can be read now, so the batch need not run."""


def extent(
    snapshots: Mapping[str, TopicSnapshot],
    start: Offsets,
    limit: int | None = None,
    *,
    assigned: Mapping[str, frozenset[int]] | None = None,
    horizon: Mapping[str, Mapping[int, int]] | None = None,
    reads: Callable[[str], bool] = lambda _: True,
) -> Extent:
    """Choose the end of the micro-batch that begins at `start`, of at most `limit` offsets.

    `horizon` holds the log ends not to read beyond; a partition without an entry is not read. `reads` tells of a topic
    of `start` without a snapshot whether the query would read it: then it was deleted. The limit is shared in
    proportion to the readable offsets. Every partition with readable offsets gets at least one, or, if the limit is
    smaller than their number, gets one in turn.
    """
    losses: list[Loss] = []
    all_positions: dict[str, QueryPositions] = {}
    open_: dict[TopicPartition, int] = {}
    for topic, snapshot in sorted(snapshots.items()):
        found = query_positions(
            snapshot, start.get(topic), None if assigned is None else assigned.get(topic, frozenset())
        )
        all_positions[topic] = found
        losses += found.losses
        ends = {partition: snapshot.ends[partition] for partition in found.positions}
        if horizon is not None:
            known = horizon.get(topic, {})
            ends = {p: min(ends[p], known.get(p, position)) for p, position in found.positions.items()}
        readable = _readable(snapshot, found.positions, ends)
        open_.update((TopicPartition(topic, p), readable[p] - position) for p, position in found.positions.items())
    end_offsets: dict[str, TopicOffsets] = {}
    for topic in sorted(start.keys() - snapshots.keys()):
        if start[topic].offsets:
            losses.append(Loss(topic, None, 0, None, "the topic was deleted"))
        if not reads(topic):
            end_offsets[topic] = start[topic].left_out()
    read_so_far = sum(position for found in all_positions.values() for position in found.positions.values())
    taken = share(open_, limit, turn=read_so_far)
    for topic, found in all_positions.items():
        snapshot = snapshots[topic]
        ends = {
            partition: position + taken.get(TopicPartition(topic, partition), 0)
            for partition, position in found.positions.items()
        }
        seen = {
            partition: snapshot.ends[partition] for partition, end in ends.items() if end < snapshot.ends[partition]
        }
        end_offsets[topic] = snapshot.noted(ends, seen, found.left)
    return Extent(end_offsets, tuple(losses), bool(losses) or any(taken.values()))


def _readable(snapshot: TopicSnapshot, positions: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, int]:
    """Return the offset up to which each partition can be read now, at most its end in `ends`."""
    lineage = snapshot.lineage
    gates = {p: gate for p, gate in _gates(snapshot, positions).items() if gate is not None}
    own = {p: min(end, gates.get(p, end)) for p, end in ends.items()}
    held = {lineage.layout_at(p, gate) for p, gate in gates.items() if gate < ends[p]}
    if not held:
        return own
    oldest = min((lineage.layout_at(p, at) for p, at in positions.items() if at < own[p]), default=lineage.current)
    layout = min((layout for layout in held if layout > oldest), default=None)
    if layout is None:
        return own
    return {p: min(own[p], max(at, lineage.start(p, layout))) for p, at in positions.items()}


def _gates(snapshot: TopicSnapshot, positions: Mapping[int, int]) -> Mapping[int, int | None]:
    """Return the first closed gate of every partition in which something is left to read; None where none is closed."""
    if not snapshot.ordered:
        return {}
    ends = snapshot.ends
    all_positions = {partition: positions.get(partition, BEYOND) for partition in snapshot.starts}
    return snapshot.lineage.deliverable(all_positions, [p for p, position in positions.items() if position < ends[p]])


def share(open_: Mapping[TopicPartition, int], limit: int | None, *, turn: int) -> dict[TopicPartition, int]:
    """Share `limit` offsets out over partitions in proportion to each partition's readable offsets.

    `turn` is the number of offsets read so far. The remainder goes to partitions in rotation, starting at `turn`, so
    every partition has its turn after at most len(open_) / limit batches.
    """
    some = {tp: count for tp, count in open_.items() if count > 0}
    total = sum(some.values())
    if limit is None or total <= limit:
        return some
    assert limit > 0
    names = sorted(open_)
    first = turn % len(names)
    in_turn = [tp for tp in (*names[first:], *names[:first]) if tp in some]
    if limit <= len(some):
        return dict.fromkeys(in_turn[:limit], 1)
    taken = {tp: 1 + (count - 1) * (limit - len(some)) // (total - len(some)) for tp, count in some.items()}
    rest = limit - sum(taken.values())
    for tp in in_turn:
        more = min(rest, 1, some[tp] - taken[tp])
        taken[tp] += more
        rest -= more
    assert rest == 0
    return taken
