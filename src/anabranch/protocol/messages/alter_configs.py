"""AlterConfigs (API 33). v2 is flexible."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int8, int16, int32, message, string, struct


@struct()
class AlterableConfig:
    """One config to change."""

    name: str = string()
    value: str | None = string(nullable=True)


@struct()
class AlterConfigsResource:
    """The configs of one resource."""

    resource_type: int = int8()
    resource_name: str = string()
    configs: Sequence[AlterableConfig] = array(AlterableConfig)


@message(api_key=33, versions="0-2", flexible="2+")
class AlterConfigsRequest:
    """Replace all configs of resources."""

    resources: Sequence[AlterConfigsResource] = array(AlterConfigsResource)
    validate_only: bool = boolean()


@struct()
class AlterConfigsResourceResponse:
    """The result for one resource."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    resource_type: int = int8()
    resource_name: str = string()


@message(api_key=33, versions="0-2", flexible="2+")
class AlterConfigsResponse:
    """The results for the resources."""

    throttle_time_ms: int = int32()
    responses: Sequence[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse)
