"""Bytes of batches, sound or hostile, become columns or an error in words."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
import tracemalloc

import cramjam
import numpy as np
import pyarrow as pa
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AioBuilder
from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaBuilder

from anabranch.base.errors import DecodeError
from anabranch.records import batch as b
from anabranch.records.arrow.decode import COLUMN_TYPES, COLUMNS_DEFAULT, decode, decode_all
from anabranch.records.arrow.encode import encode_records
from anabranch.records.arrow.warm import warm
from anabranch.records.compression import Compression
from tests.support.batches import recompress
from tests.support.records import RECORDS, as_tuples


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


def peers_batch(builder_class: type, codec: Compression) -> bytes:
    options = {"producer_id": 5, "producer_epoch": 0, "base_sequence": 0, "batch_size": 1 << 30}
    builder = builder_class(magic=2, compression_type=int(codec), is_transactional=0, **options)
    for number, (key, value, timestamp, headers) in enumerate(RECORDS):
        builder.append(number, timestamp=timestamp, key=key, value=value, headers=headers)
    return bytes(builder.build())


@pytest.mark.parametrize("codec", list(Compression))
@pytest.mark.parametrize("builder", [KafkaBuilder, AioBuilder])
def test_what_other_clients_write_is_read(builder: type, codec: Compression) -> None:
    data = peers_batch(builder, codec)
    assert b.parse_header(data).compression is codec
    decoded = decode(data)
    assert as_tuples(decoded.records) == RECORDS
    assert decoded.records.column("offset").to_pylist() == list(range(len(RECORDS)))


def test_header_keys_that_are_no_text_are_replaced() -> None:
    data = encode_records([(b"k", b"v", 0, [("ab", b"x"), ("\u00e9", b"y")])])
    record = bytes(data).replace(b"\xc3\xa9", b"\xff\xa9")
    changed = bytearray(record)
    b.stamp_crc(changed)
    assert as_tuples(decode(changed).records) == [(b"k", b"v", 0, [("ab", b"x"), ("\ufffd\ufffd", b"y")])]


def test_the_schema_is_that_of_the_columns() -> None:
    decoded = decode(encode_records(RECORDS), columns=("value", "key_hash"))
    assert decoded.records.schema == pa.schema({"value": pa.binary(), "key_hash": pa.int32()})
    assert decode(b"").records.schema.names == list(COLUMNS_DEFAULT)
    with pytest.raises(ValueError, match="no column 'valeu'"):
        decode(b"", columns=("valeu",))


def test_a_column_without_nulls_has_no_bitmap() -> None:
    records = decode(encode_records([(b"k", b"v", 0, ()), (b"l", b"w", 0, ())])).records
    assert [records.column(name).buffers()[0] for name in ("key", "value")] == [None, None]


def test_buffers_are_aligned_as_arrow_wants_them() -> None:
    records = decode(encode_records(RECORDS), columns=tuple(COLUMN_TYPES)).records
    for name in ("offset", "timestamp", "key", "value", "key_hash", "leader_epoch"):
        assert all(buffer.address % 64 == 0 for buffer in records.column(name).buffers() if buffer is not None)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8).data])
def test_any_buffer_is_read(kind: type) -> None:
    assert as_tuples(decode(kind(bytes(encode_records(RECORDS)))).records) == RECORDS


def test_batches_out_of_order_do_not_keep_a_reader_for_ever() -> None:
    data = bytes(encode_records(RECORDS[:5])) * 3
    with pytest.raises(DecodeError, match="comes after"):
        decode(data, decoded_size_max=100)
    with pytest.raises(DecodeError, match="comes after"):
        list(decode_all(data, decoded_size_max=100))


def test_old_formats_are_refused_in_words() -> None:
    with pytest.raises(b.UnsupportedFormatError):
        decode(bytes(encode_records(RECORDS)) + struct.pack(">qiib", 0, 60, 0, 1) + bytes(60))


@pytest.mark.parametrize(
    ("records", "count"),
    [
        (b"\x7f" * 30, 1),
        (b"\x0e\0\0\0\2a\2a\0", 2),
        (b"\x0e\0\0\0\2a\2a\0" * 2, 1),
        (b"\x10\0\0\0\2a\2a\0\0", 1),
        (b"", 9),
    ],
)
def test_a_malformed_record_names_the_offset_of_its_batch(records: bytes, count: int) -> None:
    data = b.build(records, record_count=count, base_timestamp=0, max_timestamp=0, base_offset=4321)
    with pytest.raises(DecodeError, match="4321"):
        decode(data)


def among_alike(odd: bytes, *, key: bytes, offset: int | None = None) -> bytes:
    """A batch of records that are alike but for the one in the middle, and a batch behind it to read into."""

    def record(offset: int, fields: bytes) -> bytes:
        body = b"\0\0" + bytes([2 * offset]) + fields + b"\0"
        return bytes([2 * len(body)]) + body

    alike = key + b"\4xy"
    records = [record(offset, alike) for offset in range(200 // len(alike))]
    place = len(records) // 2
    records[place] = record(place if offset is None else offset, odd)
    made = b.build(b"".join(records), record_count=len(records), base_timestamp=0, max_timestamp=0, base_offset=4321)
    return bytes(made) + bytes(encode_records(RECORDS))


LONG_KEY = b"\x84\x80\x80\x80\x80\0"
"""A length of 2 in six bytes."""


@pytest.mark.parametrize("wanted", [("offset", "timestamp", "key", "value"), ("value", "key_hash")])
@pytest.mark.parametrize(
    ("odd", "key", "offset"),
    [
        (b"\4ab\4xy", b"\4ab", 0),
        (b"\4ab\5xy", b"\4ab", None),
        (b"\5ab\4xy", b"\4ab", None),
        (b"\4ab\6xy", b"\4ab", None),
        (b"\4ab\2xy", b"\4ab", None),
        (b"\x14ab\4xy", b"\4ab", None),
        (b"\x84\xff\xff\xff\xff\x7fab\4xy", LONG_KEY + b"ab", None),
    ],
)
def test_a_malformed_record_among_others_is_found(
    odd: bytes, key: bytes, offset: int | None, wanted: tuple[str, ...]
) -> None:
    with pytest.raises(DecodeError, match="offset 4321 holds a malformed record"):
        decode(among_alike(odd, key=key, offset=offset), columns=wanted)


@pytest.mark.parametrize("key", [b"\4ab", LONG_KEY + b"ab"])
@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        (b"\x84\0a\6\4xy", (b"a\6", b"xy")),  # Reads as b"\0a" and b"\4xy", too, if the length had one byte.
        (b"\1\4xy", (None, b"xy")),
        (b"\4ab\1", (b"ab", None)),
        (b"\4ab\x84\0xy", (b"ab", b"xy")),
        (b"\0\0", (b"", b"")),
    ],
)
def test_a_record_among_others_is_read_as_what_it_is(
    odd: bytes, expected: tuple[bytes | None, bytes | None], key: bytes
) -> None:
    data = among_alike(odd, key=key)
    rows = as_tuples(decode(data).records)[: -len(RECORDS)]
    place = len(rows) // 2
    assert rows.pop(place)[:2] == expected
    assert {row[:2] for row in rows} == {(b"ab", b"xy")}


@pytest.mark.parametrize("headers", [b"\2", b"\2\1\0", b"\2\4ab", b"\2\4ab\3", b"\4\2a\2b", b"\1"])
def test_a_malformed_header_is_refused(headers: bytes) -> None:
    record = b"\0\0\0\2a\2a" + headers
    records = bytes((len(record) << 1,)) + record
    data = b.build(records, record_count=1, base_timestamp=0, max_timestamp=0, base_offset=4321)
    with pytest.raises(DecodeError, match="4321"):
        decode(data)


@pytest.mark.parametrize("codec", [codec for codec in Compression if codec])
def test_a_bomb_is_refused_in_bounded_memory(codec: Compression) -> None:
    bomb = recompress(encode_records([(None, bytes(1 << 27), 0, ())]), codec, 1 << 28)
    b.stamp(bomb, 0, 99, 0)
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="offset 99"):
            decode(bomb, size_max=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_many_bombs_at_once_stop_at_the_bound_of_the_whole() -> None:
    bomb = bytes(recompress(encode_records([(None, bytes(4 << 20), 0, ())]), Compression.ZSTD, 1 << 28))
    bombs = bytearray(bomb * 100)
    for number, (position, _) in enumerate(b.headers(bombs)):
        b.stamp(bombs, position, number, 0)
    decoded = decode(bombs, decoded_size_max=20 << 20)
    assert not decoded.complete
    assert decoded.records.num_rows == decoded.next_offset == 4
    assert sum(piece.records.num_rows for piece in decode_all(bombs, decoded_size_max=20 << 20)) == 100


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    frame = bytearray(cramjam.zstd.compress(b"\x0e\0\0\0\2a\2a\0"))
    for said in (0xFFFF_FFFF, 1 << 30, 3):
        lying = bytes(frame[:4]) + b"\xa0" + said.to_bytes(4, "little") + bytes(frame[6:])
        data = b.build(lying, record_count=1, base_timestamp=0, max_timestamp=0, attributes=4)
        with pytest.raises(DecodeError, match="offset 0"):
            decode(data)


def test_results_outlive_the_input_and_other_results() -> None:
    data = bytearray(encode_records(RECORDS))
    kept = [decode(data, columns=("key", "value")).records.column("value") for _ in range(5)]
    data[:] = bytes(len(data))
    for _ in range(10):
        decode(encode_records([(b"x" * 100, b"y" * 100, 0, ())] * 700))
    for column in kept:
        column.validate(full=True)
        assert column.to_pylist() == [record[1] for record in RECORDS]


def test_decoding_touches_no_memory_that_other_threads_may_have() -> None:
    """What it keeps of a block of records lay in memory that was freed before it was used."""
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}  # so that all threads take from one heap
    command = [sys.executable, "-m", "tests.unit.records.arrow.decode_beside_others"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
