"""A classic group: the state of its last record, and above it the rebalance in progress, lost with the coordinator.

The rule: `apply` alone makes a group STABLE or EMPTY, live and on reload; a decision may begin a rebalance and carry it
on, since a coordinator that forgets one only makes the members join again.

    state                 begun      joined      stored         emptied    dissolved
    EMPTY                 PREPARING  -           STABLE (1)     EMPTY (1)  DEAD
    PREPARING_REBALANCE   -          COMPLETING  PREPARING (2)  EMPTY      DEAD
    COMPLETING_REBALANCE  PREPARING  -           STABLE         -          DEAD
    STABLE                PREPARING  -           STABLE (3)     EMPTY (1)  DEAD
    DEAD                  -          -           -              -          DEAD

begun: a member joined, left, timed out or changed; joined: all have joined, or the time is up; stored: the record of a
generation with its assignment; emptied: the record of a generation without members. `-` cannot happen.
(1) on reload. (2) a group converted from the other protocol and kicked in one step. (3) a static member was replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.machines.groups.embedded import (
    CONSUMER_PROTOCOL,
    READ_SIZE_MAX,
    assigned,
    assigned_by_name,
    subscription,
    topics,
)
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.records import CoordinatorRecord, GroupMetadataKey, GroupMetadataValue, MemberMetadata
from anabranch.protocol.messages.describe_groups import DescribedGroup, DescribedGroupMember

NO_MEMBER_ID = ""
SHORT_SIZE_MAX = 1024
"""Bytes of a subscription that most consumers stay below."""


class ClassicState(Enum):
    """The states, by the names that DescribeGroups and ListGroups show."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class ClassicEvent(Enum):
    """The events that move a group from one state to another."""

    BEGUN = "begun"
    JOINED = "joined"
    STORED = "stored"
    EMPTIED = "emptied"
    DISSOLVED = "dissolved"


_EMPTY, _PREPARING, _COMPLETING, _STABLE, _DEAD = ClassicState
_BEGUN, _JOINED, _STORED, _EMPTIED, _DISSOLVED = ClassicEvent

NEXT: dict[tuple[ClassicState, ClassicEvent], ClassicState | None] = {
    (_EMPTY, _BEGUN): _PREPARING,
    (_EMPTY, _JOINED): None,
    (_EMPTY, _STORED): _STABLE,
    (_EMPTY, _EMPTIED): _EMPTY,
    (_EMPTY, _DISSOLVED): _DEAD,
    (_PREPARING, _BEGUN): None,
    (_PREPARING, _JOINED): _COMPLETING,
    (_PREPARING, _STORED): _PREPARING,
    (_PREPARING, _EMPTIED): _EMPTY,
    (_PREPARING, _DISSOLVED): _DEAD,
    (_COMPLETING, _BEGUN): _PREPARING,
    (_COMPLETING, _JOINED): None,
    (_COMPLETING, _STORED): _STABLE,
    (_COMPLETING, _EMPTIED): None,
    (_COMPLETING, _DISSOLVED): _DEAD,
    (_STABLE, _BEGUN): _PREPARING,
    (_STABLE, _JOINED): None,
    (_STABLE, _STORED): _STABLE,
    (_STABLE, _EMPTIED): _EMPTY,
    (_STABLE, _DISSOLVED): _DEAD,
    (_DEAD, _BEGUN): None,
    (_DEAD, _JOINED): None,
    (_DEAD, _STORED): None,
    (_DEAD, _EMPTIED): None,
    (_DEAD, _DISSOLVED): _DEAD,
}


class ClassicMember(NamedTuple):
    """A member, with the fields of its last JoinGroup.

    A tuple, which is made in half of the time: each generation makes the members anew in one step.
    """

    member_id: str
    instance_id: str | None
    """`group.instance.id` of a static member (KIP-345)."""
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    """Names and metadata, the one it likes best first."""
    assignment: bytes = b""

    def metadata(self, protocol_name: str | None) -> bytes:
        """The member's metadata for this protocol."""
        for name, metadata in self.protocols:
            if name == protocol_name:
                return metadata
        return b""

    @property
    def protocol_names(self) -> Collection[str]:
        """The names of the protocols, each once."""
        return self.protocols[0][:1] if len(self.protocols) == 1 else {name for name, _ in self.protocols}


@dataclass(frozen=True, slots=True)
class ParkedJoin:
    """A JoinGroup request that waits for the others."""

    ticket: Hashable
    version: int


