"""Keys and values of small batches: written, read one by one, read many at once; damage of any kind is noticed."""

from __future__ import annotations

import random

import pytest

from anabranch.base.errors import DecodeError
from anabranch.records.batch import end_transaction_marker, headers, parse_header, stamp_crc
from anabranch.records.bulk_scan import spans, walk
from anabranch.records.compression import Compression
from anabranch.records.key_values import Pair, decode_pairs, encode_pairs
from tests.support.batches import make_keyed_batch

PAIRS: list[Pair] = [(b"k", b"v"), (b"k" * 200, None), (None, b"v" * 20_000), (b"", b"")]


def read_one_by_one(data: bytes) -> list[Pair]:
    return [pair for at, header in headers(data) for pair in decode_pairs(memoryview(data)[at:], header)]


def read_at_once(data: bytes) -> list[Pair]:
    columns = zip(*(column.tolist() for column in spans(data, walk(data))), strict=True)
    return [(None if b < 0 else data[a:b], None if d < 0 else data[c:d]) for a, b, c, d in columns]


def test_what_is_written_is_read() -> None:
    batch = encode_pairs(PAIRS, 1_700_000_000_000)
    header = parse_header(batch)
    assert (header.record_count, header.base_timestamp, header.max_timestamp) == (4, *[1_700_000_000_000] * 2)
    assert (header.producer_id, header.is_transactional, header.base_sequence) == (-1, False, -1)
    assert decode_pairs(memoryview(batch), header) == PAIRS


def test_a_batch_of_a_transaction_says_so() -> None:
    header = parse_header(encode_pairs(PAIRS, 0, producer_id=7, producer_epoch=3))
    assert (header.producer_id, header.producer_epoch, header.is_transactional) == (7, 3, True)


@pytest.mark.parametrize("compression", list(Compression))
def test_batches_of_others_are_read(compression: Compression) -> None:
    batch = make_keyed_batch([(b"a", b"1"), (b"b", None)] * 100, compression=compression)
    assert decode_pairs(memoryview(batch), parse_header(batch)) == [(b"a", b"1"), (b"b", None)] * 100


def test_many_at_once_are_read_as_they_are_one_by_one() -> None:
    chance = random.Random(1)
    for _ in range(50):
        data = bytearray()
        for _ in range(chance.randrange(20)):
            data += encode_pairs(
                [
                    (chance.choice((None, chance.randbytes(chance.randrange(300)))), chance.choice((None, b"v" * 70)))
                    for _ in range(chance.choice((1, 1, 2, 200)))
                ],
                chance.randrange(1 << 40),
            )
        assert read_at_once(bytes(data)) == read_one_by_one(bytes(data))


def test_a_batch_that_is_not_all_there_is_left_for_the_next_window() -> None:
    data = bytes(encode_pairs(PAIRS, 0) + encode_pairs(PAIRS, 0))
    half = len(data) // 2
    near = {abs(at + by) for at in (0, half, 2 * half) for by in range(-80, 80)}
    for size in sorted(size for size in near | set(range(0, 2 * half, 97)) if size < len(data)):
        assert walk(data[:size]).end == (half if size >= half else 0)


def test_batches_that_need_more_than_a_look_are_told_apart() -> None:
    batches = [
        encode_pairs(PAIRS, 0),
        encode_pairs(PAIRS, 0, producer_id=1, producer_epoch=0),
        make_keyed_batch([(b"a", b"b")], compression=Compression.LZ4),
        end_transaction_marker(1, 0, commit=True, coordinator_epoch=0, timestamp_ms=0),
    ]
    assert walk(b"".join(map(bytes, batches))).special.tolist() == [1, 2, 3]


def test_any_damage_is_an_error_or_other_records_never_anything_else() -> None:
    chance = random.Random(2)
    sound = encode_pairs(PAIRS[:2] * 3, 0)
    for _ in range(1_000):
        data = bytearray(sound * 2)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(61, len(sound))] = chance.randrange(256)
        if data != sound * 2:
            with pytest.raises(DecodeError):
                walk(bytes(data))
        stamp_crc(data)
        try:
            expected = read_one_by_one(bytes(data))
        except DecodeError:
            with pytest.raises(DecodeError):
                read_at_once(bytes(data))
        else:
            assert read_at_once(bytes(data)) == expected
