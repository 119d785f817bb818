from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as peer_murmur2

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
