"""Group commit: appends that come while a sync runs share the next one, so the cost is one sync per few milliseconds.

At most one sync per log is in flight; the logs' syncs run side by side in a few threads. A failed sync fails everyone
whose records it should have made durable; the log then cuts its unsynced tail before it takes appends again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from anabranch.storage.log.log import Flush, PartitionLog

SYNC_THREADS = 16
"""Syncs that run side by side. A file system writes its journal once for all that wait for it: 16 files took 7 ms one
after another, or with 4 threads, and 3 ms with 8 or 16 (ext4)."""
Told = Callable[[OSError | None], None]
"""What is called when a sync is over, with why it failed."""


class GroupCommit:
    """Makes logs durable on behalf of all who wait for it."""

    def __init__(self, threads: int = SYNC_THREADS) -> None:
        self._threads = _SyncThreads(threads)
        self._running: dict[PartitionLog, list[Told]] = {}
        self._next: dict[PartitionLog, list[Told]] = {}
        self._idle: list[asyncio.Future[None]] = []
        self.syncs = 0

    def commit(self, log: PartitionLog, flushed: Callable[[], None] | None = None) -> asyncio.Future[None]:
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

    def commit_then(self, log: PartitionLog, done: Told, flushed: Callable[[], None] | None = None) -> None:
        """Make all that `log` holds now durable, and call `done` with the OSError of the sync, or None.

        `flushed` is called after each successful sync, before those who wait are told, to tell readers that the high
        watermark has moved.
        """
        others = self._next.get(log)
        if others is not None:
            others.append(done)
            return
        self._next[log] = [done]
        if log not in self._running:
            asyncio.get_running_loop().call_soon(self._start, log, flushed)

    def _start(self, log: PartitionLog, flushed: Callable[[], None] | None) -> None:
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

        self._threads.run(flush, done)

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
        """Let the threads go, after `drain`."""
        self._threads.close()


class _SyncThreads:
    """Threads that run flushes. What is done is told in the loop, all at once that was done since it last looked.

    A sync takes a few hundred microseconds, and an executor's futures a good part of that in processor time.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads: list[threading.Thread] = []
        self._todo: queue.SimpleQueue[tuple[Flush, Told, asyncio.AbstractEventLoop] | None] = queue.SimpleQueue()
        self._done: deque[tuple[Told, OSError | None]] = deque()
        self._open = 0
        """Flushes that were asked for and not told of yet."""
        self._telling = False
        """Whether the loop has been asked to tell, and has not begun."""

    def run(self, flush: Flush, done: Told) -> None:
        """Run it in a thread, then call `done` in the loop that this is called in."""
        self._open += 1
        if len(self._threads) < min(self._open, self._count):
            thread = threading.Thread(target=self._work, name=f"sync-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._todo.put((flush, done, asyncio.get_running_loop()))

    def _work(self) -> None:
        while (task := self._todo.get()) is not None:
            flush, done, loop = task
            error: OSError | None = None
            try:
                flush.run()
            except Exception as failure:
                error = failure if isinstance(failure, OSError) else OSError(errno.EIO, f"{failure!r}")
            self._done.append((done, error))
            # In this order, here and in `_tell`: what was done before the mark was seen is told of by who set it.
            if not self._telling:
                self._telling = True
                with contextlib.suppress(RuntimeError):  # The loop is closed: there is nobody to tell.
                    loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._telling = False
        loop = asyncio.get_running_loop()
        while self._done:
            done, error = self._done.popleft()
            self._open -= 1
            loop.call_soon(done, error)

    def close(self) -> None:
        """Let the threads end."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()


def _consume(future: asyncio.Future[None]) -> None:
    """An error that nobody waits for any more is no surprise."""
    if not future.cancelled():
        future.exception()
