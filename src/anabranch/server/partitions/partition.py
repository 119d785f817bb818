"""One partition at its leader: its log, its producers, the role it has taken, and the watchers of its changes.

Everything here runs in the broker's loop without awaiting, which is the lock that a resize and an append share. The
rules: the producer table is a fold over the log, so that it is the same after a restart; before records are deleted,
their producers are saved beside the log; a watcher is called after every change that a waiting fetch can see (append,
high watermark, log start, role, end).
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple, Protocol
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_LEADER_EPOCH, TopicPartition
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.cuts import NO_CUTS
from anabranch.machines.lineage import Cuts
from anabranch.machines.partition.producers import Marker, ProducerTable
from anabranch.records.batch import CONTROL, BatchHeader, parse_end_transaction_marker
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.mapped import read_in
from anabranch.server.partitions.topic_settings import TopicSettings
from anabranch.storage.interface import Appended, OfflineLogError, PartitionLog

events = EventLogger("partition")
FAILURE_INTERVAL_S = 10.0
Watcher = Callable[[], None]


class Counter(Protocol):
    """A counter of bytes or records."""

    value: float

    def add(self, amount: float = 1) -> None: ...


class KnownCuts(NamedTuple):
    """The cuts of a partition's log for the layouts below number `newest`."""

    newest: int = 0
    cuts: Cuts = NO_CUTS


NOTHING_ASKED = KnownCuts()


