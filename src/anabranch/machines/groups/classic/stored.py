from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.codec import Blob, array, bytes_, int32, int64, message, string, struct


@message(versions="2")
class GroupMetadataKey:
    group: str = string()


@struct()
class MemberMetadata:
    member_id: str = string()
    group_instance_id: str | None = string(since=3, nullable=True, default=None)
    client_id: str = string()
    client_host: str = string()
    rebalance_timeout: int = int32(since=1, default=-1)
    session_timeout: int = int32()
    subscription: Blob = bytes_()
    assignment: Blob = bytes_()


@message(versions="0-4", flexible="4+")
class GroupMetadataValue:
    protocol_type: str = string()
    generation: int = int32()
    protocol: str | None = string(nullable=True, default=None)
    leader: str | None = string(nullable=True, default=None)
    current_state_timestamp: int = int64(since=2, default=-1)
    members: Sequence[MemberMetadata] = array(MemberMetadata)


@dataclass(frozen=True, slots=True)
class Record:
    key: GroupMetadataKey
    value: GroupMetadataValue | None
