"""The deliverable records: the gates are evaluated once with the positions of all partitions of a topic."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching.state import FetchingState, Partition, Topic
from anabranch.machines.clients.fetching.values import Deliverable, TopicView
from anabranch.machines.lineage import BEYOND


def deliverable(state: FetchingState) -> list[Deliverable]:
    """Return the deliverable records; a partition's parts in order, with a different first partition in every call."""
    groups: list[list[Deliverable]] = []
    for topic in state.topics.values():
        if topic.view is None or not any(partition.held for partition in topic.partitions.values()):
            continue
        if topic.limits is None:
            topic.limits = _limits(topic, topic.view)
        for partition in topic.partitions.values():
            group = _parts(partition, topic.limits.get(partition.number))
            if group:
                groups.append(group)
    state.turn += 1
    first = state.turn % len(groups) if groups else 0
    return [part for group in (*groups[first:], *groups[:first]) for part in group]


def _parts(partition: Partition, limit: int | None) -> list[Deliverable]:
    found: list[Deliverable] = []
    if partition.paused or partition.position is None:
        return found
    start = partition.position
    for fetched in partition.held:
        end = fetched.next_offset if limit is None else min(limit, fetched.next_offset)
        if end <= start:
            break
        found.append(Deliverable(partition.topic.name, partition.number, fetched, start, end))
        start = end
    return found


def is_next(state: FetchingState, part: Deliverable) -> bool:
    """Whether `part` begins at the position of its partition."""
    partition = state.find(TopicPartition(part.topic, part.partition))
    return partition is not None and partition.position == part.start


def all_handed_out(state: FetchingState, parts: Sequence[Deliverable]) -> bool:
    """Move the positions past `parts`. Return False, and move none, if a position is not where its part begins."""
    reached: dict[tuple[str, int], int] = {}
    for part in parts:
        name = (part.topic, part.partition)
        if part.start != reached[name] if name in reached else not is_next(state, part):
            return False
        reached[name] = part.end
    for part in parts:
        handed_out(state, part, part.end)
    return True


def handed_out(state: FetchingState, part: Deliverable, offset: int) -> None:
    """Move the position from the start of `part` to `offset`."""
    partition = state.partition(TopicPartition(part.topic, part.partition))
    assert partition.position == part.start, (partition.name, partition.position, part.start)
    assert part.start <= offset <= part.end
    partition.position = offset
    view = partition.topic.view
    if view is not None and view.lineage.current:
        layouts = {view.lineage.layout_at(part.partition, at) for at in (part.start, offset)}
        state.milestone = state.milestone or len(layouts) > 1
    while partition.held and partition.held[0].next_offset <= offset:
        partition.held_size -= len(partition.held.popleft().data)
    limits = partition.topic.limits
    if limits is not None and any(limit is not None for limit in limits.values()):
        partition.topic.limits = None


def waits(state: FetchingState) -> tuple[TopicPartition, ...]:
    """Return the partitions of other members that gates of granted partitions wait on."""
    found: set[TopicPartition] = set()
    for topic in state.topics.values():
        view = topic.view
        if not topic.granted or view is None or not view.ordered or view.lineage.current == 0:
            continue
        gates = view.lineage.gates(_positions(topic, view))
        for number in topic.partitions:
            names = (TopicPartition(topic.name, wait.partition) for wait in gates.waits(number))
            found.update(tp for tp in names if tp.partition not in topic.partitions)
    return tuple(sorted(found))


def _limits(topic: Topic, view: TopicView) -> dict[int, int | None]:
    """Return the offset at which each partition must stop, given the positions of all of them."""
    if not view.ordered or view.lineage.current == 0:
        return {}
    return view.lineage.deliverable(_positions(topic, view))


def _positions(topic: Topic, view: TopicView) -> dict[int, int]:
    """Return the position of each partition: the known ones of other members, BEYOND for unassigned ones."""
    if topic.granted:
        positions = dict(topic.elsewhere)
    else:
        positions = dict.fromkeys((*view.lineage.cuts, *view.lineage.unknown), BEYOND)
    for number, partition in topic.partitions.items():
        positions.pop(number, None)
        if partition.position is not None:
            positions[number] = partition.position
    return positions
