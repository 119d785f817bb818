"""Segments that lie below the log start, until their files are removed: in one thread for all logs, some at a time.

To remove a file of a gigabyte takes 10 to 100 ms: with the threads that other work needs, it would wait for seconds.

Their records were deleted when the log start was moved, durably; since then nothing reads them, and a start would
remove them (`recovery`). So a kill may come between any two files. The oldest go first, and of a segment its batches
before their index: what is left is always a log without a hole, and indexes that a start removes.

A log that is closed removes nothing any more (`close`): it may be opened again. A directory that is about to be
removed, and perhaps made again, is left alone, too: `forget`, then `close`, which may have to wait for the thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from anabranch.runtime.disk import Disk
from anabranch.storage.log.recovery import remove_covered
from anabranch.storage.log.segment import Segment

logger = logging.getLogger("anabranch.storage.log")

REMOVED_AT_A_TIME = 8
"""Segments, of three files each, that are removed before those of another log have their turn."""
_thread = ThreadPoolExecutor(1, thread_name_prefix="remove")


class DroppedSegments:
    """The dropped segments of one log."""

    def __init__(self, disk: Disk) -> None:
        self.removing: dict[asyncio.Future[None], Sequence[Segment]] = {}
        """What the thread is at, or has next; it ends without an error."""
        self._disk = disk
        self._waiting: deque[Segment] = deque()
        self._removal: asyncio.Task[None] | None = None
        self._closed = False
        self._file = threading.Lock()
        """Held while a file is removed."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, segments: Iterable[Segment]) -> None:
        """Add segments, oldest first."""
        self._waiting.extend(segments)

    def forget(self) -> None:
        """Leave the files that the thread has not been given."""
        self._waiting.clear()

    def close(self) -> None:
        """Leave all files that are left, when this returns. Blocks while one file is removed."""
        self._closed = True  # Before the lock: the thread would take it again for the next file.
        with self._file:
            pass

    async def remove(self) -> None:
        """Remove the files of all segments; what cannot be removed stays until the next start.

        It goes on when a caller is cancelled: a client may hang up.
        """
        if self._waiting and (self._removal is None or self._removal.done()):
            self._removal = asyncio.get_running_loop().create_task(self._remove_in_threads(), name="remove segments")
        if self._removal is not None and not self._removal.done():
            await asyncio.shield(self._removal)

    async def _remove_in_threads(self) -> None:
        while self._waiting and not self._closed:
            some = self._some(REMOVED_AT_A_TIME)
            work = asyncio.get_running_loop().run_in_executor(_thread, self._remove, some)
            self.removing[work] = some
            work.add_done_callback(self.removing.pop)
            await asyncio.shield(work)

    def remove_at_once(self) -> None:
        """Remove the files of all segments, those that the thread is at among them, before this returns. Blocks."""
        for segments in (*self.removing.values(), self._some(len(self._waiting))):
            self._remove(segments)

    def _some(self, most: int) -> Sequence[Segment]:
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def _remove(self, segments: Collection[Segment]) -> None:
        for segment in segments:
            try:
                if not segment.is_named:  # What it was made of may be there still; a start takes it for deleted, too.
                    with self._file:
                        if self._closed:
                            return
                        remove_covered(self._disk, segment.path.parent, [(segment.base_offset, segment.end)])
                for path in segment.paths:
                    with self._file:
                        if self._closed:
                            return
                        self._disk.unlink(path)
            except OSError as error:
                logger.warning("%s: deleted records, but not their file: %s", segment.path, error)
