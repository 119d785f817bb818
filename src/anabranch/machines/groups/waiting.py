"""The partitions of a group that wait at gates, as ConsumerGroupDescribe shows them."""

from __future__ import annotations

from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.gatekeeper import Gatekeeper, Group
from anabranch.machines.groups.gates import Evaluated
from anabranch.machines.groups.group_gates import GroupGates
from anabranch.machines.lineage import GateWait
from anabranch.protocol.messages.consumer_group_describe import DescribedGroup, WaitedOnPartition, WaitingPartition

WAITING_MAX = 1_000
"""Waiting partitions that are listed; of more, their number is told."""


def with_waiting(described: DescribedGroup, keeper: Gatekeeper, group: Group | None, now_ms: int) -> DescribedGroup:
    """Add the waiting partitions to a description: what each waits on, how far that is, and since when."""
    gates = keeper.known(described.group_id)
    if gates is None or not isinstance(group, ConsumerGroup):
        return described
    found: list[WaitingPartition] = []
    omitted = 0
    for topic_id, made in sorted(gates.evaluated.items(), key=lambda item: item[1].topic.name):
        for partition in sorted(made.closed):
            verdict = made.verdicts[partition]
            if (topic_id, partition) in group.holders and not verdict.is_reopened:
                continue
            if len(found) == WAITING_MAX:
                omitted += 1
                continue
            since_ms = gates.closed_ms.get((topic_id, partition), now_ms)
            found.append(
                WaitingPartition(
                    topic_id=topic_id,
                    topic_name=made.topic.name,
                    partition=partition,
                    waits_ms=max(0, now_ms - since_ms),
                    waits_on=[_waited_on(group, gates, made, wait, now_ms) for wait in verdict.waits],
                )
            )
    described.waiting_partitions, described.waiting_partitions_omitted = found, omitted
    return described


def _waited_on(
    group: ConsumerGroup, gates: GroupGates, made: Evaluated, wait: GateWait, now_ms: int
) -> WaitedOnPartition:
    at = made.topic.topic_id, wait.partition
    watch, stand = gates.standing.watches.get(at), made.stands.get(wait.partition)
    return WaitedOnPartition(
        partition=wait.partition,
        member_id=group.holders.get(at, ""),
        position=watch.position if watch is not None else stand.position if stand is not None else -1,
        offset=wait.offset,
        records_per_second=0.0 if watch is None else watch.rate(now_ms),
    )
