"""A group of the consumer protocol (KIP-848): its durable state, as a fold over its records.

Three epochs move a group. The group epoch counts the changes that call for a new assignment; the assignment epoch is
the group epoch for which the target was computed; every member has the epoch of the target it has reached. So, always,

    member epoch <= assignment epoch <= group epoch        none of them ever goes back

    state         | members | assignment epoch | members' epochs
    EMPTY         | none    |                  |
    ASSIGNING     | some    | < group epoch    |
    RECONCILING   | some    | = group epoch    | some lower, or not yet at their target
    STABLE        | some    | = group epoch    | all equal and at their target

A partition has at most one holder: the member that has it assigned, or is revoking it and has not acknowledged yet.
Of a partition that members share, that holds for every key (`shares`).
`apply` is the only code that changes a group, live and on reload; it takes records in any order that compaction
leaves, since state is kept by key, and state derived from several records is computed on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol, TypeAlias
from uuid import UUID

from anabranch.machines.groups.consumer.shares import (
    NO_SHARES,
    At,
    Shares,
    held_of,
    shared_partitions,
    shares_from,
)
from anabranch.machines.groups.records import (
    ClassicMemberMetadata,
    ClassicProtocol,
    ClientAssignor,
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMetadataKey,
    ConsumerGroupTargetAssignmentMetadataValue,
    CoordinatorRecord,
    TopicPartitions,
)
from anabranch.machines.key_ranges import WHOLE, Ranges, union

Assignment: TypeAlias = tuple[tuple[UUID, tuple[int, ...]], ...]
"""Partitions by topic id, ascending; no topic empty."""
NOTHING: Assignment = ()
LEFT_FOR_GOOD, LEFT_FOR_A_WHILE = -1, -2
"""Member epochs of a leaving member; the second is of a static member that will return."""


class GroupState(Enum):
    """How far a group is, by the names that are shown."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


class MemberState(IntEnum):
    """How far a member is."""

    STABLE = 0
    """The member has its whole target."""
    UNREVOKED_PARTITIONS = 1
    """The member has yet to acknowledge a revocation."""
    UNRELEASED_PARTITIONS = 2
    """Some of the target is held by other members, or waits at a gate."""


@dataclass(frozen=True, slots=True)
class MemberMetadata:
    """The metadata of a member, from its heartbeats."""

    client_id: str = ""
    client_host: str = ""
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    topics: tuple[str, ...] = ()
    regex: str | None = None
    server_assignor: str | None = None
    client_assignors: tuple[Assignor, ...] = ()
    classic: Classic | None = None
    """Of a member that speaks the classic protocol."""
    allow_key_share: bool = False
    """Whether the member takes partitions in part."""


class Assignor(NamedTuple):
    """A client-side assignor that a member offers (KIP-848, Member)."""

    name: str
    minimum_version: int
    maximum_version: int
    reason: int
    version: int
    metadata: bytes


class Classic(NamedTuple):
    """The fields that only a member of the classic protocol has."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A member: its metadata, and its progress towards its target."""

    member_id: str
    described: MemberMetadata = field(default_factory=MemberMetadata)
    epoch: int = 0
    previous_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Assignment = NOTHING
    revoking: Assignment = NOTHING
    """The partitions it has yet to revoke."""
    shares: Shares = NO_SHARES
    """The keys of assigned partitions that it has in part."""
    revoking_shares: Shares = NO_SHARES
    """The keys of partitions of which it has to revoke a part."""

    @property
    def holds(self) -> Iterator[At]:
        """Every partition that no other member may have, or not all of it."""
        for assignment in (self.assigned, self.revoking):
            for topic_id, partitions in assignment:
                for partition in partitions:
                    yield topic_id, partition

    @property
    def owns(self) -> list[At]:
        """The partitions that it holds whole: what it tells of a part is not the position of the partition."""
        in_part = {at for at, _ in (*self.shares, *self.revoking_shares)}
        return [at for at in self.holds if at not in in_part]

    def held(self, at: At) -> Ranges:
        """The keys of a partition that no other member may have."""
        return union(
            held_of(at, self.assigned, self.shares),
            held_of(at, self.revoking, self.revoking_shares),
        )

    @property
    def held_in_part(self) -> Sequence[tuple[At, Ranges]]:
        """The partitions of which it does not hold all keys, with those that it holds."""
        if not self.shares and not self.revoking_shares:
            return ()
        held = {at: self.held(at) for at, _ in (*self.shares, *self.revoking_shares)}
        return [(at, ranges) for at, ranges in held.items() if ranges != WHOLE]


