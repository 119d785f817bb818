"""Who may commit and fetch the offsets of a group: members at their epoch, and anybody while there are none.

A member that commits by name may not know yet that the topic is another one, which was created under the name of a
deleted one. What it read of the former is no progress in the present topic, where it would open gates.
"""

from __future__ import annotations

from collections.abc import Set

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import classic
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.protocol.messages.offset_commit import OffsetCommitRequest
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup
from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest

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
    if instance_id is not None and group.static_members.get(instance_id, member_id) != member_id:
        return ErrorCode.FENCED_INSTANCE_ID
    member = group.members.get(member_id)
    if member is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    if epoch == member.epoch:
        return ErrorCode.NONE
    if member.described.classic is not None:
        return ErrorCode.ILLEGAL_GENERATION
    return ErrorCode.STALE_MEMBER_EPOCH if version >= STALE_EPOCH_SINCE else ErrorCode.UNSUPPORTED_VERSION


def request_error(
    group: Group | None, request: OffsetCommitRequest | TxnOffsetCommitRequest, version: int = STALE_EPOCH_SINCE
) -> ErrorCode:
    """The error for all of a commit; NONE if it is accepted. `version`: of OffsetCommit; it only changes the error."""
    if isinstance(request, TxnOffsetCommitRequest):
        epoch, transactional = request.generation_id, True
    else:
        epoch, transactional = request.generation_id_or_member_epoch, False
    group_id, member_id, instance_id = request.group_id, request.member_id, request.group_instance_id
    return commit_error(group, group_id, member_id, instance_id, epoch, version, transactional=transactional)


def read_of_deleted_topics(group: Group | None, member_id: str, topic: TopicImage | None, image: Image) -> Set[int]:
    """The partitions that a member of the consumer protocol holds of deleted topics, and not of this one.

    By the name of this topic it means one of those.
    """
    member = group.members.get(member_id) if isinstance(group, ConsumerGroup) else None
    if member is None or topic is None:
        return frozenset()
    former: set[int] = set()
    present: set[int] = set()
    for topic_id, numbers in (*member.assigned, *member.revoking):
        if topic_id == topic.topic_id:
            present.update(numbers)
        elif topic_id not in image.by_id:
            former.update(numbers)
    return former - present


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
