"""What a task counts as lost of the offsets that it finds gone."""

from __future__ import annotations

import logging

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.range_reader import OffsetsGoneError
from anabranch.spark import reader
from anabranch.spark.plan import DataLossError, Read

DELETED, ENDS = "the records there were deleted", "the log ends before"


def gone(available: int | None, why: str, *, is_of_another_topic: bool = False) -> OffsetsGoneError:
    return OffsetsGoneError(TopicPartition("t", 0), 60, available, why, is_of_another_topic=is_of_another_topic)


@pytest.mark.parametrize(
    ("folds_back", "found", "is_lost"),
    [
        (True, gone(70, DELETED), False),
        (True, gone(None, "the partition was removed"), False),
        # What was cut off at the end is nowhere else.
        (True, gone(0, ENDS), True),
        (True, gone(60, ENDS), True),
        (True, gone(None, "created again", is_of_another_topic=True), True),
        (False, gone(70, DELETED), True),
        (False, gone(None, "the partition was removed"), True),
    ],
)
def test_what_was_emptied_from_its_start_on_is_read_elsewhere_where_it_folds_back_and_all_else_is_lost(
    folds_back: bool, found: OffsetsGoneError, is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    read = Read("t", 0, 40, 80, folds_back=folds_back)
    with caplog.at_level(logging.WARNING, "anabranch.spark"):
        reader._pass_over(read, found)
    assert bool(caplog.messages) is is_lost
    if not is_lost:
        reader._fail(read, found)
        return
    assert caplog.messages[0].startswith("Records were lost before this query read them: t-0: ")
    with pytest.raises(DataLossError, match=found.why) as failed:
        reader._fail(read, found)
    (loss,) = failed.value.losses
    assert (loss.wanted, loss.available) == (60, found.available)
