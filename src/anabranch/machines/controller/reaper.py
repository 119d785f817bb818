"""The reaper: a retiring partition that holds no record any more is removed (ordering.md, section 4, step 5).

From the highest index downward, so that the partitions of a topic are always 0 .. n-1, which stock clients rely on.
Intent first: the topic node remembers the partition's next offset and leader epoch, which hides it; then its replicas
are deleted, then its nodes. No resize begins meanwhile: a resize could open the partition again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from anabranch.machines.controller import nodes
from anabranch.machines.controller.effects import Decision
from anabranch.machines.controller.nodes import Removed
from anabranch.machines.controller.plan import Plan
from anabranch.machines.controller.state import ControllerState


class LogRange(NamedTuple):
    """The offsets that the log of a retiring partition holds, `end` exclusive, as its leader saw them.

    Taken only while the leader's role is retiring and no transaction is open in the log: then nothing is appended any
    more, not even a marker. The leader epoch tells a report that comes late, after the partition opened and retired
    again, from one that still holds.
    """

    start: int
    end: int
    leader_epoch: int


def decide_reap(state: ControllerState, name: str, logs: Mapping[int, LogRange]) -> Decision[tuple[int, ...]]:
    """Begin to remove the retiring partitions of a topic that are empty; the reply names them.

    `logs` are the ranges that leaders report; a partition missing in it is assumed to hold records.
    """
    topic = state.topics.get(name)
    if topic is None or name in state.deleting or topic.resize is not None or topic.reaping:
        return Decision(reply=())
    plan = Plan(state, topic)
    empty: dict[int, Removed] = {}
    for partition in range(len(topic.partitions) - 1, topic.undeleted_partition_count - 1, -1):
        log = logs.get(partition)
        if log is None or log.start != log.end or log.leader_epoch != plan.epoch(partition):
            break
        if not plan.confirmed(partition):
            break
        empty[partition] = Removed(next_offset=log.end, leader_epoch=plan.epoch(partition))
    if not empty:
        return Decision(reply=())
    plan.topic = replace(topic, removed={**topic.removed, **empty})
    plan.draft.write(nodes.put_topic(plan.topic))
    plan.publish()
    plan.send_stops(sorted(empty))
    return plan.decision(tuple(sorted(empty)))
