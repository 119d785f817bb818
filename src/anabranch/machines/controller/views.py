"""Views of the state: the metadata of a topic, its lineage, its description. Pure reading.

A view never shows half a layout: while a resize runs, counts, layouts and partitions are the old ones; once its last
step is durable, all are the new ones. Leader epochs are shown as they are at the leaders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import INTERNAL_TOPICS
from anabranch.machines.controller.effects import Accepted
from anabranch.machines.controller.layouts import Layout, ended_with
from anabranch.machines.controller.nodes import (
    Confirmed,
    DeleteNode,
    MetadataRecord,
    PartitionNode,
    Phase,
    PutNode,
    Topic,
    Unconfirmed,
)
from anabranch.machines.controller.plan import Plan
from anabranch.machines.controller.state import ControllerState

NO_LEADER = -1


@dataclass(frozen=True, slots=True)
class PartitionView:
    """One partition in a Metadata answer."""

    partition: int
    leader: int
    """-1 while its broker is not there."""
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    offline_replicas: tuple[int, ...]
    retiring: bool


@dataclass(frozen=True, slots=True)
class TopicView:
    """One topic in a Metadata answer."""

    name: str
    topic_id: UUID
    internal: bool
    initial_partition_count: int
    undeleted_partition_count: int
    layouts: tuple[Layout, ...]
    """Oldest first; the last one rules."""
    partitions: tuple[PartitionView, ...]
    """0 .. n-1 without a hole, live ones first, then retiring ones."""
    removed: tuple[tuple[int, int], ...] = ()
    """(partition, next offset) of those that were removed and have not been made again."""


class EndedEpoch(NamedTuple):
    """A leader epoch that ended when `layout` began: the proposal's map, one entry of one layout."""

    layout: int
    partition: int
    leader_epoch: int


class LeaderEpochs(NamedTuple):
    """The answer of PartitionLeaderEpochsForPartitions for one partition."""

    creation: tuple[EndedEpoch, ...]
    """`leader_epoch_after_creation`: for each layout that made the partition, or opened it again."""
    deletion: tuple[EndedEpoch, ...]
    """`leader_epoch_before_deletion`: for each layout in which it began to retire."""


@dataclass(frozen=True, slots=True)
class Description:
    """Everything about a topic's shape, for people and consoles."""

    view: TopicView
    resizing_to: int | None
    phase: Phase | None
    waiting_for: tuple[int, ...]
    """Partitions whose leader has not confirmed its target role."""
    reaping: tuple[int, ...]
    removed: tuple[tuple[int, int, int], ...]
    """(partition, next offset, leader epoch) of those that were removed and may be made again."""
    deleting: bool


def topic_view(state: ControllerState, name: str) -> TopicView | None:
    """Return the Metadata view of a topic; None if the topic does not exist or is being deleted."""
    topic = state.topics.get(name)
    if topic is None or name in state.deleting:
        return None
    return view_of(topic, state.partitions.get(name, {}), state.brokers.keys())


def view_of(topic: Topic, nodes: Mapping[int, PartitionNode], live: Collection[int]) -> TopicView:
    """Return the Metadata view of a topic from its partitions' state nodes and the ids of the `live` brokers."""
    layouts = topic.published
    count = layouts[-1].count
    return TopicView(
        name=topic.name,
        topic_id=topic.topic_id,
        internal=topic.name in INTERNAL_TOPICS,
        initial_partition_count=topic.initial_partition_count,
        undeleted_partition_count=count,
        layouts=layouts,
        partitions=tuple(
            _partition_view(topic, partition, nodes[partition], live, retiring=partition >= count)
            for partition in visible_partitions(topic, nodes)
        ),
        removed=tuple((partition, topic.removed[partition].next_offset) for partition in sorted(topic.removed)),
    )


def leader_epochs(topic: Topic, partition: int, entries_max: int) -> LeaderEpochs | None:
    """The epochs that ended when `partition` was made, opened again, or began to retire (KIP-253, Protocol 5).

    For a partition that has been removed too, because the layouts outlive it; the entries are of partitions that exist.
    So a reader learns the whole lineage by asking, for every layout v but the first, for the partition
    `max(count[v-1], count[v]) - 1`, which v made or retired. None where there are more than `entries_max` entries.
    """
    creation: list[EndedEpoch] = []
    deletion: list[EndedEpoch] = []
    for before, layout in pairwise(topic.published):
        old, new = before.count, layout.count
        if min(old, new) <= partition < max(old, new):
            if len(creation) + len(deletion) + len(topic.ended) > entries_max:
                return None
            into = creation if new > old else deletion
            ended = ended_with(topic.ended, layout.number - 1)
            into.extend(EndedEpoch(layout.number, q, epoch) for q, epoch in ended.items())
    return LeaderEpochs(tuple(creation), tuple(deletion))


