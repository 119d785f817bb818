"""EndTxn (API 26). v3 is flexible; v5 adds `producer_id`, `producer_epoch`."""

from __future__ import annotations

from anabranch.codec import boolean, int16, int32, int64, message, string


@message(api_key=26, versions="0-5", flexible="3+")
class EndTxnRequest:
    """Commit or abort."""

    transactional_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    committed: bool = boolean()


@message(api_key=26, versions="0-5", flexible="3+")
class EndTxnResponse:
    """Whether it will be; from v5 with the epoch to go on with."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id: int = int64(since=5, default=-1)
    producer_epoch: int = int16(since=5, default=-1)
