"""A partition log that has nothing near, as one over an object store: every read must be waited for.

`pause` is awaited before a read is answered: there a test delays it, or has it fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from anabranch.storage.interface import FetchedSlice, IsVoid, Slice, nothing_is_void
from anabranch.storage.log.log import LocalLog
from anabranch.storage.next_record import find_next_record

T = TypeVar("T")


async def _no_pause() -> None:
    await asyncio.sleep(0)


def _copied(found: Slice | None) -> Slice | None:
    return None if found is None else FetchedSlice(bytes(found.view()))


class ColdLog(LocalLog):
    """A local log with slow reads and deletions; only offsets out of range are reported at once."""

    pause: Callable[[], Awaitable[None]] = staticmethod(_no_pause)

    def read(  # type: ignore[override]
        self, offset: int, size_max: int, *, end: int | None = None
    ) -> Awaitable[Slice | None] | None:
        found = super().read(offset, size_max, end=end)
        return None if found is None else self._later(lambda: _copied(found))

    def slices(self) -> Awaitable[Sequence[Slice]]:  # type: ignore[override]
        found = super().slices()
        return self._later(lambda: [FetchedSlice(bytes(piece.view())) for piece in found])

    def batch_for_timestamp(self, timestamp: int) -> Awaitable[Slice | None]:  # type: ignore[override]
        found = super().batch_for_timestamp(timestamp)
        assert found is None or isinstance(found, Slice), "the log is short"
        return self._later(lambda: _copied(found))

    def batch_of_max_timestamp(self) -> Awaitable[Slice | None]:  # type: ignore[override]
        newest = self._segments.max_timestamp(self.log_start)
        return self._later(lambda: None) if newest is None else self.batch_for_timestamp(newest)

    def delete_before(self, offset: int) -> Awaitable[None]:  # type: ignore[override]
        return self._later(lambda: super(ColdLog, self).delete_before(offset))

    def next_record(self, offset: int, is_void: IsVoid = nothing_is_void) -> Awaitable[int]:
        return find_next_record(self, offset, is_void)

    async def _later(self, work: Callable[[], T]) -> T:
        await self.pause()
        return work()
