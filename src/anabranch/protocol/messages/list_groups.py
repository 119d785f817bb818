"""ListGroups (API 16). v1 adds `throttle_time_ms`; v3 is flexible; v4 adds `states_filter`, `group_state`; v5 adds
`types_filter`, `group_type`.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, message, string, struct


@message(api_key=16, versions="0-5", flexible="3+")
class ListGroupsRequest:
    """Ask for groups; empty filters let all pass."""

    states_filter: Sequence[str] = array(string, since=4)
    types_filter: Sequence[str] = array(string, since=5)


@struct()
class ListedGroup:
    """One group."""

    group_id: str = string()
    protocol_type: str = string()
    group_state: str = string(since=4)
    group_type: str = string(since=5)


@message(api_key=16, versions="0-5", flexible="3+")
class ListGroupsResponse:
    """The groups of this coordinator."""

    throttle_time_ms: int = int32(since=1)
    error_code: int = int16()
    groups: Sequence[ListedGroup] = array(ListedGroup)
