"""Names by the time at which something is due: those due are found without a look at the others.

Times are rounded up to steps, so that there are few of them; what is due in one step has no order but that of `set`.
"""

from __future__ import annotations

from collections.abc import Iterator

STEPS = 1_000
"""Into how many steps the longest time ahead is divided: what is due is found late by so small a part of it."""


class Schedule:
    """Names, each with the time at which it is due."""

    def __init__(self, ahead_max_ms: int) -> None:
        """`ahead_max_ms`: how far ahead a name is usually set at the most."""
        self._step_ms = max(1, ahead_max_ms // STEPS)
        self._steps: dict[str, int] = {}
        """The step in which each name is due."""
        self._names: dict[int, dict[str, None]] = {}
        """The names of each step that has some."""

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def set(self, name: str, due_ms: int) -> None:
        """Have a name be due at this time, and not at any that was set for it before."""
        self.drop(name)
        step = self._steps[name] = -(-due_ms // self._step_ms)
        self._names.setdefault(step, {})[name] = None

    def drop(self, name: str) -> None:
        """Forget a name, which need not be set."""
        step = self._steps.pop(name, None)
        if step is not None:
            names = self._names[step]
            del names[name]
            if not names:
                del self._names[step]

    def due(self, now_ms: int) -> Iterator[str]:
        """The names that are due, those of earlier steps first."""
        last = now_ms // self._step_ms
        for step in sorted(step for step in self._names if step <= last):
            yield from self._names[step]
