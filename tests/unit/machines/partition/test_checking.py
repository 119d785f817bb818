"""Which produced batches are sound: bytes, sizes, checksums, headers and times."""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass, replace

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import EXPANDED_SIZE_MAX, PRODUCER_ID_BITS, RECORDS_PER_BATCH_MAX
from anabranch.machines.partition.appending import Refuse
from anabranch.machines.partition.checking import (
    BATCHES_PER_PARTITION_MAX,
    SEVERAL_SIZE_MAX,
    TIMELY_SIZE_MAX,
    Effort,
    TooLongError,
    check_batches,
    expanded_size_max,
    refuse_header,
)
from anabranch.records.batch import (
    CONTROL,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    BatchHeader,
    build,
    expanded,
    parse_header,
    stamp_crc,
)
from anabranch.records.compression import Compression, compress, lz4_blocks
from anabranch.records.examination import NO_TIMESTAMP
from anabranch.records.varint import encode_varint
from tests.support.batches import make_keyed_batch, make_sound_batch

NOW_MS = 1_000_000


@dataclass(frozen=True)
class Limits:
    message_size_max: int = 1_000
    compression: Compression | None = None
    keyed: bool = False
    log_append_time: bool = False
    timestamp_before_max_ms: int = 500
    timestamp_after_max_ms: int = 100


LIMITS = Limits()
SOUND = make_sound_batch(3, timestamp=NOW_MS)


def checked(data: bytes | bytearray, limits: Limits = LIMITS) -> ErrorCode | int:
    """The code of the refusal, or how many batches were found."""
    found = check_batches(memoryview(bytearray(data)), limits, NOW_MS)
    return found.code if isinstance(found, Refuse) else len(found)


def with_bytes(position: int, value: bytes, *, crc: bool = True) -> bytearray:
    data = bytearray(SOUND)
    data[position : position + len(value)] = value
    if crc:
        stamp_crc(data)
    return data


def test_sound_batches_are_found_where_they_are() -> None:
    found = check_batches(memoryview(SOUND + SOUND), LIMITS, NOW_MS)
    assert found == [(parse_header(SOUND), SOUND), (parse_header(SOUND), SOUND)]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", ErrorCode.CORRUPT_MESSAGE),
        (SOUND[:-1], ErrorCode.CORRUPT_MESSAGE),
        (SOUND[:40], ErrorCode.CORRUPT_MESSAGE),
        (SOUND + b"abc", ErrorCode.CORRUPT_MESSAGE),
        (SOUND + SOUND[:-1], ErrorCode.CORRUPT_MESSAGE),
        (with_bytes(8, struct.pack(">i", -5), crc=False), ErrorCode.CORRUPT_MESSAGE),
        (with_bytes(16, b"\x01"), ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        (with_bytes(16, b"\x03"), ErrorCode.CORRUPT_MESSAGE),
        (with_bytes(21, b"\x00\x07"), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        (with_bytes(len(SOUND) - 1, b"!", crc=False), ErrorCode.CORRUPT_MESSAGE),
        (make_sound_batch(payload=b"x" * 1_000, timestamp=NOW_MS), ErrorCode.MESSAGE_TOO_LARGE),
        (SOUND * (BATCHES_PER_PARTITION_MAX + 1), ErrorCode.INVALID_RECORD),
    ],
)
def test_what_is_no_sound_batch_is_refused(data: bytearray, code: ErrorCode) -> None:
    assert checked(data) is code


def test_as_many_batches_as_are_allowed_are_taken() -> None:
    assert checked(SOUND * BATCHES_PER_PARTITION_MAX) == BATCHES_PER_PARTITION_MAX


