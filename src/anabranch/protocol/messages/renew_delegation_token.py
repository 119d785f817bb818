"""RenewDelegationToken (API 39). v2 is flexible."""

from __future__ import annotations

from anabranch.codec import Blob, bytes_, int16, int32, int64, message


@message(api_key=39, versions="1-2", flexible="2+")
class RenewDelegationTokenRequest:
    """Let a token live longer."""

    hmac: Blob = bytes_()
    renew_period_ms: int = int64()


@message(api_key=39, versions="1-2", flexible="2+")
class RenewDelegationTokenResponse:
    """When the token expires."""

    error_code: int = int16()
    expiry_timestamp_ms: int = int64()
    throttle_time_ms: int = int32()