class Partition:
    """A partition with an open log, or offline with the reason."""

    __slots__ = (
        "_failures",
        "_now_ms",
        "_remembered",
        "_watchers",
        "bytes_in",
        "bytes_out",
        "cuts",
        "leadership",
        "log",
        "log_cuts",
        "messages_in",
        "name",
        "offline_reason",
        "settings",
        "snapshot_end",
        "table",
        "topic_id",
    )

    def __init__(
        self,
        name: TopicPartition,
        topic_id: UUID,
        log: PartitionLog,
        settings: TopicSettings,
        bytes_in: Counter,
        bytes_out: Counter,
        messages_in: Counter,
        *,
        remembered: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`remembered` is told of every producer more that the table holds by an append."""
        self.name = name
        self.topic_id = topic_id
        self.log = log
        self.settings = settings
        self.table = ProducerTable()
        self.leadership: Leadership | None = None
        self.offline_reason: str | None = None
        self.cuts = NOTHING_ASKED
        """The cuts of its log as they were asked for last (`server.partitions.cutting`)."""
        self.log_cuts = 0
        """How often records at the log's end were cut: what was read before may be of those."""
        self.snapshot_end = -1
        """Where the newest producer snapshot was taken."""
        self.bytes_in = bytes_in
        self.bytes_out = bytes_out
        self.messages_in = messages_in
        self._remembered = remembered
        self._now_ms = 0
        """The time of the last append, or of building the table."""
        self._failures: EventLimit | None = None
        self._watchers: dict[Watcher, None] | None = None
        log.observe(self)

    @property
    def leader_epoch(self) -> int:
        """The leader epoch of its role; NO_LEADER_EPOCH before it has taken one."""
        return NO_LEADER_EPOCH if self.leadership is None else self.leadership.leader_epoch

    @property
    def retiring(self) -> bool:
        """Whether its role takes no more appends."""
        return self.leadership is not None and self.leadership.retiring

    def is_folded_below(self, offset: int) -> bool:
        """Whether the records that lay there and are gone were folded back into another partition (ADR 0036)."""
        return self.retiring and self.settings.log.compact and offset < self.log.log_start

    @property
    def last_stable_offset(self) -> int:
        """Where readers of committed records stop."""
        return max(self.table.last_stable_offset(self.log.high_watermark), self.log.log_start)

    # -- appending -----------------------------------------------------------------------------------------------

    def append(self, data: bytearray | memoryview, header: BatchHeader, now_ms: int) -> Appended:
        """Append one checked batch and remember its producer. OSError when the disk refuses; nothing changed then."""
        self._now_ms = now_ms
        role = self.leadership
        appended = self.log.append(data, NO_LEADER_EPOCH if role is None else role.leader_epoch, now_ms, header)
        if header.producer_id >= 0:
            marker = _marker(data) if header.attributes & CONTROL else None
            table = self.table
            known = len(table)
            table.apply(header, now_ms, marker, appended.base_offset)
            if len(table) > known:
                self._remembered(1)
            if marker is not None:
                self.table.last_stable_offset(self.log.high_watermark)  # It forgets transactions that have ended.
        self.bytes_in.value += header.size
        self.messages_in.value += header.record_count
        if self._watchers is not None and not self.settings.fsync:
            self.changed()
        return appended

    def storage_failed(self, error: OSError) -> None:
        """Log that the disk refused an append or a read, at most every FAILURE_INTERVAL_S seconds."""
        if error.errno != errno.EMFILE:  # Of all logs alike: said once, where files are opened.
            self.failed("append refused by the disk", error)

    def failed(self, event: str, error: Exception) -> None:
        """Log that the log could not be read or written, at most every FAILURE_INTERVAL_S: clients ask ever again."""
        self._failures = self._failures or EventLimit(FAILURE_INTERVAL_S)
        suppressed = self._failures.admit(time.monotonic())
        if suppressed is not None:
            events.error(event, partition=self.name, reason=error, suppressed=suppressed)

    def high_watermark_moved(self) -> None:
        """A sync is done: call the watchers, as more records may be read."""
        self.changed()

    # -- producers -----------------------------------------------------------------------------------------------

    def rebuild_table(self, now_ms: int) -> None:
        """Fold the producer table anew."""
        self.take_table(fold_producers(self.log, now_ms), now_ms)

    def take_table(self, folded: Folded, now_ms: int) -> None:
        """Take the producer table that was folded of the log."""
        self._now_ms = now_ms
        self.table, self.snapshot_end = folded

    def save_inherited(self) -> None:
        """Save the table of the removed partition of this name beside the new log. Blocks; OSError."""
        self.log.write_snapshot(self.table.snapshot())
        self.log.checkpoint()  # A log reads a snapshot only if its log start is durably recorded.
        self.snapshot_end = self.log.end

    def snapshot(self) -> None:
        """Save the producer table beside the log, unless the newest snapshot has it all. Blocks; OSError."""
        if self.snapshot_end != self.log.end and (len(self.table) or self.snapshot_end >= 0):
            self.log.write_snapshot(self.table.snapshot())
            self.snapshot_end = self.log.end

    def before_delete(self, start: int) -> None:
        """Save the producers of the records below `start` before their deletion. Blocks; OSError."""
        if len(self.table) and not self.log.has_snapshot_from(start):
            self._sync_tail()
            self.snapshot()

    async def prepare_delete(self, start: int) -> None:
        """Write beside the loop what a deletion of the records below `start` needs: it then finds that done. OSError.

        The producers come first: a power loss must not take them with records whose deletion is noted already. The
        replica may have been stopped when this returns.
        """
        await self.note_delete(start)
        if self.unavailable() is ErrorCode.NONE:
            await self.log.checkpoint_beside(start)

    async def note_delete(self, start: int) -> None:
        """As `prepare_delete`; but the checkpoints are still to be saved, once for many logs. OSError."""
        await self.save_producers(start)
        if self.log.flushed < start:
            await self.log.commit()
        if self.unavailable() is ErrorCode.NONE:
            self.log.note_points(start)

    async def save_producers(self, start: int) -> None:
        """Save the producers of the records below `start`, so that a power loss does not take them, either. OSError."""
        if len(self.table) and not self.log.has_snapshot_from(start):
            await self.snapshot_beside()
            if not self.log.has_snapshot_from(start):
                await self.log.commit()

    async def snapshot_beside(self) -> None:
        """As `snapshot`, without blocking the loop. OSError."""
        end = self.log.end
        if await self.log.write_snapshot_beside(self.table.copy().snapshot):
            self.snapshot_end = max(self.snapshot_end, end)

    def _sync_tail(self) -> None:
        """Sync the log: a power loss that cuts its end takes the snapshots taken there with it."""
        if self.log.flushed < self.log.end:
            self.log.flush()

    async def forget_aborted(self, markers: Collection[int]) -> bool:
        """Forget, durably, the transactions of markers that are about to be compacted away. OSError.

        False if the log was cut meanwhile: then the markers must stay.
        """
        if self.log.flushed < self.log.end:
            await self.log.commit()
        table = self.table
        newest, without = table.aborted.newest_marker, table.aborted.copy().without
        kept = await asyncio.get_running_loop().run_in_executor(None, without, markers)
        if self.table is not table:
            return False
        kept.follow(table.aborted, newest)
        table.aborted = kept
        end = self.log.end
        if not await self.log.write_snapshot_beside(self.table.copy().snapshot, replace=True):
            return False
        self.snapshot_end = max(self.snapshot_end, end)
        if self.log.flushed < end:  # A power loss takes a snapshot with the records it is of.
            await self.log.commit()
        await self.log.forget_snapshots_below(end)  # They know the transactions still.
        return True

    def log_cut(self, end: int) -> None:
        """Unsynced records were cut after a failed sync: fold the table of those that are left."""
        events.warning("unsynced records cut after a failed sync", partition=self.name, log_end=end)
        self.log_cuts += 1
        try:
            self.rebuild_table(self._now_ms)
        except OfflineLogError as error:
            self.table = ProducerTable()  # The old one tells of batches that are gone.
            self.take_offline(str(error))
        self.changed()

    # -- waiting -------------------------------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` after every change, until `unwatch`."""
        if self._watchers is None:
            self._watchers = {}
        self._watchers[watcher] = None

    def unwatch(self, watcher: Watcher) -> None:
        """Stop calling `watcher`."""
        if self._watchers is not None:
            self._watchers.pop(watcher, None)
            if not self._watchers:
                self._watchers = None

    @property
    def watchers(self) -> int:
        """How many watch."""
        return len(self._watchers or ())

    def changed(self) -> None:
        """Call every watcher."""
        if self._watchers:
            for watcher in list(self._watchers):
                watcher()

    def deleted(self) -> None:
        """The log start has moved: forget what was told of the records below it, and call every watcher."""
        self.table.aborted.forget_before(self.log.log_start)
        self.changed()

    # -- its end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Save the producers, sync and close the log. Blocks; OSError."""
        self.leadership = None
        self.changed()
        if self.offline_reason is None:
            self.snapshot()
            self.log.close()

    def take_offline(self, reason: str) -> None:
        """Serve this partition no more, and log why; other partitions are not touched."""
        self.offline_reason = reason
        events.error("partition offline", partition=self.name, reason=reason)
        self.changed()

    def unavailable(self) -> ErrorCode:
        """The error for requests while nothing can be read or appended; NONE where it can."""
        if self.offline_reason is not None:
            return ErrorCode.KAFKA_STORAGE_ERROR
        return ErrorCode.NONE if self.leadership is not None else ErrorCode.NOT_LEADER_OR_FOLLOWER


class Folded(NamedTuple):
    """The producers of a log."""

    table: ProducerTable
    snapshot_end: int
    """Where the snapshot was taken that they were folded from; the log's start without one."""


def fold_producers(log: PartitionLog, now_ms: int) -> Folded:
    """Fold the producers of a log: the newest sound snapshot, then the batches after it.

    Blocks; OSError, OfflineLogError, also where producers of deleted records are lost with a damaged snapshot.
    """
    table, start = ProducerTable(), log.log_start
    newest = log.newest_snapshot(ProducerTable.restore)
    if newest is not None:
        table, start = newest[1], max(newest[0], start)
        table.seen_by(now_ms)
    if start < log.end:
        for header in log.headers_from(start):
            if header.base_offset >= start:
                table.apply(header, now_ms, _marker_at(log, header) if header.is_control else None)
    table.aborted.forget_before(log.log_start)
    return Folded(table, start)


def _marker_at(log: PartitionLog, header: BatchHeader) -> Marker | None:
    found = log.read(header.base_offset, 0, end=log.end)
    assert not isinstance(found, Awaitable), "the folded part of a log is near"
    return None if found is None else _marker(read_in(found.view()))


def _marker(batch: bytearray | memoryview) -> Marker | None:
    """Read the end of a transaction from a control batch; None from another one."""
    found = parse_end_transaction_marker(batch)
    return None if found is None else Marker(found.commit, found.coordinator_epoch)
