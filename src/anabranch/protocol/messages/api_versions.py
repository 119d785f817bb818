"""ApiVersions (API 18). v1 adds `throttle_time_ms`; v3 adds `client_software_name`, `client_software_version`,
`supported_features`, `finalized_features_epoch`, `finalized_features`, `zk_migration_ready` and is flexible.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct


@message(api_key=18, versions="0-4", flexible="3+")
class ApiVersionsRequest:
    """The first request of a connection: the client's name and version."""

    client_software_name: str = string(since=3)
    client_software_version: str = string(since=3)


@struct()
class ApiVersion:
    """The versions of one API that the broker serves."""

    api_key: int = int16()
    min_version: int = int16()
    max_version: int = int16()


@struct()
class SupportedFeatureKey:
    """A feature that the broker supports."""

    name: str = string()
    min_version: int = int16()
    max_version: int = int16()


@struct()
class FinalizedFeatureKey:
    """A feature that is in force in the whole cluster."""

    name: str = string()
    max_version_level: int = int16()
    min_version_level: int = int16()


@message(api_key=18, versions="0-4", flexible="3+")
class ApiVersionsResponse:
    """The APIs that the broker serves. Its header is version 0 always, so that any client can read it."""

    error_code: int = int16()
    api_keys: Sequence[ApiVersion] = array(ApiVersion)
    throttle_time_ms: int = int32(since=1)
    supported_features: Sequence[SupportedFeatureKey] = array(SupportedFeatureKey, tag=0)
    finalized_features_epoch: int = int64(default=-1, tag=1)
    finalized_features: Sequence[FinalizedFeatureKey] = array(FinalizedFeatureKey, tag=2)
    zk_migration_ready: bool = boolean(tag=3)
