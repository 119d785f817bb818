"""DeleteGroups (API 42). v2 is flexible."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, message, string, struct


@message(api_key=42, versions="0-2", flexible="2+")
class DeleteGroupsRequest:
    """Delete groups that have no members."""

    groups_names: Sequence[str] = array(string)


@struct()
class DeletableGroupResult:
    """The result for one group."""

    group_id: str = string()
    error_code: int = int16()


@message(api_key=42, versions="0-2", flexible="2+")
class DeleteGroupsResponse:
    """The results for the groups."""

    throttle_time_ms: int = int32()
    results: Sequence[DeletableGroupResult] = array(DeletableGroupResult)
