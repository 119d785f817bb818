"""Which topics a group's members share, and the target that follows (cooperative.md, section 3).

A topic is shared while it allows that (`accept.range.fetch`), the broker takes commits by ranges, and more members that
are willing subscribe to it than it has live partitions. Members that are not willing take part with their due number
of whole partitions, rounded down; willing members share the others. All other topics are assigned as ever.

A topic that is shared no longer goes back to whole partitions: of each, to the member that had most of it, if that is
even enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple
from uuid import UUID

from anabranch.machines.groups.assignors.model import Assignment, Subscriber
from anabranch.machines.groups.assignors.shares import (
    PARTITIONS_BY_LOAD_MAX,
    Held,
    Shared,
    deal_whole,
    divide_in_runs,
    divide_in_turn,
)
from anabranch.machines.groups.consumer.group import ConsumerGroup, same
from anabranch.machines.groups.consumer.shares import NO_SHARES, At, Shares, shares_of
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.key_ranges import RANGES_IN_ALL_MAX, WHOLE, Ranges, size

SHARED_TOPICS_MAX = RANGES_IN_ALL_MAX // 2
"""Topics that a group shares, the first ones by name; the others are whole. A member has a range of each, perhaps two,
and what it reports of them must be no more than one heartbeat may name."""
IN_RUNS = "range"
"""The assignor that does not look at what members have."""


class Planned(NamedTuple):
    """The targets that change, by member, and the keys of those partitions that are in part."""

    targets: dict[str, Assignment]
    shares: Mapping[str, Shares] = {}


def shared_topics(subscribers: Mapping[str, Subscriber], willing: Iterable[str], image: Image) -> list[TopicImage]:
    """The topics that are shared, in the order of their names."""
    counts: dict[frozenset[str], int] = {}
    for member_id in willing:
        topics = subscribers[member_id].topics
        counts[topics] = counts.get(topics, 0) + 1
    by_topic: dict[str, int] = {}
    for topics, count in counts.items():
        for name in topics:
            by_topic[name] = by_topic.get(name, 0) + count
    found = (topic for name in sorted(by_topic) if (topic := image.by_name.get(name)) is not None)
    shared = (topic for topic in found if topic.accepts_ranges and 0 < len(topic.partitions) < by_topic[topic.name])
    return list(islice(shared, SHARED_TOPICS_MAX))


def ordinary_targets(group: ConsumerGroup, shared: Iterable[TopicImage]) -> dict[str, Assignment]:
    """The present targets without topics that are shared now, and without parts of partitions that no longer are."""
    left_out = {topic.topic_id for topic in shared}
    most: dict[At, tuple[int, str]] = {}
    for member_id in sorted(group.target_shares):
        for at, ranges in group.target_shares[member_id]:
            if member_id in group.members and size(ranges) > most.get(at, (0, ""))[0]:
                most[at] = size(ranges), member_id
    found = {}
    for member_id, target in group.targets.items():
        in_part = {at for at, _ in group.target_shares.get(member_id, NO_SHARES)}
        if in_part or any(topic_id in left_out for topic_id, _ in target):
            kept = (
                (
                    topic_id,
                    tuple(
                        number
                        for number in numbers
                        if (topic_id, number) not in in_part or most[topic_id, number][1] == member_id
                    ),
                )
                for topic_id, numbers in target
                if topic_id not in left_out
            )
            target = tuple(entry for entry in kept if entry[1])
        found[member_id] = target
    return found


def planned(
    group: ConsumerGroup,
    image: Image,
    ordinary: Mapping[str, Assignment],
    parts: Mapping[str, Mapping[At, Ranges]],
    members: Iterable[str],
) -> Planned:
    """Put the targets together from what is `ordinary` and the `parts` of shared topics; those that change."""
    targets: dict[str, Assignment] = {}
    shares: dict[str, Shares] = {}
    for member_id in members:
        mine = parts.get(member_id, {})
        target = ordinary.get(member_id, ())
        if mine:
            by_topic: dict[UUID, list[int]] = {}
            for topic_id, number in mine:
                by_topic.setdefault(topic_id, []).append(number)
            more = ((topic_id, tuple(sorted(numbers))) for topic_id, numbers in by_topic.items())
            target = tuple(sorted((*target, *more), key=lambda entry: image.name_of(entry[0])))
        now = shares_of(mine)
        before = group.targets.get(member_id)
        if before is None or now != group.target_shares.get(member_id, NO_SHARES) or not same(before, target):
            targets[member_id] = target
            if now:
                shares[member_id] = now
    return Planned(targets, shares)


def divided(
    name: str,
    group: ConsumerGroup,
    shared: Sequence[TopicImage],
    subscribers: Mapping[str, Subscriber],
    willing: set[str],
    shares_max: int,
) -> dict[str, dict[At, Ranges]]:
    """Divide the shared topics as the assignor `name` does: by member, its partitions and their keys."""
    order = sorted(subscribers, key=lambda member_id: _rank(member_id, subscribers[member_id]))
    held = _held_in_targets(group, {topic.topic_id for topic in shared})
    found: dict[str, dict[At, Ranges]] = {}
    by_load = sum(topic.size for topic in shared) <= PARTITIONS_BY_LOAD_MAX
    for topic in shared:
        mine = [member_id for member_id in order if topic.name in subscribers[member_id].topics]
        has = {member_id: held.get((member_id, topic.topic_id), {}) for member_id in mine}
        for partitions in (topic.partitions, topic.retiring):
            parts = _divided(name, topic, list(partitions), mine, willing, has, shares_max, by_load=by_load)
            for member_id, ranges in parts.items():
                entry = found.setdefault(member_id, {})
                entry.update(((topic.topic_id, number), part) for number, part in ranges.items())
    return found


def _divided(
    name: str,
    topic: TopicImage,
    partitions: list[int],
    members: list[str],
    willing: set[str],
    held: Mapping[str, Held],
    shares_max: int,
    *,
    by_load: bool,
) -> dict[str, dict[int, Ranges]]:
    sharing = [member_id for member_id in members if member_id in willing]
    others = [member_id for member_id in members if member_id not in willing]
    theirs = {number for member_id in others for number in held[member_id]}
    due = len(partitions) * len(others) // len(members)
    whole = sorted(sorted(partitions, key=lambda number: number not in theirs)[:due])
    found = deal_whole(whole, others, held)
    left = [number for number in partitions if number not in whole]
    if len(sharing) <= len(left):
        found.update(deal_whole(left, sharing, held))
        return found
    if left:
        intervals = {number: topic.interval(number) for number in left}
        divide = divide_in_runs if name == IN_RUNS else divide_in_turn
        shared = Shared(intervals, sharing, held, shares_max)
        found.update(divide(shared._replace(loads=topic.load) if by_load else shared))
    return found


def _rank(member_id: str, subscriber: Subscriber) -> tuple[bool, str, str]:
    """Static members first, by instance id, then the others, as for the other assignors."""
    return subscriber.instance_id is None, subscriber.instance_id or "", member_id


def _held_in_targets(group: ConsumerGroup, shared: set[UUID]) -> dict[tuple[str, UUID], dict[int, Ranges]]:
    """By member and shared topic the keys that it has in the present target."""
    found: dict[tuple[str, UUID], dict[int, Ranges]] = {}
    for member_id, target in group.targets.items():
        parts = dict(group.target_shares.get(member_id, NO_SHARES))
        for topic_id, numbers in target:
            if topic_id not in shared:
                continue
            found[member_id, topic_id] = {number: parts.get((topic_id, number), WHOLE) for number in numbers}
    return found
