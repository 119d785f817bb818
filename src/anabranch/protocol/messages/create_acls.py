"""CreateAcls (API 30). v2 is flexible; v3 adds the resource type User."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int8, int16, int32, message, string, struct


@struct()
class AclCreation:
    """Who may, or may not, do what with which resource from where."""

    resource_type: int = int8()
    resource_name: str = string()
    resource_pattern_type: int = int8(default=3)
    principal: str = string()
    host: str = string()
    operation: int = int8()
    permission_type: int = int8()


@message(api_key=30, versions="1-3", flexible="2+")
class CreateAclsRequest:
    """Add entries to access control lists."""

    creations: Sequence[AclCreation] = array(AclCreation)


@struct()
class AclCreationResult:
    """The result of one entry, in the order of the request."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True)


@message(api_key=30, versions="1-3", flexible="2+")
class CreateAclsResponse:
    """A result for each entry."""

    throttle_time_ms: int = int32()
    results: Sequence[AclCreationResult] = array(AclCreationResult)
