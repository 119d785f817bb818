"""Which produced batches are sound: bytes, sizes, checksums, headers and times."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import PRODUCER_ID_BITS
from anabranch.machines.partition.appending import Refuse
from anabranch.machines.partition.checking import BATCHES_PER_PARTITION_MAX, check_batches, refuse_header
from anabranch.records.batch import CONTROL, TRANSACTIONAL, BatchHeader, parse_header, stamp_crc
from tests.support.batches import make_batch

NOW_MS = 1_000_000


@dataclass(frozen=True)
class Limits:
    message_size_max: int = 1_000
    log_append_time: bool = False
    timestamp_before_max_ms: int = 500
    timestamp_after_max_ms: int = 100


LIMITS = Limits()
SOUND = make_batch(3, timestamp=NOW_MS)


def checked(data: bytes | bytearray, limits: Limits = LIMITS) -> ErrorCode | int:
    """The code of the refusal, or how many batches were found."""
    found = check_batches(memoryview(data), limits, NOW_MS)
    return found.code if isinstance(found, Refuse) else len(found)


def with_bytes(position: int, value: bytes, *, crc: bool = True) -> bytearray:
    data = bytearray(SOUND)
    data[position : position + len(value)] = value
    if crc:
        stamp_crc(data)
    return data


def test_sound_batches_are_found_where_they_are() -> None:
    found = check_batches(memoryview(SOUND + SOUND), LIMITS, NOW_MS)
    assert found == [(0, parse_header(SOUND)), (len(SOUND), parse_header(SOUND))]


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
        (make_batch(payload=b"x" * 1_000, timestamp=NOW_MS), ErrorCode.MESSAGE_TOO_LARGE),
        (SOUND * (BATCHES_PER_PARTITION_MAX + 1), ErrorCode.INVALID_RECORD),
    ],
)
def test_what_is_no_sound_batch_is_refused(data: bytearray, code: ErrorCode) -> None:
    assert checked(data) is code


def test_as_many_batches_as_are_allowed_are_taken() -> None:
    assert checked(SOUND * BATCHES_PER_PARTITION_MAX) == BATCHES_PER_PARTITION_MAX


def test_one_bad_batch_refuses_all_of_them() -> None:
    assert checked(SOUND + with_bytes(23, struct.pack(">i", 7))) is ErrorCode.INVALID_RECORD


def test_the_size_counts_before_the_checksum_and_the_checksum_before_the_header() -> None:
    large = make_batch(payload=b"x" * 1_000, timestamp=NOW_MS)
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
        (HEADER._replace(max_timestamp=NOW_MS + 101), ErrorCode.INVALID_TIMESTAMP),
        (HEADER._replace(base_timestamp=NOW_MS - 501), ErrorCode.INVALID_TIMESTAMP),
    ],
)
def test_what_a_client_may_not_send_is_refused(header: BatchHeader, code: ErrorCode) -> None:
    refusal = refuse_header(header, LIMITS, NOW_MS)
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
        HEADER._replace(max_timestamp=NOW_MS + 100),
        HEADER._replace(base_timestamp=NOW_MS - 500),
        HEADER._replace(base_timestamp=-1),
    ],
)
def test_what_a_client_may_send_is_not(header: BatchHeader) -> None:
    assert refuse_header(header, LIMITS, NOW_MS) is None


def test_where_the_broker_stamps_the_times_those_of_clients_do_not_matter() -> None:
    header = HEADER._replace(base_timestamp=0, max_timestamp=2**60)
    assert refuse_header(header, replace(LIMITS, log_append_time=True), NOW_MS) is None
