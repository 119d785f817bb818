from __future__ import annotations

import contextlib
import struct
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from anabranch.base.errors import DecodeError
from anabranch.records import batch as b
from anabranch.records.compression import Compression
from tests.support.batches import recompress


def peer_batch(
    count: int = 3, compression: int = 0, *, value: bytes = b"value", transactional: bool = False
) -> bytearray:
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=int(transactional),
        producer_id=77,
        producer_epoch=3,
        base_sequence=40,
        batch_size=1 << 20,
    )
    for number in range(count):
        builder.append(number, timestamp=1_000 + number, key=b"key", value=value, headers=[])
    return bytearray(builder.build())


def test_a_peers_header_is_read() -> None:
    data = peer_batch(3, 4, transactional=True)
    header = b.parse_header(data)
    assert header == b.BatchHeader(0, len(data), 0, 2, header.crc, 0x14, 2, 1_000, 1_002, 77, 3, 40, 3)
    assert header.compression is Compression.ZSTD
    assert header.is_transactional
    assert not header.is_control
    assert not header.log_append_time
    assert (header.last_offset, header.next_offset) == (2, 3)
    b.check(data, 0, header)


def test_batches_one_after_another_are_walked_and_an_incomplete_last_one_is_left() -> None:
    one, two = peer_batch(1), peer_batch(5, 1)
    both = one + two
    assert [(position, header.record_count) for position, header in b.headers(both)] == [(0, 1), (len(one), 5)]
    for end in range(len(one), len(both)):
        assert [position for position, _ in b.headers(both[:end])] == [0]
        assert [position for position, _ in b.headers(memoryview(bytes(both))[:end])] == [0]


def test_stamping_a_place_keeps_the_checksum() -> None:
    data = peer_batch() + peer_batch()
    second = len(data) // 2
    b.stamp(data, second, 1 << 40, 9)
    header = b.parse_header(data, second)
    assert (header.base_offset, header.leader_epoch) == (1 << 40, 9)
    b.check(data, second, header)
    assert b.parse_header(data).base_offset == 0


def test_a_changed_bit_is_found_by_the_checksum() -> None:
    data = peer_batch()
    for position in range(21, len(data)):
        data[position] ^= 0x10
        with pytest.raises(DecodeError):
            b.check(data, 0, b.parse_header(data))
        data[position] ^= 0x10
    b.check(data, 0, b.parse_header(data))


def test_log_append_time_replaces_every_timestamp() -> None:
    data = peer_batch()
    stamped = bytearray(data)
    b.stamp_log_append_time(stamped, 0, 5_000)
    header = b.parse_header(stamped)
    b.check(stamped, 0, header)
    assert header.log_append_time
    assert header.max_timestamp == 5_000
    assert [record.timestamp for record in DefaultRecordBatch(bytes(stamped))] == [5_000] * 3
    assert not b.parse_header(data).log_append_time


def test_another_producer_is_written_into_a_batch() -> None:
    data = peer_batch()
    b.stamp_producer(data, 1 << 41, 7, 12)
    header = b.parse_header(data)
    b.check(data, 0, header)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (1 << 41, 7, 12)
    assert not header.is_transactional
    b.stamp_producer(data, 1, 2, 3, transactional=True)
    b.check(data, 0, b.parse_header(data))
    assert b.parse_header(data).is_transactional


@pytest.mark.parametrize("damaged", [False, True])
def test_another_header_of_a_large_batch_does_not_hide_damage(damaged: bool) -> None:
    data = bytearray(peer_batch(5_000))
    assert len(data) > 64 * 1024
    data[-9] ^= damaged
    for producer in ((1 << 41, 7, 12), (3, 0, 0)):
        b.stamp_producer(data, *producer, transactional=producer[0] == 3)
        header = b.parse_header(data)
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == producer
        with pytest.raises(b.ChecksumError) if damaged else nullcontext():
            b.check(data, 0, header)
    b.stamp_log_append_time(data, 0, 5_000)
    with pytest.raises(b.ChecksumError) if damaged else nullcontext():
        b.check(data, 0, b.parse_header(data))


