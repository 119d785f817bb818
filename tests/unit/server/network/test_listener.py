"""The listener judges its connections every second, some at a time, whatever becomes of one of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.runtime.loop_steps import LoopSteps
from anabranch.runtime.metrics import Metrics
from anabranch.runtime.net.acceptor import ConnectionNumbers
from anabranch.server.context import BrokerContext
from anabranch.server.network import listener
from anabranch.server.network.admission import Activity
from anabranch.server.network.listener import SWEPT_AT_A_TIME, Listener
from anabranch.server.settings import Address, Settings

QUIET = Activity(0.0, None, 0, False, 0, 0.0)


class Judged:
    """A connection that counts how often it is judged."""

    def __init__(self, *, fails: bool = False) -> None:
        self.peer, self.times, self._fails = "peer:1", 0, fails
        self.channel = SimpleNamespace(pause=lambda: None, close=lambda: None)
        self.busy = False

    @property
    def activity(self) -> Activity:
        self.times += 1
        if self._fails:
            raise KeyError("a defect")
        return QUIET._replace(progress_at=asyncio.get_running_loop().time())


def swept(connections: list[Judged], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Judge all connections twice; how many were judged in each step of the loop."""
    monkeypatch.setattr(listener, "SWEEP_INTERVAL_S", 0.0)
    counts: list[int] = []

    async def run() -> None:
        settings = Settings(listeners=Address("127.0.0.1", 0))
        broker = cast(BrokerContext, SimpleNamespace(settings=settings, metrics=Metrics()))
        loop = asyncio.get_running_loop()
        made = Listener(broker, loop, ConnectionNumbers(), LoopSteps(), connections_max=10_000)
        made.listen()
        made._connections = cast(Any, dict(enumerate(connections)))
        made.accept()
        while connections[-1].times < 2:
            before = sum(each.times for each in connections)
            await asyncio.sleep(0)
            counts.append(sum(each.times for each in connections) - before)
        await made.close(0)

    asyncio.run(asyncio.wait_for(run(), 20))
    return [count for count in counts if count]


def test_other_work_has_its_turn_while_thousands_of_connections_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = swept([Judged() for _ in range(3 * SWEPT_AT_A_TIME)], monkeypatch)
    assert set(counts) == {SWEPT_AT_A_TIME} and len(counts) >= 6


def test_a_connection_that_cannot_be_judged_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = [Judged(), Judged(fails=True), Judged()]
    swept(connections, monkeypatch)
    assert all(each.times >= 2 for each in connections)
