"""Checks of produced batches before any decision about them: the first step of a produce request.

The bytes are whole batches, not too many; each has an allowed size, a correct checksum, a header that a client may
send, and sound records (`records.examination`), also where they are compressed. What is appended harms no reader. The
rule: every batch of a request is checked before the first one is appended, and a batch with a wrong checksum is
CORRUPT_MESSAGE, which producers retry, regardless of the rest of its header.

A batch leaves the check as it is to be written: with the codec of its topic, and its largest timestamp corrected in
place where its producer was wrong about it, as a Kafka broker does. What one check costs is bounded: by the size of a
batch, by the number of its records, and by what it may expand to (`expanded_size_max`). A caller on an event loop
bounds it further (`Effort`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.base.ids import NO_PRODUCER_ID
from anabranch.base.limits import DECOMPRESSION_RATIO_MAX, EXPANDED_SIZE_MAX, PRODUCER_ID_BITS, RECORDS_PER_BATCH_MAX
from anabranch.machines.partition.appending import Refuse
from anabranch.records.batch import (
    ATTRIBUTES_OF_PRODUCERS,
    COVERED_FROM,
    HEADER_SIZE,
    TRANSACTIONAL,
    BatchHeader,
    UnsupportedCompressionError,
    UnsupportedFormatError,
    check,
    expanded,
    parse_header,
    recompressed,
    stamp_max_timestamp,
)
from anabranch.records.checksum import crc32c
from anabranch.records.compression import (
    COMPRESSION_MASK,
    Bytes,
    Compression,
    ExpandsTooFarError,
    gunzip,
    lz4_blocks,
    snappy_blocks,
)
from anabranch.records.examination import (
    BODY_SIZE_MIN,
    INT64_MAX,
    INT64_MIN,
    Accepted,
    Examine,
    Examined,
    Flaw,
    Malformed,
    examine,
)

BATCHES_PER_PARTITION_MAX = 100
"""Of one request. They are appended together, so that their offsets are contiguous. Clients send one: Kafka takes no
more from those that send batches of version 2."""
SEVERAL_SIZE_MAX = 1 << 20
"""The bytes of several batches for one partition, as they are sent and as they are to be written; one alone may have as
many as its topic allows."""
_RECORD_SIZE_MIN = BODY_SIZE_MIN + 1
_TAKES_ALL = Accepted()
_RECORD_COUNT_AT = HEADER_SIZE - 4
_BYTES_PER_US = 4096
"""Of a checksum, and of memory that is read."""
TIMELY_SIZE_MAX = 2 << 20
"""Bytes of a batch; larger ones, if they hold headers of records alone, take three times longer than is estimated."""
_EXPANDED_BYTES_PER_US = 256
"""By the slowest codec."""
_COMPRESSED_BYTES_PER_US = 16
_HOSTILE_BYTES_PER_US = {Compression.GZIP: 10, Compression.ZSTD: 100, Compression.LZ4: 500, Compression.SNAPPY: 500}
"""Of compressed records that were made to take as long as possible, as by thousands of empty blocks."""

_BROKEN_RULES = {
    Malformed.CUT_OFF: "is cut off, or has a length that is none",
    Malformed.NUMBER: "has a number that is cut off or too large",
    Malformed.OFFSET: "has another offset delta than its place in the batch",
    Malformed.TIMESTAMP: "has a timestamp beyond 64 bits",
    Malformed.KEY: "has a key that does not fit into it",
    Malformed.VALUE: "has a value that does not fit into it",
    Malformed.HEADERS: "has headers that do not fit into it, or bytes behind them",
    Malformed.BYTES_BEHIND: "is the last one, and is not where the batch ends",
}
_OF_RECORDS = {
    Flaw.UNTIMELY: "The record's timestamp is out of range.",
    Flaw.KEYLESS: "The record has no key.",
}


BLOCKS_CHECKED_AT_A_TIME = 100
_BLOCKS_PER_US = {Compression.LZ4: 3.0, Compression.SNAPPY: 0.3}


class BatchLimits(Protocol):
    """The limits of a topic, implemented by `server.partitions.topic_settings.TopicSettings`."""

    @property
    def message_size_max(self) -> int: ...
    @property
    def compression(self) -> Compression | None: ...
    @property
    def keyed(self) -> bool: ...
    @property
    def log_append_time(self) -> bool: ...
    @property
    def timestamp_before_max_ms(self) -> int: ...
    @property
    def timestamp_after_max_ms(self) -> int: ...


class TooLongError(Exception):
    """The rest of a check would take longer than its caller can wait for."""


class Effort:
    """The time that is left for the checks of one request; TooLongError where a step would take more.

    What a step takes is estimated; of records with many headers too low. So with a clock no step is begun, either, when
    those before have taken as long. A first step is not timed: most requests have no other.
    """

    __slots__ = ("_clock", "_is_generous", "_is_given_up", "_left_us", "_record_us", "_steps", "_until", "_whole_us")

    def __init__(
        self,
        left_us: float,
        record_us: float,
        *,
        is_generous: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`record_us` is what the examination of one record takes; `clock` gives processor time in seconds.

        `is_generous`: compressed records are taken for what honest producers send, and not for the worst there is.
        """
        self._left_us = self._whole_us = left_us
        self._record_us = record_us
        self._is_generous = is_generous
        self._is_given_up = False
        self._clock = clock
        self._steps = 0
        self._until = 0.0

    def give_up(self) -> None:
        """Have no further step be begun; may be called while another thread makes one."""
        self._is_given_up = True

    def spend_on_batch(self, size: int, records: int) -> None:
        """Take off what the checksum of a batch, and the examination of so many records, take."""
        if size > TIMELY_SIZE_MAX and not self._is_generous:
            raise TooLongError
        self.spend(size, records)

    def spend_on_compressed(self, size: int, codec: Compression) -> None:
        """Take off what the expansion of so many bytes may take beside writing its content."""
        if not self._is_generous:
            self.spend(size, 0, _HOSTILE_BYTES_PER_US[codec])

    def spend(self, size: int, records: int, bytes_per_us: float = _BYTES_PER_US) -> None:
        """Take off a step over so many bytes and records, before it is done."""
        self._left_us -= size / bytes_per_us + records * self._record_us
        if self._left_us < 0 or self._is_given_up:
            raise TooLongError
        self._steps = steps = self._steps + 1
        if steps > 1 and self._clock is not None:
            now = self._clock()
            if steps == 2:
                self._until = now + self._whole_us / 1e6
            elif now > self._until:
                raise TooLongError

    @property
    def expanded_size_max(self) -> int:
        """Bytes to which records can be expanded in the time that is left."""
        return int(self._left_us * _EXPANDED_BYTES_PER_US) + 1


