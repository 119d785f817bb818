"""AlterUserScramCredentials (API 51)."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import Blob, array, bytes_, int8, int16, int32, message, string, struct


@struct()
class ScramCredentialDeletion:
    """A credential to remove."""

    name: str = string()
    mechanism: int = int8()


@struct()
class ScramCredentialUpsertion:
    """A credential to add or change."""

    name: str = string()
    mechanism: int = int8()
    iterations: int = int32()
    salt: Blob = bytes_()
    salted_password: Blob = bytes_()


@message(api_key=51, versions="0", flexible="0+")
class AlterUserScramCredentialsRequest:
    """Add, change or remove SCRAM credentials of users."""

    deletions: Sequence[ScramCredentialDeletion] = array(ScramCredentialDeletion)
    upsertions: Sequence[ScramCredentialUpsertion] = array(ScramCredentialUpsertion)


@struct()
class AlterUserScramCredentialsResult:
    """The result for one user."""

    user: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


@message(api_key=51, versions="0", flexible="0+")
class AlterUserScramCredentialsResponse:
    """A result for each user."""

    throttle_time_ms: int = int32()
    results: Sequence[AlterUserScramCredentialsResult] = array(AlterUserScramCredentialsResult)
