"""ShareGroupHeartbeat (API 76)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, message, nested, string, struct, uuid


@message(api_key=76, versions="1", flexible="1+")
class ShareGroupHeartbeatRequest:
    """Join a share group, keep the session, leave (KIP-932)."""

    group_id: str = string()
    member_id: str = string()
    member_epoch: int = int32()
    rack_id: str | None = string(nullable=True, default=None)
    subscribed_topic_names: Sequence[str] | None = array(string, nullable=True, default=None)


@struct()
class TopicPartitions:
    """Partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[int] = array(int32)


@struct()
class Assignment:
    """The partitions of a member."""

    topic_partitions: Sequence[TopicPartitions] = array(TopicPartitions)


@message(api_key=76, versions="1", flexible="1+")
class ShareGroupHeartbeatResponse:
    """The member's epoch and partitions."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    member_id: str | None = string(nullable=True, default=None)
    member_epoch: int = int32()
    heartbeat_interval_ms: int = int32()
    assignment: Assignment | None = nested(Assignment, nullable=True)
