"""DescribeUserScramCredentials (API 50)."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int8, int16, int32, message, string, struct


@struct()
class UserName:
    """A user."""

    name: str = string()


@message(api_key=50, versions="0", flexible="0+")
class DescribeUserScramCredentialsRequest:
    """Ask for SCRAM credentials of users; null or none means all."""

    users: Sequence[UserName] | None = array(UserName, nullable=True)


@struct()
class CredentialInfo:
    """One credential: its mechanism and how often it is hashed."""

    mechanism: int = int8()
    iterations: int = int32()


@struct()
class DescribeUserScramCredentialsResult:
    """The credentials of one user."""

    user: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    credential_infos: Sequence[CredentialInfo] = array(CredentialInfo)


@message(api_key=50, versions="0", flexible="0+")
class DescribeUserScramCredentialsResponse:
    """The credentials of each user."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    results: Sequence[DescribeUserScramCredentialsResult] = array(DescribeUserScramCredentialsResult)
