"""Checks of produced batches before any decision about them: the first step of a produce request.

The bytes are whole batches, not too many; each has an allowed size, a correct checksum, and a header that a client may
send; in a compacted topic every record has a key (`refuse_unfit`). The rule: every batch of a request is checked before
the first one is appended, and a batch with a wrong checksum is CORRUPT_MESSAGE, which producers retry, regardless of
the rest of its header.
"""

from __future__ import annotations

from typing import Protocol

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.base.ids import NO_PRODUCER_ID
from anabranch.base.limits import PRODUCER_ID_BITS
from anabranch.machines.partition.appending import Refuse
from anabranch.records.batch import (
    BatchHeader,
    UnsupportedCompressionError,
    UnsupportedFormatError,
    check,
    headers,
    parse_header,
)
from anabranch.records.keyless import Unfit

BATCHES_PER_PARTITION_MAX = 1_000
KEYLESS_REPORTED_MAX = 1_000
"""Records of one refused batch that the answer names."""


class BatchLimits(Protocol):
    """The limits of a topic, implemented by `server.partitions.topic_settings.TopicSettings`."""

    @property
    def message_size_max(self) -> int: ...
    @property
    def log_append_time(self) -> bool: ...
    @property
    def timestamp_before_max_ms(self) -> int: ...
    @property
    def timestamp_after_max_ms(self) -> int: ...


def check_batches(data: memoryview, limits: BatchLimits, now_ms: int) -> list[tuple[int, BatchHeader]] | Refuse:
    """Check all batches of a request for one partition; return the position and header of each, in order."""
    batches: list[tuple[int, BatchHeader]] = []
    end = 0
    try:
        for position, header in headers(data):
            if header.size > limits.message_size_max:
                return Refuse(
                    ErrorCode.MESSAGE_TOO_LARGE,
                    f"The batch has {header.size} bytes, max.message.bytes allows {limits.message_size_max}.",
                )
            check(data, position, header)
            refusal = refuse_header(header, limits, now_ms)
            if refusal is not None:
                return refusal
            batches.append((position, header))
            end = position + header.size
            if len(batches) > BATCHES_PER_PARTITION_MAX:
                return Refuse(ErrorCode.INVALID_RECORD, f"more than {BATCHES_PER_PARTITION_MAX} batches")
        if end != len(data) or not batches:
            parse_header(data, end)
            return Refuse(ErrorCode.CORRUPT_MESSAGE, "a batch is cut off")
    except UnsupportedFormatError as error:
        return Refuse(ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT, str(error))
    except UnsupportedCompressionError as error:
        return Refuse(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, str(error))
    except DecodeError as error:
        return Refuse(ErrorCode.CORRUPT_MESSAGE, str(error))
    return batches


def refuse_unfit(unfit: Unfit) -> Refuse:
    """Refuse the batches of a request for a partition of a compacted topic, one of which it cannot take.

    Compaction keeps the last record of each key; a record without a key would be lost (KIP-467 names the records).
    """
    if unfit.malformed is not None:
        return Refuse(ErrorCode.INVALID_RECORD, f"The records of the batch cannot be read: {unfit.malformed}.")
    count = len(unfit.keyless)
    verb = "has" if count == 1 else "have"
    return Refuse(
        ErrorCode.INVALID_RECORD,
        f"The topic is compacted and takes no record without a key; {count} of this batch {verb} none.",
        records=unfit.keyless[:KEYLESS_REPORTED_MAX],
    )


def refuse_header(header: BatchHeader, limits: BatchLimits, now_ms: int) -> Refuse | None:
    """Check the header of a batch with a correct checksum; return None if a client may send such a batch now."""
    if header.is_control:
        return Refuse(ErrorCode.INVALID_RECORD, "Clients may not send control batches.")
    if header.record_count < 1 or header.last_offset_delta != header.record_count - 1:
        return Refuse(
            ErrorCode.INVALID_RECORD,
            f"The batch has {header.record_count} records, and {header.last_offset_delta} as its last offset delta.",
        )
    producer_id = header.producer_id
    if producer_id != NO_PRODUCER_ID:
        if producer_id >= 0 and (header.base_sequence < 0 or header.producer_epoch < 0):
            return Refuse(ErrorCode.INVALID_RECORD, "The batch has a producer id, but no sequence.")
        if not 0 <= producer_id < 1 << PRODUCER_ID_BITS:
            return Refuse(ErrorCode.INVALID_PRODUCER_ID_MAPPING, f"No producer was given producer id {producer_id}.")
    elif header.is_transactional:
        return Refuse(ErrorCode.INVALID_RECORD, "The batch is transactional, but has no producer id.")
    return None if limits.log_append_time else _refuse_timestamps(header, limits, now_ms)


def _refuse_timestamps(header: BatchHeader, limits: BatchLimits, now_ms: int) -> Refuse | None:
    if header.max_timestamp - now_ms > limits.timestamp_after_max_ms:
        return Refuse(
            ErrorCode.INVALID_TIMESTAMP,
            f"Timestamp {header.max_timestamp} is more than {limits.timestamp_after_max_ms} ms ahead of the broker's "
            f"clock, {now_ms}.",
        )
    if header.base_timestamp >= 0 and now_ms - header.base_timestamp > limits.timestamp_before_max_ms:
        return Refuse(
            ErrorCode.INVALID_TIMESTAMP,
            f"Timestamp {header.base_timestamp} is more than {limits.timestamp_before_max_ms} ms behind the broker's "
            f"clock, {now_ms}.",
        )
    return None
