"""Groups and their committed offsets; every request goes to the coordinator of the group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from anabranch.base.errors import ApiError, DecodeError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.admin.progress import with_gaps
from anabranch.client.admin.slices import HeldSlices, describe_slices
from anabranch.client.cluster.connection import ConnectError, DisconnectedError
from anabranch.client.cluster.coordinator import Coordinator
from anabranch.client.cluster.metadata import Cluster
from anabranch.client.consumer.offsets import OffsetAndMetadata, Offsets, OffsetsByPartition, offsets_of
from anabranch.machines.clients.membership.strategies import assignment_of, subscribed_topics
from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, without
from anabranch.machines.keyspace import Interval
from anabranch.machines.lineage import UNKNOWN_END
from anabranch.protocol.messages.consumer_group_describe import Assignment as DescribedAssignment
from anabranch.protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from anabranch.protocol.messages.consumer_group_describe import DescribedGroup as DescribedConsumerGroup
from anabranch.protocol.messages.consumer_group_describe import WaitingPartition as DescribedWaitingPartition
from anabranch.protocol.messages.delete_groups import DeleteGroupsRequest
from anabranch.protocol.messages.describe_groups import DescribedGroup as DescribedClassicGroup
from anabranch.protocol.messages.describe_groups import DescribeGroupsRequest
from anabranch.protocol.messages.list_groups import ListGroupsRequest
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)

T = TypeVar("T")
PURPOSE = "control"
POLL_INTERVAL_S = 0.05
STATES_VERSION, TYPES_VERSION = 4, 5
CLASSIC, CONSUMER = "classic", "consumer"
MEMBER_TYPES = {0: CLASSIC, 1: CONSUMER}
NOT_A_CONSUMER_GROUP = frozenset({ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.UNSUPPORTED_VERSION})


class GroupListing(NamedTuple):
    """An entry of the list of groups. `type` and `state` are empty if the broker is too old to return them."""

    group_id: str
    type: str
    state: str
    protocol_type: str


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member of a group."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    epoch: int
    """The member epoch; -1 for a member of a classic group."""
    topics: tuple[str, ...]
    pattern: str | None
    assigned: frozenset[TopicPartition]
    """The partitions the member owns now."""
    target: frozenset[TopicPartition]
    """The partitions the member owns after the rebalance."""
    type: str
    key_ranges: Mapping[TopicPartition, Ranges] = field(default_factory=dict)
    """The keys of partitions that the member shares with others, of those that it owns now; others are whole."""
    target_key_ranges: Mapping[TopicPartition, Ranges] = field(default_factory=dict)
    """The same of those that it owns after the rebalance."""

    @property
    def pending(self) -> frozenset[TopicPartition]:
        """The partitions assigned to the member but not granted yet, or not all of their keys."""
        more = {tp for tp in self.target & self.assigned if without(self.keys_to_come(tp), self.keys(tp))}
        return (self.target - self.assigned) | more

    @property
    def revoking(self) -> frozenset[TopicPartition]:
        """The partitions the member has yet to revoke, or some of their keys."""
        less = {tp for tp in self.target & self.assigned if without(self.keys(tp), self.keys_to_come(tp))}
        return (self.assigned - self.target) | less

    def keys(self, tp: TopicPartition) -> Ranges:
        """The keys of a partition that the member owns now."""
        return self.key_ranges.get(tp, WHOLE if tp in self.assigned else NONE)

    def keys_to_come(self, tp: TopicPartition) -> Ranges:
        """The keys of a partition that the member owns after the rebalance."""
        return self.target_key_ranges.get(tp, WHOLE if tp in self.target else NONE)


class WaitedOn(NamedTuple):
    """A partition whose position the gate of another partition waits for."""

    partition: TopicPartition
    member_id: str
    """The member that holds up the others: its owner, or of a shared partition one that is furthest back; or empty."""
    records_left: int | None
    """How far the group's position is from opening the gate, in offsets; None while the partition's log is offline."""
    records_per_second: float
    """How fast the position moves."""


class WaitingPartition(NamedTuple):
    """A partition whose next record waits at a gate until the group has read others.

    It is handed out to no member, or its owner, a member of ours, stops in it before that record.
    """

    partition: TopicPartition
    waits_ms: int
    """For how long it has waited, as far as the coordinator knows."""
    waits_on: tuple[WaitedOn, ...]
    opened_by_time: bool = False
    """It waits no longer: the gate has opened by time, although records are left in `waits_on`."""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group and its members."""

    group_id: str
    type: str
    state: str
    assignor: str
    group_epoch: int
    assignment_epoch: int
    members: tuple[MemberDescription, ...]
    coordinator: str
    """The coordinator's address."""
    waiting: tuple[WaitingPartition, ...] = ()
    """The partitions that wait at gates, or whose gate has opened by time; at most 1,000 are listed.

    Only brokers with gates tell. Of a classic group those of members of ours are known.
    """
    waiting_omitted: int = 0
    """How many more partitions wait."""


