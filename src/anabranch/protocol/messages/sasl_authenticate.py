"""SaslAuthenticate (API 36). v1 adds `session_lifetime_ms`; v2 is flexible."""

from __future__ import annotations

from anabranch.codec import Blob, bytes_, int16, int64, message, string


@message(api_key=36, versions="0-2", flexible="2+")
class SaslAuthenticateRequest:
    """Bytes of the chosen mechanism."""

    auth_bytes: Blob = bytes_()


@message(api_key=36, versions="0-2", flexible="2+")
class SaslAuthenticateResponse:
    """Bytes of the chosen mechanism, or why it failed."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    auth_bytes: Blob = bytes_()
    session_lifetime_ms: int = int64(since=1)
