"""Group commit: appends that come while a sync runs share the next one, so the cost is one sync per few milliseconds.

At most one sync per log is in flight; the logs' syncs run side by side. A failed sync fails
every request whose records it should have made durable; the log then cuts its unsynced tail before it takes appends.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence

from anabranch.runtime.loop_steps import timed
from anabranch.runtime.syncs import Syncs, Told
from anabranch.storage.log.log import LocalLog


class GroupCommit:
    """Makes logs durable, with one sync for all waiters."""

    def __init__(self, syncs: Syncs | None = None) -> None:
        self._syncs = syncs or Syncs()
        self._running: dict[LocalLog, list[Told]] = {}
        self._next: dict[LocalLog, list[Told]] = {}
        self._idle: list[asyncio.Future[None]] = []
        self.syncs = 0

    def commit(self, log: LocalLog, flushed: Callable[[], None] | None = None) -> asyncio.Future[None]:
        """As `commit_then`, with a future of the caller's own, which fails with the OSError of the sync."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.add_done_callback(_consume)

        def done(error: OSError | None) -> None:
            if waiting.done():
                return  # Its caller was cancelled.
            if error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(error)

        self.commit_then(log, done, flushed)
        return waiting

    def commit_then(self, log: LocalLog, done: Told, flushed: Callable[[], None] | None = None) -> None:
        """Make all that `log` holds now durable, and call `done` with the OSError of the sync, or None.

        `flushed` is called after each successful sync, before the waiters, so that readers learn that the high
        watermark has moved.
        """
        others = self._next.get(log)
        if others is not None:
            others.append(done)
            return
        self._next[log] = [done]
        if log not in self._running:
            loop = asyncio.get_running_loop()
            loop.call_soon(timed(loop, "commit", self._start), log, flushed)

    def _start(self, log: LocalLog, flushed: Callable[[], None] | None) -> None:
        waiting = self._next.pop(log)
        try:
            flush = log.begin_flush()
        except OSError as error:
            self._finish(waiting, error)
            return
        self._running[log] = waiting
        self.syncs += 1

        def done(error: OSError | None) -> None:
            if not log.end_flush(flush, error) and error is None:
                error = OSError(errno.EIO, "the log was cut while it was synced", str(log.directory))
            del self._running[log]
            if error is None and flushed is not None:
                flushed()
            if log in self._next:
                self._start(log, flushed)
            self._finish(waiting, error)

        if flush.directories:
            self._syncs.run(flush.run, done)
        else:
            self._syncs.sync(flush.files, done)

    def is_busy(self, log: object) -> bool:
        """Whether a sync of a log is under way or due."""
        return log in self._running or log in self._next

    async def drain(self) -> None:
        """Wait for every sync that is under way or due."""
        while self._running or self._next:
            idle = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle

    def _finish(self, waiting: Sequence[Told], error: OSError | None) -> None:
        for done in waiting:
            done(error)
        if not (self._running or self._next):
            idle, self._idle = self._idle, []
            for future in idle:
                future.set_result(None)

    def close(self) -> None:
        """Release threads and descriptors, after `drain`."""
        self._syncs.close()


def _consume(future: asyncio.Future[None]) -> None:
    """Retrieve the error of a commit without waiters, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