@dataclass(slots=True)
class InitialDelay:
    """The first rebalance of an empty group waits for more members to come, as long as they do come."""

    delay_ms: int
    waiting_ms: int
    """The delay of the timer that runs now."""
    remaining_ms: int
    someone_came: bool = False


@dataclass(slots=True, eq=False)
class ClassicGroup:
    """A group of one protocol type, say `consumer` or `connect`."""

    group_id: str
    state: ClassicState = ClassicState.EMPTY
    state_changed_ms: int = -1
    """The time of the last change of state, in ms; -1 where an old record lacks it."""
    generation: int = 0
    protocol_type: str | None = None
    """None until the first member joined."""
    protocol_name: str | None = None
    leader: str | None = None
    """None for an empty group, or for a generation from the other protocol before its first rebalance."""
    members: dict[str, ClassicMember] = field(default_factory=dict)
    """By member id, in the order of joining."""
    static: dict[str, str] = field(default_factory=dict)
    """Member ids of static members by instance id."""
    renames: int = 0
    """How many static members came back under another id: their generation goes on, its partitions are others'."""
    is_stored: bool = False
    """Whether the log has a record of it."""

    supported: Counter[str] = field(default_factory=Counter)
    """How many members support each protocol."""
    pending: dict[str, None] = field(default_factory=dict)
    """Ids given with MEMBER_ID_REQUIRED that did not join yet, oldest first."""
    joining: dict[str, ParkedJoin] = field(default_factory=dict)
    syncing: dict[str, Hashable] = field(default_factory=dict)
    """Tickets of parked SyncGroup requests by member id."""
    answers_later: bool = False
    """Whether a timer is set to answer more of them: the leader's assignment is stored."""
    unsynced: dict[str, None] = field(default_factory=dict)
    """Members of this generation without a SyncGroup yet."""
    new: set[str] = field(default_factory=set)
    """Members whose first JoinGroup is parked."""
    initial: InitialDelay | None = None
    connections: dict[str, int] = field(default_factory=dict)
    """The newest connection on which each member joined: requests on an older one are stale."""

    @property
    def is_vacant(self) -> bool:
        """Whether the group can be dropped: no record, no member, no pending join."""
        return self.state is ClassicState.EMPTY and not self.is_stored and not self.pending

    @property
    def is_empty(self) -> bool:
        """Whether the group has no members and expects none."""
        return self.state is ClassicState.EMPTY and not self.members and not self.pending

    @property
    def is_joined(self) -> bool:
        """Whether every known member has joined."""
        return len(self.joining) == len(self.members) and not self.pending

    @property
    def rebalance_timeout_ms(self) -> int:
        """The longest that a member wants to be waited for."""
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def supports(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Whether one of the protocols is supported by all members."""
        if not self.members:
            return protocol_type != "" and any(True for _ in names)
        return protocol_type == self.protocol_type and any(self.supported[n] == len(self.members) for n in names)

    def select_protocol(self) -> str:
        """Let every member vote for the protocol it likes best among those that all support."""
        candidates = {name for name, count in self.supported.items() if count == len(self.members)}
        votes = Counter(
            next(name for name, _ in member.protocols if name in candidates) for member in self.members.values()
        )
        return max(votes, key=lambda name: votes[name])

    def put(self, member: ClassicMember) -> None:
        """Add a member, or put it in the place of its former self."""
        former = self.members.get(member.member_id)
        if former is not None:
            self._uncount(former)
        self.members[member.member_id] = member
        self.supported.update(member.protocol_names)
        if member.instance_id is not None:
            self.static[member.instance_id] = member.member_id
        if self.leader is None:
            self.leader = member.member_id

    def remove(self, member_id: str) -> None:
        """Take a member out; where it was the leader another one becomes it."""
        member = self.members.pop(member_id)
        self._uncount(member)
        if member.instance_id is not None and self.static.get(member.instance_id) == member_id:
            del self.static[member.instance_id]
        if self.leader == member_id:
            self.leader = next(iter(self.members), None)
        self.unsynced.pop(member_id, None)
        self.new.discard(member_id)
        self.connections.pop(member_id, None)

    def rename(self, member_id: str, new_id: str) -> None:
        """Give a static member another id, in its place and with its role."""
        self.members = {
            new_id if known == member_id else known: member._replace(member_id=new_id) if known == member_id else member
            for known, member in self.members.items()
        }
        instance_id = self.members[new_id].instance_id
        assert instance_id is not None
        self.static[instance_id] = new_id
        self.renames += 1
        if self.leader == member_id:
            self.leader = new_id
        if member_id in self.unsynced:
            self.unsynced = {new_id if known == member_id else known: None for known in self.unsynced}
        self.new.discard(member_id)
        self.connections.pop(member_id, None)

    def _uncount(self, member: ClassicMember) -> None:
        for name in member.protocol_names:
            self.supported[name] -= 1
            if not self.supported[name]:
                del self.supported[name]

    def move(self, event: ClassicEvent, now_ms: int) -> None:
        """Move along the table of states."""
        following = NEXT[self.state, event]
        assert following is not None, (self.group_id, self.state, event)
        self.state = following
        self.state_changed_ms = now_ms


def group_of(
    group_id: str,
    members: Iterable[ClassicMember],
    *,
    generation: int,
    protocol_type: str,
    now_ms: int,
    protocol_name: str | None = None,
    leader: str | None = None,
) -> ClassicGroup:
    """Make a STABLE group of members that came from elsewhere (the other protocol); `decide_loaded` sets its timers.

    Without `protocol_name` the members vote, without `leader` the first member is it.
    """
    group = ClassicGroup(group_id, ClassicState.STABLE, now_ms, generation, protocol_type)
    for member in members:
        group.put(member)
    assert group.members
    group.protocol_name = protocol_name if protocol_name is not None else group.select_protocol()
    group.leader = leader if leader is not None else group.leader
    assert group.leader in group.members
    return group


def generation_record(
    group: ClassicGroup, now_ms: int, assignments: Mapping[str, bytes] | None = None, *, led: bool = True
) -> CoordinatorRecord:
    """The record of the present generation: its members and their assignments; without `assignments` the present ones.

    Without `led` no leader has assigned it as a whole: loading it begins a rebalance.
    """
    members = [
        MemberMetadata(
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            client_id=member.client_id,
            client_host=member.client_host,
            rebalance_timeout=member.rebalance_timeout_ms,
            session_timeout=member.session_timeout_ms,
            subscription=member.metadata(group.protocol_name),
            assignment=member.assignment if assignments is None else assignments.get(member.member_id, b""),
        )
        for member in group.members.values()
    ]
    value = GroupMetadataValue(
        protocol_type=group.protocol_type or "",
        generation=group.generation,
        protocol=group.protocol_name,
        leader=group.leader if led else None,
        current_state_timestamp=now_ms,
        members=members,
    )
    return CoordinatorRecord(GroupMetadataKey(group=group.group_id), value)


def tombstone(group_id: str) -> CoordinatorRecord:
    """The tombstone of a group."""
    return CoordinatorRecord(GroupMetadataKey(group=group_id), None)


def apply(group: ClassicGroup, value: GroupMetadataValue | None) -> ClassicGroup:
    """Fold a record into the group, in place, and give it back; None removed the group."""
    if value is None:
        group.move(ClassicEvent.DISSOLVED, group.state_changed_ms)
        group.is_stored = False
        return group
    prepares = group.state is ClassicState.PREPARING_REBALANCE
    group.move(ClassicEvent.STORED if value.members else ClassicEvent.EMPTIED, value.current_state_timestamp)
    group.is_stored = True
    if prepares and value.members:
        assert value.generation == group.generation
        return group
    known = group.members
    group.generation = value.generation
    group.protocol_type = value.protocol_type or None
    group.protocol_name = value.protocol
    group.leader = value.leader
    protocol_name = value.protocol or ""
    made = [_restored(stored, protocol_name, known.get(stored.member_id)) for stored in value.members]
    group.members = {member.member_id: member for member in made}  # As `put` does, and in half the time.
    group.static = {member.instance_id: member.member_id for member in made if member.instance_id is not None}
    group.supported = Counter(name for member in made for name in member.protocol_names)
    return group


def _restored(stored: MemberMetadata, protocol_name: str, known: ClassicMember | None) -> ClassicMember:
    """The member of a record; the record lacks the protocols that a live member supports beside the chosen one."""
    chosen = (protocol_name, bytes(stored.subscription))
    return ClassicMember(  # By position, as names take as long again.
        stored.member_id,
        stored.group_instance_id,
        stored.client_id,
        stored.client_host,
        stored.session_timeout,
        stored.rebalance_timeout if stored.rebalance_timeout > 0 else stored.session_timeout,
        known.protocols if known is not None and chosen in known.protocols else (chosen,),
        bytes(stored.assignment),
    )


def restore(group_id: str, value: GroupMetadataValue) -> ClassicGroup:
    """The group of a record; its members support the chosen protocol, others are unknown."""
    return apply(ClassicGroup(group_id), value)


def subscribed_topics(group: ClassicGroup) -> frozenset[str] | None:
    """The subscribed topics; None where the coordinator cannot read them in a step, or at all: other protocol types."""
    if group.protocol_type != CONSUMER_PROTOCOL or (group.members and group.protocol_name is None):
        return None
    found: set[str] = set()
    left = READ_SIZE_MAX
    for metadata in {member.metadata(group.protocol_name) for member in group.members.values()}:
        left -= len(metadata) if len(metadata) > SHORT_SIZE_MAX else 0
        subscribed = _topics(metadata) if left >= 0 else None
        if subscribed is None:
            return None
        found |= subscribed
    return frozenset(found)


def owners(group: ClassicGroup, image: Image) -> dict[tuple[UUID, int], str]:
    """The members that partitions are assigned to, as far as the coordinator can read that."""
    found: dict[tuple[UUID, int], str] = {}
    left = READ_SIZE_MAX
    for member_id, each in group.members.items():
        left -= len(each.assignment)
        if left < 0:
            break
        with suppress(DecodeError):
            for topic_id, numbers in assigned(each.assignment, image):
                found.update(((topic_id, number), member_id) for number in numbers)
    return found


def subscribes_otherwise(group: ClassicGroup, former: ClassicMember, said: ClassicMember) -> bool:
    """Whether a member subscribes to other topics than before, as far as the coordinator can read."""
    if group.protocol_type != CONSUMER_PROTOCOL:
        return False
    return _topics(former.metadata(group.protocol_name)) != _topics(said.metadata(group.protocol_name))


def _topics(metadata: bytes) -> frozenset[str] | None:
    return _topics_remembered(metadata) if len(metadata) <= SHORT_SIZE_MAX else _topics_read(metadata)


@lru_cache(maxsize=5_000)
def _topics_remembered(metadata: bytes) -> frozenset[str] | None:
    """Short ones are read once: a group may have thousands, and each is other than the rest by what its member owns."""
    return _topics_read(metadata)


def _topics_read(metadata: bytes) -> frozenset[str] | None:
    try:
        return frozenset(topics(metadata))
    except DecodeError:
        return None


def leaves_out(group: ClassicGroup, image: Image) -> bool:
    """Whether a partition of a topic that the group subscribes to is nobody's, as far as the coordinator can read."""
    subscribed = subscribed_topics(group)
    if not subscribed or sum(len(member.assignment) for member in group.members.values()) > READ_SIZE_MAX:
        return False
    given: dict[str, set[int]] = {name: set() for name in subscribed}
    for member in group.members.values():
        try:
            for name, numbers in assigned_by_name(member.assignment).items():
                given.setdefault(name, set()).update(numbers)
        except DecodeError:
            return False
    known = (topic for name in subscribed if (topic := image.by_name.get(name)) is not None)
    return any(not given[topic.name].issuperset(topic.partitions) for topic in known)


def was_giving_up(group: ClassicGroup, member: ClassicMember) -> bool:
    """Whether a member reported to own more than its assignment (KIP-429).

    The member revokes the excess and joins again, so that other members get it.
    """
    if group.protocol_type != CONSUMER_PROTOCOL:
        return False
    try:
        _, said = subscription(member.metadata(group.protocol_name))
        given = assigned_by_name(member.assignment)
    except DecodeError:
        return False
    return any(not given.get(owned.topic, set()).issuperset(owned.partitions) for owned in said.owned_partitions)


class ClassicGroupView(NamedTuple):
    """A group as it is now: values that do not change, of which there may be many."""

    group: DescribedGroup
    """Without its members."""
    members: Sequence[ClassicMember] = ()

    def described(self) -> DescribedGroup:
        """Describe the members, too; metadata and assignments are shown of a STABLE group only. In any thread."""
        stable, protocol = self.group.group_state == ClassicState.STABLE.value, self.group.protocol_data
        self.group.members = [
            DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata(protocol) if stable else b"",
                member_assignment=member.assignment if stable else b"",
            )
            for member in self.members
        ]
        return self.group


def view(group: ClassicGroup) -> ClassicGroupView:
    """The group as DescribeGroups shows it."""
    if group.state is ClassicState.DEAD:
        return ClassicGroupView(DescribedGroup(group_id=group.group_id, group_state=ClassicState.DEAD.value))
    stable = group.state is ClassicState.STABLE
    shown = DescribedGroup(
        error_code=ErrorCode.NONE,
        group_id=group.group_id,
        group_state=group.state.value,
        protocol_type=group.protocol_type or "",
        protocol_data=(group.protocol_name or "") if stable else "",
    )
    return ClassicGroupView(shown, tuple(group.members.values()))
