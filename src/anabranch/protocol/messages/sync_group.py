"""SyncGroup (API 14). v1 adds `throttle_time_ms`; v3 adds `group_instance_id`; v4 is flexible; v5 adds
`protocol_type`, `protocol_name`.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import Blob, array, bytes_, int16, int32, message, string, struct


@struct()
class SyncGroupRequestAssignment:
    """The assignment of one member."""

    member_id: str = string()
    assignment: Blob = bytes_()


@message(api_key=14, versions="0-5", flexible="4+")
class SyncGroupRequest:
    """The leader hands in the assignment; the others ask for it."""

    group_id: str = string()
    generation_id: int = int32()
    member_id: str = string()
    group_instance_id: str | None = string(since=3, nullable=True, default=None)
    protocol_type: str | None = string(since=5, nullable=True, default=None)
    protocol_name: str | None = string(since=5, nullable=True, default=None)
    assignments: Sequence[SyncGroupRequestAssignment] = array(SyncGroupRequestAssignment)


@message(api_key=14, versions="0-5", flexible="4+")
class SyncGroupResponse:
    """The assignment of the member that asked."""

    throttle_time_ms: int = int32(since=1)
    error_code: int = int16()
    protocol_type: str | None = string(since=5, nullable=True, default=None)
    protocol_name: str | None = string(since=5, nullable=True, default=None)
    assignment: Blob = bytes_()
