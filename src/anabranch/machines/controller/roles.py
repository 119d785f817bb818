"""The steps of a resize and the role of every partition in each: the table of ordering.md, section 4.

A resize moves a topic from layout v-1 (C partitions) to v (C'). Its phases run strictly one after the other, each
ends when every leader in it has confirmed its new role, and each partition changes its role in exactly one of them:

    expand   CUT    p < C            ends its epoch, starts the next one, adopts C'
             OPEN   C <= p < C'      is made, or opens again, under C'
    shrink   CLOSE  C' <= p < C      takes no more records, ends its epoch, starts the next one, adopts C'
             CUT    p < C'           ends its epoch, starts the next one, adopts C'
    either   last   p >= C and C'    retires on, ends its epoch, starts the next one, adopts C'

A partition that retires gets a new epoch too, in which nothing is ever appended but the markers of transactions that
were open: so the end of the old one, which is the end of its records, stays where it is. CLOSE before CUT is what keeps
order: if a survivor took appends under C' while a retiring partition still took them under C,
a reader could find the retiring one finished too early. The role of a partition follows from the topic
node and its own state node alone, so the tree alone determines every role.

A resize can be undone in its first phase (`Plan.undo`), because no record has been placed by C' then: in CUT of an
expansion no partition of C' alone exists, and in CLOSE of a shrink no survivor has adopted C'. Later it cannot: a
partition that has opened, or a survivor that takes the keys of closed ones, may hold records that C places elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anabranch.machines.controller.effects import Role
from anabranch.machines.controller.layouts import ended_epoch
from anabranch.machines.controller.nodes import PartitionNode, Phase, Topic

EXPAND = "expand"
SHRINK = "shrink"
PHASES: Mapping[str, tuple[Phase, ...]] = {EXPAND: (Phase.CUT, Phase.OPEN), SHRINK: (Phase.CLOSE, Phase.CUT)}


def direction(old: int, new: int) -> str:
    """Name the direction of a resize."""
    return EXPAND if new > old else SHRINK


def phases(old: int, new: int) -> tuple[Phase, ...]:
    """The phases of a resize, in order."""
    return PHASES[direction(old, new)]


def phase_of(partition: int, old: int, new: int) -> Phase:
    """The phase in which a partition changes its role."""
    if partition < min(old, new):
        return Phase.CUT
    if partition >= max(old, new):
        return phases(old, new)[-1]
    return Phase.OPEN if new > old else Phase.CLOSE


def may_undo(topic: Topic) -> bool:
    """Whether the resize that runs can be undone: it is in its first phase."""
    return topic.resize is not None and topic.resize.phase is phases(*counts(topic))[0]


def counts(topic: Topic) -> tuple[int, int]:
    """The counts (C, C') of the resize that runs."""
    return topic.layouts[-2].count, topic.layouts[-1].count


def layout_of(topic: Topic, partition: int) -> int:
    """The number of the layout that the leader of `partition` is to serve."""
    newest = topic.layouts[-1].number
    if topic.resize is None:
        return newest
    old, new = counts(topic)
    order = phases(old, new)
    entered = order.index(phase_of(partition, old, new)) <= order.index(topic.resize.phase)
    return newest if entered else topic.layouts[-2].number


def count_of(topic: Topic, layout: int) -> int:
    """The count of a layout that leaders serve: of the newest one, or of the one before while a resize runs."""
    return next(known.count for known in reversed(topic.layouts) if known.number == layout)


def role_of(topic: Topic, partition: int, node: PartitionNode) -> Role:
    """The target role of the leader of `partition`."""
    layout = layout_of(topic, partition)
    return Role(
        partition=partition,
        leader=node.leader,
        leader_epoch=node.leader_epoch,
        layout=layout,
        retiring=partition >= count_of(topic, layout),
        replicas=topic.partitions[partition],
        isr=node.isr,
        start_offset=node.start_offset,
    )


def due_node(topic: Topic, partition: int, node: PartitionNode | None, controller_epoch: int) -> PartitionNode:
    """The state node that `partition` must have, given its present one. Idempotent."""
    if node is None:
        replicas = topic.partitions[partition]
        gone = topic.removed.get(partition)
        born = 0 if gone is None else gone.leader_epoch + 1
        return PartitionNode(
            leader=replicas[0],
            leader_epoch=born,
            isr=replicas,
            controller_epoch=controller_epoch,
            start_offset=0 if gone is None else gone.next_offset,
            born=born,
        )
    if topic.resize is not None and layout_of(topic, partition) == topic.layouts[-1].number:
        ended = ended_epoch(topic.ended.get(partition, ()), topic.layouts[-2].number)
        if ended is not None and node.leader_epoch <= ended:
            return replace(node, leader_epoch=ended + 1, controller_epoch=controller_epoch)
    return node
