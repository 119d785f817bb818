"""Heartbeat (API 12). v1 adds `throttle_time_ms`; v3 adds `group_instance_id`; v4 is flexible."""

from __future__ import annotations

from anabranch.codec import int16, int32, message, string


@message(api_key=12, versions="0-4", flexible="4+")
class HeartbeatRequest:
    """Sent by every member of a classic group, several times within its session timeout."""

    group_id: str = string()
    generation_id: int = int32()
    member_id: str = string()
    group_instance_id: str | None = string(since=3, nullable=True, default=None)


@message(api_key=12, versions="0-4", flexible="4+")
class HeartbeatResponse:
    """Whether the member may go on, or must rejoin."""

    throttle_time_ms: int = int32(since=1)
    error_code: int = int16()
