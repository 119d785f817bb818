"""The gates of a consumer: how far each partition goes, what closed gates wait on, and which segments are announced.

What counts as read decides (ordering.md, section 6). In a group that is the committed progress, also in the partitions
of this member: the committed offset, and what follows without a record for the application (control records, gaps). Of
other members' partitions the coordinator tells. Where nothing is committed, the first position of the owner counts.
Without a group, records count as read when the application asks for the next ones, and unassigned partitions are read.
So are the keys outside of a share: gates are those of the share's keys alone (keyspace.md, section 4). In a group, keys
outside of a member's share count as read as far as is known to be committed. What was deleted counts as read, but for
what this member has fetched before: it is handed out.

A gate whose segment has committed records was open once, and is not closed again, where owners of the keys have come
there: what others have finished out of turn says nothing of keys that wait (`Partition.passed`). Records below the log
start do not count, since a member that finds them deleted begins behind them, and commits that; nor do records below
the place where this member's reset made it begin; and a place behind a closed gate that the application has sought is
not committed. A gate that opens by time counts what it waits on as read up to the offset it needs, and no further: a
later gate waits again. What such a gate waits on is still needed: as soon as that position moves, the coordinator takes
its word back, and the gate is closed. Where several closed gates wait on one partition, the next of them is what is
needed: what the last one waits for may be behind the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching.state import FetchingState, Partition, Topic
from anabranch.machines.clients.fetching.values import TopicView
from anabranch.machines.clients.key_ranges import NOWHERE, at_least, frontier_of, lowest, pieces, set_to
from anabranch.machines.keyspace import SPACE, Interval, interval
from anabranch.machines.lineage import BEYOND, NO_CUTS, Frontier, Gates, GateWait, Lineage, Position
from anabranch.machines.progress import progress as read_up_to


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a member is in one of its partitions."""

    position: int | None
    """The next offset to hand out, or to finish: the application has, or has finished, all records before."""
    progress: int | None
    """Up to where the partition counts as read; None while that is unknown."""
    flushed: int
    """The application has flushed its state of the records before this offset."""
    high_watermark: int
    ends: Sequence[int]
    """Where the ended segments end, ascending."""

    is_shared: bool = False
    """Whether other members have other keys of the partition: only what is committed says how far the group is."""

    @property
    def is_flushed(self) -> bool:
        """Whether the application has flushed its state of all records handed out."""
        return self.position is None or self.position <= self.flushed

    def passes(self, since: int, offset: int) -> bool:
        """Whether a segment ends behind `since`, at `offset` or before."""
        return any(since < end <= offset for end in self.ends)


def is_layered(topic: Topic) -> bool:
    """Whether the topic has gates: ordered, with more than one layout."""
    return topic.view is not None and topic.view.ordered and len(topic.view.lineage.counts) > 1


def progress(partition: Partition) -> int | None:
    """Return the offset up to which the member's partition counts as read; None while that is unknown."""
    base = partition.start if partition.committed is None else partition.committed
    if base is None:
        return partition.told
    if partition.share and partition.committed_by_key is not None:
        return min(_counts(partition, at) for _, _, at in pieces(partition.committed_by_key, partition.share))
    return _counts(partition, base)


def _counts(partition: Partition, base: int) -> int:
    """Up to where keys count as read that are committed, or were begun, at `base`."""
    committed = base if partition.told is None else max(base, partition.told)

    def next_record(offset: int) -> int | None:
        """Return the next record's offset where the fetches have shown that none is left before it."""
        return partition.position if offset >= partition.handed_end else None

    return read_up_to(committed, _gone_below(partition), next_record)


def _gone_below(partition: Partition) -> int:
    """Below where nothing is handed out any more: not the log start while records are kept that lie below it."""
    if partition.held and partition.position is not None:
        return min(partition.log_start, partition.position)
    return partition.log_start


def _by_key(partition: Partition) -> Frontier:
    """Up to where a shared partition counts as read, by key: others' keys as far as they are known to be committed."""
    known = partition.committed_by_key
    if known is None:
        own = progress(partition) or 0
        return frontier_of(((start, end, own) for start, end in partition.share), partition.told or 0)
    mine = [(start, end, _counts(partition, at)) for start, end, at in pieces(known, partition.share)]
    return set_to(at_least(known, partition.told or 0), partition.share, mine)


def limits(topic: Topic) -> dict[int, int | None]:
    """Return the offset at which each assigned partition must stop, None for no limit; evaluate the gates if needed."""
    if topic.limits is None:
        topic.limits, topic.needs = ({}, {}) if not is_layered(topic) else _evaluate(topic)
    return topic.limits


