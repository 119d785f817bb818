"""Whose work is missing in a group: the members that own the keys of a gap between offsets that are done.

A gap is held by every member that owns keys whose next offset is not above the gap's end. Keys whose next offset is
above it are done there, whoever owns them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.offsets import Gap, OffsetAndMetadata
from anabranch.machines.groups.individual import gaps
from anabranch.machines.key_ranges import Ranges, common
from anabranch.machines.keyspace import SPACE, Interval

if TYPE_CHECKING:
    from anabranch.client.admin.groups import MemberDescription
    from anabranch.client.admin.slices import HeldSlices


def with_gaps(
    committed: Mapping[TopicPartition, OffsetAndMetadata],
    members: Iterable[MemberDescription],
    slices: Mapping[TopicPartition, Iterable[HeldSlices]],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Add the gaps below the ranges of offsets, and their owners, to a group's committed offsets.

    `slices`: what members hold of partitions that they fetch without keys.
    """
    listed, found = list(members), dict[TopicPartition, OffsetAndMetadata]()
    for tp, at in committed.items():
        if tp in slices:
            gaps = tuple(gap._replace(owners=holders_of(gap, slices[tp])) for gap in gaps_of(at, {}))
        else:
            gaps = gaps_of(at, {member.member_id: member.keys(tp) for member in sorted_by_keys(listed, tp)})
        found[tp] = at._replace(gaps=gaps)
    return found


def holders_of(gap: Gap, slices: Iterable[HeldSlices]) -> tuple[str, ...]:
    """Return the ids of the members that hold slices in a gap, or before it and behind it."""
    return tuple(held.member_id for held in slices if held.first_offset <= gap.end and held.last_offset >= gap.start)


def sorted_by_keys(members: Iterable[MemberDescription], tp: TopicPartition) -> list[MemberDescription]:
    """Return the members that own keys of a partition, ascending by their keys."""
    return sorted((member for member in members if member.keys(tp)), key=lambda member: member.keys(tp))


def gaps_of(at: OffsetAndMetadata, keys: Mapping[str, Ranges]) -> tuple[Gap, ...]:
    """Return the gaps below the ranges of a partition, ascending. `keys`: what each member owns of it."""
    steps = [(Interval(start, end), offset) for start, end, offset in at.shares] or [(SPACE, at.offset)]
    lowest = {
        name: min((offset for step, offset in steps if common(ranges, (step,))), default=at.offset)
        for name, ranges in keys.items()
    }
    return tuple(
        Gap(start, end, tuple(name for name, offset in lowest.items() if offset <= end))
        for start, end in gaps(at.offset, at.ranges)
    )


def owners_of(keys: Interval, tp: TopicPartition, members: Iterable[MemberDescription]) -> list[str]:
    """Return the ids of the members that own some of these keys of a partition, in the order given."""
    return [member.member_id for member in members if common(member.keys(tp), (keys,))]
