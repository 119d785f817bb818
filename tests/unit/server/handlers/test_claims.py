"""When a fetch that claims slices looks again; what a commit of records that another member holds is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
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
from anabranch.server.handlers.offsets import handle_offset_commit
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


def holding(held: Callable[[], Any], **more: Any) -> Any:
    """A broker of which `held` says what other members hold."""

    class Books:
        def __len__(self) -> int:
            return 1

        def holder_of(self, *asked: Any) -> Any:
            return held()

    return SimpleNamespace(
        slices=Books(),
        replicas=SimpleNamespace(get=lambda name, number: SimpleNamespace(name="t" * 249)),
        memberships=SimpleNamespace(check_member=lambda *given: None),
        **more,
    )


def refuse(asked: OffsetCommitRequest, code: ErrorCode, message: str) -> OffsetCommitResponse:
    answers = [
        OffsetCommitResponsePartition(partition_index=it.partition_index, error_code=code, error_message=message)
        for it in asked.topics[0].partitions
    ]
    return OffsetCommitResponse(topics=[OffsetCommitResponseTopic(partitions=answers)])


def test_a_commit_that_waited_in_line_does_not_count_if_a_claim_before_it_got_the_records() -> None:
    """What others hold was looked at as the commit came."""
    held: list[Any] = [None]
    told: list[int] = []

    class Group:
        def weight_of_offsets(self, group_id: str) -> int:
            return 0

        def offset_commit(self, request: OffsetCommitRequest, caller: Any, now_ms: int) -> OffsetCommitResponse:
            told.extend(it.partition_index for it in request.topics[0].partitions)
            return refuse(request, ErrorCode.NONE, "")

    def ask(decide: Callable[[Any, int], Any], weigh: Callable[[Any], int]) -> Any:
        held[0] = SimpleNamespace(start=0, end=9, member_id="other")  # A claim that was in line before it.
        weigh(Group())
        return decide(Group(), 0)

    groups = SimpleNamespace(shard_of=lambda group_id: SimpleNamespace(ask=ask), takes_individual=True)
    call = SimpleNamespace(peer="host:1", client_id="c", api_version=9, connection=1)
    part = OffsetCommitRequestPartition(partition_index=0, committed_offset=10)
    request = OffsetCommitRequest(
        group_id="g", member_id="m", topics=[OffsetCommitRequestTopic(name="t", partitions=[part])]
    )
    answer = handle_offset_commit(holding(lambda: held[0], groups=groups), request, cast(Any, call))
    assert isinstance(answer, OffsetCommitResponse) and told == []
    assert answer.topics[0].partitions[0].error_code == ErrorCode.INVALID_RECORD_STATE


def test_a_commit_that_does_not_count_quotes_the_member_that_holds_the_records_in_short() -> None:
    """It chose its id: the members beside it must be able to read their answers."""
    held = SimpleNamespace(start=0, end=9, member_id="m" * STRING_SIZE_MAX)

    broker = holding(lambda: held)
    count = 100
    parts = [OffsetCommitRequestPartition(partition_index=it, committed_offset=10) for it in range(count)]
    request = OffsetCommitRequest(
        group_id="g", member_id="honest", topics=[OffsetCommitRequestTopic(name="t" * 249, partitions=parts)]
    )

    unheld = Unheld(broker, request, refuse)
    unheld.look()
    answer = unheld.whole(refuse(unheld.rest, ErrorCode.NONE, ""))
    answers = answer.topics[0].partitions
    assert [it.error_code for it in answers] == [ErrorCode.INVALID_RECORD_STATE] * count
    assert max(len(it.error_message or "") for it in answers) < 250
    assert answers[0].error_message is not None and "Offsets 0 to 9 are with member mmm" in answers[0].error_message
