"""Envelope (API 58)."""

from __future__ import annotations

from anabranch.codec import Blob, bytes_, int16, message


@message(api_key=58, versions="0", flexible="0+")
class EnvelopeRequest:
    """Forward a request of a client to the controller."""

    request_data: Blob = bytes_()
    request_principal: Blob | None = bytes_(nullable=True)
    client_host_address: Blob = bytes_()


@message(api_key=58, versions="0", flexible="0+")
class EnvelopeResponse:
    """The response to the request within."""

    response_data: Blob | None = bytes_(nullable=True, default=None)
    error_code: int = int16()