@pytest.mark.parametrize("source", list(Compression))
@pytest.mark.parametrize("target", list(Compression))
def test_recompressing_changes_the_codec_alone(source: Compression, target: Compression) -> None:
    data = peer_batch(50, source, transactional=True)
    changed = recompress(data, target, 1 << 20)
    before, after = b.parse_header(data), b.parse_header(changed)
    b.check(changed, 0, after)
    assert after.compression is target
    assert after._replace(size=0, crc=0, attributes=0) == before._replace(size=0, crc=0, attributes=0)
    assert after.attributes & ~7 == before.attributes & ~7
    records, expected = list(DefaultRecordBatch(bytes(changed))), list(DefaultRecordBatch(bytes(data)))
    assert [(r.offset, r.timestamp, r.key, r.value) for r in records] == [
        (r.offset, r.timestamp, r.key, r.value) for r in expected
    ]


def test_recompressing_a_bomb_is_refused() -> None:
    with pytest.raises(DecodeError):
        recompress(peer_batch(100, 4, value=bytes(1000)), Compression.NONE, 10_000)


@pytest.mark.parametrize("commit", [True, False])
def test_an_end_marker_is_read_back_by_us_and_by_a_peer(commit: bool) -> None:
    data = b.end_transaction_marker(9, 2, commit=commit, coordinator_epoch=5, timestamp_ms=1234)
    header = b.parse_header(data)
    b.check(data, 0, header)
    assert header.is_control
    assert header.is_transactional
    assert b.parse_end_transaction_marker(data) == b.EndTransactionMarker(9, 2, commit, 5, 1234)
    peer = DefaultRecordBatch(bytes(data))
    assert peer.is_control_batch
    (record,) = peer
    assert (record.abort, record.commit) == (not commit, commit)


def test_another_control_record_is_no_end_marker() -> None:
    data = b.end_transaction_marker(9, 2, commit=True, coordinator_epoch=5, timestamp_ms=1234)
    data = data.replace(struct.pack(">bhh", 8, 0, 1), struct.pack(">bhh", 8, 0, 2))
    assert b.parse_end_transaction_marker(data) is None


def test_old_formats_are_told_apart() -> None:
    for magic in (0, 1):
        with pytest.raises(b.UnsupportedFormatError, match="format"):
            b.parse_header(struct.pack(">qiib", 0, 22, 0, magic) + bytes(17))
    with pytest.raises(b.UnsupportedCompressionError):
        b.parse_header(b.build(b"", record_count=1, base_timestamp=0, max_timestamp=0, attributes=5))
    with pytest.raises(DecodeError, match="magic 3"):
        b.parse_header(bytes(16) + b"\x03" + bytes(60))


@pytest.mark.parametrize(
    ("at", "field"),
    [
        (8, struct.pack(">i", -1)),
        (8, struct.pack(">i", 48)),
        (8, struct.pack(">i", 1 << 30)),
        (0, struct.pack(">q", -1)),
        (0, struct.pack(">q", (1 << 63) - 1)),
        (23, struct.pack(">i", -1)),
        (57, struct.pack(">i", -1)),
        (57, struct.pack(">i", 4)),
    ],
)
def test_a_header_that_cannot_be_is_refused(at: int, field: bytes) -> None:
    data = peer_batch()
    data[at : at + len(field)] = field
    with pytest.raises(DecodeError):
        b.parse_header(data)


def test_a_hostile_length_stops_the_walk_with_an_error() -> None:
    data = peer_batch()
    for length in (-1, -(1 << 31), 0, 48):
        data[8:12] = struct.pack(">i", length)
        with pytest.raises(DecodeError):
            list(b.headers(data))


@given(st.binary(max_size=200), st.integers(0, 61))
def test_any_bytes_are_batches_or_a_decode_error(noise: bytes, keep: int) -> None:
    data = bytes(peer_batch())[:keep] + noise
    try:
        for position, header in b.headers(data):
            b.check(data, position, header)
            if header.is_control:
                b.parse_end_transaction_marker(data, position)
    except DecodeError:
        pass


@given(st.binary(max_size=60))
def test_any_control_record_is_a_marker_or_a_decode_error(noise: bytes) -> None:
    data = b.build(noise, record_count=1, base_timestamp=0, max_timestamp=0, attributes=0x30)
    with contextlib.suppress(DecodeError):
        b.parse_end_transaction_marker(data)
