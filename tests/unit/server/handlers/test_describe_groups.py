"""Describing groups when their shard cannot answer: the answer says so for each group, and no connection is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.protocol.messages.describe_groups import DescribedGroup, DescribeGroupsRequest, DescribeGroupsResponse
from anabranch.server.context import ANONYMOUS, BrokerContext, RequestContext
from anabranch.server.handlers.describe_groups import handle_describe_groups

CALL = RequestContext(ANONYMOUS, None, "peer:1", 1, 6)


class Groups:
    """Shards of which one is sound, one waits for its disk, and one is still loading."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[Any]] = []

    def shard_of(self, group_id: str) -> Groups:
        if group_id == "loading":
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "still loading")
        return self

    def read(self, read: Callable[[Any, int], Any]) -> Any:
        machine = SimpleNamespace(describe_group=lambda group_id: DescribedGroup(group_id=group_id))
        found: DescribedGroup = read(machine, 0)
        if found.group_id != "waits":
            return found
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]


def test_a_shard_that_fails_while_its_answer_waits_for_the_disk_is_said_for_its_group() -> None:
    async def story() -> None:
        groups = Groups()
        broker = cast(BrokerContext, SimpleNamespace(groups=groups))
        asked = DescribeGroupsRequest(groups=["sound", "waits", "loading"])
        answer = handle_describe_groups(broker, asked, CALL)
        assert hasattr(answer, "__await__")
        task = asyncio.ensure_future(cast(Awaitable[DescribeGroupsResponse], answer))
        await asyncio.sleep(0)
        groups.waiting[0].set_exception(ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "failed"))
        response = await task
        assert [(it.group_id, it.error_code) for it in response.groups] == [
            ("sound", ErrorCode.NONE),
            ("waits", ErrorCode.COORDINATOR_NOT_AVAILABLE),
            ("loading", ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
        ]

    asyncio.run(story())
