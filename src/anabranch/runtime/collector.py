"""Python's garbage collector, kept from holding up the event loop.

A collection of the oldest generation looks at every object of the process, at a third of a microsecond each: 40 ms in
a broker of 1,000 partitions, in the middle of whatever request happens to allocate. So the objects that survive one
are set aside (`gc.freeze`), and thresholds are such that the next one looks at 20,000 objects at most, those made
since. The rule: reference counts free what is set aside, but for cycles that become garbage later: those of the
broker are broken by hand, and a test of a whole broker finds none that is left. A complete collection, which finds
others, is one long step that nothing can divide. So it takes place after the memory in use has doubled while no
client is connected, whom it would keep waiting. Only where the memory has grown to eight times what it was does it
take place beside clients: at a quiet moment, or, where none comes within an hour, at any. Memory that is known to be
in use, as that of partitions, is no growth: so much cannot be garbage.

The thresholds count objects made less objects freed, whichever these are. So where a thread frees what a large request
took, or new values take the place of old ones, nothing is collected, and 200,000 young objects come to wait: 10 ms to
look at, once in each generation. So the young ones are looked at in short intervals, too, and those that have survived
are set aside as soon as looking at them has taken a millisecond. A list of 100,000 partitions is one object, and to
look at it is to look at each of them, for 10 ms or more: where one is among the young, all are set aside unseen.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from time import monotonic, perf_counter, process_time
from typing import Any

THRESHOLDS = (500, 10, 1)
"""Objects made, net, until a young collection; young until a middle one; middle until one of the oldest generation."""
LOOK_INTERVAL_S = 2.0
YOUNG_INTERVAL_S = 0.05
"""How long young objects wait until they are looked at: for 1 or 2 ms, those that a busy loop makes meanwhile."""
LARGE_BYTES = 1 << 16
"""How large a young object is that is not looked at: a list of 8,000 others, which takes half a millisecond."""
YOUNG_SIZED = 2_000
"""How many young objects are asked how large they are: for a third of a millisecond."""
_FIRST = itemgetter(slice(YOUNG_SIZED))
LOOKED_MAX_S = 0.001
"""How long young objects are looked at before those that survive are set aside: it may take as long again each time."""
QUIET_LOAD_MAX = 0.02
"""The part of the processor that was in use, at most, since the look before a quiet moment."""
WAIT_MAX_S = 3600.0
"""How long a complete collection waits for a quiet moment."""
GROWTH, GROWTH_BESIDE_CLIENTS = 2, 8
"""How often the memory of the last complete collection is in use before the next one, without and with clients."""
YOUNGEST, OLDEST = 0, 2


class Collector:
    """The collector of a process whose event loop must not be held up. `installed`, then `run` as a task."""

    def __init__(self) -> None:
        self._known: Callable[[], int] = lambda: 0
        self._left = sys.getallocatedblocks()
        """Blocks of memory at the start of `run`, or after the last complete collection, without those known."""
        self._due_since: float | None = None
        self.completed = 0
        """Complete collections so far."""
        self._looked_s = 0.0
        """How long objects that may still be looked at again were looked at."""
        self._began_s = 0.0
        self._complete = False
        """Whether all objects are being looked at, large ones, too."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Set survivors aside meanwhile."""
        before = gc.get_threshold()
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._on_collection)
        self._settle()
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_collection)
            gc.set_threshold(*before)
            gc.unfreeze()

    async def run(self, alone: Callable[[], bool], known: Callable[[], int] = lambda: 0) -> None:
        """Collect all garbage when there may be much of it.

        `alone` tells whether no client is connected; `known` gives the blocks of memory that are in use for certain.
        """
        self._known = known
        self._settle()
        while True:
            used = process_time()
            for _ in range(round(LOOK_INTERVAL_S / YOUNG_INTERVAL_S)):
                await asyncio.sleep(YOUNG_INTERVAL_S)
                gc.collect(YOUNGEST)
            quiet = process_time() - used < QUIET_LOAD_MAX * LOOK_INTERVAL_S
            self.look(monotonic(), quiet=quiet, alone=alone())

    def look(self, now_s: float, *, quiet: bool, alone: bool) -> None:
        """Collect all garbage, if it is time."""
        growth = self._blocks() / self._left
        if growth <= GROWTH_BESIDE_CLIENTS:
            self._due_since = None
        elif self._due_since is None:
            self._due_since = now_s
        beside_clients = self._due_since is not None and (quiet or now_s - self._due_since >= WAIT_MAX_S)
        if beside_clients or (alone and quiet and growth > GROWTH):
            before = _complete_collections()
            self._complete = True
            gc.unfreeze()
            gc.collect()
            self._complete = False
            if _complete_collections() == before:  # Another thread was collecting: it is tried again at the next look.
                gc.freeze()
                return
            self._settle()
            self.completed += 1

    def _settle(self) -> None:
        gc.freeze()
        gc.collect()  # Of nothing: the next one is due after a quarter of what the last one left.
        self._left, self._due_since = self._blocks(), None

    def _on_collection(self, phase: str, info: Mapping[str, Any]) -> None:
        """Set survivors aside; of two collections one ends before the other begins, whichever threads they are in."""
        if phase == "start":
            if not self._complete and largest_young() > LARGE_BYTES:
                gc.freeze()
            self._began_s = perf_counter()
            return
        self._looked_s += perf_counter() - self._began_s
        if not self._complete and (info["generation"] == OLDEST or self._looked_s > LOOKED_MAX_S):
            gc.freeze()
            self._looked_s = 0.0

    def _blocks(self) -> int:
        """Blocks of memory in use, without those known."""
        return max(1, sys.getallocatedblocks() - self._known())


def _complete_collections() -> int:
    """How many collections of the oldest generation there were."""
    return int(gc.get_stats()[OLDEST]["collections"])


def look_at_young() -> None:
    """Look at the young objects in this thread: the loop need not look at those that work in a thread has left."""
    gc.collect(YOUNGEST)


def largest_young() -> int:
    """The size of the largest of the young objects, in bytes; of the first 2,000, if there are more.

    In one call from the interpreter's view: no other thread runs while they are held, which may be about to ask whether
    it holds one alone, as when a tuple is made from an iterator. They are read to the end: the iterators are young
    objects, too, and what holds them would be held by one of them.
    """
    young = map(_FIRST, map(gc.get_objects, (YOUNGEST,)))
    return max(map(sys.getsizeof, chain.from_iterable(young)), default=0)


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
