"""DeleteAcls (API 31). v2 is flexible; v3 adds the resource type User."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int8, int16, int32, message, string, struct
from anabranch.protocol.messages.describe_acls import AclFilter


@struct()
class DeleteAclsFilter(AclFilter):
    """Which entries to remove."""


@message(api_key=31, versions="1-3", flexible="2+")
class DeleteAclsRequest:
    """Remove the entries that match any of the filters."""

    filters: Sequence[DeleteAclsFilter] = array(DeleteAclsFilter)


@struct()
class DeleteAclsMatchingAcl:
    """An entry that matched, and the result of its removal."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    resource_type: int = int8()
    resource_name: str = string()
    pattern_type: int = int8(default=3)
    principal: str = string()
    host: str = string()
    operation: int = int8()
    permission_type: int = int8()


@struct()
class DeleteAclsFilterResult:
    """The result of one filter, in the order of the request."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    matching_acls: Sequence[DeleteAclsMatchingAcl] = array(DeleteAclsMatchingAcl)


@message(api_key=31, versions="1-3", flexible="2+")
class DeleteAclsResponse:
    """A result for each filter."""

    throttle_time_ms: int = int32()
    filter_results: Sequence[DeleteAclsFilterResult] = array(DeleteAclsFilterResult)
