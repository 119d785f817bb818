"""The assignors that a classic group's leader runs: range, roundrobin, sticky and cooperative-sticky.

Live and retiring partitions are two lists, each balanced by itself: retiring partitions get no more records, and a
member with many of them would soon have nothing to read. Without retiring partitions, range and roundrobin give the
same assignments as the Java client, so that leaders of either kind agree. The sticky ones keep current owners as far as
balance allows; cooperative-sticky gives a partition to a new owner only in the rebalance after its revocation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.base.ids import TopicPartition
from anabranch.codec import array, decode, encode, int32, message, string, struct
from anabranch.protocol.messages.consumer_protocol_assignment import ConsumerProtocolAssignment
from anabranch.protocol.messages.consumer_protocol_assignment import TopicPartition as AssignedPartitions
from anabranch.protocol.messages.consumer_protocol_subscription import ConsumerProtocolSubscription
from anabranch.protocol.messages.consumer_protocol_subscription import TopicPartition as OwnedPartitions

RANGE, ROUND_ROBIN, STICKY, COOPERATIVE_STICKY = "range", "roundrobin", "sticky", "cooperative-sticky"
STRATEGIES = (RANGE, ROUND_ROBIN, STICKY, COOPERATIVE_STICKY)
SUBSCRIPTION_VERSION = 3
ASSIGNMENT_VERSION = 3
NO_GENERATION = -1
_VERSION_SIZE = 2


@struct()
class _TopicAssignment:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[int] = array(int32)


@message(versions="0-1")
class _StickyUserData:
    """The user data of a sticky member; v1 adds the generation of its partitions."""

    previous_assignment: Sequence[_TopicAssignment] = array(_TopicAssignment)
    generation: int = int32(since=1, default=NO_GENERATION)


@message(versions="0")
class _CooperativeUserData:
    """The generation of the owned partitions."""

    generation: int = int32(default=NO_GENERATION)


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A member in the leader's input."""

    member_id: str
    topics: frozenset[str]
    owned: frozenset[TopicPartition] = frozenset()
    generation: int = NO_GENERATION
    """The generation of `owned`."""
    instance_id: str | None = None

    @property
    def order(self) -> tuple[int, str]:
        """Static members come first, by instance id; then dynamic ones, by member id."""
        return (1, self.member_id) if self.instance_id is None else (0, self.instance_id)


Assignment = dict[str, list[TopicPartition]]


class PartitionCounts(NamedTuple):
    """The partitions of a topic; the highest ones are retiring, since partitions are removed from the top."""

    total: int = 0
    retiring: int = 0

    @property
    def lists(self) -> tuple[range, range]:
        """The live partitions, and the retiring ones."""
        live = self.total - self.retiring
        return range(live), range(live, self.total)


Counts = Mapping[str, PartitionCounts]
"""By topic."""
NONE = PartitionCounts()


def strategies_of(named: str | Iterable[str]) -> tuple[str, ...]:
    """Parse `partition.assignment.strategy`: a list, or names separated by commas; Java class names are accepted."""
    names = named.split(",") if isinstance(named, str) else list(named)
    known = {strategy.replace("-", ""): strategy for strategy in STRATEGIES}
    found: list[str] = []
    for name in (name.strip() for name in names):
        key = name.rpartition(".")[2].removesuffix("Assignor").lower().replace("-", "")
        if key not in known:
            allowed = ", ".join(STRATEGIES)
            raise ValueError(f"partition.assignment.strategy: there is no '{name}'; it can be {allowed}")
        found.append(known[key])
    if not found:
        raise ValueError("partition.assignment.strategy is empty; name at least one")
    return tuple(dict.fromkeys(found))


def is_cooperative(strategies: Sequence[str]) -> bool:
    """Whether members keep their partitions during a rebalance: only if every strategy is cooperative."""
    return all(strategy == COOPERATIVE_STICKY for strategy in strategies)


def assign(strategy: str, members: Sequence[Subscriber], counts: Counts) -> Assignment:
    """Assign every partition of every subscribed topic to a member that subscribes to the topic."""
    members = sorted(members, key=lambda member: member.order)
    match strategy:
        case "range":
            return _range(members, counts)
        case "roundrobin":
            return _round_robin(members, counts)
        case "sticky":
            return _sticky(members, counts)[0]
        case _:
            assert strategy == COOPERATIVE_STICKY
            return _cooperative(members, counts)


def _range(members: Sequence[Subscriber], counts: Counts) -> Assignment:
    given: Assignment = {member.member_id: [] for member in members}
    for topic in sorted(counts):
        takers = [member for member in members if topic in member.topics]
        if not takers:
            continue
        for numbers in counts[topic].lists:
            share, extra = divmod(len(numbers), len(takers))
            first = 0
            for index, member in enumerate(takers):
                size = share + (index < extra)
                given[member.member_id] += [TopicPartition(topic, number) for number in numbers[first : first + size]]
                first += size
    return given


