"""BrokerHeartbeat (API 63). v1 and v2 add directories that are offline, and cordoned."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, int64, message, uuid


@message(api_key=63, versions="0-2", flexible="0+")
class BrokerHeartbeatRequest:
    """Keep a broker registered."""

    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    current_metadata_offset: int = int64()
    want_fence: bool = boolean()
    want_shut_down: bool = boolean()
    offline_log_dirs: Sequence[UUID] = array(uuid, since=1, tag=0)
    cordoned_log_dirs: Sequence[UUID] | None = array(uuid, since=2, nullable=True, default=None, tag=1)


@message(api_key=63, versions="0-2", flexible="0+")
class BrokerHeartbeatResponse:
    """What the broker is to do."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    is_caught_up: bool = boolean()
    is_fenced: bool = boolean(default=True)
    should_shut_down: bool = boolean()
