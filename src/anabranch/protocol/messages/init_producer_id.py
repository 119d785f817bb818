"""InitProducerId (API 22). v2 is flexible; v3 adds `producer_id`, `producer_epoch`; v6 adds `enable2_pc`,
`keep_prepared_txn`, `ongoing_txn_producer_id`, `ongoing_txn_producer_epoch`.
"""

from __future__ import annotations

from anabranch.codec import boolean, int16, int32, int64, message, string


@message(api_key=22, versions="0-6", flexible="2+")
class InitProducerIdRequest:
    """Ask for a producer id, or for the next epoch of one."""

    transactional_id: str | None = string(nullable=True)
    transaction_timeout_ms: int = int32()
    producer_id: int = int64(since=3, default=-1)
    producer_epoch: int = int16(since=3, default=-1)
    enable2_pc: bool = boolean(since=6)
    keep_prepared_txn: bool = boolean(since=6)


@message(api_key=22, versions="0-6", flexible="2+")
class InitProducerIdResponse:
    """The id and epoch to stamp batches with."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id: int = int64(default=-1)
    producer_epoch: int = int16()
    ongoing_txn_producer_id: int = int64(since=6, default=-1)
    ongoing_txn_producer_epoch: int = int16(since=6, default=-1)
