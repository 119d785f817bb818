"""DescribeDelegationToken (API 41). v2 is flexible; v3 adds the principal that asked for a token."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import Blob, array, bytes_, int16, int32, int64, message, string, struct


@struct()
class DescribeDelegationTokenOwner:
    """An owner of tokens."""

    principal_type: str = string()
    principal_name: str = string()


@message(api_key=41, versions="1-3", flexible="2+")
class DescribeDelegationTokenRequest:
    """Ask for the tokens of owners; null means all."""

    owners: Sequence[DescribeDelegationTokenOwner] | None = array(DescribeDelegationTokenOwner, nullable=True)


@struct()
class DescribedDelegationTokenRenewer:
    """A principal that may renew the token."""

    principal_type: str = string()
    principal_name: str = string()


@struct()
class DescribedDelegationToken:
    """One token."""

    principal_type: str = string()
    principal_name: str = string()
    token_requester_principal_type: str = string(since=3)
    token_requester_principal_name: str = string(since=3)
    issue_timestamp: int = int64()
    expiry_timestamp: int = int64()
    max_timestamp: int = int64()
    token_id: str = string()
    hmac: Blob = bytes_()
    renewers: Sequence[DescribedDelegationTokenRenewer] = array(DescribedDelegationTokenRenewer)


@message(api_key=41, versions="1-3", flexible="2+")
class DescribeDelegationTokenResponse:
    """The tokens."""

    error_code: int = int16()
    tokens: Sequence[DescribedDelegationToken] = array(DescribedDelegationToken)
    throttle_time_ms: int = int32()
