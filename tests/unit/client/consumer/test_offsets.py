"""Committed offsets as coordinators of all ages answer them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.offsets import OffsetAndMetadata, Offsets
from anabranch.protocol.messages.offset_commit import KeyRangeOffset
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)

P0 = TopicPartition("t", 0)
PASSED = [KeyRangeOffset(start=0, end=9, offset=3)]


class Coordinator:
    """Answers by one version."""

    def __init__(self, version: int) -> None:
        self.version = version

    async def connection(self, *_: object) -> Any:
        return SimpleNamespace(version_of=lambda _: self.version)

    async def ask(self, *_: object, **__: object) -> OffsetFetchResponse:
        if self.version < 8:
            old = OffsetFetchResponsePartition(partition_index=0, committed_offset=5, passed_key_ranges=PASSED)
            return OffsetFetchResponse(topics=[OffsetFetchResponseTopic(name="t", partitions=[old])])
        part = OffsetFetchResponsePartitions(partition_index=0, committed_offset=5, passed_key_ranges=PASSED)
        topics = [OffsetFetchResponseTopics(name="t", partitions=[part])]
        return OffsetFetchResponse(groups=[OffsetFetchResponseGroup(group_id="g", topics=topics)])


@pytest.mark.parametrize("version", [1, 7, 8, 9])
def test_the_answers_of_all_versions_can_be_read(version: int) -> None:
    offsets = Offsets(Coordinator(version), "g", 1_000)  # type: ignore[arg-type]
    found = asyncio.run(offsets.fetch([P0], {}))
    assert found == {P0: OffsetAndMetadata(5, passed=[(0, 9, 3)], ranges=[], shares=[])}
