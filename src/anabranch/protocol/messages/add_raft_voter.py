"""AddRaftVoter (API 80). v1 adds `ack_when_committed`."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, message, string, struct, uint16, uuid


@struct()
class Listener:
    """Where a node listens."""

    name: str = string()
    host: str = string()
    port: int = uint16()


@message(api_key=80, versions="0-1", flexible="0+")
class AddRaftVoterRequest:
    """Add a voter to the quorum."""

    cluster_id: str | None = string(nullable=True)
    timeout_ms: int = int32()
    voter_id: int = int32()
    voter_directory_id: UUID = uuid()
    listeners: Sequence[Listener] = array(Listener)
    ack_when_committed: bool = boolean(since=1, default=True)


@message(api_key=80, versions="0-1", flexible="0+")
class AddRaftVoterResponse:
    """Whether the voter was added."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
