"""Checksums that kernels take are those of the library, and wrong ones are found."""

from __future__ import annotations

import pyarrow as pa
import pytest

from anabranch.records import batch as b
from anabranch.records.arrow.decode import decode
from anabranch.records.arrow.encode import encode_partitioned, encode_records
from anabranch.records.arrow.warm import warm
from anabranch.records.compression import Compression
from anabranch.records.kernels import crc32c
from tests.support.fence import copy_behind_fence
from tests.support.records import RECORDS


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


SIZES = [*range(300), 383, 384, 385, 1023, 1024, 3071, 3072, 3073, 3455, 3456, 6144, 9999, 40_001]


def test_checksums_of_the_kernels_are_those_of_the_library() -> None:
    values = pa.array([bytes((n * 31 + size) % 256 for n in range(size)) for size in SIZES])
    encoded = encode_partitioned(None, values, 0, batch_size_max=1)
    assert len(encoded) == len(SIZES)
    for batch in encoded:
        b.check(batch.data, 0, b.parse_header(batch.data))
        b.stamp_crc(batch.data)
        assert decode(batch.data).records.num_rows == 1
        assert decode(copy_behind_fence(batch.data)).records.num_rows == 1
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


def test_a_wrong_checksum_is_found_unless_it_is_not_wanted() -> None:
    data = encode_records(RECORDS)
    b.stamp(data, 0, 700, 3)
    data[-10] ^= 1
    with pytest.raises(b.ChecksumError, match="offset 700"):
        decode(data)
    assert decode(data, check_crc=False).records.num_rows == len(RECORDS)
    assert decode(data, start_offset=700 + len(RECORDS)).records.num_rows == 0
