"""PushTelemetry (API 72)."""

from __future__ import annotations

from uuid import UUID

from anabranch.codec import Blob, boolean, bytes_, int8, int16, int32, message, uuid


@message(api_key=72, versions="0", flexible="0+")
class PushTelemetryRequest:
    """Push metrics of a client (KIP-714)."""

    client_instance_id: UUID = uuid()
    subscription_id: int = int32()
    terminating: bool = boolean()
    compression_type: int = int8()
    metrics: Blob = bytes_()


@message(api_key=72, versions="0", flexible="0+")
class PushTelemetryResponse:
    """Whether the metrics were taken."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
