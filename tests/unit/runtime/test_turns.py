"""Long work in turns: all of it is done, in order, and other tasks run in between."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

from anabranch.runtime.turns import TURN_S, KeyedTurns, Pace, in_turns, spent_in_parts


class Item:
    """Can be seen to go."""


async def turns_among(count: int, at_a_time: int, each: Callable[[], None] = lambda: None) -> list[object]:
    """What is done where so many items are taken in turns, and another task wants to have its own all the time."""
    seen: list[object] = []

    async def beside() -> None:
        while True:
            seen.append("beside")
            await asyncio.sleep(0)

    task = asyncio.create_task(beside())
    async for item in in_turns(range(count), at_a_time):
        seen.append(item)
        each()
    task.cancel()
    return seen


def test_other_tasks_have_their_turn_after_so_many_items() -> None:
    async def story() -> list[object]:
        asyncio.get_running_loop().time = lambda: 0.0  # type: ignore[method-assign]
        return await turns_among(5, 2)

    assert asyncio.run(story()) == [0, 1, "beside", 2, 3, "beside", 4]


def test_a_turn_ends_with_its_time_however_few_the_items_are() -> None:
    async def story() -> list[object]:
        now = 0.0

        def take() -> None:
            nonlocal now
            now += 0.6 * TURN_S

        asyncio.get_running_loop().time = lambda: now  # type: ignore[method-assign]
        return await turns_among(5, 100, take)

    assert asyncio.run(story()) == [0, 1, "beside", 2, 3, "beside", 4]


def test_each_part_of_what_is_spent_is_freed_before_the_next_one() -> None:
    items = [Item() for _ in range(5)]
    alive = [weakref.ref(item) for item in items]
    left: list[list[int]] = []
    for part in spent_in_parts(items, 2):
        left.append([place for place, item in enumerate(alive) if item() is not None])
        assert len(part) <= 2
        del part
    assert left == [[0, 1, 2, 3, 4], [0, 1, 2], [0]]
    assert not items


async def paced(pace: Pace, counts: list[int], cancelled: frozenset[int] = frozenset()) -> list[list[int]]:
    """The places of those that went on, by the turn of the loop in which they did."""
    turns: list[list[int]] = []

    async def take(place: int, count: int) -> None:
        await pace.take(count)
        turns[-1].append(place)

    tasks = [asyncio.create_task(take(place, count)) for place, count in enumerate(counts)]
    while not all(task.done() for task in tasks):
        turns.append([])
        await asyncio.sleep(0)
        for place in cancelled:
            tasks[place].cancel()
    return [turn for turn in turns if turn]


def test_a_pace_lets_so_many_items_be_done_in_a_turn_of_all_who_do_some_in_their_order() -> None:
    for counts in ([4] * 5, [1] * 20, [10, 1, 10, 1, 10], [3, 10, 3, 10]):
        turns = asyncio.run(paced(Pace(10), counts))
        assert [place for turn in turns for place in turn] == [*range(len(counts))]
        assert max(sum(counts[place] for place in turn) for turn in turns) <= 10
        assert len(turns) <= len(counts)
    assert len(asyncio.run(paced(Pace(10), [1] * 20))) == 2, "small ones share a turn"


def test_whoever_is_gone_has_no_turn_in_a_pace_and_keeps_nobody_waiting() -> None:
    turns = asyncio.run(paced(Pace(10), [10] * 6, frozenset({2, 3})))
    assert [place for turn in turns for place in turn] == [0, 1, 4, 5]


def test_those_of_one_key_take_turns_and_those_of_others_do_not_wait_for_them() -> None:
    async def story() -> list[str]:
        turns, began = KeyedTurns(), list[str]()
        may_end = asyncio.Event()

        async def take(key: str, name: str) -> None:
            async with turns.taken(key):
                began.append(name)
                await may_end.wait()

        tasks = [
            asyncio.create_task(take(key, name)) for key, name in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"))
        ]
        await asyncio.sleep(0.01)
        assert began == ["a1", "b1"] and len(turns) == 2
        tasks[1].cancel()
        may_end.set()
        await asyncio.wait(tasks)
        assert tasks[1].cancelled()
        assert len(turns) == 0, "nothing is kept of keys that nobody waits for"
        return began

    assert asyncio.run(story()) == ["a1", "b1", "a3"]
