"""AddOffsetsToTxn (API 25). v3 is flexible."""

from __future__ import annotations

from anabranch.codec import int16, int32, int64, message, string


@message(api_key=25, versions="0-4", flexible="3+")
class AddOffsetsToTxnRequest:
    """Announce that a transaction will commit a group's offsets."""

    transactional_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    group_id: str = string()


@message(api_key=25, versions="0-4", flexible="3+")
class AddOffsetsToTxnResponse:
    """Whether it may."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
