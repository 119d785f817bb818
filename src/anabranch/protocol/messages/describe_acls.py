"""DescribeAcls (API 29). v2 is flexible; v3 adds the resource type User."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int8, int16, int32, message, string, struct


@struct()
class AclFilter:
    """Which entries are meant; null and ANY match all."""

    resource_type_filter: int = int8()
    resource_name_filter: str | None = string(nullable=True)
    pattern_type_filter: int = int8(default=3)
    principal_filter: str | None = string(nullable=True)
    host_filter: str | None = string(nullable=True)
    operation: int = int8()
    permission_type: int = int8()


@message(api_key=29, versions="1-3", flexible="2+")
class DescribeAclsRequest(AclFilter):
    """Ask for the entries that match a filter."""


@struct()
class AclDescription:
    """Who may, or may not, do what from where."""

    principal: str = string()
    host: str = string()
    operation: int = int8()
    permission_type: int = int8()


@struct()
class DescribeAclsResource:
    """The entries of one resource, or of one prefix of names."""

    resource_type: int = int8()
    resource_name: str = string()
    pattern_type: int = int8(default=3)
    acls: Sequence[AclDescription] = array(AclDescription)


@message(api_key=29, versions="1-3", flexible="2+")
class DescribeAclsResponse:
    """The entries that match the filter."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    resources: Sequence[DescribeAclsResource] = array(DescribeAclsResource)
