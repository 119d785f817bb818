"""Commits of many ranges: each partition has its own answer, whatever becomes of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetRange,
)
from anabranch.server.context import ANONYMOUS, BrokerContext, RequestContext
from anabranch.server.handlers.in_ranges import RANGES_AT_A_TIME
from anabranch.server.handlers.offsets import handle_offset_commit

CALL = RequestContext(ANONYMOUS, None, "peer:1", 9, 1)


def test_what_no_coordinator_takes_is_refused_by_its_own_number() -> None:
    """All partitions behind the first one were answered as that one, and their clients took them for committed."""

    def shard_of(group_id: str) -> Any:
        raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "The coordinator is loading.")

    async def ready() -> None:
        pass

    groups = SimpleNamespace(takes_individual=True, ensure_individual=ready, shard_of=shard_of)
    broker = cast("BrokerContext", SimpleNamespace(groups=groups, slices=()))
    parts = [
        OffsetCommitRequestPartition(
            partition_index=index,
            committed_offset=-1,
            offset_ranges=[OffsetRange(start=2 * at, end=2 * at) for at in range(RANGES_AT_A_TIME)],
        )
        for index in (3, 5, 8)
    ]
    request = OffsetCommitRequest(
        group_id="g", member_id="m", topics=[OffsetCommitRequestTopic(name="t", partitions=parts)]
    )

    async def story() -> OffsetCommitResponse:
        answer = handle_offset_commit(broker, request, CALL)
        assert not isinstance(answer, OffsetCommitResponse)
        return await answer

    answered = asyncio.run(story()).topics[0].partitions
    refused = ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert [(it.partition_index, it.error_code) for it in answered] == [(3, refused), (5, refused), (8, refused)]
