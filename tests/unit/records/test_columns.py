from __future__ import annotations

import gc
import os
import random
import struct
import subprocess
import sys
import tracemalloc

import cramjam
import numpy as np
import pyarrow as pa
import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AioBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AioBuilder
from kafka.record.default_records import DefaultRecordBatch as KafkaBatch
from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaBuilder

from anabranch.base.errors import DecodeError
from anabranch.records import batch as b
from anabranch.records.arrow.decode import COLUMN_TYPES, COLUMNS_DEFAULT, decode, decode_all
from anabranch.records.arrow.encode import encode_partitioned, encode_records, hash_keys
from anabranch.records.arrow.warm import warm
from anabranch.records.compression import Compression
from anabranch.records.kernels import crc32c
from anabranch.records.kernels.decode import decode_records
from anabranch.records.kernels.encode import encode_batches

RECORDS = [
    (b"N14228", b"2013-01-01T05:15 UA1545 +2", 1_356_998_400_000, [("carrier", b"UA"), ("cancelled", None)]),
    (None, b"", 1_356_998_400_500, []),
    (b"", None, 1_356_998_399_000, [("", b"")]),
    (b"k" * 70, b"v" * 70_000, 1_356_998_500_000, []),
    *((b"N%05d" % (n % 300), b"leg %d" % n, 1_356_998_400_000 + n * 70, []) for n in range(1000)),
]


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


def as_tuples(records: pa.RecordBatch) -> list[tuple]:
    return [
        (row["key"], row["value"], row["timestamp"], [(entry["key"], entry["value"]) for entry in row["headers"]])
        for row in records.to_pylist()
    ]


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


@pytest.mark.parametrize("codec", list(Compression))
@pytest.mark.parametrize("reader", [KafkaBatch, AioBatch])
def test_other_clients_read_what_we_write(reader: type, codec: Compression) -> None:
    data = bytes(encode_records(RECORDS, compression=codec))
    batch = reader(data)
    assert batch.validate_crc()
    assert [(r.key, r.value, r.timestamp, list(r.headers)) for r in batch] == RECORDS


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


def test_a_wrong_checksum_is_found_unless_it_is_not_wanted() -> None:
    data = encode_records(RECORDS)
    b.stamp(data, 0, 700, 3)
    data[-10] ^= 1
    with pytest.raises(b.ChecksumError, match="offset 700"):
        decode(data)
    assert decode(data, check_crc=False).records.num_rows == len(RECORDS)
    assert decode(data, start_offset=700 + len(RECORDS)).records.num_rows == 0


SIZES = [*range(300), 383, 384, 385, 1023, 1024, 3071, 3072, 3073, 3455, 3456, 6144, 9999, 40_001]


def test_checksums_of_the_kernels_are_those_of_the_library() -> None:
    values = pa.array([bytes((n * 31 + size) % 256 for n in range(size)) for size in SIZES])
    encoded = encode_partitioned(None, values, 0, batch_size_max=1)
    assert len(encoded) == len(SIZES)
    for batch in encoded:
        b.check(batch.data, 0, b.parse_header(batch.data))
        b.stamp_crc(batch.data)
        assert decode(batch.data).records.num_rows == 1
        batch.data[-1] ^= 0x80
        with pytest.raises(b.ChecksumError):
            decode(batch.data)


def test_without_the_processors_instruction_checksums_are_computed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crc32c, "CHECKS_CRC", False)
    data = encode_records(RECORDS)
    b.check(data, 0, b.parse_header(data))
    assert decode(data).records.num_rows == len(RECORDS)
    data[-10] ^= 1
    with pytest.raises(b.ChecksumError, match="offset 0"):
        decode(data)


@pytest.mark.parametrize("codec", list(Compression))
def test_a_wrong_checksum_is_found_in_any_batch_of_many(codec: Compression) -> None:
    data = bytearray()
    for number in range(3):
        batch = encode_records(RECORDS[:5], compression=codec)
        b.stamp(batch, 0, 5 * number, 0)
        data += batch
    assert decode(data).records.num_rows == 15
    data[2 * len(data) // 3 + 30] ^= 1
    with pytest.raises(b.ChecksumError, match="offset 10"):
        decode(data)
    assert decode(data, end_offset=10).records.num_rows == 10


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
    bomb = b.recompress(encode_records([(None, bytes(1 << 27), 0, ())]), codec, 1 << 28)
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
    bomb = bytes(b.recompress(encode_records([(None, bytes(4 << 20), 0, ())]), Compression.ZSTD, 1 << 28))
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


def test_a_batch_takes_a_producer_after_it_is_encoded() -> None:
    (encoded,) = encode_partitioned(None, pa.array([b"v"]), 5, partitions=3)
    b.stamp_producer(encoded.data, 1 << 33, 2, 77)
    header = b.parse_header(encoded.data)
    b.check(encoded.data, 0, header)
    assert (encoded.partition, header.producer_id, header.producer_epoch, header.base_sequence) == (3, 1 << 33, 2, 77)


def test_nothing_to_encode_is_no_batch() -> None:
    assert encode_partitioned(pa.array([], pa.binary()), pa.array([], pa.binary()), 0) == []
    assert encode_partitioned(None, pa.nulls(0), np.empty(0, np.int64), None, np.empty(0, np.int32)) == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"keys": pa.array([b"k"])}, ValueError),
        ({"keys": pa.array([1, 2])}, TypeError),
        ({"timestamps": np.zeros(3, np.int64)}, ValueError),
        ({"partitions": np.zeros(3, np.int32)}, ValueError),
        ({"partitions": np.array([0, -1], np.int32)}, ValueError),
        ({"headers": pa.array([[], []], COLUMN_TYPES["headers"]).slice(1)}, ValueError),
        ({"headers": pa.array(["a", "b"])}, TypeError),
        ({"headers": pa.array([[{"key": None, "value": b""}], []])}, ValueError),
        ({"headers": pa.array([[{"key": None, "value": b""}, {"key": "a", "value": b""}], []])}, ValueError),
    ],
)
def test_columns_that_do_not_fit_are_refused_in_words(changes: dict, error: type[Exception]) -> None:
    arguments = {"keys": None, "values": pa.array([b"a", b"b"]), "timestamps": 0} | changes
    with pytest.raises(error, match=r"\d+ .* for 2 values|expected"):
        encode_partitioned(**arguments)


