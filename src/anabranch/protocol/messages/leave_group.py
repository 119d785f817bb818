"""LeaveGroup (API 13). v1 adds `throttle_time_ms`; v3 adds `members`; v4 is flexible; v5 adds `reason`."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, message, string, struct


@struct()
class MemberIdentity:
    """A member that leaves."""

    member_id: str = string()
    group_instance_id: str | None = string(nullable=True, default=None)
    reason: str | None = string(since=5, nullable=True, default=None)


@message(api_key=13, versions="0-5", flexible="4+")
class LeaveGroupRequest:
    """Leave a classic group at once."""

    group_id: str = string()
    member_id: str = string(until=2)
    members: Sequence[MemberIdentity] = array(MemberIdentity, since=3)


@struct()
class MemberResponse:
    """The result for one member."""

    member_id: str = string()
    group_instance_id: str | None = string(nullable=True)
    error_code: int = int16()


@message(api_key=13, versions="0-5", flexible="4+")
class LeaveGroupResponse:
    """The results for the members."""

    throttle_time_ms: int = int32(since=1)
    error_code: int = int16()
    members: Sequence[MemberResponse] = array(MemberResponse, since=3)
