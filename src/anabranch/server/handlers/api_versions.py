"""ApiVersions (API 18): what this broker speaks. A version of it that we do not have is answered in version 0."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.api_versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse
from anabranch.protocol.registry import API
from anabranch.server.node import Call, Node

BROKERS_ONLY = frozenset({4, 5, 6})
"""Spoken between controller and brokers: refused when a client sends them, so not advertised."""


def handle_api_versions(node: Node, request: ApiVersionsRequest, call: Call) -> ApiVersionsResponse:
    """List every API with its versions."""
    return supported(ErrorCode.NONE)


def supported(error: ErrorCode) -> ApiVersionsResponse:
    """The list, with an error code."""
    keys = [
        ApiVersion(api_key=api.key, min_version=api.versions[0], max_version=api.versions[-1])
        for api in API.values()
        if api.key not in BROKERS_ONLY
    ]
    return ApiVersionsResponse(error_code=error, api_keys=sorted(keys, key=lambda api: api.api_key))
