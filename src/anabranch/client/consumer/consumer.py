"""The consumer: carries out on sockets what `fetcher` decides, and hands out records and Arrow tables.

It reads what it is assigned (`assign`), or its share of what its group reads (`subscribe`; see `group`). Records of a
key come in the order they were produced in, through every resize of the topic, as long as one consumer, or one group,
reads all its partitions. One that is assigned some of them waits for no partition that it does not read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from uuid import UUID

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.client.cluster.connection import DisconnectedError, LaneSettings
from anabranch.client.cluster.metadata import Cluster, OffsetAndTimestamp, offsets_request
from anabranch.client.consumer.group import (
    CLOSE_TIMEOUT_MS,
    Group,
    GroupMetadata,
    GroupSettings,
    Invoke,
    SubscriptionPattern,
    listener_of,
)
from anabranch.client.consumer.offsets import OffsetAndMetadata, OffsetsByPartition, offsets_of
from anabranch.client.settings import as_keywords
from anabranch.machines.clients.fetching import (
    EARLIEST,
    LATEST,
    Deliverable,
    Fetch,
    Fetcher,
    FetcherSettings,
    FetchResult,
    Lookup,
)
from anabranch.machines.clients.membership.assignors import PartitionAssignor
from anabranch.machines.clients.membership.steps import Subscription
from anabranch.machines.clients.membership.strategies import COOPERATIVE_STICKY, RANGE, strategies_of
from anabranch.machines.lineage import Lineage
from anabranch.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic, ForgottenTopic

if TYPE_CHECKING:
    import pyarrow as pa

PURPOSE = "fetch"
TOPIC_ID_VERSION = 13
"""From this version on, Fetch names topics by their ids."""
THREAD_SIZE_MIN = 256 * 1024
"""Decoding more than this much is left to a thread: kernels hold no interpreter lock."""
COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value")


class Record(NamedTuple):
    """A record, as it was read. `timestamp_type` is 0 for the producer's time and 1 for the broker's."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


@dataclass(slots=True)
class _Decoded:
    """A part that was decoded and not handed out to its end: `rows` from `first` on are left, `position` is theirs."""

    part: Deliverable
    rows: pa.Table
    first: int
    position: int


