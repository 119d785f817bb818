"""Folding a retiring partition back into its survivor (`machines.compaction`, `storage.log.folding`).

    read what is left -> append it, chunk by chunk -> sync the survivor -> delete it

The files are read in threads. A chunk is appended in one step of the event loop, which is the survivor's append lock:
only when every batch that the survivor was given since the files were read has been looked at. While producers are
faster than that, the look is repeated; after LOOKS_MAX times the rest waits for the next round. A crash at any point
leaves copies in the survivor, which the next round finds to be newer records.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

from anabranch.base.errors import ErrorCode
from anabranch.machines.compaction import may_fold
from anabranch.records.batch import parse_header
from anabranch.runtime.events import EventLogger
from anabranch.server.partitions.offsets import delete_records
from anabranch.server.partitions.partition import Partition
from anabranch.storage.interface import Slice
from anabranch.storage.log.evidence import LogFiles
from anabranch.storage.log.folding import CHUNK_SIZE_MAX, Chunk, Folding, is_little

events = EventLogger("compaction")
LOOKS_MAX = 100


class InThread(Protocol):
    """Does work on files in a thread."""

    def __call__(self, work: Callable[[], Any]) -> Awaitable[Any]: ...


class FoldBack:
    """One range of a retiring partition's log, folded back; used once."""

    def __init__(
        self,
        retiring: Partition,
        survivor: Partition,
        files: Sequence[LogFiles],
        *,
        in_thread: InThread,
        now_ms: Callable[[], int],
    ) -> None:
        """`files` are those of the retiring partition, then of its family; those two's as they are in this step."""
        self.retiring = retiring
        self._survivor = survivor
        self._roles = retiring.leadership, survivor.leadership
        """While they hold no key of the range gets a place elsewhere, so that only the survivor is looked at."""
        self._in_thread = in_thread
        self._now_ms = now_ms
        self._folding: Folding | None = Folding(files[0], files[1:], survivor.settings.compression)
        self._looked_to = survivor.log.end
        self._table = survivor.table
        """The table is folded anew when unsynced records are cut: copies among them are lost then."""
        self.appended = 0
        """Records appended so far."""
        self.done_to = retiring.log.log_start
        """The offset below which nothing in the log is needed any more."""
        self.postponed: Collection[int] = ()
        """The partitions with tombstones that must stay for `delete.retention.ms` after `delete`."""

    async def append(self) -> bool:
        """Append what the survivor lacks, durably; whether that could be finished."""
        folding = self._folding
        assert folding is not None
        await self._in_thread(folding.prepare)
        while (chunk := await self._in_thread(folding.next_chunk)) is not None:
            if not await self._append(folding, chunk):
                return False
        if self._survivor.log.flushed < self._survivor.log.end:
            await self._survivor.log.commit()
        if self._survivor.table is not self._table:
            return False
        self.done_to, self.postponed = folding.done_to, folding.postponed
        self._folding = None  # What was read for it need not wait for the deletion.
        return True

    async def prepare_delete(self) -> None:
        """Note what `delete` needs; it is cheap when the checkpoints are saved. OSError."""
        await self.retiring.note_delete(self.done_to)

    async def delete(self) -> None:
        """Delete the records that nothing needs any more."""
        deleted = await delete_records(self.retiring, self.done_to)
        if isinstance(deleted, ErrorCode):
            events.warning("folded records not deleted", partition=self.retiring.name, reason=deleted.name)

    async def _append(self, folding: Folding, chunk: Chunk) -> bool:
        """Append a chunk in front of all later writes of its keys; False if that is not possible now."""
        survivor = self._survivor
        batch = await self._in_thread(lambda: folding.batch_of(chunk))
        for _ in range(LOOKS_MAX):
            # From here to the append nothing awaits.
            roles = self.retiring.leadership, survivor.leadership
            if roles != self._roles or not may_fold(*roles) or survivor.table is not self._table:
                return False
            unseen = self._unseen()
            if unseen is not None and is_little(unseen):
                self._looked_to = folding.look(unseen)
                unseen = self._unseen()
            if unseen is None:
                if folding.touches(chunk):
                    batch = folding.batch_of(chunk)
                if batch is not None:
                    header = parse_header(batch)
                    self._looked_to = survivor.append(batch, header, self._now_ms()).last_offset + 1
                    self.appended += header.record_count
                return True
            self._looked_to = await self._in_thread(partial(folding.look, unseen))
        return False

    def _unseen(self) -> Slice | None:
        """The next batches that the survivor was given and nobody has looked at yet; None at its end."""
        log = self._survivor.log
        if self._looked_to >= log.end:
            return None
        found = log.read(self._looked_to, CHUNK_SIZE_MAX, end=log.end)
        assert found is not None and not isinstance(found, Awaitable), "what was just appended is near"
        return found
