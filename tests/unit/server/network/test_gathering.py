"""A coroutine that gives the loop back again and again waits for room; a short one does not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from anabranch.server.network.gathering import FREE_TURNS, gathered


async def gather(turns: int) -> int:
    """An answer that takes so many turns."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return turns


class Room:
    """Counts those that wait for it."""

    def __init__(self) -> None:
        self.asked = 0
        self.free = asyncio.Event()

    async def __call__(self) -> None:
        self.asked += 1
        await self.free.wait()


def play(story: Callable[[Room], Awaitable[None]]) -> None:
    async def run() -> None:
        await story(Room())

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(FREE_TURNS))
def test_a_short_answer_needs_no_room(turns: int) -> None:
    async def story(room: Room) -> None:
        assert await gathered(gather(turns), room) == turns
        assert room.asked == 0

    play(story)


def test_a_long_answer_waits_for_room_once() -> None:
    async def story(room: Room) -> None:
        task = asyncio.create_task(_awaited(gathered(gather(50), room)))
        for _ in range(100):
            await asyncio.sleep(0)
        assert room.asked == 1 and not task.done()
        room.free.set()
        assert await task == 50
        assert room.asked == 1

    play(story)


async def _awaited(answer: Awaitable[int]) -> int:
    return await answer


def test_what_an_answer_waits_for_it_is_given_and_its_errors_are_its_own() -> None:
    async def story(room: Room) -> None:
        loop = asyncio.get_running_loop()

        async def answer() -> int:
            found = await loop.run_in_executor(None, lambda: 7)
            failing: asyncio.Future[None] = loop.create_future()
            loop.call_soon(failing.set_exception, OSError("no disk"))
            with suppress(OSError):
                await failing
                found = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await asyncio.sleep(60)
            raise KeyError(found)

        with pytest.raises(KeyError, match="7"):
            await gathered(answer(), room)
        assert room.asked == 0
        done: asyncio.Future[int] = loop.create_future()
        loop.call_soon(done.set_result, 9)
        assert await gathered(done, room) == 9

    play(story)


def test_who_is_cancelled_while_waiting_for_room_is_told_where_it_was() -> None:
    async def story(room: Room) -> None:
        ended: list[str] = []

        async def answer() -> None:
            try:
                await gather(10)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        async def awaited() -> None:
            await gathered(answer(), room)

        task = asyncio.create_task(awaited())
        while not room.asked:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["cancelled"]

    play(story)
