"""Fetches: read the records at hand, or wait for records without polling.

Slices that a log can read at once are read at once; pending ones are awaited together, before the response. Where a
deletion overtakes one, its reader is refused: with records the log forgets which of them were aborted.
A fetch that finds too little watches its partitions and reads again those that changed, until its budget is reached,
its time is over, or the broker stops. Records, errors and offsets that the reader's session has been sent before are
not answered again. Where only some records are asked for (`filtering`), a fetch that waits goes on where it has looked
last, and is woken by records that it wants. What fetches read and watch has a budget (`machines.held_memory`), for
which the waits of large ones are ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.machines.controller.leadership import Leadership, refuse_read
from anabranch.machines.held_memory import FetchMemory, FetchPart
from anabranch.machines.partition.aborted import AbortedTransaction
from anabranch.machines.partition.fetching import FetchBudget
from anabranch.machines.partition.sharing import Asked
from anabranch.runtime.loop_steps import timed
from anabranch.runtime.metrics import Metrics
from anabranch.runtime.turns import in_turns
from anabranch.server.partitions.fetch_sessions import FetchContext, FetchSessions, Target
from anabranch.server.partitions.filtering import FilteredSlice, FilterRefusedError, Filters
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from anabranch.storage.interface import OfflineLogError, OffsetOutOfRangeError, Slice

READS_AT_A_TIME = 200
"""Partitions that a fetch reads or watches before other work has its turn: 3 ms where all have records."""
PARTITION_SIZE = 1_000
"""Bytes of memory that a fetch takes for a partition: 900 were measured while it waits, 1,000 until it is answered."""
TopicNames = Callable[[UUID], str | None]
"""Finds the name of the topic that has an id."""


class EpochEnd(NamedTuple):
    """Where the newest leader epoch that leader and reader may share ended at the leader."""

    epoch: int
    end_offset: int


@dataclass(slots=True)
class PartitionRead:
    """The result of reading one target."""

    target: Target
    partition: Partition | None
    error: ErrorCode = ErrorCode.NONE
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start: int = -1
    found: Slice | None = None
    aborted: Sequence[AbortedTransaction] = ()
    """The aborted transactions with records in the slice found, for readers of committed records.

    Some that begin right behind it may be among them, where the slice does not know its end.
    """
    told: int = 0
    """How many of them the response has room for, or has; of one that is awaited at most so many."""
    diverging: EpochEnd | None = None
    """Set where the reader's log is not a prefix of the leader's; nothing is found then."""
    limit: int = -1
    """Only records below it are found."""
    folded: bool = False
    """Whether the reader may go on at the log start: what lay before it was written into another partition."""
    role: Leadership | None = None
    """The leader's role when it was read."""
    coming: asyncio.Future[Slice | None] | asyncio.Task[FilteredSlice] | None = None
    """The pending slice, while it must be waited for."""
    filtered_to: int = -1
    """Of all records below it those that were asked for are found; -1 where nothing is filtered."""

    @property
    def size(self) -> int:
        """Bytes found."""
        return 0 if self.found is None else self.found.size

    @property
    def stale(self) -> bool:
        """Whether the partition has changed since it was read."""
        partition = self.partition
        if partition is None or self.high_watermark < 0:
            return False
        log = partition.log
        now = partition.leadership, log.high_watermark, log.log_start
        return now != (self.role, self.high_watermark, self.log_start)

    @property
    def urgent(self) -> bool:
        """Whether the reader must hear of it at once."""
        return self.error is not ErrorCode.NONE or self.diverging is not None


def memory_of(targets: Iterable[Target]) -> int:
    """The bytes of memory that a fetch takes for some targets."""
    return sum(PARTITION_SIZE if target.asked is None else PARTITION_SIZE + target.size for target in targets)


