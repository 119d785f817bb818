"""What a member held is free when the coordinator has let it go, which may be later than the request came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from anabranch.runtime.clock import Clock
from anabranch.server.context import ANONYMOUS, BrokerContext, RequestContext
from anabranch.server.coordinators.turns import Turns
from anabranch.server.handlers.groups import handle_consumer_group_heartbeat

CALL = RequestContext(ANONYMOUS, None, "peer:1", 1, 1)


class Groups:
    """A coordinator that answers at once, or in line."""

    consumer_protocol = True
    metadata = SimpleNamespace(refuses=lambda size, group_id, newcomer: "")

    def __init__(self, turns: Turns | None) -> None:
        self.turns = turns
        self.may_end = asyncio.Event()
        self.left = False

    def has_begun_anew(self, group_id: str, connection: int) -> bool:
        return False

    def weighed(self, weigh: Callable[[Any], int]) -> Callable[[Any], int]:
        return weigh

    def shard_of(self, group_id: str) -> Groups:
        return self

    def ask(self, decide: Callable[[Any, int], Any], weigh: Callable[[Any], int], look: None) -> Any:
        return self._leave() if self.turns is None else self.turns.take(self._leave_later)

    def _leave(self) -> ConsumerGroupHeartbeatResponse:
        self.left = True
        return ConsumerGroupHeartbeatResponse(assignment=None)

    async def _leave_later(self) -> ConsumerGroupHeartbeatResponse:
        await self.may_end.wait()
        return self._leave()


@pytest.mark.parametrize("in_line", [False, True])
@pytest.mark.parametrize("hangs_up", [False, True])
def test_what_a_member_held_is_said_to_be_free_when_it_has_left(in_line: bool, hangs_up: bool) -> None:
    async def story() -> None:
        groups = Groups(Turns("a shard", Clock()) if in_line else None)
        freed: list[bool] = []
        slices = SimpleNamespace(waits=SimpleNamespace(freed=lambda group_id: freed.append(groups.left)))
        broker: Any = SimpleNamespace(
            groups=groups,
            slices=slices,
            chance=SimpleNamespace(uuid=lambda: "a"),
            settings=SimpleNamespace(group_consumer_max_subscribed_names=1),
        )
        request = ConsumerGroupHeartbeatRequest(group_id="g", member_id="m", member_epoch=-1)
        answer = handle_consumer_group_heartbeat(cast(BrokerContext, broker), request, CALL)
        if in_line:
            waiting = asyncio.ensure_future(cast(Any, answer))
            await asyncio.sleep(0.01)
            assert freed == [], "it is a member still"
            if hangs_up:
                waiting.cancel()
            groups.may_end.set()
            await asyncio.wait([waiting])
        assert freed == [True]

    asyncio.run(story())
