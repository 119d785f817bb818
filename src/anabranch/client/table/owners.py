"""Who owns a key: the member of the group that is given the key's next records.

While the group has yet to read a partition that held the key in an earlier layout, that is this partition's owner. What
it has committed may lie before the end of that layout though nothing is left to read: markers, aborted records, deleted
ones. So the partition is read from there on, as far as the next record.
"""

from __future__ import annotations

from typing import NamedTuple

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.admin.admin import Admin
from anabranch.client.admin.groups import MemberDescription
from anabranch.client.consumer.consumer import Consumer
from anabranch.client.consumer.offsets import OffsetAndMetadata
from anabranch.client.table.changelog import connection_of

LOOK_S, LOOKS_MS = 0.2, 5_000
"""The time for which a poll, and all polls, wait for a record that is left."""


class Owner(NamedTuple):
    """The partition whose records of a key are next, and its owner; None while nobody owns it."""

    partition: TopicPartition
    member: MemberDescription | None


class Owners:
    """The owners of one topic's keys."""

    def __init__(self, consumer: Consumer, group: str | None, source: str) -> None:
        self._consumer = consumer
        self._group = group
        self._source = source

    async def owner_of(self, key: bytes) -> Owner:
        """Ask the coordinator. Raises `ApiError` where there is no group with members."""
        if self._group is None or self._consumer.settings.group_id is None:
            text = (
                "owners are told of members of a group; shares that are assigned by hand are known to whoever cut them"
            )
            raise ApiError(ErrorCode.INVALID_GROUP_ID, text)
        async with Admin(**connection_of(self._consumer.settings)) as admin:
            history = await admin.explain(self._source, key)
            committed = await admin.list_group_offsets(self._group)
            group = (await admin.describe_groups(self._group))[self._group]
        tp, place = TopicPartition(self._source, history.partition), history.spread
        for stay in history.stays:
            held = TopicPartition(self._source, stay.partition)
            at = committed.get(held)
            if stay.end is None or stay.start is None or stay.end <= stay.start:
                continue
            if at is None or await self._is_left(held, _next_of(place, at), stay.end):
                tp = held
                break
        owners = (one for one in group.members if any(start <= place <= end for start, end in one.keys(tp)))
        return Owner(tp, next(owners, None))

    async def _is_left(self, tp: TopicPartition, offset: int, end: int) -> bool:
        """Whether a record can be read between two offsets; True while an open transaction holds that up."""
        if offset >= end:
            return False
        settings = self._consumer.settings
        level, given = settings.isolation_level, connection_of(settings)
        async with Consumer(**given, isolation_level=level, auto_offset_reset="earliest") as reader:
            reader.assign([tp])
            await reader.seek(*tp, offset)
            until = reader.driver.now_ms() + LOOKS_MS
            while (position := await reader.position(*tp)) < end and reader.driver.now_ms() < until:
                for record in await reader.poll(LOOK_S):
                    return record.offset < end
            return position < end


def _next_of(place: int, at: OffsetAndMetadata) -> int:
    """Return the next offset to read of a place of the key space; the members that share a partition differ in it."""
    return next((offset for start, end, offset in at.shares if start <= place <= end), at.offset)
