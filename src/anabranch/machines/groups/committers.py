"""Who may commit and fetch the offsets of a group: members at their epoch, and anybody while there are none."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import classic
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup

Group = ConsumerGroup | ClassicGroup

STALE_EPOCH_SINCE = 9
"""Version of OffsetCommit and OffsetFetch that adds the consumer protocol."""


def commit_error(
    group: Group | None,
    group_id: str,
    member_id: str,
    instance_id: str | None,
    epoch: int,
    version: int,
    *,
    transactional: bool = False,
) -> ErrorCode:
    """The error for a commit under this member id; NONE if it is accepted."""
    if not group_id:
        return ErrorCode.INVALID_GROUP_ID
    if isinstance(group, ClassicGroup):
        return classic.commit_error(group, member_id, instance_id, epoch, transactional=transactional)
    if group is None or not group.members:
        if epoch < 0:
            return ErrorCode.NONE
        if group is None:
            return ErrorCode.GROUP_ID_NOT_FOUND if version >= STALE_EPOCH_SINCE else ErrorCode.ILLEGAL_GENERATION
        return ErrorCode.UNKNOWN_MEMBER_ID
    if transactional and epoch < 0 and not member_id:
        return ErrorCode.NONE
    member = group.members.get(member_id)
    if member is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    if epoch == member.epoch:
        return ErrorCode.NONE
    if member.described.classic is not None:
        return ErrorCode.ILLEGAL_GENERATION
    return ErrorCode.STALE_MEMBER_EPOCH if version >= STALE_EPOCH_SINCE else ErrorCode.UNSUPPORTED_VERSION


def fetch_error(group: Group | None, asked: OffsetFetchRequestGroup) -> ErrorCode:
    """The error for a fetch under this member id; NONE if it is answered."""
    if not asked.member_id or asked.member_epoch < 0:
        return ErrorCode.NONE
    if group is None:
        return ErrorCode.GROUP_ID_NOT_FOUND
    if isinstance(group, ClassicGroup):
        return ErrorCode.NONE
    member = group.members.get(asked.member_id)
    if member is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    return ErrorCode.NONE if member.epoch == asked.member_epoch else ErrorCode.STALE_MEMBER_EPOCH