def takes_longer(sent: Iterable[memoryview], left_us: float, record_us: float) -> bool:
    """Tell, by their first headers, whether checks would end with TooLongError: work that would be done again."""
    for data in sent:
        count = int.from_bytes(data[_RECORD_COUNT_AT:HEADER_SIZE], "big")
        left_us -= len(data) / _BYTES_PER_US + (count if count <= RECORDS_PER_BATCH_MAX else 0) * record_us
    return left_us < 0


class CheckedBatch(NamedTuple):
    """A batch as it is to be written; its offset and leader epoch are not stamped."""

    header: BatchHeader
    data: memoryview


def expanded_size_max(message_size_max: int) -> int:
    """Bytes of a batch's records while they are not compressed; a batch that could be sent uncompressed may expand."""
    return max(message_size_max, min(message_size_max * DECOMPRESSION_RATIO_MAX, EXPANDED_SIZE_MAX))


def check_batches(
    data: memoryview, limits: BatchLimits, now_ms: int, examine: Examine = examine, effort: Effort | None = None
) -> list[CheckedBatch] | Refuse:
    """Check all batches of a request for one partition; return them in order. Nothing else holds `data` meanwhile.

    TooLongError where that takes more than the `effort`; None bounds nothing. The check can then be begun anew.
    """
    batches: list[CheckedBatch] = []
    end, whole, written = 0, len(data), 0
    accepted = _accepted(limits, now_ms)
    try:
        while end < whole:
            header = parse_header(data, end)
            size = header.size
            if size > limits.message_size_max:
                return Refuse(
                    ErrorCode.MESSAGE_TOO_LARGE,
                    f"The batch has {size} bytes, max.message.bytes allows {limits.message_size_max}.",
                )
            if effort is not None:
                count = header.record_count  # More than are allowed are not examined.
                effort.spend_on_batch(size, count if count <= RECORDS_PER_BATCH_MAX else 0)
            if crc32c(data[end + COVERED_FROM : end + size]) != header.crc:
                check(data, end, header)
            batch = data if size == whole else data[end : end + size]
            end += size
            found = refuse_header(header) or _check_records(batch, header, limits, accepted, examine, effort)
            if isinstance(found, Refuse):
                return found
            batches.append(found)
            if end < whole or len(batches) > 1:
                written += len(found.data)
                if len(batches) > BATCHES_PER_PARTITION_MAX:
                    return Refuse(ErrorCode.INVALID_RECORD, f"more than {BATCHES_PER_PARTITION_MAX} batches")
                if len(batches) > 1 and max(whole, written) > SEVERAL_SIZE_MAX:
                    return Refuse(ErrorCode.INVALID_RECORD, f"several batches, of more than {SEVERAL_SIZE_MAX} bytes")
        if not batches:
            return Refuse(ErrorCode.CORRUPT_MESSAGE, "There are no batches.")
    except UnsupportedFormatError as error:
        return Refuse(ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT, str(error))
    except UnsupportedCompressionError as error:
        return Refuse(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, str(error))
    except DecodeError as error:
        return Refuse(ErrorCode.CORRUPT_MESSAGE, str(error))
    return batches


