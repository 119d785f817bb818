"""The memory of producers: one budget for the tables of all partitions.

A table holds a producer until it has been idle for `producer.id.expiration.ms`, a day, and so long whoever asks for ids
can fill it. The budget counts producers, all of them as if every batch that may be remembered of them was. The rule:
what is held never passes the bound, and no producer is forgotten that may still repeat a batch. So, at the bound:

    some producer has been idle for PRODUCER_IDLE_MIN_MS    it is forgotten, in steps beside the loop's other work
    none has                                                newcomers are refused; those that are known go on
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from anabranch.base.limits import PRODUCER_IDLE_MIN_MS
from anabranch.machines.partition.producers import EXPIRED_MAX, PRODUCER_SIZE, ProducerTable
from anabranch.runtime.clock import Clock, SteadyTime
from anabranch.runtime.events import EventLimit, EventLogger

events = EventLogger("producers")
RECOUNT_INTERVAL_S = 1.0
WARNING_INTERVAL_S = 10.0
TABLES_AT_A_TIME = 1_000


class ProducerBudget:
    """Counts the producers of all tables, and forgets idle ones when there are too many."""

    def __init__(self, tables: Callable[[], Iterable[ProducerTable]], clock: Clock, size_max: int) -> None:
        """`tables` lists them all; `size_max` in bytes."""
        self._tables = tables
        self._clock = clock
        self._time = SteadyTime(clock)
        self._most = size_max // PRODUCER_SIZE
        self._count = 0
        """No fewer than there were at the last recount, and those that came since."""
        self._sweep: asyncio.Task[None] | None = None
        self._warnings = EventLimit(WARNING_INTERVAL_S)

    @property
    def size(self) -> int:
        """Bytes of memory, at the most."""
        return self._count * PRODUCER_SIZE

    def has_room(self) -> bool:
        """Whether one more producer can be remembered."""
        if self._count < self._most:
            return True
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().create_task(self._make_room())
        suppressed = self._warnings.admit(self._clock.monotonic_ms() / 1000)
        if suppressed is not None:
            reason = f"Partitions remember {self._count} of them; producer.state.max.bytes allows {self._most}."
            events.warning("producer refused", reason=reason, suppressed=suppressed)
        return False

    def took(self, count: int) -> None:
        """Note that tables remember so many producers more."""
        self._count += count

    def close(self) -> None:
        """End the work beside."""
        if self._sweep is not None:
            self._sweep.cancel()

    async def _make_room(self) -> None:
        """Forget producers that are idle, and count the others; after a failure the next newcomer has it tried."""
        try:
            before = self._count
            held = await self._forget_and_count()
            self._count += held - before  # Those that came meanwhile are counted, too.
        except Exception as error:  # A defect must not refuse newcomers for ever.
            events.error("idle producers not forgotten", exception=error)
        await asyncio.sleep(RECOUNT_INTERVAL_S)
        self._sweep = None

    async def _forget_and_count(self) -> int:
        now_ms, count = self._time.now_ms(), 0
        for place, table in enumerate(list(self._tables()), 1):
            await expire_producers(table, now_ms, PRODUCER_IDLE_MIN_MS)
            count += len(table)
            if place % TABLES_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return count


async def expire_producers(table: ProducerTable, now_ms: int, idle_max_ms: int) -> None:
    """Forget the producers of a table that were idle for longer; other work has its turn in between."""
    while table.expire(now_ms, idle_max_ms) == EXPIRED_MAX:
        await asyncio.sleep(0)