def _evaluate(topic: Topic) -> tuple[dict[int, int | None], dict[int, list[int]]]:
    assert topic.view is not None
    lineage = topic.view.lineage
    positions = _positions(topic, topic.view)
    waiting = gates = lineage.gates(positions)
    lifted: dict[int, Position] = {}
    if topic.lifted:
        lifted = {number: _lifted(positions.get(number), offset) for number, offset in topic.lifted.items()}
        gates = lineage.gates({**positions, **lifted})
    numbers = topic.partitions.keys() & positions.keys()
    found = {number: _limit(topic, gates, number) for number in numbers}
    needs = _needs(_waits(topic, gates, numbers), _waits(topic, waiting, numbers) if topic.lifted else ())
    for number in topic.lifted.keys() - needs.keys():
        others = {each: position for each, position in lifted.items() if each != number}
        without = _waits(topic, lineage.gates({**positions, **others}), numbers)
        if offsets := sorted((wait.offset for wait in without if wait.partition == number), reverse=True):
            needs[number] = offsets  # Of a gate behind others that open by time.
            continue
        del topic.lifted[number]
        topic.bound.discard(number)
        topic.unsure.add(number)
    return found, needs


def need(topic: Topic, number: int) -> int | None:
    """Return up to where the group must read a partition next; None if nothing waits on it.

    Of an own partition that is what has been handed out already, if anything: its next segment may wait on others.
    """
    offsets = topic.needs.get(number)
    if not offsets:
        return None
    partition = topic.partitions.get(number)
    position = None if partition is None else partition.position
    return max((offset for offset in offsets if position is not None and offset <= position), default=offsets[0])


def is_lifted_too_little(topic: Topic, number: int) -> bool:
    """Whether a partition counts as read because gates open by time, and not as far as another gate may need."""
    lifted = None if number in topic.bound else topic.lifted.get(number)
    return lifted is not None and lifted < (need(topic, number) or 0)


def _needs(closed: Iterable[GateWait], by_time: Iterable[GateWait]) -> dict[int, list[int]]:
    """By partition, what gates wait for, the next first. `by_time`: those that are closed, or open by time."""
    needs: dict[int, list[int]] = {}
    for wait in sorted(closed, key=_offset):
        needs.setdefault(wait.partition, []).append(wait.offset)
    for wait in sorted(by_time, key=_offset, reverse=True):
        needs.setdefault(wait.partition, []).append(wait.offset)
    return needs


def _offset(wait: GateWait) -> int:
    return wait.offset


def _waits(topic: Topic, gates: Gates, numbers: Iterable[int]) -> Iterator[GateWait]:
    """What the closed gates of a member wait on; a gate behind others is among them."""
    for number in numbers if topic.granted else ():
        if _limit(topic, gates, number) is not None:
            for keys in topic.partitions[number].share or (None,):
                yield from gates.waits(number, keys)


def _limit(topic: Topic, gates: Gates, number: int) -> int | None:
    partition = topic.partitions[number]
    if partition.share:
        steps = _steps(partition) if topic.granted else [(keys, 0) for keys in partition.share]
        found = [
            at for keys, committed in steps if (at := _limit_of(topic, gates, partition, keys, committed)) is not None
        ]
        return min(found, default=None)
    limit = _at_gate(partition, gates.limit(number))
    passed = partition.committed if partition.passed is None else lowest(partition.passed, (SPACE,))
    if limit is None or not passed or passed <= max(partition.log_start, partition.reset_at):
        return limit
    assert topic.view is not None
    return _begun(topic.view.lineage, number, passed, limit)


def is_sought_past_gate(partition: Partition) -> bool:
    """Whether the application has sought a place behind a closed gate, and was handed nothing from there.

    Where nothing is committed it is, all the same, what the group has to begin at.
    """
    if not partition.is_sought or partition.committed is None or partition.position is None:
        return False
    limit = limits(partition.topic).get(partition.number)
    return limit is not None and limit < partition.position


def _steps(partition: Partition) -> list[tuple[Interval, int]]:
    """The ranges of a share with how far their owners have come, 0 where that is not known."""
    known = partition.passed or partition.committed_by_key or NOWHERE
    return [(Interval(start, end), at) for start, end, at in pieces(known, partition.share)]


def _limit_of(topic: Topic, gates: Gates, partition: Partition, keys: Interval, committed: int) -> int | None:
    limit = _at_gate(partition, gates.limit(partition.number, keys))
    if limit is None or committed <= max(0, partition.log_start, partition.reset_at):
        return limit
    assert topic.view is not None
    return _begun(topic.view.lineage, partition.number, committed, limit)


