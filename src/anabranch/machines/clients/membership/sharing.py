"""Partitions and ranges of their keys that a member owns, misses, or must release (cooperative.md, section 3).

A range moves as a partition does: what the target has no longer is revoked, then what is missing is assigned, and what
stays is not touched. A partition without ranges is whole. Members that share nothing have no ranges anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.machines.clients.key_ranges import WHOLE, KeyRanges, places, ranges_in, share
from anabranch.machines.clients.membership.assignors import TopicIdPartition
from anabranch.machines.clients.membership.steps import Owned, by_topic
from anabranch.machines.key_ranges import joined, union, without
from anabranch.machines.keyspace import SPACE
from anabranch.protocol.messages.consumer_group_heartbeat import KeyRange, PartitionKeyRanges, TopicPartitions

Shares = dict[TopicIdPartition, KeyRanges]
"""The ranges of those partitions of a target that are shared."""


def id_of(owned: Owned) -> TopicIdPartition:
    """The partition by the topic's id."""
    return TopicIdPartition(owned.topic_id, owned.partition)


def beyond(owned: frozenset[Owned], target: frozenset[TopicIdPartition], shares: Shares) -> frozenset[Owned]:
    """What is owned and not in the target: partitions, and ranges of partitions of which the target has others."""
    if not shares:
        return frozenset([each for each in owned if id_of(each) not in target])
    found: set[Owned] = set()
    for each in owned:
        at = id_of(each)
        if at not in target:
            found.add(each)
        elif at in shares and (rest := without(places(each.keys), shares[at])):
            found.add(each._replace(keys=share(rest)))
    return frozenset(found)


def added(missing: frozenset[Owned], owned: frozenset[Owned]) -> frozenset[Owned]:
    """Of units of the target that are not owned as they are: what of them is not owned."""
    partly = {each[:3]: each.keys for each in owned if each.keys}
    if not partly:
        return missing
    return frozenset(
        [
            each if (had := partly.get(each[:3])) is None else each._replace(keys=without(places(each.keys), had))
            for each in missing
        ]
    )


def with_ranges(owned: frozenset[Owned], added: frozenset[Owned]) -> frozenset[Owned]:
    """Own more partitions, or more ranges of partitions that are owned."""
    partly = {each[:3]: each for each in owned if each.keys} if any(each.keys for each in added) else {}
    joined: set[Owned] = set()
    replaced: set[Owned] = set()
    for each in added:
        before = partly.get(each[:3])
        if before is None:
            joined.add(each)
        else:
            replaced.add(before)
            joined.add(each._replace(keys=share(union(before.keys, places(each.keys)))))
    return (owned - replaced) | joined


def without_ranges(owned: frozenset[Owned], gone: frozenset[Owned]) -> frozenset[Owned]:
    """Own these partitions, or these ranges of partitions, no longer."""
    kept: set[Owned] = set()
    cut = gone - owned  # What is owned as it goes has no rest.
    if cut:
        of = {each[:3]: each for each in owned}
        for each in cut:
            before = of.get(each[:3])
            if before is None:
                continue
            gone |= {before}
            rest = without(places(before.keys), places(each.keys))
            if rest:
                kept.add(before._replace(keys=share(rest)))
    return (owned - gone) | kept


def shares_in(topics: Iterable[TopicPartitions]) -> Shares:
    """The ranges of the partitions that are shared. ValueError for ranges that are none."""
    found: Shares = {}
    for topic in topics:
        for each in topic.key_ranges:
            ranges = joined(ranges_in((it.start, it.end) for it in each.ranges))
            if ranges and ranges != (SPACE,) and each.partition in topic.partitions:
                found[TopicIdPartition(topic.topic_id, each.partition)] = ranges
    return found


def with_pending(
    target: frozenset[TopicIdPartition], shares: Shares, pending: Iterable[TopicPartitions]
) -> dict[TopicIdPartition, KeyRanges]:
    """The ranges of a target with those that others have yet to release. ValueError for ranges that are none."""
    coming = shares_in(pending)
    found = {
        at: union(shares.get(at, ()), coming.get(at, ()))
        for at in shares.keys() | coming.keys()
        if at in shares or at not in target
    }
    return {at: ranges for at, ranges in found.items() if ranges != (SPACE,)}


def on_wire(owned: frozenset[Owned]) -> list[TopicPartitions]:
    """Owned partitions as a heartbeat reports them; the ranges of a topic's partitions in the order of those."""
    shares = {(each.topic_id, each.partition): each.keys for each in owned if each.keys}
    topics: list[TopicPartitions] = []
    for (_, topic_id), numbers in by_topic(owned).items():
        shared = any((topic_id, number) in shares for number in numbers) if shares else False
        ranges = [
            PartitionKeyRanges(
                partition=number,
                ranges=[KeyRange(start=start, end=end) for start, end in shares.get((topic_id, number), WHOLE)],
            )
            for number in (numbers if shared else ())
        ]
        topics.append(TopicPartitions(topic_id=topic_id, partitions=numbers, key_ranges=ranges))
    return topics
