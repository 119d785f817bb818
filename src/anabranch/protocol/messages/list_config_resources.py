"""ListConfigResources (API 74). v1 adds `resource_types`, `resource_type`."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int8, int16, int32, message, string, struct


@message(api_key=74, versions="0-1", flexible="0+")
class ListConfigResourcesRequest:
    """Ask which resources have configs."""

    resource_types: Sequence[int] = array(int8, since=1)


@struct()
class ConfigResource:
    """A resource that has configs."""

    resource_name: str = string()
    resource_type: int = int8(since=1, default=16)


@message(api_key=74, versions="0-1", flexible="0+")
class ListConfigResourcesResponse:
    """The resources found."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    config_resources: Sequence[ConfigResource] = array(ConfigResource)
