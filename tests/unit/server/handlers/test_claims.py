"""When a fetch that claims slices looks again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.protocol.messages.fetch import FetchRequest
from anabranch.server.handlers import claims
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
