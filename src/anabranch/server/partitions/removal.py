"""Deleting the files of logs: of those that a StopReplica names, and of those whose deletion was interrupted.

The rule: a log is there whole, or it is gone. Its checkpoints are forgotten first, once for all logs of an order; then
its directory is renamed into that of deleted logs, and its files are removed there. Whatever has been renamed when the
process ends is left over, and removed by the next one while it serves. What cannot be removed is tried again with the
next order, and at the next start.

100,000 logs take minutes. `stop` ends the work between two logs: the controller's order for those that are left is
given again in its next term.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from anabranch.base.ids import TopicPartition
from anabranch.runtime.events import EventLogger
from anabranch.runtime.turns import spent_in_parts
from anabranch.storage.directory import DataDirectory

events = EventLogger("removal")
DELETED_AT_A_TIME = 500
"""Logs that are deleted together: directories are synced once for all of them."""
CLEARED_AT_A_TIME = 50
"""Left-over logs that a thread removes in one go."""
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class Removed(NamedTuple):
    """What became of some logs; those that were not reached before `LogRemoval.stop` are in neither."""

    gone: Sequence[TopicPartition]
    failed: dict[TopicPartition, OSError]


class LogRemoval:
    """Deletes logs in threads."""

    def __init__(self, directory: DataDirectory, in_thread: InThread) -> None:
        """Find what is left over; OSError. `in_thread` does blocking work in a thread."""
        self._directory = directory
        self._in_thread = in_thread
        self._stopped = threading.Event()
        self._left_over = directory.left_over()
        self._stuck: list[Path] = []
        """Renamed logs whose files could not be removed: tried again with the next order, which may be the same."""

    def stop(self) -> None:
        """End the work between two logs: the process is about to end."""
        self._stopped.set()

    def _goes_on(self) -> bool:
        return not self._stopped.is_set()

    async def remove(
        self, names: list[TopicPartition], keep: Callable[[TopicPartition], None] | None = None
    ) -> AsyncIterator[Removed]:
        """Delete logs, some at a time, and drop them from `names`.

        `keep` is called for each log before any is touched, in a thread; its OSError keeps that log. OSError where the
        checkpoints cannot be saved; then no log is deleted.
        """
        if keep is not None:
            kept: list[TopicPartition] = []
            for some in spent_in_parts(names, DELETED_AT_A_TIME):
                failed = await self._in_thread(partial(_errors, keep, some))
                yield Removed((), failed)
                kept += [name for name in some if name not in failed]
            names = kept
        stuck = [self._stuck.pop() for _ in range(len(self._stuck))]
        for paths in spent_in_parts(stuck, CLEARED_AT_A_TIME):
            await self._in_thread(partial(self._clear, paths))
        there = await self._in_thread(partial(self._directory.forget_logs, names))
        with_files = set(there)
        for some in spent_in_parts(names, DELETED_AT_A_TIME):
            yield Removed([name for name in some if name not in with_files], {})
        for some in spent_in_parts(there, DELETED_AT_A_TIME):
            if not self._goes_on():
                return
            yield await self._in_thread(partial(self._remove, some))

    def _remove(self, names: Sequence[TopicPartition]) -> Removed:
        """Delete logs whose checkpoints are forgotten. Blocks."""
        doomed, failed = self._directory.take_away(names, self._goes_on)
        for name, away in doomed.items():
            self._directory.checkpoints.forget(str(name))
            try:
                self._directory.remove_trees([away], self._goes_on)
            except OSError as error:
                failed[name] = error
                self._stuck.append(away)
        return Removed([name for name in doomed if name not in failed], failed)

    async def clear(self) -> None:
        """Remove what is left over of deletions that were interrupted, some logs at a time."""
        for some in spent_in_parts(self._left_over, CLEARED_AT_A_TIME):
            await self._in_thread(partial(self._clear, some))

    def _clear(self, paths: Sequence[Path]) -> None:
        """Remove directories. Blocks."""
        for path in paths:
            try:
                self._directory.remove_trees([path], self._goes_on)
            except OSError as error:
                self._stuck.append(path)
                events.warning("deleted log not removed", directory=path, reason=error)


def _errors(work: Callable[[TopicPartition], None], names: Sequence[TopicPartition]) -> dict[TopicPartition, OSError]:
    """Do something for each log; return the errors. Blocks."""
    failed: dict[TopicPartition, OSError] = {}
    for name in names:
        try:
            work(name)
        except OSError as error:
            failed[name] = error
    return failed
