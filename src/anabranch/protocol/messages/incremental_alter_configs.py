"""IncrementalAlterConfigs (API 44). v1 is flexible."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int8, int16, int32, message, string, struct


@struct()
class AlterableConfig:
    """One config to set (0), delete (1), append to (2) or subtract from (3)."""

    name: str = string()
    config_operation: int = int8()
    value: str | None = string(nullable=True)


@struct()
class AlterConfigsResource:
    """The configs of one resource."""

    resource_type: int = int8()
    resource_name: str = string()
    configs: Sequence[AlterableConfig] = array(AlterableConfig)


@message(api_key=44, versions="0-1", flexible="1+")
class IncrementalAlterConfigsRequest:
    """Change some configs of resources."""

    resources: Sequence[AlterConfigsResource] = array(AlterConfigsResource)
    validate_only: bool = boolean()


@struct()
class AlterConfigsResourceResponse:
    """The result for one resource."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    resource_type: int = int8()
    resource_name: str = string()


@message(api_key=44, versions="0-1", flexible="1+")
class IncrementalAlterConfigsResponse:
    """The results for the resources."""

    throttle_time_ms: int = int32()
    responses: Sequence[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse)