def _round_robin(members: Sequence[Subscriber], counts: Counts) -> Assignment:
    given: Assignment = {member.member_id: [] for member in members}
    turn = 0
    for tp in (tp for listed in _lists(members, counts) for tp in listed):
        while tp.topic not in members[turn % len(members)].topics:
            turn += 1
        given[members[turn % len(members)].member_id].append(tp)
        turn += 1
    return given


def _lists(members: Sequence[Subscriber], counts: Counts) -> tuple[list[TopicPartition], list[TopicPartition]]:
    """The live and the retiring partitions of all subscribed topics, in order."""
    live: list[TopicPartition] = []
    retiring: list[TopicPartition] = []
    for topic in sorted(counts):
        if any(topic in member.topics for member in members):
            for found, numbers in zip((live, retiring), counts[topic].lists, strict=True):
                found += [TopicPartition(topic, number) for number in numbers]
    return live, retiring


@dataclass(slots=True)
class _Share:
    member: Subscriber
    other: int
    """The member's partitions of the list that was balanced before; fewer go first where members tie."""
    partitions: set[TopicPartition] = field(default_factory=set)


def _sticky(members: Sequence[Subscriber], counts: Counts) -> tuple[Assignment, dict[TopicPartition, str]]:
    """Return the assignment, and the owner of each partition until now."""
    owners = _owners(members, counts)
    takers = {topic: [m.member_id for m in members if topic in m.topics] for topic in counts}
    given: dict[str, set[TopicPartition]] = {member.member_id: set() for member in members}
    for listed in _lists(members, counts):
        shares = {member.member_id: _Share(member, len(given[member.member_id])) for member in members}
        _balance(shares, takers, listed, owners)
        for member_id, share in shares.items():
            given[member_id] |= share.partitions
    return {member_id: sorted(partitions) for member_id, partitions in given.items()}, owners


def _balance(
    shares: Mapping[str, _Share],
    takers: Mapping[str, Sequence[str]],
    listed: Sequence[TopicPartition],
    owners: Mapping[TopicPartition, str],
) -> None:
    """Share the listed partitions out: owners keep theirs as far as balance allows."""
    for tp in listed:
        if tp in owners:
            shares[owners[tp]].partitions.add(tp)
    if len({share.member.topics for share in shares.values()}) == 1:
        _shed(shares, len(listed))
    kept = {tp for share in shares.values() for tp in share.partitions}
    heaps = {
        topic: [(len(shares[m].partitions), shares[m].other, at, m) for at, m in enumerate(ids)]
        for topic, ids in takers.items()
    }
    by_takers: dict[tuple[str, ...], list[tuple[int, int, int, str]]] = {}
    for topic, ids in takers.items():
        heap = by_takers.setdefault(tuple(ids), heaps[topic])
        heapq.heapify(heap)
        heaps[topic] = heap
    for tp in sorted((tp for tp in listed if tp not in kept), key=lambda tp: (len(takers[tp.topic]), tp)):
        heap = heaps[tp.topic]
        while True:
            size, other, at, member_id = heap[0]
            actual = len(shares[member_id].partitions)
            if actual == size:
                break
            heapq.heapreplace(heap, (actual, other, at, member_id))
        shares[member_id].partitions.add(tp)
        heapq.heapreplace(heap, (size + 1, other, at, member_id))
    _even_out(shares, takers)


def _owners(members: Sequence[Subscriber], counts: Counts) -> dict[TopicPartition, str]:
    """Return the owner of each existing, still subscribed partition; of two claims the later generation's counts."""
    claims: dict[TopicPartition, tuple[int, str | None]] = {}
    for member in members:
        for tp in member.owned:
            if tp.topic not in member.topics or not 0 <= tp.partition < counts.get(tp.topic, NONE).total:
                continue
            rival = claims.get(tp)
            if rival is None or member.generation > rival[0]:
                claims[tp] = (member.generation, member.member_id)
            elif member.generation == rival[0]:
                claims[tp] = (member.generation, None)
    return {tp: owner for tp, (_, owner) in claims.items() if owner is not None}


def _shed(shares: Mapping[str, _Share], total: int) -> None:
    """With equal subscriptions, limit every member's partitions to an even share."""
    low, extra = divmod(total, len(shares))
    for share in sorted(shares.values(), key=lambda share: (-len(share.partitions), share.other, share.member.order)):
        allowed = low + 1 if extra > 0 and len(share.partitions) > low else low
        extra -= allowed > low
        for tp in sorted(share.partitions)[allowed:]:
            share.partitions.discard(tp)


def _even_out(shares: Mapping[str, _Share], takers: Mapping[str, Sequence[str]]) -> None:
    """Move partitions from a member with at least two more than another member that can take them."""
    moved = True
    while moved:
        moved = False
        for share in sorted(shares.values(), key=lambda share: (-len(share.partitions), share.member.order)):
            for tp in sorted(share.partitions):
                least = min(takers[tp.topic], key=lambda member_id: len(shares[member_id].partitions))
                if len(shares[least].partitions) + 1 < len(share.partitions):
                    share.partitions.discard(tp)
                    shares[least].partitions.add(tp)
                    moved = True


