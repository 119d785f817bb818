"""Fetch (API 1): reads what is there, or waits for it, without polling.

A fetch that finds fewer than `min_bytes` is parked: it watches its partitions and reads again those that changed,
until it has enough, something is wrong, or `max_wait_ms` are over. At least one batch is given, however large, if
there is any; beyond it `max_bytes` holds, and `partition_max_bytes` for each partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.machines.controller.leadership import refuse_read
from anabranch.protocol.messages.fetch import (
    AbortedTransaction,
    EpochEndOffset,
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    LeaderIdAndEpoch,
    PartitionData,
)
from anabranch.records.batch import headers
from anabranch.server.context import BrokerContext, RequestContext
from anabranch.server.partitions.fetch_sessions import Context, Key, Target
from anabranch.server.partitions.partition import Partition
from anabranch.storage.log.log import OfflineLogError, OffsetOutOfRangeError
from anabranch.storage.log.segment import LogSlice

READ_COMMITTED = 1
TOPIC_IDS_SINCE = 13


@dataclass(slots=True)
class Read:
    """What was found for one target."""

    target: Target
    partition: Partition | None
    error: ErrorCode = ErrorCode.NONE
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start: int = -1
    found: LogSlice | None = None
    aborted: Sequence[AbortedTransaction] = ()
    diverging: EpochEndOffset | None = None

    @property
    def size(self) -> int:
        """Bytes found."""
        return 0 if self.found is None else self.found.size

    @property
    def urgent(self) -> bool:
        """Whether the reader must hear of it at once."""
        return self.error is not ErrorCode.NONE or self.diverging is not None


def handle_fetch(
    broker: BrokerContext, request: FetchRequest, call: RequestContext
) -> FetchResponse | Awaitable[FetchResponse]:
    """Answer a fetch at once, or when there is enough."""
    uses_ids = call.api_version >= TOPIC_IDS_SINCE
    context = broker.fetch_sessions.begin(
        request.session_id,
        request.session_epoch,
        _targets(request),
        _forgotten(request, uses_ids=uses_ids),
        uses_topic_ids=uses_ids,
        now_ms=broker.clock.now_ms(),
    )
    if isinstance(context, ErrorCode):
        return FetchResponse(error_code=context, session_id=0)
    fetch = _Fetch(broker, request, context)
    fetch.read()
    if fetch.complete or request.max_wait_ms <= 0 or broker.stopping:
        return fetch.response()
    return fetch.park()


def _targets(request: FetchRequest) -> list[Target]:
    return [
        Target(
            topic.topic,
            topic.topic_id,
            asked.partition,
            asked.fetch_offset,
            asked.partition_max_bytes,
            asked.current_leader_epoch,
            asked.last_fetched_epoch,
            topic.undeleted_partition_count,
        )
        for topic in request.topics
        for asked in topic.partitions
    ]


def _forgotten(request: FetchRequest, *, uses_ids: bool) -> list[Key]:
    return [
        (topic.topic_id if uses_ids else topic.topic, partition)
        for topic in request.forgotten_topics_data
        for partition in topic.partitions
    ]


class _Fetch:
    """One fetch on its way to its answer."""

    def __init__(self, broker: BrokerContext, request: FetchRequest, context: Context) -> None:
        self._broker = broker
        self._context = context
        self._size_max = max(0, min(request.max_bytes, broker.settings.fetch_max_bytes))
        self._size_min = min(request.min_bytes, self._size_max)
        self._wait_ms = request.max_wait_ms
        self._committed = request.isolation_level == READ_COMMITTED
        self._reads: list[Read] = []
        self._size = 0
        self._urgent = False

    @property
    def complete(self) -> bool:
        """Whether there is no reason to wait."""
        return self._size >= self._size_min or self._urgent or not self._reads

    def read(self) -> None:
        """Read every target, in order, within the limits."""
        self._reads = []
        self._size = 0
        self._urgent = False
        for target in self._context.targets:
            read = self._read(target, self._size_max - self._size)
            self._size += read.size
            self._urgent = self._urgent or read.urgent
            self._reads.append(read)

    def _read(self, target: Target, left: int) -> Read:
        partition, error = self._locate(target)
        if partition is None or error is not ErrorCode.NONE:
            return Read(target, None, error)
        role, log = partition.leadership, partition.log
        if role is None or partition.offline_reason is not None:
            return Read(target, None, partition.unavailable())
        error = refuse_read(role, target.undeleted_partition_count, target.leader_epoch)
        high_watermark = log.high_watermark
        if error is not ErrorCode.NONE:
            return Read(target, partition, error)
        stable = partition.last_stable_offset
        read = Read(target, partition, ErrorCode.NONE, high_watermark, stable, log.log_start)
        if target.last_fetched_epoch >= 0:
            epoch, end = log.end_offset_for_epoch(target.last_fetched_epoch)
            if epoch < target.last_fetched_epoch or end < target.offset:
                read.diverging = EpochEndOffset(epoch=epoch, end_offset=end)
                return read
        limit = stable if self._committed else high_watermark
        size_max = min(target.size_max, left)
        if size_max <= 0 and self._size > 0:
            return read
        try:
            found = log.read(target.offset, max(size_max, 0), end=limit)
        except OffsetOutOfRangeError:
            return Read(target, partition, ErrorCode.OFFSET_OUT_OF_RANGE, high_watermark, stable, log.log_start)
        except OfflineLogError as damage:
            partition.abandon(str(damage))
            return Read(target, None, ErrorCode.KAFKA_STORAGE_ERROR)
        except OSError as failure:
            partition.storage_failed(failure)
            return Read(target, None, ErrorCode.KAFKA_STORAGE_ERROR)
        if found is not None and (found.size <= left or self._size == 0):
            read.found = found
            if self._committed:
                read.aborted = _aborted_in(partition, target.offset, limit, found)
        return read

    def _locate(self, target: Target) -> tuple[Partition | None, ErrorCode]:
        name = target.topic
        if target.topic_id != NO_TOPIC_ID:
            known = self._broker.view.name_of(target.topic_id)
            if known is None:
                return None, ErrorCode.UNKNOWN_TOPIC_ID
            name = known
        partition = self._broker.replicas.get(name, target.partition)
        if partition is None:
            return None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if target.topic_id not in (NO_TOPIC_ID, partition.topic_id):
            return None, ErrorCode.INCONSISTENT_TOPIC_ID
        return partition, ErrorCode.NONE

    async def park(self) -> FetchResponse:
        """Wait until complete, or for as long as the reader allows."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        dirty: set[int] = set()
        scheduled = False

        def look() -> None:
            nonlocal scheduled
            scheduled = False
            if not done.done():
                self._read_again(dirty)
                dirty.clear()
                if self.complete:
                    done.set_result(None)

        def changed(index: int) -> None:
            nonlocal scheduled
            dirty.add(index)
            if not scheduled:
                scheduled = True
                loop.call_soon(look)

        watchers: list[tuple[Partition, Callable[[], None]]] = []
        for index, read in enumerate(self._reads):
            if read.partition is not None:
                watcher: Callable[[], None] = partial(changed, index)
                read.partition.watch(watcher)
                watchers.append((read.partition, watcher))
        timer = loop.call_later(self._wait_ms / 1000, _finish, done)
        self._broker.parked.add(done)
        try:
            await done
        finally:
            self._broker.parked.discard(done)
            timer.cancel()
            for partition, watcher in watchers:
                partition.unwatch(watcher)
        return self.response()

    def _read_again(self, dirty: set[int]) -> None:
        for index in sorted(dirty):
            before = self._reads[index]
            self._size -= before.size
            read = self._read(before.target, self._size_max - self._size)
            self._size += read.size
            self._urgent = self._urgent or read.urgent
            self._reads[index] = read

    def response(self) -> FetchResponse:
        """The answer; what the session's reader already knows is left out."""
        session, incremental = self._context.session, self._context.incremental
        topics: list[FetchableTopicResponse] = []
        for read in self._reads:
            target = read.target
            news = target.has_news(
                size=read.size, error=read.error, high_watermark=read.high_watermark, log_start=read.log_start
            )
            if incremental and not news and not read.urgent:
                continue
            if session is not None and read.size:
                session.to_the_back(target)
            if not topics or topics[-1].topic != target.topic or topics[-1].topic_id != target.topic_id:
                partitions: list[PartitionData] = []
                topics.append(
                    FetchableTopicResponse(topic=target.topic, topic_id=target.topic_id, partitions=partitions)
                )
            partitions.append(self._partition(read))
        return FetchResponse(session_id=self._context.session_id, responses=topics)

    def _partition(self, read: Read) -> PartitionData:
        answer = PartitionData(
            partition_index=read.target.partition,
            error_code=read.error,
            high_watermark=read.high_watermark,
            last_stable_offset=read.last_stable_offset,
            log_start_offset=read.log_start,
            aborted_transactions=read.aborted if self._committed else None,
            records=b"" if read.found is None else read.found,
        )
        if read.diverging is not None:
            answer.diverging_epoch = read.diverging
        partition = read.partition
        if partition is not None:
            if read.found is not None:
                partition.bytes_out.add(read.found.size)
            if read.error is ErrorCode.FENCED_LEADER_EPOCH:
                leader = self._broker.settings.node_id
                answer.current_leader = LeaderIdAndEpoch(leader_id=leader, leader_epoch=partition.leader_epoch)
        return answer


def _aborted_in(partition: Partition, start: int, limit: int, found: LogSlice) -> list[AbortedTransaction]:
    """The aborted transactions that have records in what was found, from `start` on and below `limit`."""
    lines = partition.table.aborted.between(start, limit)
    if lines:
        end = limit
        for _, header in headers(found.view()):
            end = header.next_offset
        lines = [line for line in lines if line.first_offset < end]
    return [AbortedTransaction(producer_id=line.producer_id, first_offset=line.first_offset) for line in lines]


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
