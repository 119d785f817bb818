"""RemoveRaftVoter (API 81)."""

from __future__ import annotations

from uuid import UUID

from anabranch.codec import int16, int32, message, string, uuid


@message(api_key=81, versions="0", flexible="0+")
class RemoveRaftVoterRequest:
    """Remove a voter from the quorum."""

    cluster_id: str | None = string(nullable=True)
    voter_id: int = int32()
    voter_directory_id: UUID = uuid()


@message(api_key=81, versions="0", flexible="0+")
class RemoveRaftVoterResponse:
    """Whether the voter was removed."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
