"""Python's garbage collector, kept from holding up the event loop.

A collection of the oldest generation looks at every object of the process, at a third of a microsecond each: 40 ms in a
broker of 1,000 partitions, in the middle of whatever request happens to allocate. So the objects that survive one are
set aside (`gc.freeze`), and thresholds are such that the next one looks at 20,000 objects at most, those made since.
The rule: reference counts free what is set aside, but for cycles that become garbage later. A complete collection,
which finds these, takes place only after the objects have doubled: at a quiet moment, or, once they have quadrupled,
at any. Counting the objects takes a tenth of a microsecond each, and is done as rarely.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import process_time
from typing import Any

THRESHOLDS = (500, 10, 1)
"""Objects made, net, until a young collection; young until a middle one; middle until one of the oldest generation."""
LOOK_INTERVAL_S = 1.0
QUIET_LOAD_MAX = 0.02
"""The part of the processor that is in use, at most, at a quiet moment."""
OLDEST = 2


class Collector:
    """The collector of a process whose event loop must not be held up. `installed`, then `run` as a task."""

    def __init__(self) -> None:
        self._set_aside = 0
        """Objects set aside since they were last counted; some of them are gone."""
        self._left = 0
        """Objects that were there at the start of `run`, or after the last complete collection."""
        self._due = False
        self.completed = 0
        """Complete collections so far."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Set survivors aside meanwhile."""
        before = gc.get_threshold()
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._on_collection)
        self._count()
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_collection)
            gc.set_threshold(*before)
            gc.unfreeze()

    def _on_collection(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "stop" and info["generation"] == OLDEST:
            self._set_aside += len(gc.get_objects(OLDEST))
            gc.freeze()

    async def run(self) -> None:
        """Collect all garbage at quiet moments, when there may be much of it."""
        self._count()
        while True:
            used = process_time()
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.look(quiet=process_time() - used < QUIET_LOAD_MAX * LOOK_INTERVAL_S)

    def look(self, *, quiet: bool) -> None:
        """Collect all garbage, if it is time."""
        if self._set_aside > self._left:
            self._set_aside, count = 0, gc.get_freeze_count()
            self._due = count > 2 * self._left
            quiet = quiet or count > 4 * self._left
        if self._due and quiet:
            gc.unfreeze()
            gc.collect()
            self._count()
            self.completed += 1

    def _count(self) -> None:
        gc.freeze()
        gc.collect()  # Of nothing: the next one is due after a quarter of what the last one left.
        self._set_aside, self._left, self._due = 0, gc.get_freeze_count(), False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage meanwhile: the collector would scan the same new objects again and again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