def describe(state: ControllerState, name: str) -> Description | None:
    """The full shape of a topic, also in deletion; None for an unknown topic."""
    topic = state.topics.get(name)
    if topic is None:
        return None
    deleting = name in state.deleting
    view = topic_view(state, name)
    if view is None:
        view = TopicView(name, topic.topic_id, name in INTERNAL_TOPICS, topic.initial_partition_count, 0, (), ())
    plan = Plan(state, topic)
    gone = frozenset(topic.reaping)
    return Description(
        view=view,
        resizing_to=None if topic.resize is None else topic.resize.to,
        phase=None if topic.resize is None else topic.resize.phase,
        waiting_for=tuple(
            p for p in sorted(topic.partitions) if not deleting and p not in gone and not plan.confirmed(p)
        ),
        reaping=topic.reaping,
        removed=tuple((p, *topic.removed[p]) for p in sorted(topic.removed)),
        deleting=deleting,
    )


class ResizeWait(NamedTuple):
    """A partition that a resize waits for, and why: the error of its leader, LEADER_NOT_AVAILABLE without one."""

    partition: int
    broker_id: int
    error: ErrorCode


def resize_waits(state: ControllerState, name: str) -> tuple[ResizeWait, ...]:
    """The partitions whose leaders refuse, or cannot be told, what the running resize wants of them.

    A leader that has only not answered yet is not among them.
    """
    topic = state.topics.get(name)
    if topic is None or topic.resize is None or name in state.deleting:
        return ()
    errors = state.unconfirmed.get(name, {})
    if not errors and {node.leader for node in state.partitions.get(name, {}).values()} <= state.brokers.keys():
        return ()  # The usual case, without a look at each of perhaps 100,000 partitions.
    plan, waits = Plan(state, topic), []
    for partition in plan.members(topic.resize.phase):
        node = plan.node(partition)
        if node is None or plan.confirmed(partition):
            continue
        error = errors.get(partition) if node.leader in state.brokers else ErrorCode.LEADER_NOT_AVAILABLE
        if error is not None:
            waits.append(ResizeWait(partition, node.leader, error))
    return tuple(waits)


def reached(state: ControllerState, name: str) -> bool:
    """Whether every leader has its role, but those that refuse or cannot be told."""
    topic = state.topics.get(name)
    if topic is None:
        return True
    plan, errors = Plan(state, topic), state.unconfirmed.get(name, {})
    nodes = ((partition, plan.node(partition)) for partition in topic.partitions)
    led = (partition for partition, node in nodes if node is not None and node.leader in state.brokers)
    return all(partition in errors or plan.confirmed(partition) for partition in led)


def topics_of(state: ControllerState, records: Iterable[MetadataRecord]) -> set[str]:
    """The topics whose waits may have changed with these applied records."""
    found: set[str] = set()
    for record in records:
        match record:
            case Confirmed(name) | Unconfirmed(name):
                found.add(name)
            case PutNode(path) | DeleteNode(path):
                match path.split("/")[1:]:
                    case ["brokers", "topics", name] | ["admin", "delete_topics", name]:
                        found.add(name)
                    case ["brokers", "ids", _]:
                        found |= state.resizing
    return found


def idle(state: ControllerState, name: str) -> bool:
    """Whether no change of a topic is in progress: a command answered `Wait` can be submitted again."""
    topic = state.topics.get(name)
    return name not in state.deleting and (topic is None or (topic.resize is None and not topic.reaping))


def settled(state: ControllerState, accepted: Accepted) -> bool:
    """Whether an accepted command has been carried out: every leader serves the new layout, or the topic is deleted."""
    topic = state.topics.get(accepted.topic)
    if topic is None or topic.topic_id != accepted.topic_id:
        return True
    if accepted.layout is None:
        return False
    if accepted.topic in state.deleting or topic.newest > accepted.layout:
        return True
    if canceled(state, accepted):
        return True
    if topic.resize is not None or topic.reaping:
        return topic.newest >= accepted.layout
    plan = Plan(state, topic)
    return all(plan.confirmed(partition) for partition in topic.partitions)


def canceled(state: ControllerState, accepted: Accepted) -> bool:
    """Whether an accepted resize was canceled: its layout is not there, or is that of a later resize."""
    topic = state.topics.get(accepted.topic)
    if topic is None or topic.topic_id != accepted.topic_id or accepted.layout is None or accepted.count is None:
        return False
    newest = topic.layouts[-1]
    replaced = newest.number == accepted.layout and newest.count != accepted.count
    return newest.number < accepted.layout or replaced


def visible_partitions(topic: Topic, nodes: Mapping[int, PartitionNode]) -> list[int]:
    """Return the published partitions of a topic, ascending: live ones, then retiring ones."""
    hidden = set(topic.reaping)
    if topic.resize is not None:
        hidden |= topic.resize.assignment.keys()
    return [p for p in sorted(topic.partitions.keys() - hidden) if p in nodes]


def _partition_view(
    topic: Topic, partition: int, node: PartitionNode, live: Collection[int], *, retiring: bool
) -> PartitionView:
    replicas = topic.partitions[partition]
    return PartitionView(
        partition=partition,
        leader=node.leader if node.leader in live else NO_LEADER,
        leader_epoch=node.leader_epoch,
        replicas=replicas,
        isr=node.isr,
        offline_replicas=tuple(broker for broker in replicas if broker not in live),
        retiring=retiring,
    )
