"""JoinGroup (API 11). v1 adds `rebalance_timeout_ms`; v2 adds `throttle_time_ms`; v5 adds `group_instance_id`; v6 is
flexible; v7 adds `protocol_type`; v8 adds `reason`; v9 adds `skip_assignment`.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import Blob, array, boolean, bytes_, int16, int32, message, string, struct


@struct()
class JoinGroupRequestProtocol:
    """A protocol that the member can follow, and its subscription."""

    name: str = string()
    metadata: Blob = bytes_()


@message(api_key=11, versions="0-9", flexible="6+")
class JoinGroupRequest:
    """Join a classic group, or take part in its rebalance."""

    group_id: str = string()
    session_timeout_ms: int = int32()
    rebalance_timeout_ms: int = int32(since=1, default=-1)
    member_id: str = string()
    group_instance_id: str | None = string(since=5, nullable=True, default=None)
    protocol_type: str = string()
    protocols: Sequence[JoinGroupRequestProtocol] = array(JoinGroupRequestProtocol)
    reason: str | None = string(since=8, nullable=True, default=None)


@struct()
class JoinGroupResponseMember:
    """A member and its subscription, for the leader."""

    member_id: str = string()
    group_instance_id: str | None = string(since=5, nullable=True, default=None)
    metadata: Blob = bytes_()


@message(api_key=11, versions="0-9", flexible="6+")
class JoinGroupResponse:
    """The generation that began; for the leader, its members."""

    throttle_time_ms: int = int32(since=2)
    error_code: int = int16()
    generation_id: int = int32(default=-1)
    protocol_type: str | None = string(since=7, nullable=True, default=None)
    protocol_name: str | None = string(nullable="7+")
    leader: str = string()
    skip_assignment: bool = boolean(since=9)
    member_id: str = string()
    members: Sequence[JoinGroupResponseMember] = array(JoinGroupResponseMember)
