"""The target assignment: the choice of the assignor, and its input (KIP-848, Assignment).

A client-side assignor is used if every member offers it, in versions that overlap; of several, the one
earliest in the members' lists. Otherwise the server-side assignor that most members named; members that name none, or
one that the broker no longer offers, vote for the broker's first one. An assignor that fails concerns its group alone:
the group keeps its assignment, as far as it is still valid, until its next epoch.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, is_not
from typing import TYPE_CHECKING
from uuid import UUID

from anabranch.machines.groups.assignors.model import Subscriber
from anabranch.machines.groups.assignors.registry import Assignors
from anabranch.machines.groups.consumer.group import Assignment, Assignor, ConsumerGroup, Member, MemberMetadata
from anabranch.machines.groups.consumer.shares import NO_SHARES, Shares
from anabranch.machines.groups.consumer.sharing import (
    Planned,
    divided,
    ordinary_targets,
    planned,
    shared_topics,
)
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.regex import Regexes

if TYPE_CHECKING:
    from anabranch.machines.groups.assignors.planner import Planner

# Each join looks at all members: without a step of the interpreter for each.
_described: Callable[[Member], MemberMetadata] = attrgetter("described")
_named: Callable[[MemberMetadata], str | None] = attrgetter("server_assignor")


class Targets:
    """Computes a group's target. Its cache is a memo: without it the answers are the same."""

    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._said: dict[str, MemberMetadata] = {}
        self._subscribers: dict[str, Subscriber] = {}
        self._willing: set[str] = set()
        """The members that take partitions in part."""
        self._image = -1

    def plan(
        self,
        name: str,
        assignors: Assignors,
        group: ConsumerGroup,
        image: Image,
        regexes: Regexes,
        shares_max: int = 0,
    ) -> Planned:
        """The targets that change, by member, when the assignor `name` decides anew.

        `shares_max`: how many members share a partition at most; 0 where none may.
        """
        from anabranch.machines.groups.assignors.planner import Planner

        planner, self._planner = self._planner or Planner(assignors.uninterrupted), None
        self._look_at(group, image, regexes)
        shared = shared_topics(self._subscribers, self._willing, image) if shares_max and self._willing else []
        if not shared and not group.target_shares:
            changes = planner.plan(assignors.get(name), self._subscribers, image.by_name, group.targets)
            self._planner = planner  # A planner that failed half-way is dropped.
            return Planned(changes)
        ordinary = ordinary_targets(group, shared)
        topics = {topic: known for topic, known in image.by_name.items() if known not in shared}
        changes = planner.plan(assignors.get(name), self._subscribers, topics, ordinary)
        self._planner = planner
        parts = divided(name, group, shared, self._subscribers, self._willing, shares_max)
        return planned(group, image, {**ordinary, **changes}, parts, self._subscribers)

    def kept(self, group: ConsumerGroup, image: Image, regexes: Regexes) -> Planned:
        """The targets that change, by member, when every member keeps what it may: existing partitions, subscribed."""
        self._look_at(group, image, regexes)
        changes: dict[str, Assignment] = {}
        shares: dict[str, Shares] = {}
        for member_id, subscriber in self._subscribers.items():
            target = tuple(
                (topic_id, left)
                for topic_id, numbers in group.target(member_id)
                if (topic := image.by_id.get(topic_id)) is not None
                and topic.name in subscriber.topics
                and (left := _existing(topic, numbers))
            )
            existing = {(topic_id, number) for topic_id, numbers in target for number in numbers}
            parts = group.target_shares.get(member_id, NO_SHARES)
            left_parts = tuple(part for part in parts if part[0] in existing)
            if target != group.targets.get(member_id) or left_parts != parts:
                changes[member_id] = target
                shares[member_id] = left_parts
        return Planned(changes, shares)

    def _look_at(self, group: ConsumerGroup, image: Image, regexes: Regexes) -> None:
        """Update the subscribers of changed members; equal subscriptions are one set."""
        known, members, subscribers = self._said, group.members, self._subscribers
        for gone in known.keys() - members.keys():
            del known[gone], subscribers[gone]
            self._willing.discard(gone)
        moved = image.version != self._image
        self._image = image.version
        sets: dict[tuple[int, str | None], frozenset[str]] = {}
        others = map(is_not, map(_described, members.values()), map(known.get, members))
        for member_id in members if moved else list(compress(members, others)):
            said = members[member_id].described
            if known.get(member_id) is said and said.regex is None:
                continue
            known[member_id] = said
            if said.allow_key_share:
                self._willing.add(member_id)
            else:
                self._willing.discard(member_id)
            topics = sets.get((id(said.topics), said.regex))
            if topics is None:
                topics = sets[id(said.topics), said.regex] = subscription(said, image, regexes)
            before = subscribers.get(member_id)
            if before is None or before.topics != topics or before.instance_id != said.instance_id:
                subscribers[member_id] = Subscriber(topics, said.instance_id)


def _existing(topic: TopicImage, numbers: Iterable[int]) -> tuple[int, ...]:
    existing = {*topic.partitions, *topic.retiring}
    return tuple(number for number in numbers if number in existing)


@dataclass(frozen=True, slots=True)
class AssignorFailed:
    """An effect: report that a group goes without the server-side assignor that its members chose."""

    group_id: str
    assignor: str
    error: Exception | None
    """The exception of the assignor; None if the broker does not offer it (any more)."""


