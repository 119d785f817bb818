"""Assignors that run in a consumer: the `PartitionAssignor` interface of KIP-848.

A consumer that is given some (`group_local_assignors=[...]`, the preferred one first) offers them to the coordinator.
One that every member offers is chosen, and one member is asked to run it for the whole group. Every partition of every
subscribed topic must be given to exactly one member, and to one that subscribes to its topic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from anabranch.protocol.messages.consumer_group_heartbeat import Assignor as OfferedAssignor
from anabranch.protocol.messages.consumer_group_install_assignment import (
    ConsumerGroupInstallAssignmentRequest,
)
from anabranch.protocol.messages.consumer_group_install_assignment import Member as InstalledMember
from anabranch.protocol.messages.consumer_group_install_assignment import TopicPartition as InstalledPartitions
from anabranch.protocol.messages.consumer_group_prepare_assignment import ConsumerGroupPrepareAssignmentResponse

NO_ERROR, ASSIGNMENT_ERROR = 0, 2
"""What an assignment says of itself (the proposal's "Assignment Metadata Errors")."""


class TopicIdPartition(NamedTuple):
    """One partition of a topic that is known by its id."""

    topic_id: UUID
    partition: int


@dataclass(frozen=True, slots=True)
class AssignorMetadata:
    """What a member says to the assignor, or the assignor to a member. A `reason` other than 0 asks for a new
    assignment, and so does metadata that changed.
    """

    version: int = 0
    data: bytes = b""
    reason: int = 0


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A member as the assignor sees it; `partitions` is what it was to have until now."""

    subscribed_topic_ids: frozenset[UUID]
    partitions: frozenset[TopicIdPartition]
    instance_id: str | None = None
    rack_id: str | None = None
    metadata: AssignorMetadata = AssignorMetadata()


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic as the assignor sees it."""

    name: str
    partition_count: int


@dataclass(frozen=True, slots=True)
class AssignmentSpec:
    """The group at one epoch: members by their ids, topics by theirs."""

    group_epoch: int
    members: Mapping[str, MemberSpec]
    topics: Mapping[UUID, TopicSpec]


@dataclass(frozen=True, slots=True)
class MemberAssignment:
    """What one member is to have, some of it perhaps once others have let go; and what the assignor says to it."""

    partitions: frozenset[TopicIdPartition] = frozenset()
    metadata: AssignorMetadata = AssignorMetadata()


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    """The assignment of every member."""

    members: Mapping[str, MemberAssignment] = field(default_factory=dict)
    error: int = NO_ERROR


class PartitionAssignor(ABC):
    """An assignor of your own. `assign` runs in a thread of its own, in the member that the coordinator chose."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name, the same in all members."""

    @property
    def minimum_version(self) -> int:
        """The lowest version of metadata that it understands; -1 for that of classic members."""
        return 0

    @property
    def maximum_version(self) -> int:
        """The highest version of metadata that it understands."""
        return 0

    def metadata(self) -> AssignorMetadata:
        """What this member says to the assignor; asked at every heartbeat."""
        return AssignorMetadata(version=max(0, self.minimum_version))

    @abstractmethod
    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        """Return the assignment of every member."""

    def on_assignment(self, error: int, assignment: MemberAssignment, member_epoch: int) -> None:
        """Learn this member's assignment of a new epoch; what of it can be read now, the rebalance listener says."""
        return


def offer(assignors: tuple[PartitionAssignor, ...]) -> tuple[OfferedAssignor, ...]:
    """The assignors as heartbeats offer them."""
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
    """Read the group that the coordinator describes."""
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
            )
            for member in response.members
        },
        {topic.topic_id: TopicSpec(topic.topic_name, topic.num_partitions) for topic in response.topics},
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
                partitions=[InstalledPartitions(topic_id=key, partitions=numbers) for key, numbers in topics.items()],
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
