"""Names by the time at which something is due: those due are found without a look at the others.

Times are rounded up to steps, so that there are few of them; what is due in one step has no order but that of `set`.
The steps are in a heap, each once: a look at what is due visits the steps that are due and their neighbours. A step
whose names are dropped stays in the heap until it is the first, or until half of all steps are empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

STEPS = 1_000
"""Into how many steps the longest time ahead is divided, unless the steps must be shorter."""


class Schedule:
    """Names, each with the time at which it is due."""

    def __init__(self, ahead_max_ms: int, late_max_ms: int) -> None:
        """`ahead_max_ms`: how far ahead a name is usually set at the most; `late_max_ms`: the longest step."""
        self._step_ms = max(1, min(ahead_max_ms // STEPS, late_max_ms))
        self._steps: dict[str, int] = {}
        """The step in which each name is due."""
        self._names: dict[int, dict[str, None]] = {}
        """The names of each step that is in the heap."""
        self._heap: list[int] = []
        self._empty = 0
        """How many steps in the heap have no name."""

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def set(self, name: str, due_ms: int) -> None:
        """Have a name be due at this time, and not at any that was set for it before."""
        self.drop(name)
        step = self._steps[name] = -(-due_ms // self._step_ms)
        names = self._names.get(step)
        if names is None:
            names = self._names[step] = {}
            heapq.heappush(self._heap, step)
        elif not names:
            self._empty -= 1
        names[name] = None

    def drop(self, name: str) -> None:
        """Forget a name, which need not be set."""
        step = self._steps.pop(name, None)
        if step is None:
            return
        names = self._names[step]
        del names[name]
        if not names:
            self._empty += 1
            if 2 * self._empty >= len(self._heap):
                self._names = {step: names for step, names in self._names.items() if names}
                self._heap = sorted(self._names)
                self._empty = 0

    def due(self, now_ms: int) -> Iterator[str]:
        """The names that are due, those of earlier steps first; they stay due until they are dropped."""
        while self._heap and not self._names[self._heap[0]]:
            del self._names[heapq.heappop(self._heap)]
            self._empty -= 1
        for step in sorted(self._until(now_ms // self._step_ms)):
            yield from self._names[step]

    def _until(self, last: int) -> Iterator[int]:
        """The steps up to `last`: in the heap no step is before its parent."""
        places = [0]
        while places:
            place = places.pop()
            if place < len(self._heap) and self._heap[place] <= last:
                yield self._heap[place]
                places += (2 * place + 1, 2 * place + 2)
