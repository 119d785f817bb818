"""The record of a timestamp within a batch, whatever the codec, and from the log's start on."""

from __future__ import annotations

import pytest

from anabranch.records.timestamps import TimestampAndOffset, first_at_or_after, first_of_max
from tests.properties import record_model as model

ROWS = tuple(model.Row(offset, timestamp, b"k", None) for offset, timestamp in ((7, 50), (9, 70), (10, 60), (12, 70)))


@pytest.mark.parametrize("codec", range(5))
def test_the_first_record_of_a_time_is_found(codec: int) -> None:
    batch = memoryview(model.encode(model.Batch(5, ROWS, codec=codec, leader_epoch=3)))
    assert first_at_or_after(batch, 0, 0) == TimestampAndOffset(7, 50, 3)
    assert first_at_or_after(batch, 51, 0) == TimestampAndOffset(9, 70, 3)
    assert first_at_or_after(batch, 51, 10) == TimestampAndOffset(10, 60, 3)
    assert first_at_or_after(batch, 71, 0) is None
    assert first_of_max(batch, 0) == TimestampAndOffset(9, 70, 3)
    assert first_of_max(batch, 10) == TimestampAndOffset(12, 70, 3)
    assert first_of_max(batch, 13) is None


def test_all_records_have_the_time_of_their_append_if_the_batch_says_so() -> None:
    batch = memoryview(model.encode(model.Batch(5, ROWS, log_append_time=1_000)))
    assert first_of_max(batch, 0) == first_at_or_after(batch, 900, 0) == TimestampAndOffset(5, 1_000, -1)