def _cooperative(members: Sequence[Subscriber], counts: Counts) -> Assignment:
    """The sticky assignment, without partitions that another member has yet to revoke."""
    given, owners = _sticky(members, counts)
    claimed = {tp for member in members for tp in member.owned}
    return {
        member_id: [tp for tp in partitions if owners.get(tp) == member_id or tp not in claimed]
        for member_id, partitions in given.items()
    }


# -- on the wire ------------------------------------------------------------------------------------------------------


def subscription_bytes(
    strategy: str, topics: frozenset[str], owned: frozenset[TopicPartition], generation: int, rack_id: str | None
) -> bytes:
    """Encode a member's subscription for JoinGroup. `owned` is of `generation`."""
    listed = _listed(owned)
    user_data: bytes | None = None
    if strategy == STICKY and owned:
        previous = [_TopicAssignment(topic=topic, partitions=numbers) for topic, numbers in listed.items()]
        user_data = _written(_StickyUserData(previous_assignment=previous, generation=generation), 1)
    elif strategy == COOPERATIVE_STICKY:
        user_data = _written(_CooperativeUserData(generation=generation), 0)
    subscription = ConsumerProtocolSubscription(
        topics=sorted(topics),
        user_data=user_data,
        owned_partitions=[]
        if strategy != COOPERATIVE_STICKY
        else [OwnedPartitions(topic=topic, partitions=numbers) for topic, numbers in listed.items()],
        generation_id=generation,
        rack_id=rack_id,
    )
    return _versioned(subscription, SUBSCRIPTION_VERSION)


def subscriber_of(member_id: str, instance_id: str | None, strategy: str, data: Any) -> Subscriber:
    """Parse a member's subscription. Raises `DecodeError` for malformed data."""
    subscription = _read(ConsumerProtocolSubscription, data, SUBSCRIPTION_VERSION)
    owned = frozenset(
        TopicPartition(topic.topic, number) for topic in subscription.owned_partitions for number in topic.partitions
    )
    generation = subscription.generation_id
    if strategy == STICKY and subscription.user_data is not None and len(subscription.user_data):
        remembered = _sticky_user_data(bytes(subscription.user_data))
        if remembered is not None:
            generation = remembered.generation
            owned = frozenset(
                TopicPartition(topic.topic, number)
                for topic in remembered.previous_assignment
                for number in topic.partitions
            )
    elif strategy == COOPERATIVE_STICKY and generation == NO_GENERATION and subscription.user_data:
        try:
            generation = decode(_CooperativeUserData, bytes(subscription.user_data), 0).generation
        except DecodeError:
            generation = NO_GENERATION
    return Subscriber(member_id, frozenset(subscription.topics), owned, generation, instance_id)


def assignment_bytes(partitions: Sequence[TopicPartition]) -> bytes:
    """Encode the assignment of one member for SyncGroup."""
    listed = [AssignedPartitions(topic=topic, partitions=numbers) for topic, numbers in _listed(partitions).items()]
    return _versioned(ConsumerProtocolAssignment(assigned_partitions=listed), ASSIGNMENT_VERSION)


def assignment_of(data: Any) -> frozenset[TopicPartition]:
    """Parse the assignment of one member."""
    if not len(data):
        return frozenset()
    given = _read(ConsumerProtocolAssignment, data, ASSIGNMENT_VERSION)
    return frozenset(
        TopicPartition(topic.topic, number) for topic in given.assigned_partitions for number in topic.partitions
    )


def subscribed_topics(data: Any) -> tuple[str, ...]:
    """Return the topics of a member's subscription."""
    return tuple(_read(ConsumerProtocolSubscription, data, SUBSCRIPTION_VERSION).topics)


def _sticky_user_data(data: bytes) -> _StickyUserData | None:
    for version in (1, 0):
        try:
            return decode(_StickyUserData, data, version)
        except DecodeError:
            continue
    return None


def _listed(partitions: Sequence[TopicPartition] | frozenset[TopicPartition]) -> dict[str, list[int]]:
    listed: dict[str, list[int]] = {}
    for tp in sorted(partitions):
        listed.setdefault(tp.topic, []).append(tp.partition)
    return listed


def _written(value: Any, version: int) -> bytes:
    return b"".join(bytes(part) for part in encode(value, version))


def _versioned(value: Any, version: int) -> bytes:
    return version.to_bytes(_VERSION_SIZE, "big") + _written(value, version)


def _read(kind: type[Any], data: Any, highest: int) -> Any:
    view = memoryview(data)
    if len(view) < _VERSION_SIZE:
        raise DecodeError(f"{kind.__name__} of {len(view)} bytes; it begins with a version of two")
    version = int.from_bytes(view[:_VERSION_SIZE], "big", signed=True)
    if version < 0:
        raise DecodeError(f"{kind.__name__} of version {version}")
    return decode(kind, view[_VERSION_SIZE:], min(version, highest))
