"""The deliverable records: the gates are evaluated once with the positions of all partitions of a topic."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import sharing
from anabranch.machines.clients.fetching.gating import is_layered, limits, next_announcement, progress
from anabranch.machines.clients.fetching.state import FetchingState, Partition, Topic
from anabranch.machines.clients.fetching.values import Deliverable
from anabranch.machines.clients.key_ranges import Piece, pieces
from anabranch.machines.keyspace import SPACE


def deliverable(state: FetchingState) -> list[Deliverable]:
    """Return the deliverable records; a partition's parts in order, with a different first partition in every call."""
    groups: list[list[Deliverable]] = []
    for topic in state.topics.values():
        if topic.view is None or not any(partition.held for partition in topic.partitions.values()):
            continue
        _pass_over_empty(state, topic)
        stops = limits(topic)
        announcing = state.announcing and topic.granted and is_layered(topic)
        for partition in topic.partitions.values():
            stop = stops.get(partition.number)
            group = _parts(partition, _announced(partition, stop) if announcing else stop)
            if group:
                groups.append(group)
    state.turn += 1
    first = state.turn % len(groups) if groups else 0
    return [part for group in (*groups[first:], *groups[:first]) for part in group]


def _pass_over_empty(state: FetchingState, topic: Topic) -> None:
    """Move positions past fetches in which nothing was wanted, as far as the gates are open; that may open others."""
    moved = True
    while moved:
        moved, stops = False, limits(topic)
        for partition in topic.partitions.values():
            if not partition.held or len(partition.held[0].data):
                continue
            for part in _parts(partition, stops.get(partition.number))[:1]:
                handed_out(state, part, part.end, -1)
                moved = True


def _announced(partition: Partition, limit: int | None) -> int | None:
    """Return the limit, not beyond the next segment that must be announced."""
    start = next_announcement(partition)
    return start if limit is None or (start is not None and start < limit) else limit


def _parts(partition: Partition, limit: int | None) -> list[Deliverable]:
    found: list[Deliverable] = []
    if partition.is_still or partition.position is None or partition.is_of_another_topic:
        return found
    start = partition.position
    for fetched in partition.held:
        end = fetched.next_offset if limit is None else min(limit, fetched.next_offset)
        if end <= start:
            break
        found.append(Deliverable(partition.topic.name, partition.number, fetched, start, end, _floor(partition, start)))
        start = end
    return found


def is_next(state: FetchingState, part: Deliverable) -> bool:
    """Whether `part` begins at the position of its partition."""
    partition = state.find(TopicPartition(part.topic, part.partition))
    return partition is not None and partition.position == part.start and _is_held(partition, part)


def _is_held(partition: Partition, part: Deliverable) -> bool:
    """Whether the fetched batches are still those of the partition: other keys, or topics, may be wanted by now."""
    return not partition.is_of_another_topic and any(part.fetched is each for each in partition.held)


def all_handed_out(state: FetchingState, parts: Sequence[Deliverable]) -> bool:
    """Move the positions past `parts`. Return False, and move none, if a position is not where its part begins."""
    reached: dict[tuple[str, int], int] = {}
    for part in parts:
        name = (part.topic, part.partition)
        if part.start != reached[name] if name in reached else not is_next(state, part):
            return False
        if name in reached and not _is_held(state.partition(TopicPartition(*name)), part):
            return False
        reached[name] = part.end
    for part in parts:
        handed_out(state, part, part.end)
    return True


def handed_out(state: FetchingState, part: Deliverable, offset: int, records_end: int | None = None) -> None:
    """Move the position from the start of `part` to `offset`.

    `records_end`: the offset after the last record of them, -1 without any; by default `offset`.
    """
    partition = state.partition(TopicPartition(part.topic, part.partition))
    assert partition.position == part.start, (partition.name, partition.position, part.start)
    assert part.start <= offset <= part.end
    read = progress(partition)
    partition.position = offset
    partition.is_sought = False
    if partition.gone is not None:
        sharing.went(partition, offset)
    partition.handed_end = max(partition.handed_end, offset if records_end is None else records_end)
    topic = partition.topic
    _note_milestone(state, partition, part.start, offset)
    while partition.held and partition.held[0].next_offset <= offset:
        partition.held_size -= len(partition.held.popleft().data)
    counts = not topic.granted or progress(partition) != read
    if counts and topic.limits is not None and any(limit is not None for limit in topic.limits.values()):
        topic.limits = None


def finished(state: FetchingState, tp: TopicPartition, offset: int) -> None:
    """Note that the application has processed all records of a partition before `offset`."""
    partition = state.find(tp)
    if partition is None or partition.finished == offset:
        return
    if partition.finished is not None:
        _note_milestone(state, partition, partition.finished, offset)
    partition.finished = offset
    topic = partition.topic
    if not topic.granted and topic.limits is not None and any(limit is not None for limit in topic.limits.values()):
        topic.limits = None


def _note_milestone(state: FetchingState, partition: Partition, since: int, offset: int) -> None:
    """Note whether the application has passed the end of a layout."""
    view = partition.topic.view
    if view is not None and view.lineage.current:
        layouts = {view.lineage.layout_at(partition.number, at) for at in (since, offset)}
        state.milestone = state.milestone or len(layouts) > 1


def _floor(partition: Partition, start: int) -> Sequence[Piece]:
    """What is to be left out from an offset on, where the broker does not do that."""
    if not partition.is_sifted or partition.floor is None or max(partition.floor.offsets) <= start:
        return ()
    return pieces(partition.floor, (SPACE,))