def test_headers_whose_values_are_all_null_are_written() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.null())]))
    headers = pa.array([[{"key": "a", "value": None}], None], kind)
    (encoded,) = encode_partitioned(None, pa.array([b"v", b"w"]), 0, headers)
    assert as_tuples(decode(encoded.data).records) == [(None, b"v", 0, [("a", None)]), (None, b"w", 0, [])]


def test_columns_in_many_chunks_or_none() -> None:
    keys = pa.chunked_array([[b"a"], [], [None, b"c"]], pa.binary())
    (encoded,) = encode_partitioned(keys, pa.chunked_array([["x", "y"], ["z"]]), 0)
    assert [row[:2] for row in as_tuples(decode(encoded.data).records)] == [(b"a", b"x"), (None, b"y"), (b"c", b"z")]
    assert hash_keys(pa.chunked_array([], pa.binary())).tolist() == []


def test_every_row_may_become_a_batch_of_its_own() -> None:
    values = pa.array([b"%d" % n for n in range(500)])
    encoded = encode_partitioned(None, values, 0, partitions=np.arange(500, dtype=np.int32) % 7, batch_size_max=1)
    assert [batch.record_count for batch in encoded] == [1] * 500
    assert [batch.first_row for batch in encoded] == sorted(range(500), key=lambda row: row % 7)


def test_kernels_are_not_compiled_when_they_are_imported() -> None:
    # A fresh interpreter would prove it too, but the dispatchers say it cheaper: they compile by signature, on call.
    assert all(len(kernel.signatures) == 1 for kernel in (decode_records, encode_batches))


def test_any_processor_reads_and_writes_the_same() -> None:
    code = """
from anabranch.records.kernels import crc32c, memory
from tests.unit.records.test_columns import written_and_read
assert not (crc32c.CHECKS_CRC or crc32c.FOLDS_CRC or memory.SQUEEZES)
print(written_and_read())
"""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (written_and_read() + "\n", 0), done.stderr[-2000:]


def written_and_read() -> str:
    data = encode_records(RECORDS)
    return f"{bytes(data).hex()} {decode(data, columns=tuple(COLUMN_TYPES)).records.to_pylist()}"


def test_decoding_touches_no_memory_that_other_threads_may_have() -> None:
    """What it keeps of a block of records lay in memory that was freed before it was used."""
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}  # so that all threads take from one heap
    command = [sys.executable, "-m", "tests.unit.records.decode_beside_others"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("batch_size_max", [200, 16 * 1024, 1 << 20])
def test_rows_that_are_easy_to_write_come_out_as_others_do(batch_size_max: int) -> None:
    """Wide offsets are no other records, but are written without the short cuts that narrow ones without nulls take."""
    edges = [0, 1, 31, 32, 33, *range(60, 68), *range(126, 132), *range(8_180, 8_196), *range(16_380, 16_390)]
    chance = random.Random(5)
    sizes = [(key, value) for key in edges for value in chance.sample(edges, 12)]
    chance.shuffle(sizes)
    keys = pa.array([chance.randbytes(key) for key, _ in sizes])
    values = pa.array([chance.randbytes(value) for _, value in sizes])
    gaps = [0, 1, -1, 31, 32, 63, 64, -64, -65, 8_191, 8_192, -8_193, 1 << 40, -(1 << 40)]
    timestamps = 1_700_000_000_000 + np.cumsum([chance.choice(gaps) for _ in sizes])
    partitions = np.array([chance.choice((0, 0, 0, 1, 7)) for _ in sizes], np.int32)
    wide = [column.cast(pa.large_binary()) for column in (keys, values)]
    for to in (0, partitions):
        easy = encode_partitioned(keys, values, timestamps, None, to, batch_size_max=batch_size_max)
        other = encode_partitioned(*wide, timestamps, None, to, batch_size_max=batch_size_max)
        assert [batch._replace(data=bytes(batch.data)) for batch in easy] == [
            batch._replace(data=bytes(batch.data)) for batch in other
        ]
        assert sum(batch.record_count for batch in easy) == len(sizes)
