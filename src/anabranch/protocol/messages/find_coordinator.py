"""FindCoordinator (API 10). v1 adds `key_type`, `throttle_time_ms`, `error_message`; v3 is flexible; v4 adds
`coordinator_keys`, `coordinators`.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int8, int16, int32, message, string, struct


@message(api_key=10, versions="0-6", flexible="3+")
class FindCoordinatorRequest:
    """Ask which broker coordinates a group (key type 0) or a transaction (1)."""

    key: str = string(until=3)
    key_type: int = int8(since=1)
    coordinator_keys: Sequence[str] = array(string, since=4)


@struct()
class Coordinator:
    """The coordinator of one key."""

    key: str = string()
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


@message(api_key=10, versions="0-6", flexible="3+")
class FindCoordinatorResponse:
    """The coordinators; up to v3 one coordinator, in the fields above the array."""

    throttle_time_ms: int = int32(since=1)
    error_code: int = int16(until=3)
    error_message: str | None = string(since=1, until=3, nullable=True)
    node_id: int = int32(until=3)
    host: str = string(until=3)
    port: int = int32(until=3)
    coordinators: Sequence[Coordinator] = array(Coordinator, since=4)
