"""AllocateProducerIds (API 67)."""

from __future__ import annotations

from anabranch.codec import int16, int32, int64, message


@message(api_key=67, versions="0", flexible="0+")
class AllocateProducerIdsRequest:
    """Reserve a block of producer ids for a broker."""

    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)


@message(api_key=67, versions="0", flexible="0+")
class AllocateProducerIdsResponse:
    """The block."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id_start: int = int64()
    producer_id_len: int = int32()
