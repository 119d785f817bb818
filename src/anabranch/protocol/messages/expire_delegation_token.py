"""ExpireDelegationToken (API 40). v2 is flexible."""

from __future__ import annotations

from anabranch.codec import Blob, bytes_, int16, int32, int64, message


@message(api_key=40, versions="1-2", flexible="2+")
class ExpireDelegationTokenRequest:
    """Let a token expire earlier."""

    hmac: Blob = bytes_()
    expiry_time_period_ms: int = int64()


@message(api_key=40, versions="1-2", flexible="2+")
class ExpireDelegationTokenResponse:
    """When the token expires."""

    error_code: int = int16()
    expiry_timestamp_ms: int = int64()
    throttle_time_ms: int = int32()
