"""Which records have no key, and when an event loop may look for them."""

from __future__ import annotations

import pytest

from anabranch.records.compression import Compression
from anabranch.records.keyless import QUICK_RECORDS_MAX, Unfit, find_unfit, is_quick
from tests.support.batches import make_batch, make_keyed_batch

KEYED = (b"k", b"v")


def unfit(*batches: bytearray) -> Unfit | None:
    return find_unfit(memoryview(b"".join(batches)))


@pytest.mark.parametrize("codec", list(Compression))
def test_the_records_without_a_key_are_named_by_their_place(codec: Compression) -> None:
    rows = [KEYED, (None, b"v"), (b"", None), (None, None), (b"x" * 200, b"y" * 20_000)]
    assert unfit(make_keyed_batch(rows, compression=codec)) == Unfit(0, (1, 3))
    assert unfit(make_keyed_batch([KEYED, (b"", None)], compression=codec)) is None


def test_the_first_unfit_batch_counts() -> None:
    assert unfit(make_keyed_batch([KEYED]), make_keyed_batch([(None, b"v")])) == Unfit(1, (0,))
    assert unfit(make_keyed_batch([KEYED]), make_keyed_batch([KEYED])) is None


def test_a_batch_that_cannot_be_read_is_unfit() -> None:
    found = unfit(make_keyed_batch([KEYED]), make_batch(payload=b"no record"))
    assert found is not None
    assert (found.batch, found.keyless) == (1, ())
    assert found.malformed is not None
    assert "cut off" in found.malformed


def test_few_plain_records_are_quick_and_many_or_compressed_ones_are_not() -> None:
    half = make_keyed_batch([KEYED] * (QUICK_RECORDS_MAX // 2))
    assert is_quick([])
    assert is_quick([memoryview(half), memoryview(half)])
    assert is_quick([memoryview(half + half)])
    assert not is_quick([memoryview(half), memoryview(half + make_keyed_batch([KEYED]))])
    assert not is_quick([memoryview(make_keyed_batch([KEYED], compression=Compression.ZSTD))])
    assert is_quick([memoryview(bytes(100))]), "no batch at all"
