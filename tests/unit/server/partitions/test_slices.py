"""The books of a leader together: what is nobody's any more is freed though nobody claims, within one budget."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.partition.slices import SESSION_SIZE, SLICE_SIZE, Claimant, Slices
from anabranch.runtime.clock import Clock
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.slices import WORK_AT_A_TIME, SliceBooks
from tests.unit.machines.partition.test_slices import Nothing

COUNT = 3
SLICES = 3_000


class Leader:
    """A leader of some partitions, of which members of a group hold slices."""

    def __init__(self) -> None:
        self.live = {"a", "b"}
        self.is_loading = False
        self.metrics = Metrics()
        clock = cast(Clock, SimpleNamespace(monotonic_ms=lambda: 0))
        self.books = SliceBooks(lambda group_id: self.members, clock, self.metrics, hold_ms=1_000)
        for number in range(COUNT):
            slices = self.books.of("g", partition(number))
            for sequence in range(SLICES // 2):
                for member in ("a", "b"):
                    by = Claimant(member, 1, 1, sequence)
                    assert slices.claim(by, Nothing(), SLICES, 1, self.members, 0) is not None

    def members(self, member: str) -> bool:
        if self.is_loading:
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "The coordinator reads its log.")
        return member in self.live

    @property
    def size(self) -> int:
        return self.books._room.size


def partition(number: int) -> Partition:
    found = SimpleNamespace(topic_id=UUID(int=1), name=TopicPartition("t", number), leader_epoch=1, leadership=object())
    return cast(Partition, found)


def test_what_is_nobodys_is_freed_though_nobody_claims_some_at_a_time() -> None:
    leader = Leader()
    assert leader.size == COUNT * (SLICES * SLICE_SIZE + 2 * SESSION_SIZE)
    turns: list[int] = []

    async def sweep() -> None:
        sweeping = asyncio.create_task(leader.books.sweep())
        while not sweeping.done():
            before = leader.size
            await asyncio.sleep(0)
            turns.append((before - leader.size) // SLICE_SIZE)
        await sweeping

    asyncio.run(sweep())
    assert len(leader.books) == COUNT, "all are members"
    leader.live = {"b"}
    turns.clear()
    asyncio.run(sweep())
    assert max(turns) <= 2 * WORK_AT_A_TIME and sum(turns) >= COUNT * SLICES // 2
    assert len(leader.books.held("g", partition(0))) == SLICES // 2
    leader.is_loading = True
    asyncio.run(sweep())
    assert len(leader.books) == COUNT
    leader.is_loading, leader.live = False, set()
    asyncio.run(sweep())
    assert (len(leader.books), leader.size) == (0, 0)


def test_a_defect_in_a_book_leaves_out_that_book_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leader = Leader()
    broken = leader.books.of("g", partition(0))
    sweep = Slices.sweep

    def fail(slices: Slices, *given: Any) -> bool:
        if slices is broken:
            raise AssertionError("a defect")
        return sweep(slices, *given)

    monkeypatch.setattr(Slices, "sweep", fail)
    leader.live = set()
    for _ in range(5):
        asyncio.run(leader.books.sweep())
    assert [len(leader.books.held("g", partition(number))) for number in range(COUNT)] == [SLICES, 0, 0]
    assert len(leader.books) == 1
    assert leader.metrics.counter("anabranch_slices_sweep_failures_total", "").value == 5
    assert [record.getMessage() for record in caplog.records] == ["slices not swept"]
    monkeypatch.undo()
    asyncio.run(leader.books.sweep())
    assert (len(leader.books), leader.size) == (0, 0)


def test_a_partition_that_is_removed_gives_its_room_back() -> None:
    leader = Leader()
    leader.books.forget(UUID(int=1), range(COUNT))
    assert (len(leader.books), leader.size) == (0, 0)
