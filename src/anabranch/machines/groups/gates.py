"""Gates of a group: the partitions that wait for records of other partitions (ordering.md, section 8; ADR 0018).

The coordinator assigns a partition only when its gate is open: when the group has read every record that comes before,
as its committed offsets show. A partition without a committed offset stands at its log start, until its owner has had
it for its rebalance timeout: then the owner has nothing to commit, and the partition counts as read.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.consumer.reconcile import Waits
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.positions import Position
from anabranch.machines.lineage import BEYOND

Committed = Callable[[str, int], Position | None]
"""The committed offset of a partition, by topic name and index."""
OwnedSince = dict[tuple[UUID, int], tuple[str, int]]
"""By partition without a committed offset: its owner, and since when (ms) the owner is known to have it."""


def gates_of(group: ConsumerGroup, image: Image, committed: Committed, owned_since: OwnedSince, now_ms: int) -> Waits:
    """Return the test for partitions that wait. Each topic is looked at once, when it is first asked for.

    A missing partition waits, too: a target that a member computed may be older than the metadata.
    """
    closed: dict[UUID, frozenset[int]] = {}

    def waits(topic_id: UUID, partition: int) -> bool:
        topic = image.by_id.get(topic_id)
        if topic is None or not topic.has(partition):
            return True
        if topic_id not in closed:
            closed[topic_id] = closed_partitions(group, topic, committed, owned_since, now_ms)
        return partition in closed[topic_id]

    return waits


def closed_partitions(
    group: ConsumerGroup, topic: TopicImage, committed: Committed, owned_since: OwnedSince, now_ms: int
) -> frozenset[int]:
    """Return the partitions of a topic whose gates are closed for the group."""
    if topic.lineage is None or not topic.lineage.current:
        return frozenset()
    positions = {}
    for partition in (*topic.partitions, *topic.retiring):
        position = committed(topic.name, partition)
        if position is not None:
            positions[partition] = position.offset
        elif reads_nothing(group, (topic.topic_id, partition), owned_since, now_ms):
            positions[partition] = BEYOND
        else:
            positions[partition] = topic.log_start(partition)
    gates = topic.lineage.gates(positions)
    return frozenset(
        partition
        for partition, offset in positions.items()
        if not gates.may_deliver(partition, topic.lineage.layout_at(partition, offset))
    )


def reads_nothing(group: ConsumerGroup, partition: tuple[UUID, int], owned_since: OwnedSince, now_ms: int) -> bool:
    """Whether a partition's owner has had it for its rebalance timeout, and so has nothing to commit (ADR 0018)."""
    member = group.members.get(group.holders.get(partition, ""))
    if member is None:
        owned_since.pop(partition, None)
        return False
    owner, since_ms = owned_since.get(partition, ("", now_ms))
    if owner != member.member_id:
        since_ms = now_ms
    owned_since[partition] = member.member_id, since_ms
    return now_ms - since_ms >= member.described.rebalance_timeout_ms