@dataclass(frozen=True, slots=True)
class AssignmentMetadata:
    """The metadata that a client-side assignor gives a member beside its partitions."""

    error: int = 0
    version: int = 0
    metadata: bytes = b""


class TopicList(NamedTuple):
    """The names of topics that some members subscribe to."""

    topics: tuple[str, ...]
    members: int


@dataclass(slots=True)
class ConsumerGroup:
    """A group; `apply` changes it, decisions look."""

    group_id: str
    epoch: int = 0
    metadata_hash: int = 0
    target_epoch: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    targets: dict[str, Assignment] = field(default_factory=dict)
    told: dict[str, AssignmentMetadata] = field(default_factory=dict)
    static_members: dict[str, str] = field(default_factory=dict)
    """Member ids by instance id."""
    holders: dict[At, str] = field(default_factory=dict)
    """The member that holds a partition; of several that share it, the one with the first keys."""
    target_shares: dict[str, Shares] = field(default_factory=dict)
    """By member, the keys of target partitions that it is to have in part."""
    sharers: dict[At, dict[str, Ranges]] = field(default_factory=dict)
    """Of partitions that are held in part: the keys that each member holds."""
    topic_lists: dict[tuple[str, ...], TopicList] = field(default_factory=dict, compare=False)
    """What members subscribe to: equal subscriptions are one object, so that they compare by identity."""
    names: int = field(default=0, compare=False)
    """The names in all of `topic_lists`."""
    patterns: dict[str, int] = field(default_factory=dict, compare=False)
    """The regular expressions that members subscribe to, and how many do."""
    changes: int = field(default=0, compare=False)
    """Counts the records that were applied: what was decided on an unchanged group holds."""

    @property
    def is_empty(self) -> bool:
        """Whether the group has no members."""
        return not self.members

    def state(self) -> GroupState:
        """How far the group is."""
        if not self.members:
            return GroupState.EMPTY
        if self.epoch > self.target_epoch:
            return GroupState.ASSIGNING
        if all(
            member.state is MemberState.STABLE and member.epoch in (self.target_epoch, LEFT_FOR_A_WHILE)
            for member in list(self.members.values())  # Read while another thread applies a decision.
        ):
            return GroupState.STABLE
        return GroupState.RECONCILING

    def target(self, member_id: str) -> Assignment:
        """The target of a member."""
        return self.targets.get(member_id, NOTHING)

    @property
    def classic_members(self) -> list[Member]:
        """The members that speak the classic protocol."""
        return [member for member in self.members.values() if member.described.classic is not None]

    def copy(self) -> ConsumerGroup:
        """The same group, to try things on."""
        return replace(
            self,
            members=dict(self.members),
            targets=dict(self.targets),
            told=dict(self.told),
            static_members=dict(self.static_members),
            holders=dict(self.holders),
            target_shares=dict(self.target_shares),
            sharers={at: dict(held) for at, held in self.sharers.items()} if self.sharers else {},
            topic_lists=dict(self.topic_lists),
            patterns=dict(self.patterns),
        )

    # -- the fold ------------------------------------------------------------------------------------------------------

    def apply(self, record: CoordinatorRecord) -> None:
        """Fold one of the group's records."""
        key, value = record
        self.changes += 1
        match key:
            case ConsumerGroupMetadataKey():
                self.epoch = 0 if value is None else value.epoch
                self.metadata_hash = 0 if value is None else value.metadata_hash
            case ConsumerGroupMemberMetadataKey():
                self._put_member(key.member_id, value)
            case ConsumerGroupTargetAssignmentMetadataKey():
                self.target_epoch = 0 if value is None else value.assignment_epoch
            case ConsumerGroupTargetAssignmentMemberKey():
                self._put_target(key.member_id, value)
            case ConsumerGroupCurrentMemberAssignmentKey():
                self._put_current(key.member_id, value)

    def _put_member(self, member_id: str, value: ConsumerGroupMemberMetadataValue | None) -> None:
        if value is None:
            member = self.members.pop(member_id, None)
            if member is not None:
                self._let_go(member)
                self._count(member.described, -1)
                instance = member.described.instance_id
                if instance is not None and self.static_members.get(instance) == member_id:
                    del self.static_members[instance]
            return
        member = self.members.get(member_id) or Member(member_id)
        before = member.described.instance_id
        if before is not None and self.static_members.get(before) == member_id:
            del self.static_members[before]
        said = described(value)
        said = replace(said, topics=self._count(said, 1))
        if member_id in self.members:
            self._count(member.described, -1)
        self.members[member_id] = replace(member, described=said)
        if value.instance_id is not None:
            self.static_members[value.instance_id] = member_id

    def _count(self, said: MemberMetadata, members: int) -> tuple[str, ...]:
        """Count one more or one less member that subscribes so; the topics, as the object that all of them have."""
        topics, regex = said.topics, said.regex
        if regex is not None:
            left = self.patterns.pop(regex, 0) + members
            if left > 0:
                self.patterns[regex] = left
        known = self.topic_lists.pop(topics, None)
        if known is None:
            known = TopicList(topics, 0)
        else:
            self.names -= len(topics)
        if known.members + members > 0:
            self.topic_lists[known.topics] = known._replace(members=known.members + members)
            self.names += len(topics)
        return known.topics

    def _put_target(self, member_id: str, value: ConsumerGroupTargetAssignmentMemberValue | None) -> None:
        self.told.pop(member_id, None)
        self.target_shares.pop(member_id, None)
        if value is None:
            self.targets.pop(member_id, None)
            return
        self.targets[member_id] = assignment(value.topic_partitions)
        if value.shares:
            self.target_shares[member_id] = shares_from(value.shares)
        if value.error or value.metadata_version or len(value.metadata_bytes):
            self.told[member_id] = AssignmentMetadata(value.error, value.metadata_version, bytes(value.metadata_bytes))

    def _put_current(self, member_id: str, value: ConsumerGroupCurrentMemberAssignmentValue | None) -> None:
        member = self.members.get(member_id)
        if value is None:
            if member is not None:
                self._let_go(member)
                self.members[member_id] = Member(member_id, member.described)
            return
        if member is None:
            member = Member(member_id)
            self._count(member.described, 1)
        self._let_go(member)
        member = self.members[member_id] = Member(
            member_id,
            member.described,
            value.member_epoch,
            value.previous_member_epoch,
            MemberState(value.state),
            assignment(value.assigned_partitions),
            assignment(value.partitions_pending_revocation),
            shares_from(value.assigned_shares) if value.assigned_shares else NO_SHARES,
            shares_from(value.shares_pending_revocation) if value.shares_pending_revocation else NO_SHARES,
        )
        for partition in member.holds:
            self.holders[partition] = member_id
        for partition, ranges in member.held_in_part:
            self.sharers.setdefault(partition, {})[member_id] = ranges
            self._rank(partition)

    def _let_go(self, member: Member) -> None:
        """Remove a member's holds, except partitions that another member holds since."""
        for partition in member.holds:
            if self.holders.get(partition) == member.member_id:
                del self.holders[partition]
        for partition, _ in member.held_in_part:
            sharers = self.sharers.get(partition, {})
            sharers.pop(member.member_id, None)
            if not sharers:
                self.sharers.pop(partition, None)
            elif partition not in self.holders:
                self._rank(partition)

    def _rank(self, partition: At) -> None:
        """Name the holder of a partition that is held in part."""
        sharers = self.sharers[partition]
        self.holders[partition] = min(sharers, key=lambda member_id: (sharers[member_id][0].start, member_id))


