"""The record batch (magic 2): its 61-byte header, the checksum over the rest, and batches one after another.

    base offset 8 | length 4 | leader epoch 4 | magic 1 | crc 4 | attributes 2 | last offset delta 4
    | base timestamp 8 | max timestamp 8 | producer id 8 | epoch 2 | base sequence 4 | record count 4 | records

Length counts what follows it. The CRC-32C covers everything from the attributes on, so base offset and leader epoch
can be stamped without touching it. Nothing here looks inside records, except for a transaction's end marker, and
nothing here needs NumPy. Functions named `stamp*` write in place, functions named `with_*` return a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.base.ids import NO_LEADER_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE
from anabranch.base.limits import DECOMPRESSION_RATIO_MAX, MESSAGE_SIZE_MAX
from anabranch.records.checksum import changed, crc32c
from anabranch.records.compression import COMPRESSION_MASK, Bytes, Compression, compress, decompress
from anabranch.records.rows import iterate

MAGIC = 2
HEADER_SIZE = 61
LENGTH_END = 12
"""Base offset and length: what must be there to know where a batch ends."""
RECORD_OVERHEAD_MAX = 36
"""A record's bytes in a batch beside its key, value and headers, at most."""
OFFSET_MAX = (1 << 63) - 1

LOG_APPEND_TIME = 1 << 3
TRANSACTIONAL = 1 << 4
CONTROL = 1 << 5
ATTRIBUTES_OF_PRODUCERS = COMPRESSION_MASK | TRANSACTIONAL
"""The bits that a client may set: the one of a delete horizon (KIP-534), and those without a meaning, it may not."""

_HEADER = struct.Struct(">qiibIhiqqqhii")
_CRC = struct.Struct(">I")
_CRC_AT = 17
COVERED_FROM = 21
"""Where the attributes are: what a checksum is of begins there."""
_MAX_TIMESTAMP_AT = 35
_PRODUCER_AT = 43
_PRODUCER_END = 57
_LARGE = 64 * 1024
"""Bytes from which on it costs more to take a checksum than to change it."""
_BASE_OFFSET = struct.Struct(">q")
_LENGTH = struct.Struct(">i")
_ATTRIBUTES = struct.Struct(">h")
_PRODUCER = struct.Struct(">qhi")
_LEADER_EPOCH_AT = 12
_MAGIC_AT = 16
_CODEC_MAX = max(Compression)
_CONTROL_KEY = struct.Struct(">hh")
_CONTROL_VALUE = struct.Struct(">hi")
_ABORT, _COMMIT = 0, 1


class UnsupportedFormatError(DecodeError):
    """Records in the formats of before Kafka 0.11 (UNSUPPORTED_FOR_MESSAGE_FORMAT)."""


class UnsupportedCompressionError(DecodeError):
    """A codec that Kafka does not have (UNSUPPORTED_COMPRESSION_TYPE)."""


class ChecksumError(DecodeError):
    """A batch whose bytes are not those its CRC was made of (CORRUPT_MESSAGE)."""


