"""Assignors that run in a consumer: the `PartitionAssignor` interface of KIP-848.

A consumer with local assignors (`group_local_assignors=[...]`, the preferred one first) offers them to the coordinator.
The coordinator chooses one that every member offers, and one member to run the assignor for the whole group. Every
partition of every subscribed topic must be assigned to exactly one member, and to one that subscribes to its topic.
Or to several members that allow it, each with ranges of its keys, so that every key is assigned once (cooperative.md,
section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from anabranch.machines.key_ranges import Ranges, joined
from anabranch.machines.keyspace import Interval
from anabranch.protocol.messages.consumer_group_heartbeat import Assignor as OfferedAssignor
from anabranch.protocol.messages.consumer_group_heartbeat import KeyRange, PartitionKeyRanges
from anabranch.protocol.messages.consumer_group_install_assignment import (
    ConsumerGroupInstallAssignmentRequest,
)
from anabranch.protocol.messages.consumer_group_install_assignment import Member as InstalledMember
from anabranch.protocol.messages.consumer_group_install_assignment import TopicPartition as InstalledPartitions
from anabranch.protocol.messages.consumer_group_prepare_assignment import ConsumerGroupPrepareAssignmentResponse

NO_ERROR, ASSIGNMENT_ERROR = 0, 2
"""The error of an assignment (KIP-848, "Assignment Metadata Errors")."""


class TopicIdPartition(NamedTuple):
    """One partition of a topic, by topic id."""

    topic_id: UUID
    partition: int


@dataclass(frozen=True, slots=True)
class AssignorMetadata:
    """Metadata from a member to the assignor, or from the assignor to a member. A `reason` other than 0 requests a new
    assignment, and so does changed metadata.
    """

    version: int = 0
    data: bytes = b""
    reason: int = 0


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A member in the assignor's input; `partitions` is its current target assignment."""

    subscribed_topic_ids: frozenset[UUID]
    partitions: frozenset[TopicIdPartition]
    instance_id: str | None = None
    rack_id: str | None = None
    metadata: AssignorMetadata = AssignorMetadata()
    allow_key_share: bool = False
    """Whether the member takes ranges of a partition's keys."""
    key_ranges: Mapping[TopicIdPartition, Ranges] = field(default_factory=dict, hash=False)
    """The keys of those of `partitions` that the member shares with others; the others are whole."""


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic in the assignor's input."""

    name: str
    partition_count: int
    retiring: frozenset[int] = frozenset()
    """Partitions that only empty, and are then removed: a list of their own, to be balanced apart from the others."""
    shares_max: int = 0
    """How many members may share a partition; 0 where partitions are assigned whole."""
    intervals: Mapping[int, Interval] = field(default_factory=dict, hash=False)
    """Where partitions may be shared: by partition the keys that it holds, for `keyspace.cuts`."""


@dataclass(frozen=True, slots=True)
class AssignmentSpec:
    """The group at one epoch: members by member id, topics by topic id."""

    group_epoch: int
    members: Mapping[str, MemberSpec]
    topics: Mapping[UUID, TopicSpec]


@dataclass(frozen=True, slots=True)
class MemberAssignment:
    """The assignment of one member, some partitions possibly pending their revocation by others, with its metadata."""

    partitions: frozenset[TopicIdPartition] = frozenset()
    metadata: AssignorMetadata = AssignorMetadata()
    key_ranges: Mapping[TopicIdPartition, Sequence[tuple[int, int]]] = field(default_factory=dict, hash=False)
    """The keys of those of `partitions` that are shared, both ends inclusive; without ranges a partition is whole."""


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    """The assignment of every member."""

    members: Mapping[str, MemberAssignment] = field(default_factory=dict)
    error: int = NO_ERROR


