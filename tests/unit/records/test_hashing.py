from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as peer_murmur2

from anabranch.records.arrow.decode import decode
from anabranch.records.arrow.encode import encode_records, hash_keys
from anabranch.records.batch import stamp
from anabranch.records.hashing import fmix64, murmur2, placement_hash, range_hash


@pytest.mark.parametrize(
    ("key", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
        (b"", 275646681),
    ],
)
def test_murmur2_is_that_of_kafkas_java_client(key: bytes, signed: int) -> None:
    assert murmur2(key) == signed & 0xFFFF_FFFF
    assert placement_hash(key) == signed & 0x7FFF_FFFF


@given(st.binary(max_size=300))
def test_murmur2_agrees_with_another_implementation(key: bytes) -> None:
    assert murmur2(key) == peer_murmur2(key) & 0xFFFF_FFFF


@pytest.mark.parametrize(
    ("value", "mixed"),
    [(0, 0), (1, 0xB456BCFC34C2CB2C), (2, 0x3ABF2A20650683E7), (0xFFFF_FFFF_FFFF_FFFF, 0x64B5720B4B825F21)],
)
def test_fmix64_is_that_of_murmurhash3(value: int, mixed: int) -> None:
    assert fmix64(value) == mixed


def test_range_hashes_are_spread_evenly() -> None:
    shares = [0] * 16
    for number in range(16_000):
        shares[range_hash(murmur2(b"key-%d" % number)) >> 59] += 1
    assert min(shares) > 850
    assert max(shares) < 1150


VECTORS = Path(__file__).parents[3] / "docs" / "hashing.md"


def vectors(columns: int) -> list[list[str]]:
    """The rows of the page's table with so many columns."""
    lines = [line.strip("| ").split(" | ") for line in VECTORS.read_text().splitlines() if line.startswith("|")]
    return [cells for cells in lines if len(cells) == columns and cells[-1].isdecimal()]


def test_the_published_vectors_hold_for_reference_and_kernels() -> None:
    rows = vectors(5)
    assert len(rows) >= 12
    for name, unsigned, signed, placement, place in rows:
        text = name.removeprefix("hex ").strip("`")
        key = bytes.fromhex(text) if name.startswith("hex") else b"" if name == "(empty)" else text.encode()
        assert (murmur2(key), placement_hash(key)) == (int(unsigned), int(placement))
        assert range_hash(murmur2(key)) == int(place)
        assert int(signed) % (1 << 32) == int(unsigned)
        assert hash_keys(pa.array([key])).tolist() == [int(placement)]
        assert kept([(key, None, 0, ())], 0, int(place))


def test_the_published_vectors_of_offsets_hold_for_reference_and_kernels() -> None:
    rows = vectors(2)
    assert len(rows) >= 6
    for offset, place in rows:
        assert range_hash(int(offset)) == int(place)
        if int(offset) < (1 << 63) - 1:
            assert kept([(None, b"", 0, ())], int(offset), int(place))


def kept(records: list[tuple], offset: int, place: int) -> bool:
    """Whether the kernels find the record at exactly this place of the key range."""
    data = encode_records(records)
    stamp(data, 0, offset, 0)
    found = [
        decode(data, key_range=(place + step, place + step)).records.num_rows
        for step in (-1, 0, 1)
        if 0 <= place + step < 1 << 63
    ]
    return sum(found) == 1 and found[min(1, place)] == 1