class Consumer:
    """Reads the partitions that are assigned to it, or to it as a member of a group, in the order of their keys.

    Use as `async with Consumer(bootstrap_servers=...) as consumer`, or call `close` at the end.
    """

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        *,
        client_id: str = "anabranch-consumer",
        group_id: str | None = None,
        group_protocol: str = "consumer",
        group_instance_id: str | None = None,
        group_remote_assignor: str | None = None,
        group_local_assignors: Iterable[PartitionAssignor] = (),
        partition_assignment_strategy: str | Iterable[str] = (RANGE, COOPERATIVE_STICKY),
        session_timeout_ms: int = 45_000,
        heartbeat_interval_ms: int = 3_000,
        client_rack: str | None = None,
        enable_auto_commit: bool = True,
        auto_commit_interval_ms: int = 5_000,
        max_poll_interval_ms: int = 300_000,
        auto_offset_reset: str = "latest",
        ordering: str = "key",
        isolation_level: str = "read_uncommitted",
        fetch_min_bytes: int = 1,
        fetch_max_wait_ms: int = 500,
        fetch_max_bytes: int = 50 * 1024 * 1024,
        max_partition_fetch_bytes: int = 8 * 1024 * 1024,
        max_poll_records: int = 500,
        check_crcs: bool = True,
        metadata_max_age_ms: int = 300_000,
        request_timeout_ms: int = 30_000,
        default_api_timeout_ms: int = 60_000,
        retry_backoff_ms: int = 100,
        retry_backoff_max_ms: int = 1_000,
        socket_connection_setup_timeout_ms: int = 10_000,
        reconnect_backoff_ms: int = 50,
        reconnect_backoff_max_ms: int = 1_000,
    ) -> None:
        _one_of("auto.offset.reset", auto_offset_reset, ("earliest", "latest", "none"))
        _one_of("ordering", ordering, ("key", "none"))
        _one_of("isolation.level", isolation_level, ("read_uncommitted", "read_committed"))
        _one_of("group.protocol", group_protocol, ("consumer", "classic"))
        strategies = strategies_of(partition_assignment_strategy)
        assignors = tuple(group_local_assignors)
        if assignors and (group_remote_assignor is not None or group_protocol != "consumer"):
            text = "group.local.assignors cannot be used together with group.remote.assignor, nor with group.protocol"
            raise ValueError(f"{text} 'classic': choose one")
        lanes = LaneSettings(
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            socket_connection_setup_timeout_ms=socket_connection_setup_timeout_ms,
            reconnect_backoff_ms=reconnect_backoff_ms,
            reconnect_backoff_max_ms=reconnect_backoff_max_ms,
        )
        self._cluster = Cluster(bootstrap_servers, lanes)
        self._read_committed = isolation_level == "read_committed"
        self._fetcher = Fetcher(
            FetcherSettings(
                fetch_max_bytes=fetch_max_bytes,
                max_partition_fetch_bytes=max_partition_fetch_bytes,
                auto_offset_reset=auto_offset_reset,
                retry_backoff_ms=retry_backoff_ms,
                retry_backoff_max_ms=retry_backoff_max_ms,
            )
        )
        self._ordered = ordering == "key"
        self._fetch_min_bytes = fetch_min_bytes
        self._fetch_max_wait_ms = fetch_max_wait_ms
        self._fetch_max_bytes = fetch_max_bytes
        self._max_poll_records = max_poll_records
        self._check_crcs = check_crcs
        self._metadata_max_age_ms = metadata_max_age_ms
        self._request_timeout_ms = request_timeout_ms
        self._names: dict[UUID, str] = {}
        self._lineages: dict[str, Lineage] = {}
        self._decoded: dict[TopicPartition, _Decoded] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._aging: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._kernels_loaded = False
        self._closed = False
        self._unyielded: dict[TopicPartition, int] = {}
        """While records are read in a loop: the next one that the loop has not come to."""
        self._group: Group | None = None
        if group_id is not None:
            self._group = Group(
                GroupSettings(
                    group_id=group_id,
                    group_protocol=group_protocol,
                    group_instance_id=group_instance_id,
                    group_remote_assignor=group_remote_assignor,
                    group_local_assignors=assignors,
                    partition_assignment_strategy=strategies,
                    session_timeout_ms=session_timeout_ms,
                    heartbeat_interval_ms=heartbeat_interval_ms,
                    client_rack=client_rack,
                    enable_auto_commit=enable_auto_commit,
                    auto_commit_interval_ms=auto_commit_interval_ms,
                    max_poll_interval_ms=max_poll_interval_ms,
                    auto_offset_reset=auto_offset_reset,
                    read_committed=self._read_committed,
                    request_timeout_ms=request_timeout_ms,
                    default_api_timeout_ms=default_api_timeout_ms,
                    metadata_max_age_ms=metadata_max_age_ms,
                    retry_backoff_ms=retry_backoff_ms,
                    retry_backoff_max_ms=retry_backoff_max_ms,
                ),
                self._cluster,
                self._fetcher,
                self,
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Make a consumer from settings by Kafka's dotted names, as in `{"bootstrap.servers": "..."}`."""
        return cls(**as_keywords(cls, config))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # -- what to read -------------------------------------------------------------------------------------------------

    def assign(self, assignment: str | Iterable[str | tuple[str, int]]) -> None:
        """Read exactly these: a topic by its name (all partitions, also those to come), or (topic, partition) pairs.

        What was read before and stays keeps its position; the rest begins at the group's committed offset, if this
        consumer has a `group_id`, and otherwise where `auto_offset_reset` says.
        """
        if self._group is not None and self._group.subscription is not None:
            raise ApiError(ErrorCode.INVALID_REQUEST, "this consumer is subscribed; unsubscribe before assigning")
        parts = [assignment] if isinstance(assignment, str) else list(assignment)
        topics = [part for part in parts if isinstance(part, str)]
        pairs = [TopicPartition(*part) for part in parts if not isinstance(part, str)]
        self._fetcher.assign(pairs, topics, awaiting=self._group is not None)

    def subscribe(
        self,
        topics: str | Iterable[str] | SubscriptionPattern,
        *,
        listener: Any = None,
        on_partitions_assigned: Callable[..., Any] | None = None,
        on_partitions_revoked: Callable[..., Any] | None = None,
        on_partitions_lost: Callable[..., Any] | None = None,
    ) -> None:
        """Read these topics, or all that match a pattern, together with the other members of the group.

        It joins with the first `poll`, and stays a member as long as polls come within `max_poll_interval_ms`. The
        listener (an object with any of the three methods, or the functions themselves, plain or async) is called in
        `poll`, with the partitions in question.
        """
        group = self._grouped("subscribe")
        if group.subscription is None and self._fetcher.topics:
            raise ApiError(ErrorCode.INVALID_REQUEST, "this consumer is assigned; assign nothing before subscribing")
        if isinstance(topics, SubscriptionPattern):
            subscription = Subscription(pattern=topics.pattern)
        else:
            subscription = Subscription(frozenset([topics] if isinstance(topics, str) else topics))
        if subscription.pattern == "" or (subscription.pattern is None and not subscription.topics):
            raise ValueError("subscribe to at least one topic; to read nothing, unsubscribe")
        functions = (on_partitions_assigned, on_partitions_revoked, on_partitions_lost)
        group.subscribe(subscription, listener_of(listener, *functions))

    def subscription(self) -> frozenset[str] | SubscriptionPattern | None:
        """What this consumer is subscribed to; None if to nothing."""
        found = None if self._group is None else self._group.subscription
        if found is None:
            return None
        return found.topics if found.pattern is None else SubscriptionPattern(found.pattern)

    async def unsubscribe(self) -> None:
        """Leave the group, having committed and let go of everything."""
        self._start()
        if self._group is not None:
            await self._group.unsubscribe()

    def call_back_with(self, invoke: Invoke) -> None:
        """Have rebalance listeners called by `invoke(function, arguments)`; for clients that live in other threads."""
        if self._group is not None:
            self._group.invoke = invoke

    def _grouped(self, what: str) -> Group:
        if self._group is None:
            raise ApiError(ErrorCode.INVALID_GROUP_ID, f"this consumer has no group_id, and cannot {what} without")
        return self._group

    def assignment(self) -> tuple[TopicPartition, ...]:
        """The partitions that are read now."""
        return self._fetcher.assignment

    async def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on at `offset` in a partition that is assigned."""
        tp = TopicPartition(topic, partition)
        await self._assigned([tp])
        self._decoded.pop(tp, None)
        self._fetcher.seek(tp, offset)

    async def seek_to_beginning(self, *partitions: tuple[str, int]) -> None:
        """Go on at the log start of these partitions, by default of all."""
        await self._seek_to(partitions, EARLIEST)

    async def seek_to_end(self, *partitions: tuple[str, int]) -> None:
        """Go on at the log end of these partitions, by default of all."""
        await self._seek_to(partitions, LATEST)

    async def seek_to_time(self, timestamp: int, *partitions: tuple[str, int]) -> None:
        """Go on at the first record at or after `timestamp` (ms since 1970), by default in all partitions."""
        await self._seek_to(partitions, timestamp)

    async def _seek_to(self, partitions: Sequence[tuple[str, int]], timestamp: int) -> None:
        wanted = [TopicPartition(*partition) for partition in partitions]
        await self._assigned(wanted)
        for tp in wanted or self._fetcher.assignment:
            self._decoded.pop(tp, None)
            self._fetcher.seek_to_timestamp(tp, timestamp)

    async def position(self, topic: str, partition: int) -> int:
        """The offset of the next record to hand out."""
        tp = TopicPartition(topic, partition)
        await self._assigned([tp])
        while (position := self._fetcher.position(tp)) is None:
            await self._wait(None)
        return position

    async def pause(self, *partitions: tuple[str, int]) -> None:
        """Hand out nothing of these partitions until `resume`, by default of all."""
        await self._assigned([TopicPartition(*partition) for partition in partitions])
        for tp in [TopicPartition(*partition) for partition in partitions] or self._fetcher.assignment:
            self._fetcher.pause(tp)

    async def resume(self, *partitions: tuple[str, int]) -> None:
        """Undo `pause`, by default of all partitions."""
        await self._assigned([TopicPartition(*partition) for partition in partitions])
        for tp in [TopicPartition(*partition) for partition in partitions] or self._fetcher.assignment:
            self._fetcher.resume(tp)

    def paused(self) -> tuple[TopicPartition, ...]:
        """The partitions that are paused."""
        return self._fetcher.paused

    def lineage(self, topic: str) -> Lineage | None:
        """The lineage by which records of the topic are handed out; None before it is known."""
        return self._lineages.get(topic)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def poll(self, timeout_s: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        """Hand out the next records; wait for some at most `timeout_s` seconds, None for as long as it takes."""
        room = self._max_poll_records if max_records is None else max_records
        found: list[Record] = []
        for part in await self._gather(timeout_s):
            if len(found) >= room:
                break
            if self._fetcher.is_next(part):
                await self._hand_out_some(part, room - len(found), found)
        self._pump()
        return found

    async def _hand_out_some(self, part: Deliverable, room: int, found: list[Record]) -> None:
        """Append at most `room` records of a part to `found`; what is left is kept as it was decoded."""
        from anabranch.client.consumer.tables import RECORD_COLUMNS, records_of

        tp = TopicPartition(part.topic, part.partition)
        left = self._decoded.pop(tp, None)
        if left is None or left.part.fetched is not part.fetched or left.position != part.start:
            left = _Decoded(part, await self._table([part], RECORD_COLUMNS, None), 0, part.start)
            if not self._fetcher.is_next(part):
                return
        rows = left.rows.slice(left.first, room)
        found += records_of(part, rows)
        left.first += rows.num_rows
        if left.first == left.rows.num_rows:
            self._fetcher.handed_out(part, left.part.end)
        else:
            left.position = left.rows.column("offset")[left.first].as_py()
            self._decoded[tp] = left
            self._fetcher.handed_out(part, left.position)

    async def poll_arrow(
        self,
        timeout_s: float | None = 1.0,
        max_bytes: int | None = None,
        *,
        columns: Sequence[str] = COLUMNS,
        key_range: tuple[int, int] | None = None,
    ) -> pa.Table:
        """Hand out the next records as a table; wait for some at most `timeout_s`, None for as long as it takes.

        `max_bytes` bounds the fetched bytes that are handed out at once, to whole fetches. Columns there are: topic,
        partition, offset, timestamp, timestamp_type, key, value, headers, key_hash, leader_epoch, and sequence, which
        grows with every record of a key. With `key_range`, only keys whose range hash is in it (both ends inclusive).
        """
        while True:
            parts = await self.gather(timeout_s, max_bytes)
            table = await self._table(parts, columns, key_range)
            if self.hand_out(parts):
                return table

    async def _table(
        self, parts: Sequence[Deliverable], columns: Sequence[str], key_range: tuple[int, int] | None
    ) -> pa.Table:
        """Decode here what is small, once the kernels are loaded, and the rest in a thread."""
        if self._kernels_loaded and sum(len(part.fetched.data) for part in parts) < THREAD_SIZE_MIN:
            return self.table(parts, columns, key_range)
        table = await self._start().run_in_executor(None, self.table, parts, columns, key_range)
        self._kernels_loaded = True
        return table

    async def gather(self, timeout_s: float | None, max_bytes: int | None) -> list[Deliverable]:
        """Wait for parts of at most about `max_bytes` that may be handed out; say `hand_out` when they were."""
        parts: list[Deliverable] = []
        size = 0
        limit = self._fetch_max_bytes if max_bytes is None else max_bytes
        for part in await self._gather(timeout_s):
            if parts and size + len(part.fetched.data) > limit:
                break
            parts.append(part)
            size += len(part.fetched.data)
        return parts

    def table(
        self, parts: Sequence[Deliverable], columns: Sequence[str] = COLUMNS, key_range: tuple[int, int] | None = None
    ) -> pa.Table:
        """Decode gathered parts; may run in any thread."""
        from anabranch.client.consumer.tables import table_of

        return table_of(parts, columns, key_range, self._lineages, check_crcs=self._check_crcs)

    def hand_out(self, parts: Sequence[Deliverable]) -> bool:
        """Move the positions beyond gathered parts, and fetch on; False, and nothing moves, if a position moved since.

        Then what was gathered is not what comes next, and must be gathered anew.
        """
        standing = self._fetcher.all_handed_out(parts)
        self._pump()
        return standing

    async def __aiter__(self) -> AsyncIterator[Record]:
        while not self._closed:
            for record in self.one_by_one(await self.poll(timeout_s=None)):
                yield record

    def one_by_one(self, records: Sequence[Record]) -> Iterator[Record]:
        """Yield polled records; the positions to commit follow, so that a loop may be left at any record."""
        following: list[int | None] = []
        later: dict[tuple[str, int], int] = {}
        for record in reversed(records):
            following.append(later.get(record[:2]))
            later[record[:2]] = record.offset
        self._unyielded = {TopicPartition(*tp): offset for tp, offset in later.items()}
        for record, offset in zip(records, reversed(following), strict=True):
            tp = TopicPartition(record.topic, record.partition)
            if offset is None:
                self._unyielded.pop(tp, None)
            else:
                self._unyielded[tp] = offset
            yield record

    async def _gather(self, timeout_s: float | None) -> list[Deliverable]:
        group = self._group
        self._start()
        self._go_back()
        if group is None:
            return await self._gather_within(timeout_s)
        group.refuse_in_callback()
        group.start()
        group.poll_began()
        try:
            return await self._gather_within(timeout_s)
        finally:
            group.poll_ended()

    def _go_back(self) -> None:
        """Hand out again what a loop was left before it came to it."""
        unyielded, self._unyielded = self._unyielded, {}
        for tp, offset in unyielded.items():
            if tp in self._fetcher.assignment:
                self._decoded.pop(tp, None)
                self._fetcher.seek(tp, offset)

    async def _gather_within(self, timeout_s: float | None) -> list[Deliverable]:
        loop = self._start()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        if not self._fetcher.topics and (self._group is None or self._group.subscription is None):
            raise ApiError(ErrorCode.INVALID_REQUEST, "nothing is assigned to this consumer; assign a topic first")
        while True:
            if self._group is not None:
                await self._group.attend()
            self._pump()
            self._raise()
            parts = self._fetcher.deliverable()
            if parts:
                return parts
            self._pump()
            remaining = None if deadline is None else deadline - loop.time()
            if remaining is not None and remaining <= 0:
                return []
            due_ms = None if self._group is None else self._group.next_attendance_ms()
            if due_ms is not None:
                due = max(0.01, (due_ms - _now_ms()) / 1000)
                remaining = due if remaining is None else min(remaining, due)
            await self._wait(remaining)

    # -- the group's offsets ------------------------------------------------------------------------------------------

    async def commit(self, offsets: OffsetsByPartition | None = None) -> None:
        """Commit offsets, the next ones to read; by default after all that was handed out; wait until it is done.

        Raises `ApiError` where it cannot be done; with UNKNOWN_MEMBER_ID or FENCED_MEMBER_EPOCH the group has given
        the partitions to others.
        """
        group = self._grouped("commit")
        self._start()
        await group.commit(None if offsets is None else offsets_of(offsets))

    def commit_async(self, offsets: OffsetsByPartition | None = None) -> asyncio.Task[None]:
        """Commit without waiting; the task that comes back is the outcome. Commits are done in their order."""
        group = self._grouped("commit")
        self._start()
        return self._run(group.commit(offsets_of(self.consumed() if offsets is None else offsets)))

    async def committed(self, *partitions: tuple[str, int]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed of partitions, by default of those assigned; None where nothing is."""
        group = self._grouped("ask for committed offsets")
        self._start()
        return await group.committed([TopicPartition(*tp) for tp in partitions] or self._fetcher.assignment)

    def group_metadata(self) -> GroupMetadata:
        """Who this consumer is in its group, for a transaction that commits its offsets."""
        return self._grouped("tell of it").metadata()

    # -- offsets ------------------------------------------------------------------------------------------------------

    async def beginning_offsets(self, *partitions: tuple[str, int]) -> dict[TopicPartition, int]:
        """The log start of partitions, by default of those assigned."""
        return await self._offsets(partitions, EARLIEST)

    async def end_offsets(self, *partitions: tuple[str, int]) -> dict[TopicPartition, int]:
        """The log end (high watermark, or last stable offset under read_committed) of partitions."""
        return await self._offsets(partitions, LATEST)

    async def offsets_for_times(
        self, timestamps: Mapping[tuple[str, int], int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record at or after a timestamp (ms) in each partition; None where there is none."""
        wanted = {TopicPartition(*partition): timestamp for partition, timestamp in timestamps.items()}
        found = await self._cluster.offsets(wanted, read_committed=self._read_committed)
        return {tp: at if at.offset >= 0 else None for tp, at in found.items()}

    async def lag(self) -> dict[TopicPartition, int]:
        """How many offsets each assigned partition's position is behind its log end."""
        ends = await self.end_offsets()
        return {tp: max(0, end - await self.position(*tp)) for tp, end in ends.items()}

    async def _offsets(self, partitions: Sequence[tuple[str, int]], timestamp: int) -> dict[TopicPartition, int]:
        wanted = [TopicPartition(*partition) for partition in partitions]
        if not wanted:
            await self._assigned([])
        asked = dict.fromkeys(wanted or self._fetcher.assignment, timestamp)
        found = await self._cluster.offsets(asked, read_committed=self._read_committed)
        return {tp: at.offset for tp, at in found.items()}

    async def close(self, *, leave: bool | None = None, timeout_s: float = CLOSE_TIMEOUT_MS / 1000) -> None:
        """End. A member of a group commits (if it does so by itself), lets go of its partitions, and leaves.

        `leave`: whether to give up the place in the group; by default a static member (`group_instance_id`) does not.
        """
        if self._closed:
            return
        if self._group is not None and self._loop is not None:
            try:
                await self._group.close(leave=leave, timeout_ms=int(timeout_s * 1000))
            finally:
                await self._end()
        else:
            await self._end()

    async def _end(self) -> None:
        self._closed = True
        for timer in (self._timer, self._aging):
            if timer is not None:
                timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._cluster.close()

    # -- what the group needs -----------------------------------------------------------------------------------------

    def happened(self) -> None:
        """Look again: something has changed."""
        self._happened()

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget what was fetched of these."""
        for tp in partitions:
            self._decoded.pop(tp, None)
            self._unyielded.pop(tp, None)

    def consumed(self) -> dict[TopicPartition, int]:
        """The position after everything that the application has been given, of every partition that has one."""
        return {**self._fetcher.positions(), **self._unyielded}

    # -- carrying out -------------------------------------------------------------------------------------------------

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise ApiError(ErrorCode.INVALID_REQUEST, "this consumer is closed; make a new one")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._news = asyncio.Event()
            self._age()
        return self._loop

    def _age(self) -> None:
        assert self._loop is not None
        self._aging = self._loop.call_later(self._metadata_max_age_ms / 1000, self._grow_old)

    def _grow_old(self) -> None:
        self._fetcher.refresh_all()
        self._age()
        self._pump()

    async def _assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Wait until it is known what whole topics consist of."""
        while not (partitions and all(tp in self._fetcher.assignment for tp in partitions)):
            self._pump()
            self._raise()
            if self._fetcher.all_known:
                return
            await self._wait(None)

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait until something has happened."""
        self._start()
        assert self._news is not None
        self._pump()
        self._raise()
        self._news.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return

    def _raise(self) -> None:
        errors = self._fetcher.errors()
        if errors:
            for other in errors[1:]:
                errors[0].add_note(str(other))
            raise errors[0]

    def _happened(self) -> None:
        self._pump()
        if self._news is not None:
            self._news.set()

    def _pump(self) -> None:
        """Do what the fetcher says."""
        if self._closed:
            return
        loop = self._start()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._group is not None:
            self._group.look_for_positions()
        work = self._fetcher.drain(_now_ms())
        for fetch in work.fetches:
            self._run(self._fetch(fetch))
        for lookup in work.lookups:
            self._run(self._lookup(lookup))
        for topic in work.refresh:
            self._run(self._refresh(topic))
        if work.wake_at_ms is not None:
            self._timer = loop.call_later(max(0, work.wake_at_ms - _now_ms()) / 1000, self._happened)

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._start().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _fetch(self, fetch: Fetch) -> None:
        try:
            connection = await self._cluster.connection(fetch.node, PURPOSE)
            version = connection.version_of(FetchRequest)
            nameless = any(said.topic_id == NO_TOPIC_ID for said in fetch.partitions.values())
            if version >= TOPIC_ID_VERSION and nameless:
                version = TOPIC_ID_VERSION - 1
            request = self._fetch_request(fetch, version)
            timeout_ms = self._request_timeout_ms + self._fetch_max_wait_ms
            response = await connection.send(request, timeout_ms=timeout_ms, version=version)
        except (AnabranchError, OSError):
            self._fetcher.lost(fetch.request_id, _now_ms())
        else:
            answers = {
                TopicPartition(name, data.partition_index): FetchResult(
                    ErrorCode.of(data.error_code),
                    data.records,
                    data.high_watermark,
                    data.last_stable_offset,
                    data.log_start_offset,
                    [(entry.producer_id, entry.first_offset) for entry in data.aborted_transactions or ()],
                )
                for topic in response.responses
                if (name := topic.topic or self._names.get(topic.topic_id))
                for data in topic.partitions
            }
            error = ErrorCode.of(response.error_code)
            self._fetcher.answered(fetch.request_id, error, response.session_id, answers, _now_ms())
        self._happened()

    def _fetch_request(self, fetch: Fetch, version: int) -> FetchRequest:
        by_id = version >= TOPIC_ID_VERSION
        ids = {name: topic_id for topic_id, name in self._names.items()}
        topics: dict[str, list[FetchPartition]] = {}
        counts: dict[str, int] = {}
        for tp, said in fetch.partitions.items():
            counts[tp.topic] = said.count
            topics.setdefault(tp.topic, []).append(
                FetchPartition(
                    partition=tp.partition,
                    current_leader_epoch=said.leader_epoch,
                    fetch_offset=said.offset,
                    partition_max_bytes=said.size_max,
                )
            )
        forgotten: dict[str, list[int]] = {}
        for tp in fetch.forgotten:
            forgotten.setdefault(tp.topic, []).append(tp.partition)
        return FetchRequest(
            replica_id=-1,
            max_wait_ms=self._fetch_max_wait_ms,
            min_bytes=self._fetch_min_bytes,
            max_bytes=self._fetch_max_bytes,
            isolation_level=int(self._read_committed),
            session_id=fetch.session_id,
            session_epoch=fetch.session_epoch,
            topics=[
                FetchTopic(
                    topic_id=ids[name] if by_id else NO_TOPIC_ID,
                    topic="" if by_id else name,
                    partitions=partitions,
                    undeleted_partition_count=counts[name],
                )
                for name, partitions in topics.items()
            ],
            forgotten_topics_data=[
                ForgottenTopic(
                    topic_id=ids[name] if by_id else NO_TOPIC_ID, topic="" if by_id else name, partitions=partitions
                )
                for name, partitions in forgotten.items()
            ],
        )

    async def _lookup(self, lookup: Lookup) -> None:
        request = offsets_request(lookup.partitions, read_committed=self._read_committed)
        try:
            response = await self._cluster.ask(request, node_id=lookup.node)
        except (AnabranchError, OSError):
            self._fetcher.lost(lookup.request_id, _now_ms())
        else:
            answers = {
                TopicPartition(topic.name, partition.partition_index): (
                    ErrorCode.of(partition.error_code),
                    partition.offset,
                )
                for topic in response.topics
                for partition in topic.partitions
            }
            self._fetcher.found(lookup.request_id, answers, _now_ms())
        self._happened()

    async def _refresh(self, name: str) -> None:
        try:
            view = await self._cluster.view(name)
        except ApiError as error:
            self._fetcher.topic_unknown(name, error, _now_ms())
        except (DisconnectedError, AnabranchError, OSError) as error:
            self._fetcher.topic_unknown(name, ApiError(ErrorCode.NETWORK_EXCEPTION, str(error)), _now_ms())
        else:
            if not self._ordered:
                view = replace(view, ordered=False)
            if self._names.get(view.topic_id) != name:
                self._names = {topic_id: other for topic_id, other in self._names.items() if other != name}
                self._names[view.topic_id] = name
            self._lineages[name] = view.lineage
            self._fetcher.topic_known(view, _now_ms())
        self._happened()


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is '{value}'; it can be {' or '.join(allowed)}")


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