class PartitionAssignor(ABC):
    """The base class of custom assignors. `assign` runs in its own thread, in the member chosen by the coordinator."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The assignor's name, the same in all members."""

    @property
    def minimum_version(self) -> int:
        """The lowest supported version of metadata; -1 to support classic members."""
        return 0

    @property
    def maximum_version(self) -> int:
        """The highest supported version of metadata."""
        return 0

    def metadata(self) -> AssignorMetadata:
        """Return this member's metadata for the assignor; called for every heartbeat."""
        return AssignorMetadata(version=max(0, self.minimum_version))

    @abstractmethod
    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        """Return the assignment of every member."""

    def on_assignment(self, error: int, assignment: MemberAssignment, member_epoch: int) -> None:
        """Receive this member's assignment in a new epoch; the rebalance listener reports the granted partitions."""
        return


def offer(assignors: tuple[PartitionAssignor, ...]) -> tuple[OfferedAssignor, ...]:
    """Return the assignors in the form of the heartbeat request."""
    offered: list[OfferedAssignor] = []
    for assignor in assignors:
        metadata = assignor.metadata()
        offered.append(
            OfferedAssignor(
                name=assignor.name,
                minimum_version=assignor.minimum_version,
                maximum_version=assignor.maximum_version,
                reason=metadata.reason,
                metadata_version=metadata.version,
                metadata_bytes=metadata.data,
            )
        )
    return tuple(offered)


def spec_of(response: ConsumerGroupPrepareAssignmentResponse) -> AssignmentSpec:
    """Build the assignor's input from the coordinator's description of the group."""
    return AssignmentSpec(
        response.group_epoch,
        {
            member.member_id: MemberSpec(
                frozenset(member.subscribed_topic_ids),
                frozenset(
                    TopicIdPartition(topic.topic_id, number)
                    for topic in member.topic_partitions
                    for number in topic.partitions
                ),
                member.instance_id,
                member.rack_id,
                AssignorMetadata(
                    member.assignor.metadata_version, bytes(member.assignor.metadata_bytes), member.assignor.reason
                ),
                member.allow_key_share,
                {
                    TopicIdPartition(topic.topic_id, number): ranges
                    for topic in member.topic_partitions
                    for number, ranges in _ranges_in(topic.key_ranges)
                },
            )
            for member in response.members
        },
        {
            topic.topic_id: TopicSpec(
                topic.topic_name,
                topic.num_partitions,
                frozenset(topic.retiring_partitions),
                topic.shares_max,
                {number: Interval(held[0].start, held[-1].end) for number, held in _ranges_in(topic.intervals)},
            )
            for topic in response.topics
        },
    )


def install_request(
    group_id: str, member_id: str, member_epoch: int, group_epoch: int, computed: GroupAssignment
) -> ConsumerGroupInstallAssignmentRequest:
    """Return the request that installs a computed assignment."""
    members: list[InstalledMember] = []
    for name, assignment in sorted(computed.members.items()):
        topics: dict[UUID, list[int]] = {}
        for topic_id, number in sorted(assignment.partitions):
            topics.setdefault(topic_id, []).append(number)
        members.append(
            InstalledMember(
                member_id=name,
                partitions=[
                    InstalledPartitions(
                        topic_id=key, partitions=numbers, key_ranges=_on_wire(key, numbers, assignment.key_ranges)
                    )
                    for key, numbers in topics.items()
                ],
                metadata_version=assignment.metadata.version,
                metadata_bytes=assignment.metadata.data,
            )
        )
    return ConsumerGroupInstallAssignmentRequest(
        group_id=group_id,
        member_id=member_id,
        member_epoch=member_epoch,
        group_epoch=group_epoch,
        error=computed.error,
        members=members,
    )


def _ranges_in(named: Iterable[PartitionKeyRanges]) -> Iterable[tuple[int, Ranges]]:
    """Read the ranges of partitions; those without are whole, and left out."""
    return ((it.partition, joined((part.start, part.end) for part in it.ranges)) for it in named if it.ranges)


def _on_wire(
    topic_id: UUID, numbers: Iterable[int], shares: Mapping[TopicIdPartition, Sequence[tuple[int, int]]]
) -> list[PartitionKeyRanges]:
    """Return the ranges of a topic's partitions, in the order of those."""
    return [
        PartitionKeyRanges(partition=number, ranges=[KeyRange(start=start, end=end) for start, end in ranges])
        for number in numbers
        if (ranges := shares.get(TopicIdPartition(topic_id, number)))
    ]
