"""Work in a thread on memory that others are given when its caller ends.

The rule: `to_the_end` ends when the work has ended, or will never begin, also where its caller is cancelled. A plain
`run_in_executor` ends at once then, and the thread goes on reading, and writing, what belongs to others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Given = TypeVarTuple("Given")


def _nothing() -> None:
    """Let the work go on."""


async def to_the_end(
    thread: Executor, work: Callable[[Unpack[Given]], T], *given: *Given, give_up: Callable[[], None] = _nothing
) -> T:
    """Do work in a thread. A cancellation is raised when the thread is done with it; `give_up` makes that be soon."""
    running = thread.submit(work, *given)
    ended = asyncio.wrap_future(running)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        if not running.cancel():
            give_up()
        while not ended.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((ended,))
        if not ended.cancelled():
            ended.exception()  # Nobody is left to be told.
        raise
    finally:
        del running, ended  # Or what the work failed with holds this frame, and the frame holds it.
