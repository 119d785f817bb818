"""Which keys a table waits for before records are handed out."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.driver import FetchingDriver
from anabranch.client.settings import ConsumerSettings
from anabranch.client.table.kept import Kept
from anabranch.machines.clients.fetching import Deliverable, Fetched, Fetcher, FetcherSettings, TopicView
from anabranch.machines.clients.key_ranges import Piece
from anabranch.machines.keyspace import SPACE, Interval, cuts
from anabranch.machines.lineage import Lineage

TP = TopicPartition("t", 0)
LOWER, UPPER = cuts(SPACE, 2)
GROWN = TopicView("t", UUID(int=1), Lineage.of_ends(1, (1, 2), [{0: 10}]), {0: 1, 1: 1}, {0: 0, 1: 0}, True)


class Reading:
    """What a fetcher says of a partition that is read from offset 3 on, some keys from a later one."""

    assignment = (TP,)

    def __init__(self, floor: list[Piece]) -> None:
        self.floor = floor

    def view(self, topic: str) -> TopicView:
        return GROWN

    def share_of(self, tp: TopicPartition) -> tuple[Interval, ...]:
        return ()

    def floor_of(self, tp: TopicPartition) -> list[Piece]:
        return self.floor

    def open_at(self, tp: TopicPartition) -> int:
        return 3


def loads_of(floor: list[Piece], parts: list[Deliverable]) -> list[Interval]:
    """The keys that are loaded before records are handed out."""
    driver = cast(FetchingDriver, SimpleNamespace(fetcher=Reading(floor)))
    kept = Kept(driver, ConsumerSettings(group_id="g"), "g", "c", "t", unflushed_size_max=1)
    begun: list[Interval] = []

    async def load(load: Any) -> None:
        begun.append(load.piece.interval)

    def run(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    kept._load = load  # type: ignore[method-assign]
    kept.prepare(parts, {TP: 3}, run)
    return sorted(begun)


def test_keys_that_were_read_beyond_a_segment_are_not_waited_for_with_its_records() -> None:
    part = Deliverable("t", 0, Fetched(memoryview(b""), 20), 3, 20)
    for parts in ([], [part]):
        assert loads_of([], parts) == [SPACE]
    read_on = [(*LOWER, 3), (*UPPER, 12)]
    for parts in ([], [part]):
        assert loads_of(read_on, parts) == [LOWER]


def test_a_fetcher_tells_where_the_keys_of_a_share_are_read_on() -> None:
    fetcher = Fetcher(FetcherSettings())
    fetcher.grant([(TP, None)], {TP: (LOWER,)})
    assert fetcher.floor_of(TP) == fetcher.floor_of(TopicPartition("t", 9)) == []
    fetcher.begin(TP, offset=12)
    assert fetcher.floor_of(TP) == []
    fetcher.grant([(TP, None)], {TP: (UPPER,)})
    fetcher.arrive(TP, 3, [(*LOWER, 12), (*UPPER, 3)], 12)
    assert fetcher.position(TP) == 3
    assert fetcher.floor_of(TP) == [(*LOWER, 12), (*UPPER, 3)]


def test_a_table_is_not_ready_while_a_range_that_was_granted_arrives() -> None:
    """Until the next poll it was: the values of the new keys were not there."""
    fetcher = Fetcher(FetcherSettings())
    kept = Kept(
        cast(FetchingDriver, SimpleNamespace(fetcher=fetcher)), ConsumerSettings(), "g", "c", "t", unflushed_size_max=1
    )
    fetcher.grant([(TP, None)], {TP: (LOWER,)})
    assert not kept.is_ready
    fetcher.begin(TP, offset=3)
    kept._in_memory, kept._shares = {TP}, {TP: fetcher.share_of(TP)}
    assert kept.is_ready
    fetcher.grant([(TP, None)], {TP: (UPPER,)})
    assert not kept.is_ready
    fetcher.arrive(TP, 3, [(*SPACE, 3)], 3)
    assert not kept.is_ready
