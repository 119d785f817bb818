"""Committed offsets of a group: reading and writing them.

The rule: a failed read is never taken for a missing offset. Only a response without an error shows that a partition has
no committed offset; after any other outcome the request is retried, or the error raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_LEADER_EPOCH, NO_TOPIC_ID, TopicPartition
from anabranch.client.cluster.coordinator import MOVED, Coordinator
from anabranch.machines.clients.processing import Ranges
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetRange,
)
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)

PURPOSE = "offsets"
TOPIC_ID_VERSION = 10
"""From this version on, OffsetCommit and OffsetFetch identify topics by id."""
GROUPS_VERSION = 8
STABLE_VERSION = 7


class Gap(NamedTuple):
    """Offsets below a range that is done which are not processed, or not by the owners of all keys."""

    start: int
    end: int
    """Inclusive."""
    owners: tuple[str, ...] = ()
    """The ids of the members that own keys whose next offset is not above `end`, ascending by their keys.

    Where members fetch with `share="any"`, of those that hold slices there, by their first ones: an assignment says
    nothing of who has them.
    """


class OffsetAndMetadata(NamedTuple):
    """A committed offset, the next one to read, and the committer's metadata.

    `ranges`: offsets above it that are done, too; disjoint, ascending, both bounds inclusive. To be committed, they may
    begin at the offset, which is then the committed one: they move it.
    `shares`: as read, the next offset to read of the keys between two places of the key space (docs/hashing.md), both
    inclusive, where it is not the same for all keys; `offset` is the lowest. To be committed: the offsets of these
    keys, and of no others; `offset` counts for the others only where nothing is committed yet.
    `passed`: as read, by key how far owners are known to have come, where the group has committed further.
    `gaps`: as `Admin.list_group_offsets` reads them, what is missing below each of `ranges`. To be committed: ignored.
    """

    offset: int
    metadata: str = ""
    leader_epoch: int = NO_LEADER_EPOCH
    ranges: Ranges = ()
    shares: Sequence[tuple[int, int, int]] = ()
    passed: Sequence[tuple[int, int, int]] = ()
    gaps: Sequence[Gap] = ()


OffsetsByPartition = (
    Mapping[tuple[str, int], int | OffsetAndMetadata]
    | Mapping[TopicPartition, int | OffsetAndMetadata]
    | Mapping[TopicPartition, int]
    | Mapping[TopicPartition, OffsetAndMetadata]
)
"""Offsets to commit: the next offset to read of each partition, with or without metadata."""


RangesByPartition = Mapping[tuple[str, int], Ranges] | Mapping[TopicPartition, Ranges]
"""Ranges of offsets that are done, both bounds inclusive."""


def offsets_of(given: OffsetsByPartition) -> dict[TopicPartition, OffsetAndMetadata]:
    """Normalize the offsets given by an application."""
    return {TopicPartition(*tp): OffsetAndMetadata(at) if isinstance(at, int) else at for tp, at in given.items()}


def ranges_of(given: RangesByPartition) -> dict[TopicPartition, Ranges]:
    """Check and sort the ranges given by an application. Raises `ValueError` for ranges that cannot be."""
    found: dict[TopicPartition, Ranges] = {}
    for tp, ranges in given.items():
        ordered = sorted((int(first), int(last)) for first, last in ranges)
        for number, (first, last) in enumerate(ordered):
            if not 0 <= first <= last:
                raise ValueError(f"({first}, {last}) is no range of offsets: the first must be at most the last")
            if number and first <= ordered[number - 1][1]:
                raise ValueError(f"the ranges {ordered[number - 1]} and {(first, last)} overlap")
        if ordered:
            found[TopicPartition(*tp)] = ordered
    return found


class MemberIdentity(NamedTuple):
    """The committer: a member at an epoch (or generation); by default no member."""

    member_id: str = ""
    epoch: int = -1
    instance_id: str | None = None


Fetched = dict[TopicPartition, OffsetAndMetadata | ErrorCode]
"""The committed offset of each partition (-1: none), or the error code of the partition."""


class Offsets:
    """The offsets of one group. Every method sends one request; the caller decides on retries."""

    def __init__(self, coordinator: Coordinator, group_id: str, timeout_ms: int) -> None:
        self._coordinator = coordinator
        self._group_id = group_id
        self._timeout_ms = timeout_ms
        self.takes_ranges: bool | None = None
        """Whether the coordinator knows ranges of offsets; None before its first answer to a commit."""
        self.stable: dict[TopicPartition, int] = {}
        """By partition, the stable offset that the last answer to a commit told."""

    async def fetch(
        self,
        partitions: Iterable[TopicPartition] | None,
        ids: Mapping[str, UUID],
        member: MemberIdentity = MemberIdentity(),
        *,
        stable: bool = False,
    ) -> Fetched:
        """Return the committed offsets of partitions, None for all. Raises `ApiError` for an error of the group."""
        connection = await self._coordinator.connection(PURPOSE)
        version = connection.version_of(OffsetFetchRequest)
        topics = None if partitions is None else _by_topic(partitions)
        by_id = topics is not None and all(ids.get(name, NO_TOPIC_ID) != NO_TOPIC_ID for name in topics)
        if not by_id:
            version = min(version, TOPIC_ID_VERSION - 1)
        request = OffsetFetchRequest(require_stable=stable and version >= STABLE_VERSION)
        if version >= GROUPS_VERSION:
            listed = None
            if topics is not None:
                listed = [
                    OffsetFetchRequestTopics(
                        name=name, topic_id=ids.get(name, NO_TOPIC_ID), partition_indexes=sorted(numbers)
                    )
                    for name, numbers in topics.items()
                ]
            request.groups = [
                OffsetFetchRequestGroup(
                    group_id=self._group_id,
                    member_id=member.member_id or None,
                    member_epoch=member.epoch if member.member_id else -1,
                    topics=listed,
                )
            ]
        else:
            request.group_id = self._group_id
            request.topics = None
            if topics is not None:
                request.topics = [
                    OffsetFetchRequestTopic(name=name, partition_indexes=sorted(numbers))
                    for name, numbers in topics.items()
                ]
        response = await self._coordinator.ask(request, PURPOSE, timeout_ms=self._timeout_ms, version=version)
        answered = response.groups[0] if version >= GROUPS_VERSION else response
        code = ErrorCode.of(answered.error_code)
        if code is not ErrorCode.NONE:
            if code in MOVED:
                self._coordinator.forget()
            raise ApiError(code, f"the committed offsets of group '{self._group_id}' cannot be read")
        names = {ids[name]: name for name in topics or ()} if by_id else {}
        found: Fetched = {}
        for topic in answered.topics:
            name = names.get(topic.topic_id, "") if version >= TOPIC_ID_VERSION else topic.name
            for partition in topic.partitions:
                error = ErrorCode.of(partition.error_code)
                found[TopicPartition(name, partition.partition_index)] = (
                    OffsetAndMetadata(
                        partition.committed_offset,
                        partition.metadata or "",
                        partition.committed_leader_epoch,
                        [(bounds.start, bounds.end) for bounds in partition.committed_range_offsets],
                        [(keys.start, keys.end, keys.offset) for keys in partition.key_range_offsets],
                        [(keys.start, keys.end, keys.offset) for keys in partition.passed_key_ranges],
                    )
                    if error is ErrorCode.NONE
                    else error
                )
        return found

    async def commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        ids: Mapping[str, UUID],
        member: MemberIdentity = MemberIdentity(),
    ) -> dict[TopicPartition, ErrorCode]:
        """Commit offsets; return the error code of each partition."""
        connection = await self._coordinator.connection(PURPOSE)
        version = connection.version_of(OffsetCommitRequest)
        topics = _by_topic(offsets)
        by_id = all(ids.get(name, NO_TOPIC_ID) != NO_TOPIC_ID for name in topics)
        if not by_id:
            version = min(version, TOPIC_ID_VERSION - 1)
        request = OffsetCommitRequest(
            group_id=self._group_id,
            generation_id_or_member_epoch=member.epoch,
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            wants_stable_offset=True,
            topics=[
                OffsetCommitRequestTopic(
                    name=name,
                    topic_id=ids.get(name, NO_TOPIC_ID),
                    partitions=[
                        OffsetCommitRequestPartition(
                            partition_index=number,
                            committed_offset=offsets[TopicPartition(name, number)].offset,
                            committed_leader_epoch=offsets[TopicPartition(name, number)].leader_epoch,
                            committed_metadata=offsets[TopicPartition(name, number)].metadata,
                            offset_ranges=[
                                OffsetRange(start=start, end=end)
                                for start, end in offsets[TopicPartition(name, number)].ranges
                            ],
                            key_range_offsets=[
                                KeyRangeOffset(start=start, end=end, offset=offset)
                                for start, end, offset in offsets[TopicPartition(name, number)].shares
                            ],
                        )
                        for number in sorted(numbers)
                    ],
                )
                for name, numbers in topics.items()
            ],
        )
        response = await self._coordinator.ask(request, PURPOSE, timeout_ms=self._timeout_ms, version=version)
        names = {ids[name]: name for name in topics} if by_id else {}
        codes: dict[TopicPartition, ErrorCode] = {}
        for topic in response.topics:
            name = names.get(topic.topic_id, "") if version >= TOPIC_ID_VERSION else topic.name
            for partition in topic.partitions:
                tp, code = TopicPartition(name, partition.partition_index), ErrorCode.of(partition.error_code)
                codes[tp] = code
                self.stable[tp] = partition.last_stable_offset
                if code is ErrorCode.NONE:
                    self.takes_ranges = partition.last_stable_offset >= 0
        if not MOVED.isdisjoint(codes.values()):
            self._coordinator.forget()
        return {tp: codes.get(tp, ErrorCode.UNKNOWN_SERVER_ERROR) for tp in offsets}


def _by_topic(partitions: Iterable[TopicPartition]) -> dict[str, Sequence[int]]:
    topics: dict[str, list[int]] = {}
    for tp in partitions:
        topics.setdefault(tp.topic, []).append(tp.partition)
    return dict(topics)