class GroupAdmin:
    """The methods of `Admin` for groups."""

    _cluster: Cluster
    _timeout_ms: int
    _api_timeout_ms: int

    async def list_groups(self, *, states: Iterable[str] = (), types: Iterable[str] = ()) -> list[GroupListing]:
        """List groups by name, all or in some states ("Stable", ...) or of some types ("classic", "consumer")."""
        wanted_states, wanted_types = {s.lower() for s in states}, {t.lower() for t in types}
        found: dict[str, GroupListing] = {}
        for node in (await self._cluster.refresh()).nodes:
            connection = await self._cluster.connection(node.node_id)
            version = connection.version_of(ListGroupsRequest)
            response = await self._again(
                lambda node=node: self._cluster.ask(ListGroupsRequest(), node_id=node.node_id),  # type: ignore[misc]
                lambda response: [response.error_code],
            )
            _check(response.error_code, None, f"the groups of broker {node.node_id} cannot be listed")
            for group in response.groups:
                state = group.group_state if version >= STATES_VERSION else ""
                kind = group.group_type if version >= TYPES_VERSION else ""
                if (not wanted_states or state.lower() in wanted_states) and (
                    not wanted_types or kind.lower() in wanted_types
                ):
                    found[group.group_id] = GroupListing(group.group_id, kind.lower(), state, group.protocol_type)
        return sorted(found.values())

    async def describe_groups(self, groups: str | Iterable[str]) -> dict[str, GroupDescription]:
        """Describe groups: state, epochs, members, their current and target assignments."""
        names = [groups] if isinstance(groups, str) else list(groups)
        return {name: await self._describe_group(name) for name in names}

    async def _describe_group(self, name: str) -> GroupDescription:
        coordinator = Coordinator(self._cluster, name)
        connection = await self._retried(lambda: coordinator.connection(PURPOSE))
        if connection.serves(ConsumerGroupDescribeRequest):
            request: Any = ConsumerGroupDescribeRequest(group_ids=[name])
            response = await self._ask(coordinator, request, lambda response: [g.error_code for g in response.groups])
            described = response.groups[0]
            if ErrorCode.of(described.error_code) not in NOT_A_CONSUMER_GROUP:
                _check(described.error_code, described.error_message, f"group '{name}' cannot be described")
                return _consumer_group(described, connection.name)
        request = DescribeGroupsRequest(groups=[name])
        response = await self._ask(coordinator, request, lambda response: [g.error_code for g in response.groups])
        group = response.groups[0]
        if ErrorCode.of(group.error_code) is ErrorCode.GROUP_ID_NOT_FOUND or group.group_state == "Dead":
            text = f"there is no group '{name}'; anabranch group list shows those there are"
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, text)
        _check(group.error_code, group.error_message, f"group '{name}' cannot be described")
        return _classic_group(group, connection.name)

    async def delete_groups(self, groups: str | Iterable[str]) -> None:
        """Delete groups that have no members, with their offsets."""
        for name in [groups] if isinstance(groups, str) else list(groups):
            response = await self._ask(
                Coordinator(self._cluster, name),
                DeleteGroupsRequest(groups_names=[name]),
                lambda response: [result.error_code for result in response.results],
            )
            code = ErrorCode.of(response.results[0].error_code)
            why = "it has members; stop them first" if code is ErrorCode.NON_EMPTY_GROUP else None
            _check(code, why, f"group '{name}' cannot be deleted")

    async def list_group_offsets(
        self, group: str, partitions: Iterable[tuple[str, int]] | None = None, *, require_stable: bool = False
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return a group's committed offsets, by default of all partitions; those without an offset are left out.

        Where a member has committed ranges of offsets, the group is described, too, and the slices that members hold,
        for the owners of the gaps.
        With `require_stable` it waits for transactions that have committed offsets and have not ended, and raises
        `ApiError` UNSTABLE_OFFSET_COMMIT if they do not. A partition's first offset is waited for if the partition is
        asked for by name.
        """
        wanted = None if partitions is None else [TopicPartition(*tp) for tp in partitions]
        found = await self._again(
            lambda: self._offsets(group).fetch(wanted, {}, stable=require_stable),
            lambda found: [each for each in found.values() if each is ErrorCode.UNSTABLE_OFFSET_COMMIT],
        )
        offsets: dict[TopicPartition, OffsetAndMetadata] = {}
        for tp, result in sorted(found.items()):
            if isinstance(result, ErrorCode):
                raise ApiError(result, f"the committed offset of {tp} cannot be read")
            if result.offset >= 0:
                offsets[tp] = result
        ranged = [tp for tp, at in offsets.items() if at.ranges]
        if not ranged:
            return offsets
        return with_gaps(offsets, await self._members(group), await self.describe_slices(group, ranged))

    async def describe_slices(
        self, group_id: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, list[HeldSlices]]:
        """Return which members of a group hold slices of partitions, in the order of their first ones.

        Groups have slices where members fetch with `share="any"`. Partitions of which nothing is held are left out,
        and those whose leader is not known, or does not know slices. Raises `ApiError`.
        """
        return await describe_slices(self._cluster, group_id, partitions)

    async def _members(self, group: str) -> tuple[MemberDescription, ...]:
        """Return a group's members; none if the group was deleted."""
        try:
            return (await self._describe_group(group)).members
        except ApiError as error:
            if error.code is not ErrorCode.GROUP_ID_NOT_FOUND:
                raise
            return ()

    async def alter_group_offsets(self, group: str, offsets: OffsetsByPartition) -> None:
        """Set the committed offsets of a group that has no members."""
        wanted = offsets_of(offsets)
        if not wanted:
            return
        coordinator = Coordinator(self._cluster, group)
        codes = await self._again(
            lambda: Offsets(coordinator, group, self._timeout_ms).commit(wanted, {}), lambda codes: codes.values()
        )
        for tp, code in codes.items():
            busy = code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.NON_EMPTY_GROUP)
            why = "the group has members; stop them first" if busy else None
            _check(code, why, f"the offset of {tp} in group '{group}' cannot be set")

    async def delete_group_offsets(self, group: str, partitions: Iterable[tuple[str, int]]) -> None:
        """Delete a group's committed offsets of partitions; no member may be subscribed to their topics."""
        topics: dict[str, list[OffsetDeleteRequestPartition]] = {}
        for topic, number in partitions:
            topics.setdefault(topic, []).append(OffsetDeleteRequestPartition(partition_index=number))
        request = OffsetDeleteRequest(
            group_id=group,
            topics=[OffsetDeleteRequestTopic(name=name, partitions=listed) for name, listed in topics.items()],
        )
        response = await self._ask(Coordinator(self._cluster, group), request, lambda response: [response.error_code])
        _check(response.error_code, None, f"offsets of group '{group}' cannot be deleted")
        for topic in response.topics:
            for partition in topic.partitions:
                code = ErrorCode.of(partition.error_code)
                why = "a member is subscribed to it" if code is ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC else None
                tp = TopicPartition(topic.name, partition.partition_index)
                _check(code, why, f"the offset of {tp} in group '{group}' cannot be deleted")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _offsets(self, group: str) -> Offsets:
        return Offsets(Coordinator(self._cluster, group), group, self._timeout_ms)

    async def _ask(self, coordinator: Coordinator, request: Any, codes: Callable[[Any], Iterable[int]]) -> Any:
        async def once() -> Any:
            response = await coordinator.ask(request, PURPOSE, timeout_ms=self._timeout_ms)
            if any(ErrorCode.of(code).retriable for code in codes(response)):
                coordinator.forget()
            return response

        return await self._again(once, codes)

    async def _again(self, ask: Callable[[], Awaitable[T]], codes: Callable[[T], Iterable[int]]) -> T:
        """Send a request, and repeat it while the response has a retriable error."""
        deadline = time.monotonic() + self._api_timeout_ms / 1000
        while True:
            response = await self._retried(ask)
            if not any(ErrorCode.of(code).retriable for code in codes(response)) or time.monotonic() > deadline:
                return response
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _retried(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Send a request, and repeat it while no response arrives."""
        deadline = time.monotonic() + self._api_timeout_ms / 1000
        while True:
            try:
                return await ask()
            except (DisconnectedError, ConnectError):
                if time.monotonic() > deadline:
                    raise
            except ApiError as error:
                if not error.retriable or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(POLL_INTERVAL_S)


def _consumer_group(group: DescribedConsumerGroup, coordinator: str) -> GroupDescription:
    members = tuple(
        MemberDescription(
            member.member_id,
            member.instance_id,
            member.client_id,
            member.client_host,
            member.member_epoch,
            tuple(member.subscribed_topic_names),
            member.subscribed_topic_regex or None,
            _partitions(member.assignment),
            _partitions(member.target_assignment),
            MEMBER_TYPES.get(member.member_type, CONSUMER),
            _key_ranges(member.assignment),
            _key_ranges(member.target_assignment),
        )
        for member in group.members
    )
    return GroupDescription(
        group.group_id,
        CONSUMER,
        group.group_state,
        group.assignor_name,
        group.group_epoch,
        group.assignment_epoch,
        members,
        coordinator,
        tuple(map(_waiting, group.waiting_partitions)),
        group.waiting_partitions_omitted,
    )


def _waiting(found: DescribedWaitingPartition) -> WaitingPartition:
    name = found.topic_name
    return WaitingPartition(
        TopicPartition(name, found.partition),
        found.waits_ms,
        tuple(
            WaitedOn(
                TopicPartition(name, one.partition),
                one.member_id,
                None if one.offset >= UNKNOWN_END else max(0, one.offset - one.position),
                one.records_per_second,
            )
            for one in found.waits_on
        ),
        found.opened_by_time,
    )


def _partitions(assignment: DescribedAssignment) -> frozenset[TopicPartition]:
    return frozenset(
        TopicPartition(topic.topic_name, number) for topic in assignment.topic_partitions for number in topic.partitions
    )


def _key_ranges(assignment: DescribedAssignment) -> dict[TopicPartition, Ranges]:
    return {
        TopicPartition(topic.topic_name, it.partition): tuple(Interval(part.start, part.end) for part in it.ranges)
        for topic in assignment.topic_partitions
        for it in topic.key_ranges
        if it.ranges
    }


def _classic_group(group: DescribedClassicGroup, coordinator: str) -> GroupDescription:
    members: list[MemberDescription] = []
    for member in group.members:
        topics: Sequence[str] = ()
        assigned: frozenset[TopicPartition] = frozenset()
        if group.protocol_type == "consumer":
            try:
                topics = subscribed_topics(member.member_metadata) if len(member.member_metadata) else ()
                assigned = assignment_of(member.member_assignment)
            except DecodeError:
                topics = ()
        members.append(
            MemberDescription(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host,
                -1,
                tuple(topics),
                None,
                assigned,
                assigned,
                CLASSIC,
            )
        )
    return GroupDescription(
        group.group_id,
        CLASSIC,
        group.group_state,
        group.protocol_data,
        -1,
        -1,
        tuple(members),
        coordinator,
        tuple(map(_waiting, group.waiting_partitions)),
        group.waiting_partitions_omitted,
    )


def _check(error_code: int, message: str | None, what: str) -> None:
    if error_code:
        raise ApiError(ErrorCode.of(error_code), f"{what}: {message}" if message else what)
