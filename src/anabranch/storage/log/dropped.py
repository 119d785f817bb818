"""Segments that lie below the log start, until their files are removed: in a thread, some at a time.

Their records were deleted when the log start was moved, durably; since then nothing reads them, and a start would
remove them (`recovery`). So a kill may come between any two files. The oldest go first, and of a segment its batches
before their index: what is left is always a log without a hole, and indexes that a start removes.

A directory that is about to be removed, and perhaps made again, is left alone: `forget`, then wait for `removing`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from anabranch.runtime.disk import Disk
from anabranch.storage.log.segment import Segment

logger = logging.getLogger("anabranch.storage.log")

REMOVED_AT_A_TIME = 64
"""Segments of which a thread removes the files in one go: 192 files, a few milliseconds where they are small."""


class DroppedSegments:
    """The dropped segments of one log."""

    def __init__(self, disk: Disk) -> None:
        self.removing: dict[asyncio.Future[None], Sequence[Segment]] = {}
        """What threads are at; it ends without an error."""
        self._disk = disk
        self._waiting: deque[Segment] = deque()
        self._removal: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, segments: Iterable[Segment]) -> None:
        """Add segments, oldest first."""
        self._waiting.extend(segments)

    def forget(self) -> None:
        """Leave the files that no thread is at."""
        self._waiting.clear()

    async def remove(self) -> None:
        """Remove the files of all segments; what cannot be removed stays until the next start.

        It goes on when a caller is cancelled: a client may hang up.
        """
        if self._waiting and (self._removal is None or self._removal.done()):
            self._removal = asyncio.get_running_loop().create_task(self._remove_in_threads(), name="remove segments")
        if self._removal is not None and not self._removal.done():
            await asyncio.shield(self._removal)

    async def _remove_in_threads(self) -> None:
        while self._waiting:
            some = self._some(REMOVED_AT_A_TIME)
            work = asyncio.get_running_loop().run_in_executor(None, self._remove, some)
            self.removing[work] = some
            work.add_done_callback(self.removing.pop)
            await asyncio.shield(work)

    def remove_at_once(self) -> None:
        """Remove the files of all segments, those that a thread is at among them, before this returns. Blocks."""
        for segments in (*self.removing.values(), self._some(len(self._waiting))):
            self._remove(segments)

    def _some(self, most: int) -> Sequence[Segment]:
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def _remove(self, segments: Collection[Segment]) -> None:
        for segment in segments:
            try:
                for path in segment.paths:
                    self._disk.unlink(path)
            except OSError as error:
                logger.warning("%s: deleted records, but not their file: %s", segment.path, error)
