"""What a member may commit of a partition that members share: the progress of keys that it holds (ADR 0050).

    ranges of keys      each lies in what the member holds, has or is revoking; otherwise the commit is refused
    ranges of offsets   the member holds keys of the partition; a range of offsets does not say of which
    plain               counts for the keys that the member holds, as if it had named them; of gates that were
                        gone through it says no more than any plain commit (`ranged_commits`)

So a member that has let go of keys, and learns late of it, moves nothing of what their next owner does. That holds for
members of the consumer protocol; a commit by no member is that of a tool, which sets the offset of all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TypeVar
from uuid import UUID

from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.image import Image
from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, common, ranges_of
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
)
from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest, TxnOffsetCommitRequestPartition

Group = ConsumerGroup | ClassicGroup
OFFSET_OF_SHARE = -2
"""In place of the offset of a plain commit that counts for ranges of keys; -1 where a client has said ranges only."""
Part = OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition
Request = TypeVar("Request", OffsetCommitRequest, TxnOffsetCommitRequest)


def refusal(group: Group | None, member_id: str, topic_id: UUID, part: Part) -> str:
    """The sentence that refuses a member's commit of keys that it does not hold; empty where it does."""
    if not isinstance(group, ConsumerGroup) or (not part.key_range_offsets and not group.sharers):
        return ""
    at = topic_id, part.partition_index
    if not part.key_range_offsets and at not in group.sharers:
        return ""
    member = group.members.get(member_id)
    holds = NONE if member is None else member.held(at)
    if holds == WHOLE:
        return ""
    for it in part.key_range_offsets:
        named = _range(it)
        if named and common(named, holds) != named:
            return f"Member {member_id} does not hold the keys {it.start}-{it.end} of partition {at[1]} (any more)."
    return "" if holds else f"Member {member_id} does not hold any key of partition {at[1]} (any more)."


def bounded(group: Group | None, image: Image, request: Request) -> Request:
    """The request, with plain commits of a member limited to the keys that it holds."""
    if not isinstance(group, ConsumerGroup) or not group.sharers:
        return request
    member = group.members.get(request.member_id)
    if member is None:
        return request
    topics = []
    for topic in request.topics:
        topic_id = getattr(topic, "topic_id", None)
        known = image.by_name.get(topic.name) or (None if topic_id is None else image.by_id.get(topic_id))
        parts = [
            part if known is None else _bounded(part, member.held((known.topic_id, part.partition_index)))
            for part in topic.partitions
        ]
        made = copy(topic)
        made.partitions = parts  # type: ignore[assignment]
        topics.append(made)
    found = copy(request)
    found.topics = topics
    return found


def _bounded(part: Part, holds: Ranges) -> Part:
    if holds in (NONE, WHOLE) or part.offset_ranges or part.key_range_offsets or part.committed_offset < 0:
        return part
    found = copy(part)
    offset, found.committed_offset = part.committed_offset, OFFSET_OF_SHARE
    ranges: Sequence[KeyRangeOffset] = [KeyRangeOffset(start=it.start, end=it.end, offset=offset) for it in holds]
    found.key_range_offsets = ranges
    return found


def _range(it: KeyRangeOffset) -> Ranges:
    """The keys that a commit names; none where they are no range, which is refused elsewhere."""
    return ranges_of([(it.start, it.end)]) if 0 <= it.start <= it.end <= WHOLE[0].end else NONE
