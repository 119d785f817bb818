"""SaslHandshake (API 17)."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, message, string


@message(api_key=17, versions="0-1", flexible="none")
class SaslHandshakeRequest:
    """Choose how to authenticate."""

    mechanism: str = string()


@message(api_key=17, versions="0-1", flexible="none")
class SaslHandshakeResponse:
    """The mechanisms that are enabled."""

    error_code: int = int16()
    mechanisms: Sequence[str] = array(string)