class Fetches:
    """The fetches of one broker: their sessions, and those that wait."""

    def __init__(
        self,
        replicas: Replicas,
        sessions: FetchSessions,
        topic_names: TopicNames,
        filters: Filters,
        memory: FetchMemory,
        *,
        size_max: int,
    ) -> None:
        """`size_max`: the most bytes of one answer, unless a single batch is larger."""
        self.sessions = sessions
        self.memory = memory
        self.filters = filters
        self.size_max = size_max
        self.stopping = False
        self.waiting: set[asyncio.Future[None]] = set()
        self._replicas = replicas
        self._topic_names = topic_names

    def describe_in(self, metrics: Metrics) -> None:
        """Have the sessions and the memory of fetches measured."""
        gauge, sessions, memory = metrics.gauge, self.sessions, self.memory
        name = "kafka_server_fetchsessioncache_"
        gauge(f"{name}numfetchsessions", "Fetch sessions.", lambda: len(sessions))
        gauge(f"{name}bytes", "Memory for fetch sessions.", lambda: sessions.size)
        gauge(f"{name}evictions", "Fetch sessions evicted.", lambda: sessions.evictions)
        gauge("anabranch_fetch_bytes", "Memory for partitions that fetches read and watch.", lambda: memory.held)
        gauge("anabranch_fetch_waiting", "Large fetches that wait for it.", lambda: memory.waiting)
        gauge("anabranch_fetch_waits_ended", "Waits for records that others ended for it.", lambda: memory.ended)

    def stop(self) -> None:
        """End all waiting fetches: each is answered with the records found so far."""
        self.stopping = True
        for waiting in self.waiting:
            if not waiting.done():
                waiting.set_result(None)

    def locate(self, target: Target) -> Partition | ErrorCode:
        """Find the partition that a target names by topic name or id, or why nothing can be read from it."""
        name = target.topic
        if target.topic_id != NO_TOPIC_ID:
            known = self._topic_names(target.topic_id)
            if known is None:
                return ErrorCode.UNKNOWN_TOPIC_ID
            name = known
        partition = self._replicas.get(name, target.partition)
        if partition is None:
            return self._replicas.missing(name, target.partition)
        if target.topic_id not in (NO_TOPIC_ID, partition.topic_id):
            return ErrorCode.INCONSISTENT_TOPIC_ID
        return partition


