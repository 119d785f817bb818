"""ShareGroupDescribe (API 77)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, message, nested, string, struct, uuid


@message(api_key=77, versions="1", flexible="1+")
class ShareGroupDescribeRequest:
    """Describe share groups."""

    group_ids: Sequence[str] = array(string)
    include_authorized_operations: bool = boolean()


@struct()
class TopicPartitions:
    """Partitions of one topic."""

    topic_id: UUID = uuid()
    topic_name: str = string()
    partitions: Sequence[int] = array(int32)


@struct()
class Assignment:
    """The partitions of a member."""

    topic_partitions: Sequence[TopicPartitions] = array(TopicPartitions)


@struct()
class Member:
    """One member of the group."""

    member_id: str = string()
    rack_id: str | None = string(nullable=True, default=None)
    member_epoch: int = int32()
    client_id: str = string()
    client_host: str = string()
    subscribed_topic_names: Sequence[str] = array(string)
    assignment: Assignment = nested(Assignment)


@struct()
class DescribedGroup:
    """One group, or why it is not described."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    group_id: str = string()
    group_state: str = string()
    group_epoch: int = int32()
    assignment_epoch: int = int32()
    assignor_name: str = string()
    members: Sequence[Member] = array(Member)
    authorized_operations: int = int32(default=-2147483648)


@message(api_key=77, versions="1", flexible="1+")
class ShareGroupDescribeResponse:
    """The groups."""

    throttle_time_ms: int = int32()
    groups: Sequence[DescribedGroup] = array(DescribedGroup)
