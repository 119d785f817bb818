"""DescribeConfigs (API 32). v3 adds `include_documentation`, `config_type`, `documentation`; v4 is flexible."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int8, int16, int32, message, string, struct


@struct()
class DescribeConfigsResource:
    """A topic, broker or group, and which of its configs; null means all."""

    resource_type: int = int8()
    resource_name: str = string()
    configuration_keys: Sequence[str] | None = array(string, nullable=True)


@message(api_key=32, versions="1-4", flexible="4+")
class DescribeConfigsRequest:
    """Ask for configs."""

    resources: Sequence[DescribeConfigsResource] = array(DescribeConfigsResource)
    include_synonyms: bool = boolean()
    include_documentation: bool = boolean(since=3)


@struct()
class DescribeConfigsSynonym:
    """Another place that sets the same config, in order of precedence."""

    name: str = string()
    value: str | None = string(nullable=True)
    source: int = int8()


@struct()
class DescribeConfigsResourceResult:
    """One config: its value and where it comes from."""

    name: str = string()
    value: str | None = string(nullable=True)
    read_only: bool = boolean()
    config_source: int = int8(default=-1)
    is_sensitive: bool = boolean()
    synonyms: Sequence[DescribeConfigsSynonym] = array(DescribeConfigsSynonym)
    config_type: int = int8(since=3)
    documentation: str | None = string(since=3, nullable=True)


@struct()
class DescribeConfigsResult:
    """The configs of one resource."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    resource_type: int = int8()
    resource_name: str = string()
    configs: Sequence[DescribeConfigsResourceResult] = array(DescribeConfigsResourceResult)


@message(api_key=32, versions="1-4", flexible="4+")
class DescribeConfigsResponse:
    """The configs asked for."""

    throttle_time_ms: int = int32()
    results: Sequence[DescribeConfigsResult] = array(DescribeConfigsResult)
