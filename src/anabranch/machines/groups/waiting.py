"""The partitions of a group that wait at gates, as ConsumerGroupDescribe and DescribeGroups show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar
from uuid import UUID

from anabranch.machines.groups import opened_by_time
from anabranch.machines.groups.classic import ClassicGroupView
from anabranch.machines.groups.gatekeeper import Gatekeeper, Group
from anabranch.machines.groups.gates import Evaluated
from anabranch.machines.groups.group_gates import GroupGates, OpenedByTime
from anabranch.machines.groups.views import ConsumerGroupView
from anabranch.machines.lineage import GateWait
from anabranch.protocol.messages.consumer_group_describe import WaitedOnPartition, WaitingPartition

WAITING_MAX = 1_000
"""Waiting partitions that are listed; of more, their number is told."""
View = TypeVar("View", ConsumerGroupView, ClassicGroupView)


class _Found(NamedTuple):
    """A partition that waits, or whose gate has opened by time."""

    made: Evaluated
    partition: int
    waits_ms: int
    waits: Iterable[GateWait]
    opened_by_time: bool


def with_waiting(view: View, keeper: Gatekeeper, now_ms: int) -> View:
    """Add the waiting partitions to a description: what each waits on, how far that is, and since when."""
    described = view.group
    group, gates = keeper.groups.get(described.group_id), keeper.known(described.group_id)
    if described.error_code or group is None or gates is None:
        return view
    listed: list[WaitingPartition] = []
    omitted = 0
    for found in _find(keeper, group, gates, now_ms):
        if len(listed) == WAITING_MAX:
            omitted += 1
            continue
        listed.append(
            WaitingPartition(
                topic_id=found.made.topic.topic_id,
                topic_name=found.made.topic.name,
                partition=found.partition,
                waits_ms=found.waits_ms,
                waits_on=[_waited_on(keeper, group, gates, found.made, wait, now_ms) for wait in found.waits],
                opened_by_time=found.opened_by_time,
            )
        )
    described.waiting_partitions, described.waiting_partitions_omitted = listed, omitted
    return view


def _find(keeper: Gatekeeper, group: Group, gates: GroupGates, now_ms: int) -> Iterator[_Found]:
    """By topic and partition: those that are kept from somebody, and those whose gate has opened by time."""
    owner = keeper.owner(group, gates)
    opened: dict[UUID, dict[int, OpenedByTime]] = {}
    for (topic_id, partition), entry in gates.by_time.items():
        opened.setdefault(topic_id, {})[partition] = entry
    for topic_id, made in sorted(gates.evaluated.items(), key=lambda item: item[1].topic.name):
        known = opened.get(topic_id, {})
        for partition in sorted({*made.closed, *known}):
            at, verdict = (topic_id, partition), made.verdicts.get(partition)
            if verdict is not None and verdict.is_closed:
                if verdict.is_reopened or opened_by_time.holds_back(group, gates, at, owner):
                    waits_ms = max(0, now_ms - gates.closed_ms.get(at, now_ms))
                    yield _Found(made, partition, waits_ms, verdict.waits, False)
            elif left := opened_by_time.left(gates, made, known[partition]):
                yield _Found(made, partition, known[partition].waited_ms, left, True)


def _waited_on(
    keeper: Gatekeeper, group: Group, gates: GroupGates, made: Evaluated, wait: GateWait, now_ms: int
) -> WaitedOnPartition:
    at = made.topic.topic_id, wait.partition
    watch, stand = gates.standing.watches.get(at), made.stands.get(wait.partition)
    was = keeper.offsets.current(group.group_id, made.topic.name, wait.partition)
    return WaitedOnPartition(
        partition=wait.partition,
        member_id=keeper.holds_up(group, gates, at, was)[0],
        position=watch.position if watch is not None else stand.position if stand is not None else -1,
        offset=wait.offset,
        records_per_second=0.0 if watch is None else watch.rate(now_ms),
    )