def subscription(said: MemberMetadata, image: Image, regexes: Regexes) -> frozenset[str]:
    """The topics that a member subscribes to, by name and by regex."""
    topics = frozenset(said.topics)
    return topics if said.regex is None else topics | regexes.matches(said.regex, image)


def subscriptions(group: ConsumerGroup, image: Image, regexes: Regexes) -> frozenset[str]:
    """The topics that any member subscribes to."""
    return frozenset().union(*group.topic_lists, *(regexes.matches(regex, image) for regex in group.patterns))


def metadata_hash(topics: Iterable[str], image: Image) -> int:
    """A number that changes when partitions of subscribed topics do; 0 for none. Equal on every run."""
    text = "\n".join(
        f"{name} {topic.topic_id} {_span(topic.partitions)} {_span(topic.retiring)}"
        f"{' by ranges' if topic.accepts_ranges else ''}"
        for name in sorted(name for name in topics if name in image.by_name)
        if (topic := image.by_name.get(name)) is not None
    )
    return zlib.crc32(text.encode()) | len(text) << 32 if text else 0


def _span(numbers: Iterable[int]) -> str:
    listed = list(numbers)
    return f"{listed[0]}-{listed[-1]}/{len(listed)}" if listed else "-"


@dataclass(frozen=True, slots=True)
class Offer:
    """A client-side assignor that can be used."""

    name: str
    version: int
    """The highest metadata version that all members understand (KIP-268)."""


CLASSIC_VERSION = -1
"""The metadata version of a classic member's subscription (KIP-848, JoinGroup)."""


def offers_of(said: MemberMetadata) -> tuple[Assignor, ...]:
    """The client-side assignors that a member offers; a classic member's protocols count as such."""
    if said.classic is None:
        return said.client_assignors
    return tuple(
        Assignor(name, CLASSIC_VERSION, CLASSIC_VERSION, 0, CLASSIC_VERSION, metadata)
        for name, metadata in said.classic.protocols
    )


def client_assignor(offers: Iterable[tuple[Assignor, ...]]) -> Offer | None:
    """The client-side assignor to use; None if members share none."""
    ranks: dict[str, list[int]] = {}
    lowest: dict[str, int] = {}
    highest: dict[str, int] = {}
    members = 0
    for mine in offers:
        if not mine:
            return None
        members += 1
        for rank, offer in enumerate(mine):
            ranks.setdefault(offer.name, []).append(rank)
            lowest[offer.name] = max(lowest.get(offer.name, offer.minimum_version), offer.minimum_version)
            highest[offer.name] = min(highest.get(offer.name, offer.maximum_version), offer.maximum_version)
    usable = [name for name, places in ranks.items() if len(places) == members and lowest[name] <= highest[name]]
    if not usable:
        return None
    name = min(usable, key=lambda name: (sum(ranks[name]), name))
    return Offer(name, highest[name])


def server_assignor(said: Iterable[MemberMetadata], offered: tuple[str, ...]) -> str:
    """The server-side assignor to use."""
    votes: Counter[str] = Counter()
    for name, count in Counter(map(_named, said)).items():
        votes[name if name in offered else offered[0]] += count
    return max(offered, key=lambda name: votes[name])  # The first of several.


def missing_assignor(said: Iterable[MemberMetadata], offered: tuple[str, ...]) -> str | None:
    """A server-side assignor that a member named and the broker does not offer (any more)."""
    named = {*map(_named, said)} - {None, *offered}
    return min((name for name in named if name is not None), default=None)


def said_by(group: ConsumerGroup) -> list[MemberMetadata]:
    """What the members say of themselves."""
    return list(map(_described, group.members.values()))


def assignor_name(group: ConsumerGroup, offered: tuple[str, ...]) -> str:
    """The name of the assignor that computes the group's targets, for descriptions."""
    said = said_by(group)
    offer = client_assignor(map(offers_of, said))
    if offer is not None and any(described.classic is None for described in said):
        return offer.name
    return server_assignor(said, offered)


@dataclass(slots=True)
class Computation:
    """A target requested from a member (volatile: a new coordinator requests it again)."""

    member_id: str
    group_epoch: int
    """The group epoch of the request; from Prepare on, the epoch in its answer."""
    assignor: Offer
    tried: set[str] = field(default_factory=set)
    """Members that were asked before, since the last target, and did not deliver."""
    told: bool = False
    """Whether a heartbeat has asked the member."""
    members: Mapping[str, frozenset[UUID]] | None = None
    """The members of the group at Prepare, each with the ids of the topics that it subscribes to."""
    instances: Mapping[str, str] = field(default_factory=dict)
    """The instance ids of the static members at Prepare, by member id."""
    partitions: Mapping[UUID, frozenset[int]] = field(default_factory=dict)
    """The partitions at Prepare, by topic id."""
    willing: frozenset[str] = frozenset()
    """The members that take partitions in part, at Prepare."""
    shares_max: Mapping[UUID, int] = field(default_factory=dict)
    """How many members may share a partition, at Prepare, of topics that are shared at all."""


def concerned(group: ConsumerGroup, names: frozenset[str], regexes: Regexes) -> bool:
    """Whether the members of a group subscribe to any of these topics, or would if there were such topics."""
    return any(not names.isdisjoint(topics) for topics in group.topic_lists) or any(
        regexes.any_of(regex, names) for regex in group.patterns
    )
