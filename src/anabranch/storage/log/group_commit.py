"""Group commit: appends that come while a sync runs share the next one, so the cost is one sync per few milliseconds.

At most one sync per log is in flight; the logs' syncs run side by side in a few threads. A failed sync fails everyone
whose records it should have made durable; the log then cuts its unsynced tail before it takes appends again.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from anabranch.storage.log.log import Flush, PartitionLog

SYNC_THREADS = 16
"""Syncs that run side by side. A file system writes its journal once for all that wait for it: 16 files took 7 ms one
after another, or with 4 threads, and 3 ms with 8 or 16 (ext4)."""


class GroupCommit:
    """Makes logs durable on behalf of all who wait for it."""

    def __init__(self, threads: int = SYNC_THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="sync")
        self._running: dict[PartitionLog, list[asyncio.Future[None]]] = {}
        self._next: dict[PartitionLog, list[asyncio.Future[None]]] = {}
        self.syncs = 0

    def commit(self, log: PartitionLog, flushed: Callable[[], None] | None = None) -> asyncio.Future[None]:
        """Make all that `log` holds now durable; the future, the caller's own, fails with the OSError of the sync.

        `flushed` is called after each successful sync, before the waiting futures are done, to tell readers that the
        high watermark has moved.
        """
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()
        waiting.add_done_callback(_consume)
        others = self._next.get(log)
        if others is not None:
            others.append(waiting)
            return waiting
        self._next[log] = [waiting]
        if log not in self._running:
            loop.call_soon(self._start, log, flushed)
        return waiting

    def _start(self, log: PartitionLog, flushed: Callable[[], None] | None) -> None:
        loop = asyncio.get_running_loop()
        waiting = self._next.pop(log)
        try:
            flush = log.begin_flush()
        except OSError as error:
            _finish(waiting, error)
            return
        self._running[log] = waiting
        self.syncs += 1

        def done(work: asyncio.Future[None]) -> None:
            error = work.exception()
            assert error is None or isinstance(error, OSError), error
            if not log.end_flush(flush, error) and error is None:
                error = OSError(errno.EIO, "the log was cut while it was synced", str(log.directory))
            del self._running[log]
            if error is None and flushed is not None:
                flushed()
            _finish(waiting, error)
            if log in self._next:
                self._start(log, flushed)

        loop.run_in_executor(self._threads, Flush.run, flush).add_done_callback(done)

    async def drain(self) -> None:
        """Wait for every sync that is under way or due."""
        while pending := list(itertools.chain(*self._running.values(), *self._next.values())):
            await asyncio.wait(pending)
            await asyncio.sleep(0)

    def close(self) -> None:
        """Let the threads go, after `drain`."""
        self._threads.shutdown()


def _finish(waiting: list[asyncio.Future[None]], error: OSError | None) -> None:
    for future in waiting:
        if future.done():
            continue  # Its caller was cancelled.
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _consume(future: asyncio.Future[None]) -> None:
    """An error that nobody waits for any more is no surprise."""
    if not future.cancelled():
        future.exception()