def refuse_header(header: BatchHeader) -> Refuse | None:
    """Check the header of a batch with a correct checksum; return None if a client may send such a batch."""
    attributes, count = header.attributes, header.record_count
    if attributes & ~ATTRIBUTES_OF_PRODUCERS:
        return _refuse_attributes(header)
    if not 1 <= count <= RECORDS_PER_BATCH_MAX or header.last_offset_delta != count - 1:
        return Refuse(
            ErrorCode.INVALID_RECORD,
            f"The batch has {count} records, and {header.last_offset_delta} as its last offset delta; "
            f"{RECORDS_PER_BATCH_MAX} records are allowed.",
        )
    producer_id = header.producer_id
    if producer_id != NO_PRODUCER_ID:
        if producer_id >= 0 and (header.base_sequence < 0 or header.producer_epoch < 0):
            return Refuse(ErrorCode.INVALID_RECORD, "The batch has a producer id, but no sequence.")
        if not 0 <= producer_id < 1 << PRODUCER_ID_BITS:
            return Refuse(ErrorCode.INVALID_PRODUCER_ID_MAPPING, f"No producer was given producer id {producer_id}.")
    elif attributes & TRANSACTIONAL:
        return Refuse(ErrorCode.INVALID_RECORD, "The batch is transactional, but has no producer id.")
    return None


def _refuse_attributes(header: BatchHeader) -> Refuse:
    if header.is_control:
        return Refuse(ErrorCode.INVALID_RECORD, "Clients may not send control batches.")
    if header.log_append_time:
        return Refuse(ErrorCode.INVALID_TIMESTAMP, "Clients may not send batches with the time of their append.")
    return Refuse(
        ErrorCode.INVALID_RECORD, f"The batch has attributes that clients may not set: {header.attributes:#x}."
    )


def _accepted(limits: BatchLimits, now_ms: int) -> Accepted:
    if limits.log_append_time:
        return Accepted(keyed=True) if limits.keyed else _TAKES_ALL
    earliest = now_ms - limits.timestamp_before_max_ms
    latest = now_ms + limits.timestamp_after_max_ms
    if earliest < INT64_MIN or latest > INT64_MAX:
        earliest, latest = max(earliest, INT64_MIN), min(latest, INT64_MAX)
    # As `Accepted(...)`, at half the cost; of this, every produced batch has one.
    return tuple.__new__(Accepted, (earliest, latest, limits.keyed))


