"""The partitions that live on this broker: opened, given roles, flushed, retained, deleted.

The controller's orders (`SendLeaderAndIsr`, `SendStopReplica`) are carried out here. Each role is taken in one step of
the loop, so that no append is half under the old count and half under the new. A log that is damaged takes its
partition offline and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.base.limits import DISK_FREE_SIZE_MIN, PRODUCERS_SIZE_MAX, RECOVERY_THREADS
from anabranch.machines.controller.effects import Role, SendLeaderAndIsr, SendStopReplica
from anabranch.machines.controller.leadership import Leadership, Taken, take_role
from anabranch.machines.partition.producers import ProducerTable
from anabranch.machines.placement import level_size
from anabranch.runtime.clock import Clock, PatientTime, SteadyTime
from anabranch.runtime.descriptors import patiently, patiently_in_loop
from anabranch.runtime.disk import Disk
from anabranch.runtime.events import EventLogger
from anabranch.runtime.metrics import Metrics
from anabranch.runtime.syncs import Told
from anabranch.runtime.turns import in_turns, spent_in_parts
from anabranch.server.partitions.disk_space import DeletionRoom, DiskSpace
from anabranch.server.partitions.opening import refusal
from anabranch.server.partitions.partition import Counter, Folded, Partition, fold_producers
from anabranch.server.partitions.producer_budget import ProducerBudget, expire_producers
from anabranch.server.partitions.removal import LogRemoval
from anabranch.server.partitions.removed import RemovedPartition, RemovedPartitions
from anabranch.server.partitions.topic_settings import TopicSettings
from anabranch.server.partitions.upkeep_failures import of_retention
from anabranch.storage.directory import DataDirectory
from anabranch.storage.interface import OfflineLogError, PartitionLog
from anabranch.storage.log.dropped import DroppedSegments
from anabranch.storage.log.group_commit import GroupCommit
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.marks import retained_before
from anabranch.storage.log.open_files import OpenFiles

events = EventLogger("replicas")
COMMITTED_AT_A_TIME = 64
"""Partitions of which a sync is begun before other work has its turn."""
OPENED_AT_A_TIME = 32
"""Logs that a thread opens, and the loop takes over, in one go."""
T = TypeVar("T")
CLOSED_AT_A_TIME = 200
"""Partitions that a thread closes in one go."""
CONFIGURED_AT_A_TIME = 500
"""Partitions that take new configs, or are let go of, before other work has its turn."""
SNAPSHOT_INTERVAL_RECORDS = 200_000
"""Records after which the producers of a partition are kept anew, so that a restart reads few batches."""


class Replicas:
    """All partitions of this broker, by topic and number."""

    def __init__(
        self,
        directory: DataDirectory,
        *,
        disk: Disk,
        clock: Clock,
        metrics: Metrics,
        settings_of: Callable[[str], TopicSettings],
        commits: GroupCommit | None = None,
        files: OpenFiles | None = None,
        producers_size_max: int = PRODUCERS_SIZE_MAX,
        disk_free_min: int = DISK_FREE_SIZE_MIN,
    ) -> None:
        """Open nothing yet. OSError if the tables of removed partitions cannot be read.

        `producers_size_max`: bytes of memory for all that is remembered of producers. `disk_free_min`: bytes of the
        disk that records leave free.
        """
        self._directory = directory
        self._disk = disk
        self.time = SteadyTime(clock)
        """The time of producers, and of appends."""
        self.age = PatientTime(clock)
        """The time by which records are old."""
        self._metrics = metrics
        self._upkeep_failures = of_retention(metrics, clock, events)
        self._settings_of = settings_of
        self._checkpoints = directory.checkpoints
        self.removed = RemovedPartitions(directory.path, disk)
        self._topics: dict[str, dict[int, Partition]] = {}
        self._all: dict[TopicPartition, Partition] = {}
        """The same, to be listed: that is cheap, however many topics there are."""
        self.range_fetched: dict[TopicPartition, Partition] = {}
        """Those whose topic allows fetches of ranges of keys."""
        self.producers = ProducerBudget(self._producer_tables, clock, producers_size_max)
        self.producers.took(sum(map(len, self.removed.tables())))
        self.space = DiskSpace(partial(disk.free, directory.path), clock, metrics, free_min=disk_free_min)
        self._unopened = set(directory.logs())
        """The logs from before the start that no role has had opened yet."""
        self._closed: set[TopicPartition] = set()  # Logs that could not be opened: the controller has that done again.
        self._threads = ThreadPoolExecutor(RECOVERY_THREADS, thread_name_prefix="log")
        self._cleaner_thread = ThreadPoolExecutor(1, thread_name_prefix="cleaner")
        self._scrubber_thread = ThreadPoolExecutor(1, thread_name_prefix="scrubber")
        self._held: set[tuple[TopicPartition, asyncio.Future[None]]] = set()
        """The logs whose files are being replaced; who removes a log waits until that is done."""
        self.commits, self.files = commits or GroupCommit(), OpenFiles() if files is None else files
        self.room = DeletionRoom(directory, self.in_thread)
        self.removal = LogRemoval(directory, self.in_thread)

    def get(self, topic: str, partition: int) -> Partition | None:
        """The partition, if it lives here."""
        return None if (found := self._topics.get(topic)) is None else found.get(partition)

    def missing(self, topic: str, partition: int) -> ErrorCode:
        """Why `get` finds nothing: the partition does not live here, or its log could not be opened yet."""
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return ErrorCode.KAFKA_STORAGE_ERROR if (topic, partition) in self._closed else unknown

    def __iter__(self) -> Iterator[Partition]:
        return iter([*self._all.values()])

    def __len__(self) -> int:
        return len(self._all)

    def _producer_tables(self) -> Iterator[ProducerTable]:
        yield from self.removed.tables()
        for partition in self:
            yield partition.table

    def count_of(self, topic: str) -> int:
        """How many partitions of a topic live here."""
        return len(self._topics.get(topic, ()))

    def of_topic(self, topic: str) -> list[Partition]:
        """The partitions of a topic that live here."""
        return [*self._topics.get(topic, {}).values()]

    def role_in(self, topic: str) -> Leadership | None:
        """The role of one of a topic's partitions here, for what is the same in all of them; None without any."""
        roles = (partition.leadership for partition in self._topics.get(topic, {}).values())
        return next((role for role in roles if role is not None), None)

    def _add(self, partition: Partition) -> None:
        self._topics.setdefault(partition.name.topic, {})[partition.name.partition] = partition
        self._all[partition.name] = partition
        self._list_range_fetched(partition)

    def _list_range_fetched(self, partition: Partition) -> None:
        if partition.settings.accepts_range_fetch:
            self.range_fetched[partition.name] = partition
        else:
            self.range_fetched.pop(partition.name, None)

    def _remove(self, partition: Partition) -> None:
        found = self._topics[partition.name.topic]
        del found[partition.name.partition], self._all[partition.name]
        self.range_fetched.pop(partition.name, None)
        if not found:
            del self._topics[partition.name.topic]

    def is_compacted(self, topic: str) -> bool:
        """Whether a topic with partitions here keeps the last record of each key."""
        return (first := self.get(topic, 0)) is not None and first.settings.log.compact

    def ancestors_of(self, topic: str, number: int, initial_count: int) -> list[Partition]:
        """The partitions here that a stock producer's batches for this one may have been redirected to."""
        found: list[Partition] = []
        while number >= initial_count:
            number -= level_size(number, initial_count)
            other = self.get(topic, number)
            if other is not None:
                found.append(other)
        return found

    # -- the controller's orders -----------------------------------------------------------------------------------

    async def take_roles(self, order: SendLeaderAndIsr) -> dict[int, ErrorCode]:
        """Carry out a LeaderAndIsr; an error code for each partition."""
        missing = [role async for role in in_turns(order.roles) if self.get(order.topic, role.partition) is None]
        if missing:
            await self._open_all(order, missing)
        await self._sync_ahead(order)
        errors: dict[int, ErrorCode] = {}
        ended: list[Partition] = []
        async for role in in_turns(order.roles):
            partition = self.get(order.topic, role.partition)
            if partition is None:
                errors[role.partition] = ErrorCode.KAFKA_STORAGE_ERROR
                continue
            try:
                taken = await patiently_in_loop(partial(self._take_role, partition, order, role))
            except OSError as error:
                events.error("role not taken", partition=partition.name, reason=error)
                errors[role.partition] = ErrorCode.KAFKA_STORAGE_ERROR
                continue
            errors[role.partition] = taken.error
            if taken.final_end and partition.log.flushed < partition.log.end:
                ended.append(partition)
        if ended:
            await self._sync_ends(ended, errors)
        return errors

    async def _sync_ahead(self, order: SendLeaderAndIsr) -> None:
        """Sync the partitions whose segments are about to end, while they still take appends.

        Producers are refused from the change of roles until the resize ends; then little is left to sync. A sync that
        fails here fails again after the change of roles, where it counts.
        """
        behind: list[Partition] = []
        async for role in in_turns(order.roles):
            partition = self.get(order.topic, role.partition)
            if partition is None or partition.log.flushed >= partition.log.end or partition.offline_reason is not None:
                continue
            if take_role(partition.leadership, order, role, partition.log.epochs.latest).final_end:
                behind.append(partition)
        if behind:
            for synced in await self._commit_all(behind):
                with contextlib.suppress(OSError):
                    await synced

    async def _sync_ends(self, ended: Sequence[Partition], errors: dict[int, ErrorCode]) -> None:
        """Sync the partitions whose segments have ended, before the controller relies on their ends."""
        for partition, synced in zip(ended, await self._commit_all(ended), strict=True):
            try:
                await synced
            except OSError as failure:
                events.error("end of a segment not synced", partition=partition.name, reason=failure)
                errors[partition.name.partition] = ErrorCode.KAFKA_STORAGE_ERROR

    async def _commit_all(self, partitions: Sequence[Partition]) -> list[asyncio.Future[None]]:
        """Begin to make the records of partitions durable, as `commit`."""
        return [self.commit(partition) async for partition in in_turns(partitions, COMMITTED_AT_A_TIME)]

    def _take_role(self, partition: Partition, order: SendLeaderAndIsr, role: Role) -> Taken:
        if partition.offline_reason is not None:
            partition.topic_id = order.topic_id
            return Taken(None, ErrorCode.KAFKA_STORAGE_ERROR)
        latest = partition.log.epochs.latest
        if partition.leadership is None and latest > role.leader_epoch:
            partition.take_offline(
                f"the log of {partition.name} has leader epoch {latest}, the metadata only {role.leader_epoch}: "
                "leader-epoch-checkpoint is damaged, or the epoch of a batch, which no checksum covers, or "
                "metadata.sqlite is older than the log. Restore the right one from a copy."
            )
            partition.topic_id = order.topic_id
            return Taken(None, ErrorCode.KAFKA_STORAGE_ERROR)
        taken = take_role(partition.leadership, order, role, latest)
        if taken.error is not ErrorCode.NONE:
            return taken
        if taken.start_epoch is not None:
            partition.log.start_epoch(taken.start_epoch)
        if partition.leadership != taken.leadership:
            partition.leadership = taken.leadership
            partition.changed()
        return taken

    async def _open_all(self, order: SendLeaderAndIsr, roles: Sequence[Role]) -> None:
        settings = self._settings_of(order.topic)
        some = (roles[begin : begin + OPENED_AT_A_TIME] for begin in range(0, len(roles), OPENED_AT_A_TIME))

        async def open_on() -> None:
            for chosen in some:
                await self._open_some(order, chosen, settings)

        await asyncio.gather(*(open_on() for _ in range(RECOVERY_THREADS)))
        if self._settings_of(order.topic) != settings:  # The configs were changed while the logs were opened.
            await self.apply_settings(order.topic)

    async def _open_some(self, order: SendLeaderAndIsr, roles: Sequence[Role], settings: TopicSettings) -> None:
        names = [TopicPartition(order.topic, role.partition) for role in roles]
        opened = await self.in_thread(
            lambda: [self._open(name, role, settings) for name, role in zip(names, roles, strict=True)]
        )
        counters = self._counters(order.topic)
        adopted = [self._adopt(name, order, settings, *it, counters) for name, it in zip(names, opened, strict=True)]
        partitions = [partition for partition in adopted if partition is not None]
        heirs = [partition for partition in partitions if self._inherits(partition)]
        if heirs:
            # Until the inherited producers are durable, requests find the removed partitions.
            await self.in_thread(lambda: self._save_inherited(heirs))
        for partition in partitions:
            self._add(partition)
            self._unopened -= {partition.name}
            if partition.offline_reason is None:
                self.removed.forget(partition.name)

    def _open(
        self, name: TopicPartition, role: Role, settings: TopicSettings
    ) -> tuple[PartitionLog | OSError | OfflineLogError, Folded | OSError | OfflineLogError | None]:
        """Open a log, and fold its producers. Blocks."""
        try:
            log = patiently(lambda: self._open_log(name, settings, role.start_offset))
            if log.log_start == log.end < role.start_offset:
                # An empty log of an earlier life, or one that a crash left half made: it must go on where that ended.
                log.close()
                self._directory.remove_log(name)
                self._checkpoints.forget(str(name))
                log = self._open_log(name, settings, role.start_offset)
        except Exception as error:
            return refusal(name, error), None
        try:
            return log, patiently(lambda: fold_producers(log, self.time.now_ms()))
        except Exception as error:
            return log, refusal(name, error)

    def _open_log(self, name: TopicPartition, settings: TopicSettings, start_offset: int = 0) -> PartitionLog:
        return self._directory.open_log(name, settings.log, start_offset=start_offset, commits=self.commits)

    def _adopt(
        self,
        name: TopicPartition,
        order: SendLeaderAndIsr,
        settings: TopicSettings,
        log: PartitionLog | OSError | OfflineLogError,
        folded: Folded | OSError | OfflineLogError | None,
        counters: tuple[Counter, Counter, Counter],
    ) -> Partition | None:
        """Make a partition of an open log, offline if the log is damaged; None if it could not be opened."""
        if isinstance(log, OSError):
            events.error("log not opened", partition=name, reason=log)
            self._closed.add(name)
            return None
        reason = None
        if isinstance(log, OfflineLogError):
            log, reason = self._closed_log(name, settings), str(log)
        partition = Partition(name, order.topic_id, log, settings, *counters, remembered=self.producers.took)
        if isinstance(folded, Exception):
            reason = str(folded)
        if reason is not None:
            partition.take_offline(reason)
            return partition
        assert isinstance(folded, Folded)
        partition.take_table(folded, self.time.now_ms())
        self.producers.took(len(partition.table))
        if isinstance(log, LocalLog):
            log.segments.share(self.files, log.commit_then)
        return partition

    def _counters(self, topic: str) -> tuple[Counter, Counter, Counter]:
        count, name = self._metrics.counter, "kafka_server_brokertopicmetrics"
        return (
            count(f"{name}_bytesin_total", "Bytes appended.", topic=topic),
            count(f"{name}_bytesout_total", "Bytes fetched.", topic=topic),
            count(f"{name}_messagesin_total", "Records appended.", topic=topic),
        )

    def count_stale_batch(self, topic: str) -> None:
        """Count a batch whose producer placed its records by an old partition count."""
        doc = "Batches refused for an old partition count."
        self._metrics.counter("anabranch_produce_stalebatches_total", doc, topic=topic).add()

    def _closed_log(self, name: TopicPartition, settings: TopicSettings) -> PartitionLog:
        """A log that holds nothing, in place of one that is damaged."""
        return LocalLog(self._directory.log_path(name), settings.log, self._disk, commits=self.commits)

    def _inherits(self, partition: Partition) -> bool:
        """Give a recreated partition the table of its predecessor; return whether the table must be saved.

        A partition with the table from before a crash keeps its own.
        """
        earlier = self.removed.table(partition.name, partition.topic_id)
        log = partition.log
        if earlier is None or partition.offline_reason is not None or log.log_start < log.end or len(partition.table):
            return False
        partition.table = earlier
        return len(earlier) > 0

    def _save_inherited(self, partitions: Iterable[Partition]) -> None:
        """Save the inherited tables of partitions beside their logs. Blocks."""
        for partition in partitions:
            try:
                patiently(partition.save_inherited)
            except OSError as error:
                partition.take_offline(str(error))

    async def stop(self, order: SendStopReplica) -> dict[int, ErrorCode]:
        """Carry out a StopReplica: delete the logs, keep their producer tables; return an error code for each."""
        errors: dict[int, ErrorCode] = {}
        doomed: list[TopicPartition] = []
        removed: dict[UUID, set[int]] = {}
        gone: list[Partition] = []
        async for number, leader_epoch in in_turns(order.partitions, COMMITTED_AT_A_TIME):
            partition = self.get(order.topic, number)
            if partition is not None and order.topic_id not in (partition.topic_id, NO_TOPIC_ID):
                errors[number] = ErrorCode.NONE
                continue
            if partition is not None and partition.leader_epoch > leader_epoch >= 0:
                errors[number] = ErrorCode.FENCED_LEADER_EPOCH
                continue
            name = TopicPartition(order.topic, number)
            if partition is not None:
                self._remove(partition)
                if len(partition.table) or not order.topic_deleted:
                    self.removed.remember(name, order.topic_id, partition.table)
                partition.leadership = None
                partition.changed()
                if isinstance(partition.log, LocalLog):
                    partition.log.abandon()
                gone.append(partition)
                removed.setdefault(partition.topic_id, set()).add(number)
            doomed.append(name)
        self.removed.tell(removed)
        await self._let_go(order.topic, gone)
        try:
            keep = None if order.topic_deleted else partial(self._keep_producers, order.topic_id)
            async for names, failed in self.removal.remove(doomed, keep):
                for name, error in failed.items():
                    events.error("log not deleted", partition=name, reason=error)
                    errors[name.partition] = ErrorCode.KAFKA_STORAGE_ERROR
                for name in names:
                    self._unopened.discard(name)
                    self._closed.discard(name)
                    errors[name.partition] = ErrorCode.NONE
                await asyncio.sleep(0)
            if order.topic_deleted:
                await self.removed.forget_topic(order.topic)
            # The checkpoint of a deleted log must not apply to a topic that is made again.
            await self.in_thread(self._checkpoints.save)
        except OSError as error:
            events.error("checkpoints not saved", topic=order.topic, reason=error)
            return {number: ErrorCode.KAFKA_STORAGE_ERROR for number, _ in order.partitions}
        if not self.of_topic(order.topic):
            self._metrics.forget(topic=order.topic)
        return errors

    async def _let_go(self, topic: str, gone: list[Partition]) -> None:
        """Let go of removed partitions when nothing is done with their files any more; drop them from `gone`."""
        busy: list[Partition] = []
        removing: list[DroppedSegments] = []
        async for it in in_turns(gone, CONFIGURED_AT_A_TIME):
            if self.commits.is_busy(it.log):
                busy.append(it)
            removing += [it.log.dropped] if isinstance(it.log, LocalLog) and it.log.dropped.removing else []
        for dropped in removing:
            await self.in_thread(dropped.close)
        for some in spent_in_parts(busy, COMMITTED_AT_A_TIME):
            await asyncio.wait([self.commit(partition) for partition in some])
        if held := [it for name, it in self._held if name.topic == topic and self.get(*name) is None]:
            await asyncio.wait(held)
        for some in spent_in_parts(gone, CONFIGURED_AT_A_TIME):
            await self.in_thread(some.clear)  # Their files are closed: that takes the loop 15 ms.

    def _keep_producers(self, topic_id: UUID, name: TopicPartition) -> None:
        """Save the producer table of a log before its deletion. Blocks; OSError."""
        if self.removed.table(name, topic_id) is None:
            if not self._directory.has_log(name):
                return
            try:
                log = self._open_log(name, self._settings_of(name.topic))
                table, _ = fold_producers(log, self.time.now_ms())
                log.close()
            except OfflineLogError as error:
                events.warning("producers of a removed partition not kept", partition=name, reason=error)
                return
            self.removed.remember(name, topic_id, table)
        self.removed.save(name)

    def removed_partition(self, name: TopicPartition) -> RemovedPartition:
        """Return a removed partition for produce requests: its producer table and role."""
        first = self.get(name.topic, 0)
        role = None if first is None else first.leadership
        table = None if role is None else self._producers_of_removed(name, role.topic_id)
        return RemovedPartition(
            name,
            None if role is None or table is None else role.of_removed(name.partition),
            ProducerTable() if table is None else table,
            self._settings_of(name.topic) if first is None else first.settings,
        )

    def _producers_of_removed(self, name: TopicPartition, topic_id: UUID) -> ProducerTable | None:
        """The producers of a removed partition; None while its log from before the start is still to be read."""
        table = self.removed.table(name, topic_id)
        if table is None and name not in self._unopened:
            table = ProducerTable()
            self.removed.remember(name, topic_id, table)
        return table

    async def apply_settings(self, topic: str) -> None:
        """The configs of a topic changed: its logs go on with the new ones, all of them when this returns."""
        partitions = self.of_topic(topic)
        for begin in range(0, len(partitions), CONFIGURED_AT_A_TIME):
            settings = self._settings_of(topic)  # As they are now: they may have changed in another's turn.
            for partition in partitions[begin : begin + CONFIGURED_AT_A_TIME]:
                if self.get(*partition.name) is partition:
                    partition.settings = settings
                    self._list_range_fetched(partition)
                    partition.log.configure(settings.log)
                    partition.changed()
            await asyncio.sleep(0)

    # -- durability and upkeep ---------------------------------------------------------------------------------------

    def commit(self, partition: Partition) -> asyncio.Future[None]:
        """Make a partition's appended records durable; concurrent callers share one sync."""
        return partition.log.commit()

    def commit_then(self, partition: Partition, done: Told) -> None:
        """As `commit`; calls `done` with the OSError of the sync, or None."""
        partition.log.commit_then(done)

    async def maintain(self, producer_idle_max_ms: int) -> None:
        """Delete records past their retention, forget idle producers, save the others."""
        now_ms, old_by_ms = self.time.now_ms(), self.age.now_ms()
        for partition in self:
            if partition.offline_reason is not None or partition.leadership is None:
                continue
            try:
                await expire_producers(partition.table, now_ms, producer_idle_max_ms)
                await self._delete_expired(partition, old_by_ms)
                self._upkeep_failures.succeeded(partition.name)
            except Exception as error:  # Also a defect, which concerns this partition alone.
                self._upkeep_failures.failed(partition.name, error)
            await asyncio.sleep(0)
        self._upkeep_failures.forget(lambda name: self.get(*name) is None)
        try:
            await self.removed.expire(now_ms, producer_idle_max_ms)
        except OSError as error:
            events.warning("producers of removed partitions not forgotten", reason=error)

    async def _delete_expired(self, partition: Partition, now_ms: int) -> None:
        """Do the retention of one log, and save its producers from time to time; what blocks is done in threads."""
        log, role = partition.log, partition.leadership
        compacts = partition.settings.log.compact and role is not None and role.layout > 0
        before = retained_before(log) if compacts and isinstance(log, LocalLog) else None
        start = log.retained_from(now_ms, before)
        async with self.room.taken(needed=start > log.log_start):
            if start > log.log_start:
                await partition.prepare_delete(start)
            if log.end - partition.snapshot_end >= SNAPSHOT_INTERVAL_RECORDS and not partition.unavailable():
                if len(partition.table) or partition.snapshot_end >= 0:
                    await partition.snapshot_beside()
                if partition.unavailable() is ErrorCode.NONE:
                    await log.checkpoint_beside()
            if partition.unavailable() is not ErrorCode.NONE:
                return  # The replica was stopped meanwhile; the checkpoint of its log must stay forgotten.
            if log.retain(now_ms, before):
                partition.deleted()
            await log.remove_dropped()

    async def save_checkpoints(self) -> None:
        """Save where logs start and up to where they are synced, if that has changed. OSError."""
        await self.in_thread(self._checkpoints.save)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do work on the files of logs in one of the threads for logs."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def in_cleaner(self, work: Callable[[], T]) -> T:
        """Do long work of the cleaner in its thread: it keeps no log from being opened."""
        return await asyncio.get_running_loop().run_in_executor(self._cleaner_thread, work)

    async def in_scrubber(self, work: Callable[[], T]) -> T:
        """Do long work of the scrub in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._scrubber_thread, work)

    @contextlib.contextmanager
    def held(self, partition: Partition) -> Iterator[None]:
        """Keep the directory of a log from being removed meanwhile; several may hold it."""
        held = partition.name, asyncio.get_running_loop().create_future()
        self._held.add(held)
        try:
            yield
        finally:
            self._held.remove(held)
            held[1].set_result(None)

    async def close(self) -> bool:
        """Sync and close every log; whether all of them could be."""
        self.producers.close()
        await self.commits.drain()
        partitions = [*self]
        some = [partitions[begin : begin + CLOSED_AT_A_TIME] for begin in range(0, len(partitions), CLOSED_AT_A_TIME)]
        outcomes = await asyncio.gather(*(self.in_thread(partial(_close, each)) for each in some))
        self.commits.close()
        self._threads.shutdown()
        self._cleaner_thread.shutdown()
        self._scrubber_thread.shutdown()
        sound = all(outcomes)
        try:
            self._checkpoints.save()
        except OSError as error:
            events.error("checkpoints not saved", reason=error)
            return False
        return sound


def _close(partitions: Iterable[Partition]) -> bool:
    """Close partitions; whether all of them could be. Blocks."""
    sound = True
    for partition in partitions:
        try:
            partition.close()
        except Exception as error:  # The others are closed all the same.
            events.error("log not closed", partition=partition.name, reason=error)
            sound = False
    return sound
