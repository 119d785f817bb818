"""Long work in turns: all of it is done, in order, and other tasks run in between."""

from __future__ import annotations

import asyncio
import weakref

from anabranch.runtime.turns import in_turns, spent_in_parts


class Item:
    """Can be seen to go."""


def test_other_tasks_have_their_turn_after_so_many_items() -> None:
    async def story() -> list[object]:
        seen: list[object] = []

        async def beside() -> None:
            while True:
                seen.append("beside")
                await asyncio.sleep(0)

        task = asyncio.create_task(beside())
        async for item in in_turns(range(5), 2):
            seen += [item]
        task.cancel()
        return seen

    assert asyncio.run(story()) == [0, "beside", 1, 2, "beside", 3, 4]


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