class Fetch:
    """One fetch on its way to its answer."""

    __slots__ = ("_budget", "_fetches", "_part", "_reads", "coming", "committed", "context")

    def __init__(
        self,
        fetches: Fetches,
        context: FetchContext,
        budget: FetchBudget,
        *,
        committed: bool,
        reads: list[PartitionRead] | None = None,
        part: FetchPart | None = None,
    ) -> None:
        """Read nothing yet, but put into `reads` what is read, in steps.

        `committed`: only records of committed transactions are wanted (READ_COMMITTED). `part`: the memory that the
        fetch holds, if it has taken its turn.
        """
        self._part = part
        self.context = context
        self.committed = committed
        self._fetches = fetches
        self._budget = budget
        self.coming: list[PartitionRead] = []
        """The reads that must be waited for, even by a fetch that is not to wait."""
        self._reads = [] if reads is None else reads

    def read(self) -> None:
        """Read every target."""
        self._reads = [self._read(target) for target in self.context.targets]

    async def read_in_steps(self) -> None:
        """Read every target; other work has its turn after every `READS_AT_A_TIME`."""
        async for target in in_turns(self.context.targets, READS_AT_A_TIME):
            self._reads.append(self._read(target))

    @property
    def complete(self) -> bool:
        """Whether to answer now."""
        return not self.coming and self._enough

    @property
    def _enough(self) -> bool:
        return self._budget.reached or not self._reads or self._fetches.stopping

    def _read(self, target: Target, before: PartitionRead | None = None) -> PartitionRead:
        """Read a target; `before` is what this fetch has read of it already."""
        partition = self._fetches.locate(target)
        if isinstance(partition, ErrorCode):
            return self._refuse(target, None, partition)
        role, log = partition.leadership, partition.log
        if role is None or partition.offline_reason is not None:
            return self._refuse(target, None, partition.unavailable())
        error = refuse_read(role, target.undeleted_partition_count, target.leader_epoch)
        if error is not ErrorCode.NONE:
            return self._refuse(target, partition, error)
        high_watermark, stable = log.high_watermark, partition.last_stable_offset
        read = PartitionRead(target, partition, ErrorCode.NONE, high_watermark, stable, log.log_start, role=role)
        if target.last_fetched_epoch >= 0:
            epoch, end = log.end_offset_for_epoch(target.last_fetched_epoch)
            if epoch < target.last_fetched_epoch or end < target.offset:
                read.diverging = EpochEnd(epoch, end)
                self._budget.urgent = True
                return read
        if target.asked is not None:
            read.filtered_to = target.offset
        room = self._budget.room(target.size_max)
        if room is None:
            return read
        read.limit = limit = self._committed_limit(read, partition) if self.committed else high_watermark
        if target.asked is not None:
            return self._read_some(read, partition, room, before)
        try:
            found = log.read(target.offset, room, end=limit)
        except (OffsetOutOfRangeError, OfflineLogError, OSError) as failure:
            return self._fail(read, partition, failure)
        if found is None:
            self._tell(read, 0)
            return read
        if isinstance(found, Slice):
            self._take(read, partition, found)
        else:
            read.coming = asyncio.ensure_future(found)
            self.coming.append(read)
        return read

    def _committed_limit(self, read: PartitionRead, partition: Partition) -> int:
        """Where a read of committed records ends: the reader asks at once for what is behind too many aborted ones."""
        stable, budget = read.last_stable_offset, self._budget
        limit, count = partition.table.aborted.reach(read.target.offset, stable, budget.aborted_room)
        self._tell(read, count)
        budget.urgent |= limit < stable
        return limit

    def _tell(self, read: PartitionRead, count: int) -> None:
        """Note how many aborted transactions the reader is told of, at most while the slice is awaited."""
        self._budget.aborted += count - read.told
        read.told = count

    def _read_some(
        self, read: PartitionRead, partition: Partition, room: int, before: PartitionRead | None
    ) -> PartitionRead:
        """Read what is asked for, after what was read before under the same role."""
        target, asked, log = read.target, read.target.asked, partition.log
        if isinstance(asked, ErrorCode):
            return self._refuse(target, partition, asked)
        assert asked is not None
        if not partition.settings.accepts_range_fetch:
            return self._refuse(target, partition, ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED)
        if not log.log_start <= target.offset <= log.end:
            return self._fail(read, partition, OffsetOutOfRangeError(f"{target.offset}"))
        if before is not None and before.role is read.role and before.filtered_to > target.offset:
            if before.found is not None and before.size and not self._budget.take(before.size):
                return read
            read.found, read.filtered_to, read.aborted = before.found, before.filtered_to, before.aborted
        if read.filtered_to < read.limit:
            room = max(0, room - read.size)
            wanted = self._fetches.filters.read(partition, asked, read.filtered_to, read.limit, room)
            read.coming = asyncio.ensure_future(wanted)
            self.coming.append(read)
        return read

    def _refuse(self, target: Target, partition: Partition | None, error: ErrorCode) -> PartitionRead:
        self._budget.urgent = True
        return PartitionRead(target, partition, error)

    def _fail(self, read: PartitionRead, partition: Partition, failure: Exception) -> PartitionRead:
        """Answer for a log that could not be read."""
        if isinstance(failure, OffsetOutOfRangeError):
            self._budget.urgent = True
            read.error, read.found, read.aborted = ErrorCode.OFFSET_OUT_OF_RANGE, None, ()
            read.log_start = partition.log.log_start
            read.folded = partition.is_folded_below(read.target.offset)
            return read
        if isinstance(failure, FilterRefusedError):
            return self._refuse(read.target, partition, failure.code)
        if isinstance(failure, DecodeError):
            partition.failed("records not filtered", failure)
            return self._refuse(read.target, partition, ErrorCode.CORRUPT_MESSAGE)
        if isinstance(failure, OSError):
            partition.storage_failed(failure)
        else:
            partition.take_offline(str(failure))
        return self._refuse(read.target, None, ErrorCode.KAFKA_STORAGE_ERROR)

    def _take(self, read: PartitionRead, partition: Partition, found: Slice) -> None:
        """Take the slice found, if the response has room for it."""
        if isinstance(found, FilteredSlice):
            self._take_some(read, partition, found)
        elif self._budget.take(found.size):
            read.found = found
            self._note_aborted(read, partition, found)

    def _take_some(self, read: PartitionRead, partition: Partition, found: FilteredSlice) -> None:
        """Take what was asked for, behind what was taken before."""
        if found.size and not self._budget.take(found.size):
            assert isinstance(read.target.asked, Asked)
            self._fetches.filters.give_back(partition, read.target.asked, read.filtered_to, found)
            return
        kept = read.found
        if found.size:
            before = kept.parts if isinstance(kept, FilteredSlice) else ()
            read.found = FilteredSlice((*before, *found.parts), found.filtered_to)
        read.filtered_to = found.filtered_to
        if read.found is not None:
            self._note_aborted(read, partition, read.found)
        if read.filtered_to < read.limit:
            self._budget.urgent = True  # The reader asks for the rest: nothing will wake this fetch.

    def _note_aborted(self, read: PartitionRead, partition: Partition, found: Slice) -> None:
        """Note for a reader of committed records the aborted transactions with records in what was found."""
        aborted = partition.table.aborted
        if not self.committed or not len(aborted):
            return
        end = found.next_offset()
        read.aborted = aborted.between(read.target.offset, read.limit if end is None else min(read.limit, end))
        self._tell(read, len(read.aborted))

    async def _arrive(self) -> None:
        """Wait for the pending slices, and take them in the order of the targets."""
        while self.coming:
            waits = [read.coming for read in self.coming if read.coming is not None]
            try:
                await asyncio.wait(waits)
            except asyncio.CancelledError:
                for wait in waits:
                    wait.cancel()
                raise
            arrived, self.coming = self.coming, []
            for read in arrived:
                assert read.coming is not None
                assert read.partition is not None
                failure = read.coming.exception() or _overtaken(read, read.partition)
                if isinstance(failure, _FAILURES):
                    index = next(index for index, each in enumerate(self._reads) if each is read)
                    self._reads[index] = self._fail(read, read.partition, failure)
                elif failure is not None:
                    raise failure
                else:
                    found = read.coming.result()
                    if found is not None:
                        self._take(read, read.partition, found)
                read.coming = None

    async def wait(self, wait_max_ms: int) -> None:
        """Wait until complete, until the reader's limit, or until others need the memory of this fetch.

        Pending slices are awaited in any case.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        changed: set[int] = set()
        over = False

        def end() -> None:
            nonlocal over
            over = True
            _finish(done)

        def read_again() -> None:
            if self.coming:
                return  # `wait` calls again when the reads have arrived.
            if done.done():
                return
            indexes = sorted(islice(changed, READS_AT_A_TIME))
            changed.difference_update(indexes)
            if changed:
                loop.call_soon(timed(loop, "Fetch", again[0]))
            for index in indexes:
                before = self._reads[index]
                self._budget.give_back(before.size, before.told)
                self._reads[index] = self._read(before.target, before)
            if self._enough or self.coming:
                done.set_result(None)

        def on_change(index: int) -> None:
            if not changed:
                loop.call_soon(timed(loop, "Fetch", again[0]))
            changed.add(index)

        again = [read_again]
        watchers: list[tuple[Partition, Callable[[], None]]] = []
        timer = loop.call_later(wait_max_ms / 1000, end)
        self._fetches.waiting.add(done)
        memory, part = self._fetches.memory, self._part or FetchPart()
        if part is not self._part:
            memory.hold(part, memory_of(self.context.targets))
        memory.wait(part, end)
        try:
            for index, read in enumerate(self._reads):
                if read.partition is not None:
                    watcher: Callable[[], None] = partial(on_change, index)
                    read.partition.watch(watcher)
                    watchers.append((read.partition, watcher))
                    if read.stale:  # It changed before it was watched.
                        on_change(index)
                if index % READS_AT_A_TIME == READS_AT_A_TIME - 1:
                    await asyncio.sleep(0)
                    if over:
                        break
            while True:
                await self._arrive()
                if self._enough or over:
                    break
                if done.done():  # What was waited for has arrived, and is too little.
                    self._fetches.waiting.discard(done)
                    done = loop.create_future()
                    self._fetches.waiting.add(done)
                read_again()
                await done
        finally:
            memory.resume(part)
            if part is not self._part:
                memory.free(part)
            self._fetches.waiting.discard(done)
            timer.cancel()
            _finish(done)  # `read_again`, which may be due, does nothing any more.
            while watchers:  # Freed in steps, too.
                for _ in range(min(len(watchers), 5 * READS_AT_A_TIME)):
                    partition, watcher = watchers.pop()
                    partition.unwatch(watcher)
                if watchers:
                    await asyncio.sleep(0)
            again.clear()  # Or `read_again`, which calls itself again, holds itself, and all that was read.

    def answer(self) -> Iterator[PartitionRead | None]:
        """Give each read, once; None for those that have not changed since the last response of their session."""
        session, incremental = self.context.session, self.context.incremental
        for read in self._reads:
            target = read.target
            changed = target.note_sent(
                size=read.size, error=read.error, high_watermark=read.high_watermark, log_start=read.log_start
            )
            if session is not None:
                session.sent(target)
            moved = read.filtered_to > target.offset
            if incremental and not changed and not moved and not read.urgent:
                yield None
                continue
            if session is not None and read.size:
                session.to_the_back(target)
            if read.partition is not None and read.found is not None:
                read.partition.bytes_out.add(read.found.size)
            yield read


_FAILURES = OffsetOutOfRangeError, OfflineLogError, OSError, DecodeError, FilterRefusedError


def _overtaken(read: PartitionRead, partition: Partition) -> OffsetOutOfRangeError | None:
    """Return the error of a read that a deletion overtook: which of its records were aborted is not known any more."""
    offset, log_start = read.target.offset, partition.log.log_start
    return None if offset >= log_start else OffsetOutOfRangeError(f"{offset} is below {log_start}")


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