class BatchHeader(NamedTuple):
    """The header of one batch. `size` is the whole batch's, header and length field included."""

    base_offset: int
    size: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def compression(self) -> Compression:
        return Compression(self.attributes & COMPRESSION_MASK)

    @property
    def log_append_time(self) -> bool:
        """Whether every record's timestamp is `max_timestamp`, the broker's clock at the append."""
        return bool(self.attributes & LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        """Whether the batch marks the end of a transaction instead of holding records of users."""
        return bool(self.attributes & CONTROL)

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1


class EndTransactionMarker(NamedTuple):
    """The end of a producer's transaction, as a control batch marks it."""

    producer_id: int
    producer_epoch: int
    commit: bool
    coordinator_epoch: int
    timestamp_ms: int


def parse_header(buffer: Bytes, position: int = 0, left: int | None = None) -> BatchHeader:
    """Read and check the header of the batch at `position`.

    All of the batch must be in the buffer or, when only a part of a file was read, in the `left` bytes of the file.
    Callers rely on the checks: the size, magic 2, a known codec, offsets that fit, a record count that the offsets
    allow. The checksum is not compared (`check`).
    """
    readable = len(buffer) - position
    if left is None:
        left = readable
    elif left < readable:
        readable = left
    if readable <= _MAGIC_AT:
        raise DecodeError(f"a record batch is cut off: {left} bytes are left, its header has {HEADER_SIZE}")
    magic = buffer[position + _MAGIC_AT]
    if magic != MAGIC:
        if magic < MAGIC:
            raise UnsupportedFormatError(
                f"records in message format {magic}: only format 2 (Kafka 0.11 and newer) is read"
            )
        raise DecodeError(f"a record batch of magic {magic}, expected {MAGIC}")
    if readable < HEADER_SIZE:
        raise DecodeError(f"a record batch is cut off: {left} bytes are left, its header has {HEADER_SIZE}")
    fields = _HEADER.unpack_from(buffer, position)
    base_offset, length, _, _, _, attributes, last_delta, _, _, _, _, _, count = fields
    size = length + LENGTH_END
    if not HEADER_SIZE <= size <= left:
        raise DecodeError(f"a record batch of {size} bytes where {left} are left, header {HEADER_SIZE}")
    if attributes & COMPRESSION_MASK > _CODEC_MAX:
        raise UnsupportedCompressionError(f"compression codec {attributes & COMPRESSION_MASK} is unknown")
    if not 0 <= base_offset <= OFFSET_MAX - last_delta or last_delta < 0:
        raise DecodeError(f"a record batch from offset {base_offset}, last one {last_delta} on")
    if not 0 <= count <= last_delta + 1:
        raise DecodeError(
            f"the record batch at offset {base_offset} claims {count} records in {last_delta + 1} offsets"
        )
    # As `BatchHeader(...)`, at half the cost.
    return tuple.__new__(BatchHeader, (base_offset, size, *fields[2:]))


def headers(buffer: Bytes) -> Iterator[tuple[int, BatchHeader]]:
    """Walk over batches one after another: position and header of each; an incomplete last batch ends the walk."""
    position = 0
    total = len(buffer)
    while total - position >= LENGTH_END:
        size = _LENGTH.unpack_from(buffer, position + 8)[0] + LENGTH_END
        if size >= HEADER_SIZE and size > total - position:
            return
        yield position, (header := parse_header(buffer, position))
        position += header.size


def check(buffer: Bytes, position: int, header: BatchHeader) -> None:
    """Compare the batch at `position` with its checksum."""
    view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
    found = crc32c(view[position + COVERED_FROM : position + header.size])
    if found != header.crc:
        raise ChecksumError(
            f"the record batch at offset {header.base_offset} ({header.size} bytes) has checksum {found:#010x},"
            f" its header says {header.crc:#010x}"
        )


def stamp(buffer: Bytes, position: int, base_offset: int, leader_epoch: int) -> None:
    """Give the batch at `position` its place in the log, in place; the checksum does not cover these fields."""
    _BASE_OFFSET.pack_into(buffer, position, base_offset)
    _LENGTH.pack_into(buffer, position + _LEADER_EPOCH_AT, leader_epoch)


def stamp_crc(buffer: Bytes, position: int = 0) -> None:
    """Write the checksum of the batch at `position`, in place."""
    size = _LENGTH.unpack_from(buffer, position + 8)[0] + LENGTH_END
    _CRC.pack_into(buffer, position + _CRC_AT, crc32c(memoryview(buffer)[position + COVERED_FROM : position + size]))


def stamp_log_append_time(buffer: Bytes, position: int, now_ms: int) -> None:
    """Make `now_ms` the timestamp of every record of the batch at `position`, in place."""
    before = bytes(memoryview(buffer)[position + COVERED_FROM : position + _PRODUCER_AT])
    attributes = _ATTRIBUTES.unpack_from(before)[0]
    _ATTRIBUTES.pack_into(buffer, position + COVERED_FROM, attributes | LOG_APPEND_TIME)
    _BASE_OFFSET.pack_into(buffer, position + _MAX_TIMESTAMP_AT, now_ms)
    _correct_crc(buffer, position, before)


def stamp_max_timestamp(buffer: Bytes, position: int, header: BatchHeader, max_timestamp: int) -> BatchHeader:
    """Correct the largest timestamp in the header of the batch at `position`, in place, as a Kafka broker does."""
    head = memoryview(buffer)[position + COVERED_FROM : position + _PRODUCER_AT]
    before = bytes(head)
    _BASE_OFFSET.pack_into(buffer, position + _MAX_TIMESTAMP_AT, max_timestamp)
    crc = changed(header.crc, before, head, header.size - _PRODUCER_AT)
    _CRC.pack_into(buffer, position + _CRC_AT, crc)
    return header._replace(max_timestamp=max_timestamp, crc=crc)


def stamp_producer(
    buffer: Bytes,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    position: int = 0,
    *,
    transactional: bool = False,
) -> None:
    """Write the producer, and the sequence number, of the batch at `position`, in place."""
    before = bytes(memoryview(buffer)[position + COVERED_FROM : position + _PRODUCER_END])
    _PRODUCER.pack_into(buffer, position + _PRODUCER_AT, producer_id, producer_epoch, base_sequence)
    attributes = _ATTRIBUTES.unpack_from(before)[0] & ~TRANSACTIONAL
    _ATTRIBUTES.pack_into(buffer, position + COVERED_FROM, attributes | (TRANSACTIONAL if transactional else 0))
    _correct_crc(buffer, position, before)


def _correct_crc(buffer: Bytes, position: int, before: bytes) -> None:
    """Have the checksum be that of a header that has changed: `before` are the first bytes of those it covers.

    That of a large batch is not taken anew, but changed as those bytes are: a wrong one stays wrong.
    """
    behind = _LENGTH.unpack_from(buffer, position + 8)[0] + LENGTH_END - COVERED_FROM - len(before)
    if behind < _LARGE:
        stamp_crc(buffer, position)
    else:
        head = memoryview(buffer)[position + COVERED_FROM : position + COVERED_FROM + len(before)]
        (crc,) = _CRC.unpack_from(buffer, position + _CRC_AT)
        _CRC.pack_into(buffer, position + _CRC_AT, changed(crc, before, head, behind))


def build(
    records: Bytes,
    *,
    record_count: int,
    base_timestamp: int,
    max_timestamp: int,
    attributes: int = 0,
    base_offset: int = 0,
    last_offset_delta: int | None = None,
    leader_epoch: int = NO_LEADER_EPOCH,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
) -> bytearray:
    """Put a header before records that are encoded, and compressed as `attributes` say."""
    batch = bytearray(HEADER_SIZE)
    batch += records
    _HEADER.pack_into(
        batch,
        0,
        base_offset,
        len(batch) - LENGTH_END,
        leader_epoch,
        MAGIC,
        0,
        attributes,
        record_count - 1 if last_offset_delta is None else last_offset_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        record_count,
    )
    stamp_crc(batch)
    return batch


def expanded(batch: memoryview, header: BatchHeader, size_max: int | None = None) -> Bytes:
    """Return the records of a batch, decompressed.

    `size_max` bounds them, by default by what no batch has any reason to expand to. ExpandsTooFarError where they are
    more, DecodeError where they are malformed.
    """
    records = batch[HEADER_SIZE : header.size]
    if not header.attributes & COMPRESSION_MASK or not header.record_count:
        return records
    if size_max is None:
        size_max = max(len(records), MESSAGE_SIZE_MAX) * DECOMPRESSION_RATIO_MAX
    return decompress(header.compression, records, size_max)


def recompressed(header: BatchHeader, plain: Bytes, codec: Compression, level: int | None = None) -> bytearray:
    """Make a batch like the one of `header`, in another codec; `plain` are its records, not compressed."""
    return build(
        plain if codec is Compression.NONE else compress(codec, plain, level),
        attributes=header.attributes & ~COMPRESSION_MASK | codec,
        **{name: getattr(header, name) for name in _KEPT},
    )


_KEPT = (
    "record_count",
    "base_timestamp",
    "max_timestamp",
    "base_offset",
    "last_offset_delta",
    "leader_epoch",
    "producer_id",
    "producer_epoch",
    "base_sequence",
)


def end_transaction_marker(
    producer_id: int, producer_epoch: int, *, commit: bool, coordinator_epoch: int, timestamp_ms: int
) -> bytearray:
    """Make the control batch that ends a producer's transaction in one partition (KIP-98)."""
    key = _CONTROL_KEY.pack(0, _COMMIT if commit else _ABORT)
    value = _CONTROL_VALUE.pack(0, coordinator_epoch)
    # Attributes, timestamp and offset delta are 0; lengths this small are one zigzag byte.
    record = bytes((0, 0, 0, len(key) << 1)) + key + bytes((len(value) << 1,)) + value + b"\0"
    return build(
        bytes((len(record) << 1,)) + record,
        record_count=1,
        base_timestamp=timestamp_ms,
        max_timestamp=timestamp_ms,
        attributes=TRANSACTIONAL | CONTROL,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )


def parse_end_transaction_marker(buffer: Bytes, position: int = 0) -> EndTransactionMarker | None:
    """Read the control batch at `position`; None when it marks something else than the end of a transaction."""
    header = parse_header(buffer, position)
    assert header.is_control
    records = memoryview(buffer)[position + HEADER_SIZE : position + header.size]
    if not header.record_count:
        raise DecodeError(f"the control batch at offset {header.base_offset} has no record")
    record = next(iterate(records, 1, header.base_offset))
    key = records[record.key_start : max(record.key_end, record.key_start)]
    value = records[record.value_start : max(record.value_end, record.value_start)]
    if len(key) < _CONTROL_KEY.size:
        raise DecodeError(f"the control batch at offset {header.base_offset} has a key of {len(key)} bytes")
    _, kind = _CONTROL_KEY.unpack_from(key)
    if kind not in (_ABORT, _COMMIT):
        return None
    if len(value) < _CONTROL_VALUE.size:
        raise DecodeError(f"the control batch at offset {header.base_offset} has a value of {len(value)} bytes")
    _, coordinator_epoch = _CONTROL_VALUE.unpack_from(value)
    return EndTransactionMarker(
        header.producer_id, header.producer_epoch, kind == _COMMIT, coordinator_epoch, header.max_timestamp
    )
