"""UpdateFeatures (API 57). v1 adds `upgrade_type` and `validate_only`; v2 has no results of single features."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int8, int16, int32, message, string, struct


@struct()
class FeatureUpdateKey:
    """One feature and its new version."""

    feature: str = string()
    max_version_level: int = int16()
    allow_downgrade: bool = boolean(until=0)
    upgrade_type: int = int8(since=1, default=1)


@message(api_key=57, versions="0-2", flexible="0+")
class UpdateFeaturesRequest:
    """Raise or lower the version of features of the cluster."""

    timeout_ms: int = int32(default=60000)
    feature_updates: Sequence[FeatureUpdateKey] = array(FeatureUpdateKey)
    validate_only: bool = boolean(since=1)


@struct()
class UpdatableFeatureResult:
    """The result for one feature."""

    feature: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


@message(api_key=57, versions="0-2", flexible="0+")
class UpdateFeaturesResponse:
    """The result, and before v2 one of each feature."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    results: Sequence[UpdatableFeatureResult] = array(UpdatableFeatureResult, until=1)
