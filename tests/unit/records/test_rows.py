"""One iterator over records: what others write is read, what is malformed is a DecodeError that names the batch."""

from __future__ import annotations

import random

import pytest

from anabranch.base.errors import DecodeError
from anabranch.records.batch import (
    CONTROL,
    HEADER_SIZE,
    TRANSACTIONAL,
    build,
    parse_end_transaction_marker,
    parse_header,
)
from anabranch.records.key_values import decode_pairs
from anabranch.records.rows import RecordSpan, iterate
from anabranch.records.timestamps import first_of_max
from anabranch.records.varint import encode_varint, read_varint
from tests.properties import record_model as model

NUMBERS = [0, 1, -1, 63, 64, -64, -65, 8191, 8192, 1 << 31, -(1 << 40), (1 << 63) - 1, -(1 << 63)]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_that_is_written_is_read(number: int) -> None:
    written = encode_varint(number)
    assert written == model.varint(number)
    assert read_varint(b"\xff" + written + b"\xff", 1) == (number, 1 + len(written))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_that_is_cut_off_is_an_error(number: int) -> None:
    written = encode_varint(number)
    for size in range(len(written)):
        with pytest.raises(DecodeError, match="cut off"):
            read_varint(written[:size], 0)


def test_a_number_of_more_than_ten_bytes_is_an_error() -> None:
    assert read_varint(b"\x80" * 9 + b"\x01", 0) == (1 << 62, 10)
    with pytest.raises(DecodeError, match="10 bytes"):
        read_varint(b"\x80" * 10 + b"\x00", 0)


def test_bits_beyond_the_64th_are_dropped() -> None:
    assert read_varint(b"\xff" * 9 + b"\x7f", 0) == (-(1 << 63), 10)


ROWS = [
    model.Row(700, 50, b"key", b"value"),
    model.Row(701, 1 << 41, None, b""),
    model.Row(900, 0, b"", None, (("header", b"x" * 300), ("other", None))),
    model.Row(90_000, -1, b"k" * 200, b"v" * 20_000),
]


def test_records_are_found_where_they_are() -> None:
    records = b"".join(model.encode_record(row, 700, 50) for row in ROWS)
    spans = list(iterate(records, len(ROWS), 700))
    assert [(700 + span.offset_delta, 50 + span.timestamp_delta) for span in spans] == [
        (row.offset, row.timestamp) for row in ROWS
    ]
    assert [parts(records, span) for span in spans] == [(row.key, row.value) for row in ROWS]
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(records)


def parts(records: bytes, span: RecordSpan) -> tuple[bytes | None, bytes | None]:
    key = None if span.key_end < 0 else records[span.key_start : span.key_end]
    return key, None if span.value_end < 0 else records[span.value_start : span.value_end]


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\x00",
        b"\x01\x00\x00\x00\x01\x01\x00",  # A length of -1.
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" + bytes(7),
        b"\x0e\x00\x00\x00\x02a\x02a",  # The header count is cut off.
        b"\x0e\x00\x00\x00\x03a\x02a\x00",  # A key of -2 bytes.
        b"\x0e\x00\x00\x00\x02a\x05a\x00",
        b"\x0e\x00\x00\x00\x20a\x02a\x00" + bytes(30),  # A key beyond the end of the record.
        b"\x0e\x00\x00\x00\x02a\x08a\x00" + bytes(30),
        b"\x0e\x00\x80\x80\x80\x80\x80\x80",
    ],
)
def test_a_malformed_record_is_an_error_for_every_reader(record: bytes) -> None:
    with pytest.raises(DecodeError, match="offset 4321"):
        list(iterate(record, 1, 4321))
    batch = memoryview(build(record, record_count=1, base_timestamp=0, max_timestamp=0, base_offset=4321))
    for read in (lambda: decode_pairs(batch, parse_header(batch)), lambda: first_of_max(batch, 0)):
        with pytest.raises(DecodeError, match="offset 4321"):
            read()


def test_any_bytes_give_spans_within_them_or_an_error() -> None:
    chance = random.Random(3)
    sound = b"".join(model.encode_record(row, 700, 50) for row in (*ROWS[:2], ROWS[0]))
    read = refused = 0
    for _ in range(5_000):
        data = bytearray(sound)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.choice((0, 1, 2, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        at = 0
        try:
            for span in iterate(data, 3, 0):
                assert span.start == at < span.key_start <= max(span.key_end, span.key_start) < span.value_start
                assert max(span.value_end, span.value_start) < span.end <= len(data)
                at = span.end
            read += 1
        except DecodeError:
            refused += 1
    assert read > 500 and refused > 500


def test_a_control_batch_without_a_sound_record_is_an_error() -> None:
    for record in (b"", b"\x01", b"\x0e\x00\x00\x00\x01\x01\x00\x00"):
        batch = build(
            record, record_count=1, base_timestamp=0, max_timestamp=0, attributes=CONTROL | TRANSACTIONAL, base_offset=9
        )
        assert len(batch) == HEADER_SIZE + len(record)
        with pytest.raises(DecodeError, match="offset 9"):
            parse_end_transaction_marker(batch)