def described(value: ConsumerGroupMemberMetadataValue) -> MemberMetadata:
    """Read a member's metadata from its record."""
    classic = value.classic_member_metadata
    return MemberMetadata(
        client_id=value.client_id,
        client_host=value.client_host,
        instance_id=value.instance_id,
        rack_id=value.rack_id,
        rebalance_timeout_ms=value.rebalance_timeout_ms,
        topics=tuple(value.subscribed_topic_names),
        regex=value.subscribed_topic_regex or None,
        server_assignor=value.server_assignor,
        client_assignors=tuple(
            Assignor(one.name, one.minimum_version, one.maximum_version, one.reason, one.version, bytes(one.metadata))
            for one in value.client_assignors
        ),
        classic=None
        if classic is None
        else Classic(
            classic.session_timeout_ms, tuple((one.name, bytes(one.metadata)) for one in classic.supported_protocols)
        ),
        allow_key_share=value.allow_key_share,
    )


class Partitions(Protocol):
    """Partitions of one topic, in a record or a message."""

    @property
    def topic_id(self) -> UUID: ...
    @property
    def partitions(self) -> Sequence[int]: ...


def assignment(topics: Iterable[Partitions]) -> Assignment:
    """Read partitions from records or messages, which have the same fields."""
    return tuple((topic.topic_id, tuple(topic.partitions)) for topic in topics if len(topic.partitions))


def assignment_of(partitions: Mapping[UUID, Iterable[int]]) -> Assignment:
    """Make an assignment of sets of partitions."""
    made = ((topic_id, tuple(sorted(numbers))) for topic_id, numbers in partitions.items())
    return tuple(entry for entry in made if entry[1])


