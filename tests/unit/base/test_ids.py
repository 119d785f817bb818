"""Names of partitions, read and written."""

from __future__ import annotations

import pytest

from anabranch.base.ids import TopicPartition, is_whole


@pytest.mark.parametrize("partition", [TopicPartition("t", 0), TopicPartition("a-topic-7", 12), TopicPartition("-", 1)])
def test_a_partition_is_read_from_its_text(partition: TopicPartition) -> None:
    assert TopicPartition.named(str(partition)) == partition


@pytest.mark.parametrize("text", ["", "t", "t-", "-1", "t-x", "t-01", "t-\u00b2", "t-\u0663", "t-+1", "t- 1", "t-1.x"])
def test_other_text_is_that_of_no_partition(text: str) -> None:
    assert TopicPartition.named(text) is None


def test_a_whole_number_is_one_that_int_reads() -> None:
    assert [is_whole(text) for text in ("0", "017", "", "-1", "\u00b2", "\u0663", "1_0")] == [True, True] + [False] * 5
