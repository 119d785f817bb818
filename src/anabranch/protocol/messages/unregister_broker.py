"""UnregisterBroker (API 64)."""

from __future__ import annotations

from anabranch.codec import int16, int32, message, string


@message(api_key=64, versions="0", flexible="0+")
class UnregisterBrokerRequest:
    """Remove a broker from the cluster."""

    broker_id: int = int32()


@message(api_key=64, versions="0", flexible="0+")
class UnregisterBrokerResponse:
    """Whether the broker was removed."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
