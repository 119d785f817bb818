"""The memory of producers: refused above the bound, given back by those that are idle."""

from __future__ import annotations

import asyncio

import pytest

from anabranch.base.limits import PRODUCER_IDLE_MIN_MS
from anabranch.machines.partition.producers import EXPIRED_MAX, PRODUCER_SIZE, Producer, ProducerTable
from anabranch.runtime.clock import Clock
from anabranch.server.partitions import producer_budget
from anabranch.server.partitions.producer_budget import ProducerBudget, expire_producers

NOW_MS = 1_000_000_000


class FixedClock(Clock):
    def now_ms(self) -> int:
        return NOW_MS

    monotonic_ms = now_ms


def table_of(count: int, seen_ms: int) -> ProducerTable:
    made = ProducerTable()
    made._producers = {number: Producer(0, seen_ms=seen_ms) for number in range(count)}
    return made


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0.001)


def test_newcomers_are_refused_above_the_bound_until_others_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_budget, "RECOUNT_INTERVAL_S", 0.0)
    tables = [table_of(6, NOW_MS), table_of(4, NOW_MS - PRODUCER_IDLE_MIN_MS)]

    async def scene() -> None:
        budget = ProducerBudget(lambda: tables, FixedClock(), 10 * PRODUCER_SIZE)
        budget.took(9)
        assert budget.has_room()
        budget.took(1)
        assert not budget.has_room()
        assert budget.size == 10 * PRODUCER_SIZE
        await settled()
        assert not budget.has_room(), "none has been idle for long enough"
        await settled()
        tables[1] = table_of(4, NOW_MS - PRODUCER_IDLE_MIN_MS - 1)
        assert not budget.has_room(), "idle ones are forgotten beside"
        await settled()
        assert budget.has_room()
        assert ([len(table) for table in tables], budget.size) == ([6, 0], 6 * PRODUCER_SIZE)
        budget.close()

    asyncio.run(scene())


def test_newcomers_are_not_refused_for_ever_after_producers_could_not_be_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(producer_budget, "RECOUNT_INTERVAL_S", 0.0)
    failures = [RuntimeError("a defect")]

    def tables() -> list[ProducerTable]:
        if failures:
            raise failures.pop()
        return [table_of(3, NOW_MS)]

    async def scene() -> None:
        budget = ProducerBudget(tables, FixedClock(), 10 * PRODUCER_SIZE)
        budget.took(10)
        assert not budget.has_room()
        await settled()
        assert not budget.has_room(), "they are counted beside, again"
        await settled()
        assert budget.has_room()

    asyncio.run(scene())
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] != []


def test_many_idle_producers_are_forgotten_in_steps() -> None:
    table = table_of(2 * EXPIRED_MAX + 1, 0)

    async def scene() -> int:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while len(table):
                turns += 1
                await asyncio.sleep(0)

        await asyncio.gather(expire_producers(table, NOW_MS, 1), others())
        return turns

    assert asyncio.run(scene()) >= 2
    assert not len(table)


def test_a_copy_stays_as_it_was() -> None:
    table = table_of(3, 5)
    made = table.copy()
    data = table.snapshot()
    assert (made, made.snapshot()) == (table, data)
    table.expire(NOW_MS, 1)
    assert made.snapshot() == data
