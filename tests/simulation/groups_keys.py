"""The keys that members hold, in a coordinator's group: of each partition some, or all."""

from __future__ import annotations

from uuid import UUID

from anabranch.machines.groups.consumer.group import ConsumerGroup, Member
from anabranch.machines.groups.consumer.shares import held_of
from anabranch.machines.key_ranges import WHOLE, Ranges

Partition = tuple[UUID, int]


def keys_of(member: Member) -> dict[Partition, Ranges]:
    """What no other member may have: assigned, or to be revoked."""
    if not member.shares and not member.revoking_shares:
        return dict.fromkeys(member.holds, WHOLE)
    return {at: member.held(at) for at in dict.fromkeys(member.holds)}


def assigned_keys(member: Member) -> dict[Partition, Ranges]:
    """What a member is told to have; a whole partition as clients have it, without ranges."""
    shares = dict(member.shares)
    return {
        (topic_id, number): shares.get((topic_id, number), ())
        for topic_id, numbers in member.assigned
        for number in numbers
    }


def target_keys(group: ConsumerGroup, member_id: str) -> dict[Partition, Ranges]:
    """What a member is to have."""
    target, shares = group.target(member_id), group.target_shares.get(member_id, ())
    if not shares:
        return {(topic_id, number): WHOLE for topic_id, numbers in target for number in numbers}
    return {
        (topic_id, number): held_of((topic_id, number), target, shares)
        for topic_id, numbers in target
        for number in numbers
    }
