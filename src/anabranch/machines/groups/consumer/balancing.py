"""When the cuts of shared partitions are to be others although no member came or went (ADR 0055).

Every `key.range.balance.interval.ms` the coordinator looks at a group that shares. It begins a new assignment if a
partition has more sharers than `max.shares.per.partition` allows now, or if the measured load of its sharers is so
uneven that `uniform` would cut it anew.
"""

from __future__ import annotations

from anabranch.machines.groups.assignors.shares import PARTITIONS_BY_LOAD_MAX, is_worth_a_move
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.consumer.shares import At
from anabranch.machines.groups.consumer.sharing import IN_RUNS
from anabranch.machines.groups.consumer.step import Step
from anabranch.machines.groups.consumer.target import client_assignor, offers_of, server_assignor
from anabranch.machines.key_ranges import Ranges


def expect_look(step: Step) -> None:
    """Look at the group again later, if it shares."""
    if step.group.target_shares and step.settings.balance_interval_ms:
        step.draft.set_timer(("balance", step.group_id), step.now_ms + step.settings.balance_interval_ms)


def look(step: Step) -> None:
    """Begin a new assignment if one is due."""
    if _is_due(step):
        step.next_epoch()
        step.assign()
    expect_look(step)


def _is_due(step: Step) -> bool:
    group, settings = step.group, step.settings
    present = _by_partition(group)
    shares_max = settings.shares_max(group.group_id)
    if any(len(sharers) > shares_max for sharers in present.values()):
        return True
    if len(present) > PARTITIONS_BY_LOAD_MAX:
        return False
    said = [member.described for member in group.members.values()]
    if (
        client_assignor(map(offers_of, said)) is not None
        or server_assignor(said, settings.consumer_assignors) == IN_RUNS
    ):
        return False
    for (topic_id, partition), sharers in present.items():
        topic = step.image.by_id.get(topic_id)
        if topic is None or not topic.has(partition):
            continue
        loads = topic.load(partition)
        if any(loads) and is_worth_a_move(topic.interval(partition), loads, sharers):
            return True
    return False


def _by_partition(group: ConsumerGroup) -> dict[At, list[Ranges]]:
    """What the sharers of each partition have in the target, ascending."""
    found: dict[At, list[Ranges]] = {}
    for shares in group.target_shares.values():
        for at, ranges in shares:
            found.setdefault(at, []).append(ranges)
    return {at: sorted(sharers) for at, sharers in found.items()}
