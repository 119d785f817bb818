"""Columns of any type become batches that other clients read."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AioBatch
from kafka.record.default_records import DefaultRecordBatch as KafkaBatch

from anabranch.records import batch as b
from anabranch.records.arrow.decode import COLUMN_TYPES, decode
from anabranch.records.arrow.encode import encode_partitioned, encode_records, hash_keys
from anabranch.records.arrow.warm import warm
from anabranch.records.compression import Compression
from tests.support.records import RECORDS, as_tuples


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


@pytest.mark.parametrize("codec", list(Compression))
@pytest.mark.parametrize("reader", [KafkaBatch, AioBatch])
def test_other_clients_read_what_we_write(reader: type, codec: Compression) -> None:
    data = bytes(encode_records(RECORDS, compression=codec))
    batch = reader(data)
    assert batch.validate_crc()
    assert [(r.key, r.value, r.timestamp, list(r.headers)) for r in batch] == RECORDS


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
