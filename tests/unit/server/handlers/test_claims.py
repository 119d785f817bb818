"""When a fetch that claims slices looks again; what a commit of records that another member holds is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import STRING_SIZE_MAX
from anabranch.protocol.messages.fetch import FetchRequest
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from anabranch.server.handlers import claims
from anabranch.server.handlers.claims import Unheld
from anabranch.server.partitions.slice_waits import SliceWaits

LONG_S = 3_600.0


class Watched:
    """A partition that tells of no change."""

    def __init__(self) -> None:
        self.log = SimpleNamespace(high_watermark=5)

    def watch(self, watcher: object) -> None:
        pass

    def unwatch(self, watcher: object) -> None:
        pass


def test_a_fetch_looks_again_at_once_if_records_came_during_its_look_while_nobody_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition = Watched()
    looks: list[int] = []

    async def make(attempt: Any, waited_for: Iterable[Any]) -> None:
        looks.append(partition.log.high_watermark)
        attempt.looked_at[partition] = partition.log.high_watermark
        attempt.urgent = len(looks) == 2
        if len(looks) == 1:
            partition.log.high_watermark = 6

    monkeypatch.setattr(claims._Attempt, "make", make)
    monkeypatch.setattr(claims, "RECHECK_S", LONG_S)
    broker = cast(
        Any,
        SimpleNamespace(
            slices=SimpleNamespace(waits=SliceWaits()), fetches=SimpleNamespace(stopping=False, waiting=set())
        ),
    )
    request = FetchRequest(
        max_wait_ms=int(LONG_S * 1000),
        min_bytes=1,
        max_bytes=1 << 24,
        session_id=0,
        session_epoch=-1,
        topics=[],
        forgotten_topics_data=[],
        group_id="g",
        member_id="m",
        generation_id_or_member_epoch=1,
    )
    asyncio.run(asyncio.wait_for(claims._handle_claims(broker, request), 10))
    assert looks == [5, 6]


def test_a_commit_that_does_not_count_quotes_the_member_that_holds_the_records_in_short() -> None:
    """It chose its id: the members beside it must be able to read their answers."""
    held = SimpleNamespace(start=0, end=9, member_id="m" * STRING_SIZE_MAX)

    class Books:
        def __len__(self) -> int:
            return 1

        def holder_of(self, *asked: Any) -> Any:
            return held

    broker = cast(
        Any,
        SimpleNamespace(
            slices=Books(),
            replicas=SimpleNamespace(get=lambda name, number: SimpleNamespace(name="t" * 249)),
            memberships=SimpleNamespace(check_member=lambda *given: None),
        ),
    )
    count = 100
    parts = [OffsetCommitRequestPartition(partition_index=it, committed_offset=10) for it in range(count)]
    request = OffsetCommitRequest(
        group_id="g", member_id="honest", topics=[OffsetCommitRequestTopic(name="t" * 249, partitions=parts)]
    )

    def refuse(asked: OffsetCommitRequest, code: ErrorCode, message: str) -> OffsetCommitResponse:
        answers = [
            OffsetCommitResponsePartition(partition_index=it.partition_index, error_code=code, error_message=message)
            for it in asked.topics[0].partitions
        ]
        return OffsetCommitResponse(topics=[OffsetCommitResponseTopic(partitions=answers)])

    unheld = Unheld(broker, request, refuse)
    unheld.look()
    answer = unheld.whole(refuse(unheld.rest, ErrorCode.NONE, ""))
    answers = answer.topics[0].partitions
    assert [it.error_code for it in answers] == [ErrorCode.INVALID_RECORD_STATE] * count
    assert max(len(it.error_message or "") for it in answers) < 250
    assert answers[0].error_message is not None and "Offsets 0 to 9 are with member mmm" in answers[0].error_message
