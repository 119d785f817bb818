"""The flag with a timeout: who wakes, when, and that a wait leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from anabranch.runtime.wakeup import Wakeup
from tests.simulation.virtual_time import run, running_loop


def test_a_flag_that_is_set_is_not_waited_for() -> None:
    async def main() -> None:
        wakeup = Wakeup()
        wakeup.set()
        assert wakeup.is_set()
        assert await wakeup.wait(0)
        assert await wakeup.wait()
        wakeup.clear()
        assert not wakeup.is_set()

    run(main(), 0)


def test_all_that_wait_wake_when_the_flag_is_set_and_those_with_less_time_before() -> None:
    async def main() -> None:
        wakeup, loop = Wakeup(), running_loop()

        async def wait(timeout_s: float | None) -> tuple[bool, float]:
            return await wakeup.wait(timeout_s), loop.time()

        waits = [asyncio.create_task(wait(timeout_s)) for timeout_s in (None, 2, 9, 0)]
        loop.call_later(5, wakeup.set)
        assert await asyncio.gather(*waits) == [(True, 5), (False, 2), (True, 5), (False, 0)]

    run(main(), 0)


def test_a_wait_that_is_cancelled_ends_alone() -> None:
    async def main() -> None:
        wakeup = Wakeup()
        first, second = asyncio.create_task(wakeup.wait(60)), asyncio.create_task(wakeup.wait())
        await asyncio.sleep(1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        wakeup.set()
        wakeup.clear()
        assert await second, "set for a moment is enough"
        assert running_loop().time() == 1

    run(main(), 0)
