"""Long answers are gathered some at a time: a handler whose answer proves to be long waits for its turn.

A handler that has much to look at lets other work have its turn after every few hundred things (`asyncio.sleep(0)`).
That is how a long answer is told from a short one, before it holds much: one that comes to its third turn waits for
room. A short one never waits, whatever else is asked of its API.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any

FREE_TURNS = 2
"""Turns of the loop that an answer has before it counts as a long one."""


@types.coroutine
def gathered(answer: Awaitable[Any], room: Callable[[], Awaitable[None]]) -> Generator[Any, Any, Any]:
    """Await an answer; when it gives the loop back for the `FREE_TURNS`th time, await `room` first."""
    steps = answer.__await__()
    turns = 0
    errors: list[BaseException] = []
    """At most one, which is taken out before it is thrown: an error that is raised here must not be held here."""
    while True:
        try:
            waits_for = steps.throw(errors.pop()) if errors else next(steps)
        except StopIteration as done:
            return done.value
        turns += waits_for is None
        try:
            if waits_for is None and turns == FREE_TURNS:
                yield from room().__await__()
            else:
                yield waits_for
        except BaseException as error:  # To be handled where it would have been without this.
            errors.append(error)
