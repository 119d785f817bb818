"""Fetching committed offsets: the answers of OffsetFetch.

A fetch of a stale member is answered with an error, never "no offset": the client would then begin where its reset
says, perhaps at the end of the log. The same holds of a position that the coordinator has yet to write (`settling`):
whoever asks is told to ask again, by an error that all clients know.

    the request asks for stable offsets  ->  UNSTABLE_OFFSET_COMMIT of the partition
    it does not                          ->  COORDINATOR_LOAD_IN_PROGRESS of the group, and of all partitions

Either way most clients ask for all of the request's partitions again, and begin none meanwhile. So that lasts
`OWED_MAX_MS` at the most: a log may be closed for good, and its group is not to stop for one partition.

A position that the coordinator wrote, and that no client has committed since, is the log start at least: what is
deleted meanwhile would be out of range, and the reset of a client take what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.committers import fetch_error
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.offsets import TOPIC_IDS_SINCE, Offsets
from anabranch.machines.groups.ranges_on_wire import KeyRanges, Ranges
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchRequestGroup,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopics,
)


class OffsetFetches(NamedTuple):
    """Reads the committed offsets of a shard's groups."""

    offsets: Offsets
    is_owed: Callable[[str, str, int], bool]
    """Whether a group's position in a partition, by topic name and number, is still to be written."""

    def fetch(
        self,
        group: ConsumerGroup | ClassicGroup | None,
        asked: OffsetFetchRequestGroup,
        *,
        require_stable: bool,
        version: int,
        is_part: bool = False,
    ) -> OffsetFetchResponseGroup:
        """Return the committed offsets of a group. `is_part`: `all_again` is for what this is a part of."""
        error = fetch_error(group, asked)
        if error is not ErrorCode.NONE:
            return OffsetFetchResponseGroup(group_id=asked.group_id, error_code=error)
        by_id = version >= TOPIC_IDS_SINCE
        answer = OffsetFetchResponseGroup(
            group_id=asked.group_id,
            topics=[
                OffsetFetchResponseTopics(
                    name=name,
                    topic_id=topic_id,
                    partitions=[
                        self._fetched(asked.group_id, name, partition, require_stable, is_missing=by_id and not name)
                        for partition in partitions
                    ],
                )
                for name, topic_id, partitions in self._wanted(asked, by_id=by_id)
            ],
        )
        return answer if require_stable or is_part else all_again(answer)

    def _wanted(self, asked: OffsetFetchRequestGroup, *, by_id: bool) -> list[tuple[str, UUID, Iterable[int]]]:
        """What is asked for; a topic that is asked for by an id which nothing has is without a name."""
        offsets = self.offsets
        if asked.topics is None:
            listed: dict[str, list[int]] = {}
            for (name, partition), position in sorted(offsets.positions.entries(asked.group_id)):
                if offsets.is_current(name, partition, position):
                    listed.setdefault(name, []).append(partition)
            return [(name, offsets.image.id_of(name), partitions) for name, partitions in listed.items()]
        wanted: dict[tuple[str, UUID], Iterable[int]] = {}
        for topic in asked.topics:
            name = offsets.image.name_of(topic.topic_id) if by_id else topic.name
            wanted[name, topic.topic_id if by_id else offsets.image.id_of(name)] = topic.partition_indexes
        return [(name, topic_id, partitions) for (name, topic_id), partitions in wanted.items()]

    def _fetched(
        self, group_id: str, topic: str, partition: int, require_stable: bool, *, is_missing: bool
    ) -> OffsetFetchResponsePartitions:
        offsets, code, position = self.offsets, ErrorCode.NONE, None
        if is_missing:
            code = ErrorCode.UNKNOWN_TOPIC_ID
        elif self.is_owed(group_id, topic, partition) or (
            require_stable and offsets.is_unstable(group_id, topic, partition)
        ):
            code = ErrorCode.UNSTABLE_OFFSET_COMMIT
        else:
            position = offsets.current(group_id, topic, partition)
        if position is None:
            return OffsetFetchResponsePartitions(
                partition_index=partition, committed_offset=-1, metadata="", error_code=code
            )
        known = offsets.image.by_name.get(topic)
        if known is not None:
            position = position.told(known.log_start(partition))
        found = OffsetFetchResponsePartitions(
            partition_index=partition,
            committed_offset=position.offset,
            committed_leader_epoch=position.leader_epoch,
            metadata=position.metadata,
        )
        if position.ranges_since:
            held = offsets.individual.of(group_id, (topic, partition), position)
            found.committed_range_offsets = Ranges(held.copied())
        if position.frontier is not None:
            found.key_range_offsets = KeyRanges(position.frontier)
        if position.passed is not None:
            found.passed_key_ranges = KeyRanges(position.passed)
        return found


def all_again(answer: OffsetFetchResponseGroup) -> OffsetFetchResponseGroup:
    """The answer for a client that does not ask for stable offsets, and may not know of others: it asks again.

    It is given everything that was found: the time of each position that is owed begins with the same question.
    """
    parts = [part for topic in answer.topics for part in topic.partitions]
    if any(part.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT for part in parts):
        answer.error_code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        for part in parts:
            part.committed_offset, part.committed_leader_epoch, part.metadata = -1, -1, ""
            part.error_code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    return answer
