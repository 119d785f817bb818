from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as peer_murmur2

from anabranch.machines.keyspace import SPACE, SPACE_END, Interval, cuts, interval, keyless_spread, spread
from anabranch.records.arrow.decode import decode
from anabranch.records.arrow.encode import encode_records, hash_keys
from anabranch.records.batch import stamp
from anabranch.records.hashing import fmix64, murmur2, placement_hash
from anabranch.records.shares import KeyShare


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


PAGE = Path(__file__).parents[3] / "docs" / "hashing.md"


def vectors(section: str) -> list[list[str]]:
    """The rows of the table of a section of the page."""
    (text,) = (part for part in PAGE.read_text().split("\n## ") if part.startswith(section))
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return lines[2:]


def key_of(cell: str) -> bytes:
    text = cell.removeprefix("hex ").strip("`")
    return bytes.fromhex(text) if cell.startswith("hex") else b"" if cell == "(empty)" else text.encode()


def kept(key: bytes | None, offset: int, initial: int, held: Interval, place: int) -> bool:
    """Whether the kernels find the record at exactly this place of the key space."""
    data = encode_records([(key, b"", 0, ())])
    stamp(data, 0, offset, 0)
    found = [
        decode(data, share=KeyShare((at, at), initial, held)).records.num_rows
        for at in (place - 1, place, place + 1)
        if 0 <= at <= SPACE_END
    ]
    return sum(found) == 1 and found[min(1, place)] == 1


def test_the_published_hashes_hold_for_reference_and_kernels() -> None:
    rows = vectors("Vectors: hashes")
    assert len(rows) >= 12
    for name, unsigned, signed, placement, mixed in rows:
        key = key_of(name)
        assert (murmur2(key), placement_hash(key)) == (int(unsigned), int(placement))
        assert fmix64(murmur2(key)) == int(mixed)
        assert int(signed) % (1 << 32) == int(unsigned)
        assert hash_keys(pa.array([key])).tolist() == [int(placement)]


def test_the_published_spreads_hold_for_reference_and_kernels() -> None:
    rows = vectors("Vectors: spread")
    assert len(rows) >= 12
    for name, initial, place in rows:
        assert spread(murmur2(key_of(name)), int(initial)) == int(place)
        assert kept(key_of(name), 0, int(initial), SPACE, int(place))


def test_the_published_intervals_hold() -> None:
    rows = vectors("Vectors: intervals")
    assert len(rows) >= 12
    for initial, count, partition, start, end in rows:
        assert interval(int(partition), int(count), int(initial)) == (int(start), int(end))


def test_the_published_cuts_hold() -> None:
    rows = vectors("Vectors: cuts")
    assert len(rows) >= 4
    for initial, count, partition, readers, points in rows:
        shares = cuts(interval(int(partition), int(count), int(initial)), int(readers))
        assert [share.start for share in shares[1:]] == [int(point) for point in points.split()]
        assert (shares[0].start, shares[-1].end) == (0, SPACE_END)


def test_the_published_spreads_of_records_without_a_key_hold_for_reference_and_kernels() -> None:
    rows = vectors("Vectors: records without a key")
    assert len(rows) >= 8
    for offset, initial, count, partition, place in rows:
        held = interval(int(partition), int(count), int(initial))
        assert keyless_spread(int(offset), held) == int(place)
        if int(offset) < (1 << 63) - 1:
            assert kept(None, int(offset), int(initial), held, int(place))


@pytest.mark.parametrize("initial", [1, 2, 3, 6, 7, 1000, 2**20 - 1, 2**31 - 1])
def test_kernels_divide_by_every_count_at_creation(initial: int) -> None:
    keys = [b"%d" % number for number in range(300)]
    data = encode_records([(key, None, 0, ()) for key in keys])
    stamp(data, 0, 0, 0)
    places = [spread(murmur2(key), initial) for key in keys]
    for bound in sorted(places)[1::50]:
        for low, high in ((bound, SPACE_END), (0, bound - 1)):
            found = decode(data, columns=("key",), share=KeyShare((low, high), initial, SPACE)).records
            expected = [key for key, at in zip(keys, places, strict=True) if low <= at <= high]
            assert found.column("key").to_pylist() == expected