def _at_gate(partition: Partition, limit: int | None) -> int | None:
    """Where a partition has to stop before records that are behind a closed gate: at the gate, if it is not beyond it.

    What lies behind the gate may count as read, as it is below the log start, or done by others: the member stands at
    the gate all the same, so that what it commits says whether it has gone through.
    """
    view, position = partition.topic.view, partition.position
    if limit is None or view is None or position is None or position >= limit:
        return limit
    return max(position, view.lineage.start(partition.number, view.lineage.layout_at(partition.number, limit)))


def _positions(topic: Topic, view: TopicView) -> dict[int, Position]:
    positions: dict[int, Position]
    if not topic.granted:
        positions = dict.fromkeys((*view.lineage.cuts, *view.lineage.unknown), BEYOND)
        for number, partition in topic.partitions.items():
            positions.pop(number, None)
            if partition.processed is not None:
                position = partition.processed
                positions[number] = _frontier(partition.share, position) if partition.share else position
        return positions
    positions = dict(topic.elsewhere)
    for number, partition in topic.partitions.items():
        positions.pop(number, None)
        if partition.is_of_another_topic:
            continue
        if partition.share:
            positions[number] = _by_key(partition)
            continue
        read = progress(partition)
        if read is not None:
            positions[number] = read
    return positions


def _lifted(position: Position | None, offset: int) -> Position:
    return at_least(position, offset) if isinstance(position, Frontier) else max(offset, position or 0)


def _frontier(share: Sequence[Interval], position: int) -> Frontier:
    """The progress of a reader of some keys: those of others count as read, as partitions of others do."""
    starts, offsets = [0], [BEYOND]
    for start, end in share:
        if starts[-1] == start:
            offsets[-1] = position
        else:
            starts.append(start)
            offsets.append(position)
        if end < SPACE.end:
            starts.append(end + 1)
            offsets.append(BEYOND)
    return Frontier(tuple(starts), tuple(offsets))


def _begun(lineage: Lineage, number: int, committed: int, limit: int) -> int | None:
    """Return the limit without the gates of segments that have committed records."""
    ends = ends_of(lineage, number)
    begun = bisect_left(ends, committed)
    return None if begun == len(ends) else max(limit, ends[begun])


def ends_of(lineage: Lineage, number: int) -> Sequence[int]:
    """Return where the ended segments of a partition end, ascending."""
    return lineage.cuts.get(number, NO_CUTS).ends


# -- announcements ----------------------------------------------------------------------------------------------------


def openings(state: FetchingState) -> tuple[TopicPartition, ...]:
    """Return the partitions whose next record begins a segment with an open gate, and was not announced."""
    if not state.announcing:
        return ()
    return tuple(
        partition.name
        for topic in state.topics.values()
        if topic.granted and is_layered(topic)
        for partition in topic.partitions.values()
        if _is_opening(partition)
    )


def _is_opening(partition: Partition) -> bool:
    if partition.is_still or partition.position is None or not partition.held:
        return False
    start = next_announcement(partition)
    if start is None or partition.position < start:
        return False
    limit = limits(partition.topic).get(partition.number)
    return limit is None or limit > partition.position


def next_announcement(partition: Partition) -> int | None:
    """Return where the next segment begins that must be announced; None without any."""
    topic = partition.topic
    assert topic.view is not None
    starts = topic.gated.get(partition.number)
    if starts is None:
        starts = tuple(_gated_starts(topic.view.lineage, partition.number, max(0, partition.log_start)))
        topic.gated[partition.number] = starts
    return next((start for start in starts if start > partition.announced), None)


def _gated_starts(lineage: Lineage, number: int, log_start: int) -> Iterator[int]:
    """Where segments begin into which keys were moved, since the segment with records before."""
    since = lineage.first
    for segment in lineage.segments(number, log_start):
        if _receives(lineage, number, since, segment.layout):
            yield segment.start
        since = segment.layout


def _receives(lineage: Lineage, number: int, since: int, layout: int) -> bool:
    """Whether a partition holds keys in `layout` that it did not hold in all layouts from `since` on."""
    counts, count = lineage.counts[since - lineage.first : layout - lineage.first], lineage.count_in(layout)
    if not counts or number >= count:
        return False
    if number >= min(counts):
        return True
    return interval(number, max(counts), lineage.initial).size < interval(number, count, lineage.initial).size
