"""The consumer: reads topics and returns records and Arrow tables, in the order of their keys.

A consumer reads its assignment (`assign`), or its share of the topics of its group (`subscribe`; see `group`). The
records of a key arrive in the order they were produced in, through every resize of the topic, as long as one consumer,
or one group, reads all partitions of the topic. With a manual assignment of some partitions, the consumer does not wait
for the others. The machine in `machines.clients.fetching` decides; `driver` carries out its decisions on sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.cluster.metadata import Cluster, OffsetAndTimestamp
from anabranch.client.consumer.cooperative import CooperativeGroup, SliceRecords
from anabranch.client.consumer.driver import FetchingDriver
from anabranch.client.consumer.group import CLOSE_TIMEOUT_MS, Group
from anabranch.client.consumer.listeners import GroupMetadata, Invoke, Shares, SubscriptionPattern, listener_of
from anabranch.client.consumer.offsets import (
    OffsetAndMetadata,
    OffsetsByPartition,
    RangesByPartition,
    offsets_of,
    ranges_of,
)
from anabranch.client.consumer.pool import DeadLetter, Decide, Pool, run_refused
from anabranch.client.consumer.record import COLUMNS, Record
from anabranch.client.consumer.unfinished import Handler, Unfinished
from anabranch.client.settings import ConsumerSettings, as_keywords, configured_by
from anabranch.machines.clients.fetching import EARLIEST, LATEST, Deliverable, RecordFilter
from anabranch.machines.clients.membership.steps import Subscription
from anabranch.machines.clients.processing import OnError, Ranges
from anabranch.machines.keyspace import SPACE, Interval
from anabranch.machines.lineage import Lineage
from anabranch.machines.partition.sharing import asked_of
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock

if TYPE_CHECKING:
    import pyarrow as pa

Range = tuple[int, int]
Assignment = (
    str | Iterable[str | tuple[str, int]] | Mapping[str, Sequence[Range]] | Mapping[tuple[str, int], Sequence[Range]]
)


def shares_of(assignment: Mapping[Any, Sequence[Range]]) -> dict[TopicPartition | str, tuple[Interval, ...]]:
    """Read the shares of an assignment; ValueError where ranges are none, or overlap."""
    found: dict[TopicPartition | str, tuple[Interval, ...]] = {}
    for name, ranges in assignment.items():
        asked = asked_of(ranges)
        if isinstance(asked, ErrorCode):
            raise ValueError(f"{name} has {list(ranges)}: expected ranges in 0 to {SPACE.end} that do not overlap")
        found[name if isinstance(name, str) else TopicPartition(*name)] = asked.ranges if ranges else ()
    return found


class Consumer:
    """Reads its assigned partitions, or those granted to it as a member of a group, in the order of their keys.

    Its keyword arguments are the settings of `anabranch.client.settings.ConsumerSettings` (docs/client-settings.md).
    Use as `async with Consumer(bootstrap_servers=...) as consumer`, or call `close` at the end.
    """

    @configured_by(ConsumerSettings)
    def __init__(self, settings: ConsumerSettings) -> None:
        self._settings = settings
        self._cluster = Cluster(settings.bootstrap_servers, settings.connection())
        self._driver = FetchingDriver(settings, self._cluster)
        self._fetcher = self._driver.fetcher
        self._group = self._driver.group
        self._handout = self._driver.handout
        self._pool: Pool | None = None
        self._cooperative: CooperativeGroup | None = None
        self._records: SliceRecords | None = None
        self._postponed: tuple[Deliverable, AnabranchError] | None = None
        """What the last poll met in a part of one partition when it had records of others to return."""
        if settings.share == "any":
            self._share_any()

    def _share_any(self) -> CooperativeGroup:
        if self._driver.state is not None:
            text = "this consumer has a table by key: share 'any' gives records of a key to several members"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        if self._cooperative is None:
            if self._settings.group_id is None:
                raise ApiError(ErrorCode.INVALID_GROUP_ID, "share 'any' is for members of a group: set group_id")
            settings, driver = self._settings, self._driver
            group = CooperativeGroup(settings, self._cluster, driver, clock=Clock(), chance=Chance())
            explicit = settings.acknowledgement_mode == "explicit"
            self._records = SliceRecords(settings, driver, group, explicit=explicit)
            self._group = self._cooperative = driver.group = group
            driver.unfinished, driver.is_cooperative = self._records, True
        return self._cooperative

    def _refuse_of_slices(self, what: str) -> None:
        if self._cooperative is not None:
            text = f"this consumer shares partitions without keys, and has no positions: it cannot {what}"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)

    @property
    def driver(self) -> FetchingDriver:
        """The driver, for what is built on consumers (`client.table`)."""
        return self._driver

    @property
    def settings(self) -> ConsumerSettings:
        """The settings."""
        return self._settings

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a consumer for settings by Kafka's dotted names, as in `{"bootstrap.servers": "..."}`."""
        return cls(**as_keywords(cls, config))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # -- the assignment -----------------------------------------------------------------------------------------------

    def assign(self, assignment: Assignment, *, share: str | None = None) -> None:
        """Replace the assignment: topics by name (all partitions, including later ones), or (topic, partition) pairs.

        Partitions that stay assigned keep their positions. Each new one begins at the group's committed offset if this
        consumer has a `group_id`, and otherwise as `auto_offset_reset` defines; so does one that gets further keys of a
        table (`KeyedTable`), which were perhaps processed less far, unless the application has just sought a position.

        A mapping assigns shares: of a topic or a partition those records whose keys lie in some ranges of the key space
        (both ends inclusive, see docs/cooperative.md), all records where the list is empty. It is for topics with
        `accept.range.fetch`; with a `group_id`, offsets are committed for these keys alone. ValueError for a range that
        ends before it starts, or ranges that overlap.

        With `share="any"` (or the setting) this consumer is a member of its group that gets whatever of these
        partitions no other member has, in no order; see docs/cooperative.md.
        """
        if share not in (None, "any"):
            raise ValueError(f"share is {share!r}; it can be 'any'")
        if share == "any" or self._cooperative is not None:
            self._assign_any(assignment)
            return
        if self._group is not None and self._group.subscription is not None:
            raise ApiError(ErrorCode.INVALID_REQUEST, "this consumer is subscribed; unsubscribe before assigning")
        shares = shares_of(assignment) if isinstance(assignment, Mapping) else {}
        parts = [assignment] if isinstance(assignment, str) else list(assignment)
        topics = [part for part in parts if isinstance(part, str)]
        pairs = [TopicPartition(*part) for part in parts if not isinstance(part, str)]
        before = self.key_ranges()
        self._fetcher.assign(pairs, topics, awaiting=self._group is not None, shares=shares)
        self._driver.assigned_anew(before)

    def _assign_any(self, assignment: Assignment) -> None:
        if isinstance(assignment, Mapping):
            raise ValueError("share 'any' goes without key ranges: assign topics, or (topic, partition) pairs")
        if self._fetcher.topics:
            text = "this consumer reads whole partitions already; use another one to share them"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        group = self._share_any()
        parts = [assignment] if isinstance(assignment, str) else list(assignment)
        group.fetches.whole = frozenset(part for part in parts if isinstance(part, str))
        group.fetches.pairs = frozenset(TopicPartition(*part) for part in parts if not isinstance(part, str))
        topics = group.fetches.whole | {tp.topic for tp in group.fetches.pairs}
        if not topics:
            raise ValueError("assign at least one topic; to read nothing, unsubscribe")
        group.fetches.changed()
        group.subscribe(Subscription(topics), None)

    def subscribe(
        self,
        topics: str | Iterable[str] | SubscriptionPattern,
        listener: Any = None,
        partition_key_listener: Any = None,
        *,
        on_partitions_assigned: Callable[..., Any] | None = None,
        on_partitions_revoked: Callable[..., Any] | None = None,
        on_partitions_lost: Callable[..., Any] | None = None,
    ) -> None:
        """Subscribe to topics, or to all topics that match a pattern, as a member of the group.

        The consumer joins with the first `poll`, and stays a member if polls come within `max_poll_interval_ms`. The
        listener (an object with any of the three methods, or the functions themselves, plain or async) is called in
        `poll`, with the assigned, revoked or lost partitions. So is the partition key listener, an object with any of
        the methods of `PartitionKeyRebalanceListener`, where keys may move between partitions.
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
        if self._cooperative is not None:
            self._cooperative.fetches.pairs = None
            self._cooperative.fetches.changed()
        group.subscribe(subscription, listener_of(listener, *functions), partition_key_listener)

    def subscription(self) -> frozenset[str] | SubscriptionPattern | None:
        """Return the topics or the pattern of the subscription; None without a subscription."""
        found = None if self._group is None else self._group.subscription
        if found is None:
            return None
        return found.topics if found.pattern is None else SubscriptionPattern(found.pattern)

    async def unsubscribe(self) -> None:
        """Commit (if automatic commits are on), revoke all partitions, and leave the group."""
        self._driver.start()
        if self._group is not None:
            await self._group.unsubscribe()

    def call_back_with(self, invoke: Invoke) -> None:
        """Call rebalance listeners by `invoke(function, arguments)`; for clients that run in other threads."""
        if self._group is not None:
            self._group.invoke = invoke

    def _grouped(self, what: str) -> Group:
        if self._group is None:
            raise ApiError(ErrorCode.INVALID_GROUP_ID, f"this consumer has no group_id, and cannot {what} without")
        return self._group

    def assignment(self) -> tuple[TopicPartition, ...]:
        """Return the assigned partitions; with `share="any"` all that this member claims slices of."""
        return self._fetcher.assignment if self._cooperative is None else self._cooperative.fetches.partitions

    def key_ranges(self) -> Shares:
        """Return the assigned partitions with their ranges of keys; none: the whole partition (docs/cooperative.md)."""
        return {tp: self._fetcher.granted_share(tp) for tp in self._fetcher.assignment}

    async def seek(self, topic: str, partition: int, offset: int) -> None:
        """Set the position of an assigned partition to `offset`."""
        self._refuse_of_slices("seek")
        tp = TopicPartition(topic, partition)
        await self._driver.know([tp])
        self._driver.moved_by_hand(tp)
        self._fetcher.seek(tp, offset)

    async def seek_to_beginning(self, *partitions: tuple[str, int]) -> None:
        """Set the positions of these partitions to their log starts, by default of all assigned partitions."""
        await self._seek_to(partitions, EARLIEST)

    async def seek_to_end(self, *partitions: tuple[str, int]) -> None:
        """Set the positions of these partitions to their log ends, by default of all assigned partitions."""
        await self._seek_to(partitions, LATEST)

    async def seek_to_time(self, timestamp: int, *partitions: tuple[str, int]) -> None:
        """Set positions to the first record at or after `timestamp` (ms since 1970), by default in all partitions."""
        await self._seek_to(partitions, timestamp)

    async def _seek_to(self, partitions: Sequence[tuple[str, int]], timestamp: int) -> None:
        self._refuse_of_slices("seek")
        wanted = [TopicPartition(*partition) for partition in partitions]
        await self._driver.know(wanted)
        for tp in wanted or self._fetcher.assignment:
            self._driver.moved_by_hand(tp)
            self._fetcher.seek_to_timestamp(tp, timestamp)

    async def position(self, topic: str, partition: int) -> int:
        """Return the offset of the next record to be returned; raise what hinders finding it."""
        self._refuse_of_slices("tell one")
        return await self._driver.position(TopicPartition(topic, partition))

    async def pause(self, *partitions: tuple[str, int]) -> None:
        """Return no records of these partitions until `resume`; by default of all."""
        self._refuse_of_slices("pause; poll later")
        await self._driver.know([TopicPartition(*partition) for partition in partitions])
        for tp in [TopicPartition(*partition) for partition in partitions] or self._fetcher.assignment:
            self._fetcher.pause(tp)
            if self._driver.unfinished is not None:
                self._driver.unfinished.tracker.hold(tp)

    async def resume(self, *partitions: tuple[str, int]) -> None:
        """Resume paused partitions, by default all."""
        self._refuse_of_slices("resume")
        await self._driver.know([TopicPartition(*partition) for partition in partitions])
        for tp in [TopicPartition(*partition) for partition in partitions] or self._fetcher.assignment:
            self._fetcher.resume(tp)
            if self._driver.unfinished is not None:
                self._driver.unfinished.tracker.release(tp)

    def paused(self) -> tuple[TopicPartition, ...]:
        """Return the paused partitions."""
        return self._fetcher.paused

    def lineage(self, topic: str) -> Lineage | None:
        """Return the lineage that orders the records of the topic; None before its metadata arrived."""
        return self._handout.lineages.get(topic)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def poll(
        self,
        timeout_s: float | None = 1.0,
        max_records: int | None = None,
        *,
        filter: RecordFilter | None = None,
    ) -> list[Record]:
        """Return the next records; wait for some at most `timeout_s` seconds, None for no limit.

        With `acknowledgement_mode="explicit"` these are records that may be worked on at the same time, in any order:
        of each key the first one in its partition that is not done, and no further one before that is.

        With a `filter` those that pass it: brokers send no others (topics with `accept.range.fetch`). Positions move
        past the others. Fetches that another filter was used for are made again: keep to one.
        """
        self._refuse_beside_a_handler("poll")
        if filter is not None:
            self._refuse_of_slices("filter")
        if self._records is not None:
            self._records.finish_handed()
        self._fetcher.filter(filter)
        room = self._settings.max_poll_records if max_records is None else max_records
        if self._driver.unfinished is not None:
            return await self._driver.poll(timeout_s, room)
        met, self._postponed = self._postponed, None
        if met is not None and self._fetcher.is_next(met[0]):
            raise met[1]
        met = None
        found: list[Record] = []
        for part in await self._driver.gather(timeout_s):
            if len(found) >= room:
                break
            if self._fetcher.is_next(part):
                try:
                    await self._handout.hand_out_some(part, room - len(found), found)
                except AnabranchError as error:
                    met = part, error
        self._driver.pump()
        self._handout.returned()
        if met is not None and not found:
            raise met[1]
        self._postponed = met
        return found

    async def poll_arrow(
        self,
        timeout_s: float | None = 1.0,
        max_bytes: int | None = None,
        *,
        columns: Sequence[str] = COLUMNS,
        key_range: tuple[int, int] | None = None,
        filter: RecordFilter | None = None,
    ) -> pa.Table:
        """Return the next records as a table; wait for some at most `timeout_s` seconds, None for no limit.

        `max_bytes` bounds the fetched bytes in one table, to whole fetches. The columns are: topic, partition, offset,
        timestamp, timestamp_type, key, value, headers, key_hash, leader_epoch, and sequence, which grows with every
        record of a key. With `key_range`, only keys in this part of the key space (both ends inclusive) are returned:
        the consumer drops the others. A `filter` (see `poll`) and shares (see `assign`) save their transfer.
        """
        while True:
            parts = await self.gather(timeout_s, max_bytes, filter)
            table = await self._handout.table_beside(parts, columns, key_range)
            if self.hand_out(parts):
                return table

    async def gather(
        self, timeout_s: float | None, max_bytes: int | None, wanted: RecordFilter | None
    ) -> list[Deliverable]:
        """Wait for deliverable parts of at most about `max_bytes`; call `hand_out` to move the positions past them."""
        self._refuse_beside_a_handler("poll")
        self._refuse_of_slices("return tables; poll records")
        self._fetcher.filter(wanted)
        if self._driver.unfinished is not None:
            text = "records are acknowledged one by one with acknowledgement.mode 'explicit': poll them, not tables"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        parts, size = list[Deliverable](), 0
        limit = self._settings.fetch_max_bytes if max_bytes is None else max_bytes
        for part in await self._driver.gather(timeout_s):
            if parts and size + len(part.fetched.data) > limit:
                break
            parts.append(part)
            size += len(part.fetched.data)
        return parts

    def table(
        self, parts: Sequence[Deliverable], columns: Sequence[str] = COLUMNS, key_range: tuple[int, int] | None = None
    ) -> pa.Table:
        """Decode gathered parts; callable from any thread."""
        return self._handout.table(parts, columns, key_range)

    def hand_out(self, parts: Sequence[Deliverable]) -> bool:
        """Move the positions past gathered parts, and fetch more. Return False if a position moved since `gather`:
        no position moves then, and the parts must be discarded and gathered again.
        """
        standing = self._fetcher.all_handed_out(parts)
        self._driver.pump()
        return standing

    async def __aiter__(self) -> AsyncIterator[Record]:
        while not self._driver.closed:
            for record in self.one_by_one(await self.poll(timeout_s=None, max_records=self.polled_at_once)):
                yield record

    @property
    def polled_at_once(self) -> int | None:
        """The records that a loop polls: 1 where each is acknowledged, since those not reached would never be."""
        return None if self._driver.unfinished is None else 1

    def one_by_one(self, records: Sequence[Record]) -> Iterator[Record]:
        """Yield polled records and move the positions to commit with them, so that a loop may stop at any record."""
        return self._handout.one_by_one(records)

    # -- work that is finished out of order ---------------------------------------------------------------------------

    def done(self, record: Record) -> bool:
        """Finish a record that `poll` has returned: what is done is committed, and the next of its key may come.

        Return False if it does not count: the partition was revoked or its position moved since, or the record was
        finished or rejected before. Needs `acknowledgement_mode="explicit"`, or a handler that runs.
        """
        finished = self._tracking().tracker.done(record.lease, record.delivery_count)
        if finished:
            self._driver.nudge()
        return finished

    def reject(self, record: Record, retry_after: float = 0.0) -> bool:
        """Have a record returned again by this consumer, after `retry_after` seconds, with its `delivery_count` grown.

        Later records of its key wait for it, other keys go on. Return False if it does not count, as `done`.
        """
        if retry_after < 0:
            raise ValueError("retry_after must be at least 0")
        due_ms = self._driver.now_ms() + int(retry_after * 1000)
        rejected = self._tracking().tracker.reject(record.lease, record.delivery_count, due_ms)
        if rejected:
            self._driver.undo(record)
            self._driver.nudge()
        return rejected

    def _tracking(self) -> Unfinished:
        if self._driver.unfinished is None:
            text = "records are acknowledged one by one only with acknowledgement.mode 'explicit', or in `run`"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        return self._driver.unfinished

    async def run(
        self,
        handler: Handler,
        *,
        parallel: int = 32,
        on_error: OnError | Decide = "stop",
        dead_letter: DeadLetter | None = None,
        drain_timeout_s: float = 30.0,
    ) -> None:
        """Call `handler(record)` for every record, up to `parallel` at a time, each key in order, until `stop`.

        An async handler runs on the event loop, a plain function in a thread. A record is done when its handler
        returns; what is done is committed, nothing else. A handler that raises `RejectError` has the record again. For
        any other error `on_error` decides, or the function that it is: "stop" (the error is raised here, once the other
        handlers have returned), a `Retry`, or "skip": `dead_letter(record, error)`, if given, has the record, then it
        is done. Running handlers have `drain_timeout_s` seconds to return before a partition is revoked, or at the end.
        """
        self._refuse_beside_a_handler("run another one")
        self._driver.start()
        if self._records is not None:
            self._records.finish_handed()
        self._handout.go_back()
        self._pool = Pool(
            self._driver,
            self._driver.track(),
            handler,
            parallel=parallel,
            on_error=on_error,
            dead_letter=dead_letter,
            drain_timeout_s=drain_timeout_s,
        )
        try:
            await self._pool.run()
        finally:
            self._pool = None
            self._driver.end_of_run()

    def stop(self) -> None:
        """End `run` once the handlers that run have returned; callable from a handler."""
        if self._pool is not None:
            self._pool.stop()

    def _refuse_beside_a_handler(self, what: str) -> None:
        if self._pool is not None:
            raise run_refused(what)

    # -- the group's offsets ------------------------------------------------------------------------------------------

    async def commit(
        self, offsets: OffsetsByPartition | None = None, *, ranges: RangesByPartition | None = None
    ) -> None:
        """Commit offsets, the next ones to read; by default those after all returned records. Return once durable.

        `ranges`: offsets above the committed one that are done, too, as (first, last). By default, where records are
        acknowledged one by one, all that is done is committed. Raises INDIVIDUAL_COMMIT_NOT_ALLOWED for ranges where
        the coordinator does not take them.

        Raises `ApiError` if the commit fails; with UNKNOWN_MEMBER_ID or FENCED_MEMBER_EPOCH the partitions were
        reassigned to other members.
        """
        group = self._grouped("commit")
        self._driver.start()
        lost = self._records.finish_handed() if self._records is not None and ranges is None else 0
        if ranges is not None and not self._settings.allow_individual_commit:
            text = "this consumer commits no ranges: its allow.individual.commit is false"
            raise ApiError(ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED, text)
        await group.commit(
            None if offsets is None else offsets_of(offsets), None if ranges is None else ranges_of(ranges)
        )
        if lost:
            text = f"{lost} records of the last poll were not committed: this member was out of its group meanwhile"
            raise ApiError(ErrorCode.INVALID_RECORD_STATE, f"{text}, and they go to others")

    def commit_async(self, offsets: OffsetsByPartition | None = None) -> asyncio.Task[None]:
        """Commit without waiting; the returned task is the outcome. Commits run in the order of the calls."""
        group = self._grouped("commit")
        self._driver.start()
        if self._cooperative is not None:
            return self._driver.run(self.commit(offsets))
        if offsets is None:
            return self._driver.run(group.commit_all(group.processed()))
        return self._driver.run(group.commit(offsets_of(offsets)))

    async def committed(self, *partitions: tuple[str, int]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the group's committed offsets, by default of the assigned partitions; None without an offset."""
        group = self._grouped("ask for committed offsets")
        self._driver.start()
        return await group.committed([TopicPartition(*tp) for tp in partitions] or self.assignment())

    def offsets_to_commit(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return what `commit` would commit, of this member's keys (not of slices): for transactions."""
        return self._grouped("name offsets to commit").to_commit()

    def ranges_of(self, records: Iterable[Record]) -> dict[TopicPartition, Ranges]:
        """Return the offsets of records in slices, with those around them that have none: for `commit(ranges=...)`."""
        return self._grouped("name ranges").ranges_of(records)

    def group_metadata(self) -> GroupMetadata:
        """Return the consumer's identity in its group, for a transaction that commits its offsets."""
        return self._grouped("return group metadata").metadata()

    # -- offsets ------------------------------------------------------------------------------------------------------

    async def beginning_offsets(self, *partitions: tuple[str, int]) -> dict[TopicPartition, int]:
        """Return the log start of partitions, by default of the assigned ones."""
        return await self._offsets(partitions, EARLIEST)

    async def end_offsets(self, *partitions: tuple[str, int]) -> dict[TopicPartition, int]:
        """Return the log end of partitions: the high watermark, or the last stable offset under read_committed."""
        return await self._offsets(partitions, LATEST)

    async def offsets_for_times(
        self, timestamps: Mapping[tuple[str, int], int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return each partition's first record at or after its timestamp (ms); None if no record is that late."""
        wanted = {TopicPartition(*partition): timestamp for partition, timestamp in timestamps.items()}
        found = await self._cluster.offsets(wanted, read_committed=self._settings.read_committed)
        return {tp: at if at.offset >= 0 else None for tp, at in found.items()}

    async def lag(self) -> dict[TopicPartition, int]:
        """Return the distance in offsets from each assigned partition's position to its log end."""
        ends = await self.end_offsets()
        if self._cooperative is not None:
            committed = await self.committed()
            return {tp: end - (0 if (at := committed[tp]) is None else at.offset) for tp, end in ends.items()}
        return {tp: max(0, end - await self.position(*tp)) for tp, end in ends.items()}

    async def _offsets(self, partitions: Sequence[tuple[str, int]], timestamp: int) -> dict[TopicPartition, int]:
        wanted = [TopicPartition(*partition) for partition in partitions]
        if not wanted and self._cooperative is None:
            await self._driver.know([])
        asked = dict.fromkeys(wanted or self.assignment(), timestamp)
        found = await self._cluster.offsets(asked, read_committed=self._settings.read_committed)
        return {tp: at.offset for tp, at in found.items()}

    async def close(self, *, leave: bool | None = None, timeout_s: float = CLOSE_TIMEOUT_MS / 1000) -> None:
        """Close the consumer. A group member commits (with `enable_auto_commit`), revokes its partitions, and leaves.

        `leave`: whether to leave the group at once; by default a static member (`group_instance_id`) does not.
        """
        if self._driver.closed:
            return
        if self._pool is not None:
            await self._pool.ended()
        try:
            if self._records is not None:
                self._records.finish_handed()
            if self._group is not None and self._driver.started:
                await self._group.close(leave=leave, timeout_ms=int(timeout_s * 1000))
            elif self._driver.state is not None and self._driver.started and self._settings.enable_auto_commit:
                await self._driver.state.flush()
        finally:
            if self._driver.state is not None:
                await self._driver.state.close()
            await self._driver.close()
            await self._cluster.close()