def test_several_batches_have_fewer_bytes_than_one_may_have() -> None:
    limits = replace(LIMITS, message_size_max=2 * SEVERAL_SIZE_MAX)
    half = make_sound_batch(payload=b"x" * (SEVERAL_SIZE_MAX // 2), timestamp=NOW_MS)
    alone = make_sound_batch(payload=b"x" * SEVERAL_SIZE_MAX, timestamp=NOW_MS)
    assert checked(half, limits) == checked(alone, limits) == 1
    assert checked(half + SOUND, limits) == 2
    assert checked(half + half, limits) is checked(SOUND + alone, limits) is ErrorCode.INVALID_RECORD


def test_several_batches_have_fewer_bytes_as_they_are_to_be_written_too() -> None:
    limits = replace(LIMITS, message_size_max=2 * SEVERAL_SIZE_MAX, compression=Compression.NONE)
    small = make_keyed_batch([(b"k", bytes(SEVERAL_SIZE_MAX // 2))], timestamp=NOW_MS, compression=Compression.GZIP)
    assert len(small) < 10_000
    assert checked(small, limits) == 1
    assert checked(small + SOUND, limits) == checked(SOUND + small, limits) == 2
    assert checked(small + small, limits) is ErrorCode.INVALID_RECORD


def test_one_bad_batch_refuses_all_of_them() -> None:
    assert checked(SOUND + with_bytes(23, struct.pack(">i", 7))) is ErrorCode.INVALID_RECORD


def test_the_size_counts_before_the_checksum_and_the_checksum_before_the_header() -> None:
    large = make_sound_batch(payload=b"x" * 1_000, timestamp=NOW_MS)
    large[-1] ^= 1
    assert checked(large) is ErrorCode.MESSAGE_TOO_LARGE
    assert checked(with_bytes(23, struct.pack(">i", 7), crc=False)) is ErrorCode.CORRUPT_MESSAGE, "may be repeated"


HEADER = parse_header(SOUND)
PRODUCER = HEADER._replace(producer_id=7, producer_epoch=0, base_sequence=0)


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (HEADER._replace(attributes=CONTROL | TRANSACTIONAL), ErrorCode.INVALID_RECORD),
        (HEADER._replace(record_count=0, last_offset_delta=0), ErrorCode.INVALID_RECORD),
        (HEADER._replace(last_offset_delta=5), ErrorCode.INVALID_RECORD),
        (PRODUCER._replace(base_sequence=-1), ErrorCode.INVALID_RECORD),
        (PRODUCER._replace(producer_epoch=-1), ErrorCode.INVALID_RECORD),
        (PRODUCER._replace(producer_id=1 << PRODUCER_ID_BITS), ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        (PRODUCER._replace(producer_id=-2), ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        (HEADER._replace(attributes=TRANSACTIONAL), ErrorCode.INVALID_RECORD),
        (HEADER._replace(attributes=LOG_APPEND_TIME), ErrorCode.INVALID_TIMESTAMP),
        (HEADER._replace(attributes=1 << 6), ErrorCode.INVALID_RECORD),
        (HEADER._replace(attributes=-(1 << 15)), ErrorCode.INVALID_RECORD),
        (
            HEADER._replace(record_count=RECORDS_PER_BATCH_MAX + 1, last_offset_delta=RECORDS_PER_BATCH_MAX),
            ErrorCode.INVALID_RECORD,
        ),
    ],
)
def test_what_a_client_may_not_send_is_refused(header: BatchHeader, code: ErrorCode) -> None:
    refusal = refuse_header(header)
    assert refusal is not None
    assert refusal.code is code
    assert refusal.message
    assert not refusal.remember


@pytest.mark.parametrize(
    "header",
    [
        HEADER,
        PRODUCER,
        PRODUCER._replace(producer_id=(1 << PRODUCER_ID_BITS) - 1),
        PRODUCER._replace(attributes=TRANSACTIONAL),
        HEADER._replace(attributes=Compression.ZSTD),
        HEADER._replace(record_count=RECORDS_PER_BATCH_MAX, last_offset_delta=RECORDS_PER_BATCH_MAX - 1),
    ],
)
def test_what_a_client_may_send_is_not(header: BatchHeader) -> None:
    assert refuse_header(header) is None


def batch_of(*records: tuple[int, bytes | None], codec: Compression = Compression.NONE, **fields: int) -> bytearray:
    """A batch of records with these timestamps and keys, and other fields in its header if that is wished."""
    rows = bytearray()
    for place, (timestamp, key) in enumerate(records):
        body = b"\0" + encode_varint(timestamp - NOW_MS) + encode_varint(place)
        body += b"\1" if key is None else encode_varint(len(key)) + key
        rows += encode_varint(len(body) + 2) + body + b"\1\0"
    header: dict[str, int] = {"record_count": len(records), "base_timestamp": NOW_MS, "attributes": codec}
    header["max_timestamp"] = max(timestamp for timestamp, _ in records)
    return build(compress(codec, rows), **{**header, **fields})


def refused(data: bytearray, limits: Limits = LIMITS) -> Refuse:
    found = check_batches(memoryview(data), limits, NOW_MS)
    assert isinstance(found, Refuse)
    assert found.message
    return found


CODECS = list(Compression)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("timestamp", [NOW_MS + 100, NOW_MS - 500, NO_TIMESTAMP])
def test_a_timestamp_within_the_topics_bounds_is_taken(timestamp: int, codec: Compression) -> None:
    assert checked(batch_of((NOW_MS, b"k"), (timestamp, b"k"), codec=codec)) == 1


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("timestamp", [NOW_MS + 101, NOW_MS - 501, 0, -2])
def test_each_record_with_a_timestamp_out_of_bounds_is_named(timestamp: int, codec: Compression) -> None:
    hidden = batch_of((NOW_MS, b"k"), (timestamp, b"k"), (timestamp, b"k"), codec=codec, max_timestamp=NOW_MS)
    refusal = refused(hidden)
    assert refusal.code is ErrorCode.INVALID_TIMESTAMP
    assert [place for place, _ in refusal.records] == [1, 2]
    assert checked(hidden, replace(LIMITS, log_append_time=True)) == 1


@pytest.mark.parametrize("codec", CODECS)
def test_no_timestamp_may_leave_the_range_of_64_bits(codec: Compression) -> None:
    beyond = batch_of((NOW_MS, b"k"), codec=codec, base_timestamp=2**63 - 1, max_timestamp=2**63 - 1)
    assert checked(beyond, replace(LIMITS, log_append_time=True)) == 1, "a delta of 0"
    beyond = batch_of((NOW_MS + 1, b"k"), codec=codec, base_timestamp=2**63 - 1, max_timestamp=2**63 - 1)
    for limits in (LIMITS, replace(LIMITS, log_append_time=True)):
        refusal = refused(beyond, limits)
        assert refusal.code is ErrorCode.INVALID_RECORD
        assert "Record 0 has a timestamp beyond 64 bits" in str(refusal.message)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("said", [NOW_MS + 50, -1, 2**63 - 1])
def test_a_wrong_largest_timestamp_is_corrected(said: int, codec: Compression) -> None:
    data = batch_of((NOW_MS, b"k"), (NOW_MS + 7, b"k"), (NOW_MS + 3, b"k"), codec=codec, max_timestamp=said)
    found = check_batches(memoryview(data), LIMITS, NOW_MS)
    assert not isinstance(found, Refuse)
    ((header, written),) = found
    assert written == batch_of((NOW_MS, b"k"), (NOW_MS + 7, b"k"), (NOW_MS + 3, b"k"), codec=codec)
    assert header == parse_header(written)


@pytest.mark.parametrize("codec", CODECS)
def test_keys_are_asked_for_where_a_topic_is_compacted(codec: Compression) -> None:
    data = batch_of((NOW_MS, b""), (NOW_MS, None), (NOW_MS, b"k"), codec=codec)
    assert checked(data) == 1
    refusal = refused(data, replace(LIMITS, keyed=True))
    assert refusal.code is ErrorCode.INVALID_RECORD
    assert [place for place, _ in refusal.records] == [1]


def test_timestamps_count_before_keys_and_all_records_at_fault_are_named() -> None:
    data = batch_of((0, None), (NOW_MS, None), (0, b"k"))
    refusal = refused(data, replace(LIMITS, keyed=True))
    assert refusal.code is ErrorCode.INVALID_TIMESTAMP
    assert [place for place, _ in refusal.records] == [0, 0, 1, 2]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [2, 1_000_000, 2**31 - 1])
def test_a_count_that_the_bytes_cannot_hold_is_refused(count: int, codec: Compression) -> None:
    assert refused(batch_of((NOW_MS, b"k"), codec=codec, record_count=count)).code is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("codec", [codec for codec in Compression if codec])
def test_what_expands_beyond_the_bound_is_refused_and_up_to_it_taken(codec: Compression) -> None:
    limits = replace(LIMITS, message_size_max=1_000_000)
    bound = expanded_size_max(limits.message_size_max)
    assert bound == EXPANDED_SIZE_MAX
    rows = memoryview(make_sound_batch(payload=bytes(bound - 13), timestamp=NOW_MS))[61:]
    assert len(rows) == bound
    header: dict[str, int] = {"record_count": 1, "base_timestamp": NOW_MS, "max_timestamp": NOW_MS}
    for data, code in ((rows, 1), (bytes(rows) + b"!", ErrorCode.MESSAGE_TOO_LARGE)):
        bomb = build(compress(codec, data), attributes=codec, **header)
        size_max = len(bomb) if codec is Compression.SNAPPY else 1_000_000
        assert checked(bomb, replace(limits, message_size_max=size_max)) == code


def test_what_a_batch_may_expand_to_grows_with_what_may_be_sent() -> None:
    assert expanded_size_max(1_000) == 128_000
    assert expanded_size_max(1 << 20) == EXPANDED_SIZE_MAX
    assert expanded_size_max(1 << 27) == 1 << 27, "what may be sent may be compressed, too"


@pytest.mark.parametrize("codec", [codec for codec in Compression if codec])
def test_what_cannot_be_decompressed_is_refused(codec: Compression) -> None:
    data = build(b"no codec makes this", record_count=1, base_timestamp=0, max_timestamp=0, attributes=codec)
    refusal = refused(data)
    assert refusal.code is ErrorCode.INVALID_RECORD
    assert "cannot be decompressed" in str(refusal.message)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("target", CODECS)
def test_a_batch_leaves_in_the_codec_of_its_topic(codec: Compression, target: Compression) -> None:
    data = batch_of((NOW_MS, b"k"), (NOW_MS + 9, b"l"), codec=codec)
    found = check_batches(memoryview(data), replace(LIMITS, compression=target), NOW_MS)
    assert not isinstance(found, Refuse)
    ((header, written),) = found
    assert header == parse_header(written)
    assert header.compression is target
    assert bytes(expanded(written, header)) == bytes(expanded(memoryview(data), parse_header(data)))


def test_a_batch_that_is_too_large_in_the_codec_of_its_topic_is_refused() -> None:
    data = batch_of((NOW_MS, bytes(2_000)), codec=Compression.ZSTD)
    assert checked(data) == 1
    assert refused(data, replace(LIMITS, compression=Compression.NONE)).code is ErrorCode.MESSAGE_TOO_LARGE


def test_a_check_ends_where_it_would_take_longer_than_its_caller_can_wait() -> None:
    few, many = batch_of((NOW_MS, b"k")), batch_of(*[(NOW_MS, b"k")] * 100)
    bomb = batch_of((NOW_MS, bytes(100_000)), codec=Compression.ZSTD)
    limits = replace(LIMITS, message_size_max=10_000)
    for data in (many, bomb, few * 90):
        with pytest.raises(TooLongError):
            check_batches(memoryview(bytearray(data)), limits, NOW_MS, effort=Effort(80, 1))
        assert not isinstance(check_batches(memoryview(bytearray(data)), limits, NOW_MS), Refuse)
    assert not isinstance(check_batches(memoryview(few), limits, NOW_MS, effort=Effort(80, 1)), Refuse)
    with pytest.raises(TooLongError):
        check_batches(memoryview(few), replace(limits, compression=Compression.GZIP), NOW_MS, effort=Effort(1.1, 1))


@pytest.mark.parametrize(
    ("codec", "content"),
    [
        (Compression.GZIP, gzip.compress(b"")[:10] + int("0000000010" * 4, 2).to_bytes(5, "little") * 20_000),
        (Compression.ZSTD, bytes(compress(Compression.ZSTD, b"")) * 70_000),
        (Compression.SNAPPY, b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + b"\0\0\0\3\1\0a" * 1_000),
    ],
)
def test_compressed_records_that_hold_next_to_nothing_are_not_expanded_in_the_loop(
    codec: Compression, content: bytes
) -> None:
    batch = build(content, record_count=1, base_timestamp=0, max_timestamp=0, attributes=codec)
    limits = Limits(message_size_max=2_000_000)
    with pytest.raises(TooLongError):
        check_batches(memoryview(batch), limits, NOW_MS, effort=Effort(2_000, 0.02))
    assert isinstance(check_batches(memoryview(batch), limits, NOW_MS), Refuse)
    generous = Effort(2_000_000, 0.02, is_generous=True)
    assert isinstance(check_batches(memoryview(batch), limits, NOW_MS, effort=generous), Refuse)


def test_a_frame_of_many_blocks_is_looked_at_within_the_effort() -> None:
    blocks = 200_000 * (struct.pack("<I", 1 | 1 << 31) + b"x")
    content = bytes.fromhex("04224d18604082") + blocks + bytes(4)
    batch = build(content, record_count=1, base_timestamp=0, max_timestamp=0, attributes=Compression.LZ4)
    limits = Limits(message_size_max=2_000_000)
    effort = Effort(5_000, 0.02)
    with pytest.raises(TooLongError):
        check_batches(memoryview(batch), limits, NOW_MS, effort=effort)
    assert isinstance(check_batches(memoryview(batch), limits, NOW_MS), Refuse)
    assert sum(lz4_blocks(memoryview(content))) == 200_000


def test_no_step_is_begun_when_those_before_took_longer_than_they_were_thought_to() -> None:
    times = iter([7.0, 7.000_9, 7.001_0, 7.001_1])
    effort = Effort(1_000, 0.0, clock=lambda: next(times))
    for _ in range(4):
        effort.spend(1, 0)
    with pytest.raises(TooLongError):
        effort.spend(1, 0)
    once = Effort(1_000, 0.0, clock=lambda: next(iter(())))
    once.spend(1, 0)


def test_a_large_batch_is_not_looked_into_by_who_cannot_wait() -> None:
    """Its records may be headers alone, of which there are many in few bytes."""
    data = make_sound_batch(payload=bytes(TIMELY_SIZE_MAX), timestamp=NOW_MS)
    limits = replace(LIMITS, message_size_max=2 * len(data))
    with pytest.raises(TooLongError):
        check_batches(memoryview(data), limits, NOW_MS, effort=Effort(2_000, 0.02))
    patient = Effort(2_000, 0.02, is_generous=True)
    assert not isinstance(check_batches(memoryview(data), limits, NOW_MS, effort=patient), Refuse)