def sets_of(partitions: Assignment) -> dict[UUID, set[int]]:
    """The partitions as sets."""
    found: dict[UUID, set[int]] = {}
    for topic_id, numbers in partitions:
        found.setdefault(topic_id, set()).update(numbers)
    return found


def same(one: Assignment, other: Assignment) -> bool:
    """Whether two assignments have the same partitions, in whatever order."""
    return one == other or sets_of(one) == sets_of(other)


# -- records -----------------------------------------------------------------------------------------------------------


def group_record(group_id: str, epoch: int | None, metadata_hash: int = 0) -> CoordinatorRecord:
    """The record of the group's epoch; its tombstone for None."""
    key = ConsumerGroupMetadataKey(group_id=group_id)
    return CoordinatorRecord(
        key, None if epoch is None else ConsumerGroupMetadataValue(epoch=epoch, metadata_hash=metadata_hash)
    )


def member_record(group_id: str, member_id: str, said: MemberMetadata | None) -> CoordinatorRecord:
    """What a member said of itself; None: it is gone."""
    key = ConsumerGroupMemberMetadataKey(group_id=group_id, member_id=member_id)
    if said is None:
        return CoordinatorRecord(key)
    value = ConsumerGroupMemberMetadataValue(
        instance_id=said.instance_id,
        rack_id=said.rack_id,
        client_id=said.client_id,
        client_host=said.client_host,
        subscribed_topic_names=list(said.topics),
        subscribed_topic_regex=said.regex,
        rebalance_timeout_ms=said.rebalance_timeout_ms,
        server_assignor=said.server_assignor,
        classic_member_metadata=None
        if said.classic is None
        else ClassicMemberMetadata(
            session_timeout_ms=said.classic.session_timeout_ms,
            supported_protocols=[ClassicProtocol(name=name, metadata=data) for name, data in said.classic.protocols],
        ),
        client_assignors=[
            ClientAssignor(
                name=one.name,
                minimum_version=one.minimum_version,
                maximum_version=one.maximum_version,
                reason=one.reason,
                version=one.version,
                metadata=one.metadata,
            )
            for one in said.client_assignors
        ],
        allow_key_share=said.allow_key_share,
    )
    return CoordinatorRecord(key, value)


def target_epoch_record(group_id: str, epoch: int | None) -> CoordinatorRecord:
    """The record of the assignment epoch, written after the members' targets; its tombstone for None."""
    key = ConsumerGroupTargetAssignmentMetadataKey(group_id=group_id)
    return CoordinatorRecord(
        key, None if epoch is None else ConsumerGroupTargetAssignmentMetadataValue(assignment_epoch=epoch)
    )


def target_record(
    group_id: str,
    member_id: str,
    target: Assignment | None,
    told: AssignmentMetadata = AssignmentMetadata(),
    shares: Shares = NO_SHARES,
) -> CoordinatorRecord:
    """A member's part of the target; None: it has none any more."""
    key = ConsumerGroupTargetAssignmentMemberKey(group_id=group_id, member_id=member_id)
    if target is None:
        return CoordinatorRecord(key)
    value = ConsumerGroupTargetAssignmentMemberValue(
        topic_partitions=topic_partitions(target),
        error=told.error,
        metadata_version=told.version,
        metadata_bytes=told.metadata,
        shares=shared_partitions(shares) if shares else (),
    )
    return CoordinatorRecord(key, value)


def current_record(group_id: str, member_id: str, member: Member | None) -> CoordinatorRecord:
    """The record of a member's current assignment; its tombstone for None."""
    key = ConsumerGroupCurrentMemberAssignmentKey(group_id=group_id, member_id=member_id)
    if member is None:
        return CoordinatorRecord(key)
    value = ConsumerGroupCurrentMemberAssignmentValue(
        member_epoch=member.epoch,
        previous_member_epoch=member.previous_epoch,
        state=int(member.state),
        assigned_partitions=topic_partitions(member.assigned),
        partitions_pending_revocation=topic_partitions(member.revoking),
        assigned_shares=shared_partitions(member.shares) if member.shares else (),
        shares_pending_revocation=shared_partitions(member.revoking_shares) if member.revoking_shares else (),
    )
    return CoordinatorRecord(key, value)


def topic_partitions(partitions: Assignment) -> Sequence[TopicPartitions]:
    """The partitions as records have them."""
    return [TopicPartitions(topic_id=topic_id, partitions=numbers) for topic_id, numbers in partitions]


def gone_records(group_id: str, member_id: str) -> tuple[CoordinatorRecord, ...]:
    """The tombstones of a member."""
    return (
        current_record(group_id, member_id, None),
        target_record(group_id, member_id, None),
        member_record(group_id, member_id, None),
    )
