"""UpdateRaftVoter (API 82)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, message, nested, string, struct, uint16, uuid


@struct()
class Listener:
    """Where a node listens."""

    name: str = string()
    host: str = string()
    port: int = uint16()


@struct()
class KRaftVersionFeature:
    """The versions of the quorum's protocol that the voter supports."""

    min_supported_version: int = int16()
    max_supported_version: int = int16()


@message(api_key=82, versions="0", flexible="0+")
class UpdateRaftVoterRequest:
    """Change what the quorum knows of a voter."""

    cluster_id: str | None = string(nullable=True)
    current_leader_epoch: int = int32()
    voter_id: int = int32()
    voter_directory_id: UUID = uuid()
    listeners: Sequence[Listener] = array(Listener)
    k_raft_version_feature: KRaftVersionFeature = nested(KRaftVersionFeature)


@struct()
class CurrentLeader:
    """The leader of the quorum."""

    leader_id: int = int32(default=-1)
    leader_epoch: int = int32(default=-1)
    host: str = string()
    port: int = int32()


@message(api_key=82, versions="0", flexible="0+")
class UpdateRaftVoterResponse:
    """Whether the voter was changed."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    current_leader: CurrentLeader | None = nested(CurrentLeader, tag=0)
