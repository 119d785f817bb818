"""CreateDelegationToken (API 38). v2 is flexible; v3 adds the owner, and the one that asked."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import Blob, array, bytes_, int16, int32, int64, message, string, struct


@struct()
class CreatableRenewers:
    """A principal that may renew the token."""

    principal_type: str = string()
    principal_name: str = string()


@message(api_key=38, versions="1-3", flexible="2+")
class CreateDelegationTokenRequest:
    """Create a token for a principal."""

    owner_principal_type: str | None = string(since=3, nullable=True)
    owner_principal_name: str | None = string(since=3, nullable=True)
    renewers: Sequence[CreatableRenewers] = array(CreatableRenewers)
    max_lifetime_ms: int = int64()


@message(api_key=38, versions="1-3", flexible="2+")
class CreateDelegationTokenResponse:
    """The token."""

    error_code: int = int16()
    principal_type: str = string()
    principal_name: str = string()
    token_requester_principal_type: str = string(since=3)
    token_requester_principal_name: str = string(since=3)
    issue_timestamp_ms: int = int64()
    expiry_timestamp_ms: int = int64()
    max_timestamp_ms: int = int64()
    token_id: str = string()
    hmac: Blob = bytes_()
    throttle_time_ms: int = int32()