def _check_records(
    batch: memoryview,
    header: BatchHeader,
    limits: BatchLimits,
    accepted: Accepted,
    examine: Examine,
    effort: Effort | None,
) -> CheckedBatch | Refuse:
    """Check the records of a batch with a header that is sound, and give the batch its topic's codec."""
    records: Bytes = batch[HEADER_SIZE:]
    if header.attributes & COMPRESSION_MASK:
        found = _expand(batch, header, limits, effort)
        if isinstance(found, Refuse):
            return found
        records = found
    count = header.record_count
    if count * _RECORD_SIZE_MIN > len(records):
        return Refuse(ErrorCode.INVALID_RECORD, f"The batch claims {count} records, and has {len(records)} bytes.")
    examined = examine(records, count, header.base_timestamp, header.max_timestamp, accepted)
    if examined is not None:
        if not examined.sound:
            return _refuse_records(header, examined, accepted)
        if not limits.log_append_time:
            header = stamp_max_timestamp(batch, 0, header, examined.max_timestamp)
    codec = limits.compression
    if codec is None or codec is header.compression:
        return tuple.__new__(CheckedBatch, (header, batch))
    if effort is not None:
        effort.spend(len(records), 0, _COMPRESSED_BYTES_PER_US)
    written = memoryview(recompressed(header, records, codec))
    if len(written) > limits.message_size_max:
        return Refuse(
            ErrorCode.MESSAGE_TOO_LARGE,
            f"Recompressed, the batch has {len(written)} bytes; {limits.message_size_max} are allowed.",
        )
    return CheckedBatch(parse_header(written), written)


def _expand(batch: memoryview, header: BatchHeader, limits: BatchLimits, effort: Effort | None) -> Bytes | Refuse:
    size_max = expanded_size_max(limits.message_size_max)
    allowed = size_max if effort is None else min(size_max, effort.expanded_size_max)
    try:
        if effort is not None:
            effort.spend_on_compressed(header.size, header.compression)
        if header.compression in _BLOCKS_PER_US:
            _check_blocks(batch[HEADER_SIZE:], header.compression, effort)
        is_gzip = header.compression is Compression.GZIP
        records: Bytes = gunzip(batch[HEADER_SIZE:], allowed) if is_gzip else expanded(batch, header, allowed)
    except ExpandsTooFarError:
        if allowed < size_max:
            raise TooLongError from None
        return Refuse(
            ErrorCode.MESSAGE_TOO_LARGE,
            f"The batch of {header.size} bytes expands to more than the {size_max} bytes that its topic allows.",
        )
    except DecodeError as error:
        return Refuse(ErrorCode.INVALID_RECORD, f"The batch cannot be decompressed: {error}.")
    if effort is not None:
        effort.spend(len(records), 0, _EXPANDED_BYTES_PER_US)
    return records


def _check_blocks(records: memoryview, codec: Compression, effort: Effort | None) -> None:
    """Check the blocks of LZ4 or SNAPPY records, however small they are. DecodeError, TooLongError."""
    blocks = lz4_blocks(records) if codec is Compression.LZ4 else snappy_blocks(records)
    for number, _ in enumerate(blocks, 1):
        if effort is not None and number % BLOCKS_CHECKED_AT_A_TIME == 0:
            effort.spend(BLOCKS_CHECKED_AT_A_TIME, 0, _BLOCKS_PER_US[codec])


def _refuse_records(header: BatchHeader, examined: Examined, accepted: Accepted) -> Refuse:
    """Refuse a batch for its records: as a whole if they are malformed, else naming those at fault (KIP-467)."""
    if examined.malformed:
        reason = f"Record {examined.place} {_BROKEN_RULES[examined.malformed]}"
        message = f"The records of the batch cannot be read: {reason} ({header.record_count} records)."
        return Refuse(ErrorCode.INVALID_RECORD, message)
    untimely, keyless = examined.counts
    refused = tuple((place, _OF_RECORDS[flaw]) for place, flaw in examined.refused)
    if untimely:
        message = f"Timestamps must be from {accepted.earliest} to {accepted.latest} now; {untimely} of this batch "
        message += f"{'is' if untimely == 1 else 'are'} not."
        return Refuse(ErrorCode.INVALID_TIMESTAMP, message, records=refused)
    message = f"The topic is compacted and takes no record without a key; {keyless} of this batch "
    message += f"{'has' if keyless == 1 else 'have'} none."
    return Refuse(ErrorCode.INVALID_RECORD, message, records=refused)
