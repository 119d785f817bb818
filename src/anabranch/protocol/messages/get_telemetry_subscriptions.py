"""GetTelemetrySubscriptions (API 71)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int8, int16, int32, message, string, uuid


@message(api_key=71, versions="0", flexible="0+")
class GetTelemetrySubscriptionsRequest:
    """Ask which metrics the client is to push (KIP-714)."""

    client_instance_id: UUID = uuid()


@message(api_key=71, versions="0", flexible="0+")
class GetTelemetrySubscriptionsResponse:
    """The metrics, and how often to push them."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    client_instance_id: UUID = uuid()
    subscription_id: int = int32()
    accepted_compression_types: Sequence[int] = array(int8)
    push_interval_ms: int = int32()
    telemetry_max_bytes: int = int32()
    delta_temporality: bool = boolean()
    requested_metrics: Sequence[str] = array(string)
