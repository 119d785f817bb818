"""Snapshots of topics for the driver: the lineage and the log ends of one moment.

The rule: a lineage and the log ends beside it belong to the same layout. ListOffsets carries the leader epochs that the
lineage was read with, so the broker refuses the request after a resize (FENCED_LEADER_EPOCH), and the topic is read
again. A resize changes the epoch of every remaining partition, so on an elastic broker ListOffsets alone detects a
resize. Created and deleted topics, and partitions added on a stock broker, appear with the next metadata refresh.

Metadata may come from a broker that has not heard of a topic, or on a stock Kafka of a partition, which the query has
offsets of: all are asked in turn, as often as the options say and each once at least. Then a topic counts as deleted if
none knows it; a partition does not.

With read_committed the ends are last stable offsets. A transaction that was open during a resize keeps the last stable
offset of an old partition below its cut, so what waits for that partition waits for the transaction, too (ADR 0013).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.base.patterns import compile_pattern
from anabranch.client.admin.admin import Admin
from anabranch.client.cluster.connection import ConnectionSettings
from anabranch.client.cluster.metadata import Cluster, offsets_request
from anabranch.client.cluster.turns import Turns
from anabranch.machines.clients.fetching import TopicView
from anabranch.spark.options import EARLIEST, LATEST, Bound, OptionError, Options, did_you_mean, unreachable
from anabranch.spark.plan import Offsets, TopicOffsets, TopicSnapshot, missing_of

METADATA_AGE_MAX_S = 1.0
"""Maximum age of metadata in seconds; older metadata is refreshed even if no epoch has changed."""
SLOW_RETRIES_S = 60.0
"""How long brokers that are slow to fail are asked again, unless the options allow longer (`default.api.timeout.ms`).

Whoever drops packets is only given up after the time limit of a connection, a hundred times as late as who refuses.
"""
NO_OFFSETS: Offsets = {}

R = TypeVar("R")


def connection_settings(options: Options) -> ConnectionSettings:
    """Return the connection settings of a query."""
    names = {name.removeprefix("kafka.").replace(".", "_"): value for name, value in options.client.items()}
    fields = ConnectionSettings.__dataclass_fields__
    given: dict[str, Any] = {name: value for name, value in names.items() if name in fields}
    return ConnectionSettings(**{"client_id": "anabranch-spark", **given})


class SnapshotReader:
    """Reads snapshots of the topics of a query. Synchronous; keeps its connections between snapshots."""

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._cluster = Cluster(options.servers, connection_settings(options))
        self._loop = asyncio.new_event_loop()
        self._admin: Admin | None = None
        self._views: dict[str, TopicView] = {}
        self._names: tuple[str, ...] = ()
        self._asked_at = float("-inf")
        self._began = False
        """Whether brokers have answered."""
        self._are_named = False
        """Whether it was checked that the topics exist that the options name."""
        self._watermarks: Mapping[str, Mapping[int, int]] = {}
        self._watermarks_at = float("-inf")

    def close(self) -> None:
        """End the connections."""
        if not self._loop.is_closed():
            if self._admin is not None:
                self._loop.run_until_complete(self._admin.close())
            self._loop.run_until_complete(self._cluster.close())
            self._loop.close()

    def commit(self, group_id: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit the query's progress to a consumer group. Raises `ApiError` while the group has members."""
        self._run(self._commit(group_id, offsets))

    async def _commit(self, group_id: str, offsets: Mapping[TopicPartition, int]) -> None:
        if self._admin is None:
            self._admin = Admin(self._options.servers, client_id="anabranch-spark")
        await self._admin.alter_group_offsets(group_id, offsets)

    def read(self, known: Offsets = NO_OFFSETS, *, begins: bool | None = None) -> dict[str, TopicSnapshot]:
        """Return snapshots of all topics of the query; `known` are the offsets that it has.

        Raises `OptionError` for a topic that does not exist, and that the query does not know, where it `begins`, in
        this run, with this call; by default with the first one. Otherwise a topic that does not exist is left out.
        Raises `ApiError` if the brokers name fewer partitions than the query knows of a topic that cannot shrink.
        """
        checks = not self._are_named if begins is None else begins
        self._are_named |= checks
        return self._run(self._read(known, checks=checks))

    def bound(self, snapshots: Mapping[str, TopicSnapshot], bound: Bound, name: str) -> dict[str, dict[int, int]]:
        """Resolve a start or an end to an offset for every partition; `name` is the option's, for errors."""
        if bound.timestamp is not None or bound.timestamps:
            return self._run(self._by_timestamp(snapshots, bound, name))
        mentioned = self.with_high_watermarks(_mentioned(snapshots, bound.offsets, name), bound.offsets)
        if self._options.fail_on_data_loss:
            _check_offsets(mentioned, bound.offsets, name)
        return {topic: _by_offset(snapshot, bound, name) for topic, snapshot in mentioned.items()}

    def with_high_watermarks(
        self, snapshots: Mapping[str, TopicSnapshot], positions: Mapping[str, Mapping[int, int]]
    ) -> dict[str, TopicSnapshot]:
        """Complete the snapshots in which a position lies beyond the last stable offset, as after read_uncommitted.

        Such a position is no loss unless it lies beyond the high watermark, too, which few queries need to know.
        """
        beyond = {
            topic: snapshot
            for topic, snapshot in snapshots.items()
            if self._options.committed
            and any(at > snapshot.ends.get(p, at) for p, at in positions.get(topic, {}).items())
        }
        return {**snapshots, **{topic: self._run(self._with_high_watermarks(each)) for topic, each in beyond.items()}}

    async def _with_high_watermarks(self, snapshot: TopicSnapshot) -> TopicSnapshot:
        ends = await self._with_retries(snapshot.topic, lambda view: self._offsets(view, LATEST, committed=False))
        return replace(snapshot, high_watermarks=ends)

    def high_watermarks(self, topics: Iterable[str]) -> Mapping[str, Mapping[int, int]]:
        """Return the high watermarks of topics, about `METADATA_AGE_MAX_S` old; none where snapshots have them.

        They are for reports: a topic for which no answer comes is left out, and asked about later.
        """
        now = self._clock()
        if self._options.committed and now - self._watermarks_at > METADATA_AGE_MAX_S:
            self._watermarks_at = now
            self._watermarks = self._run(self._all_high_watermarks(tuple(topics)))
        return self._watermarks

    async def _all_high_watermarks(self, topics: Sequence[str]) -> dict[str, Mapping[int, int]]:
        views = {topic: self._views[topic] for topic in topics if topic in self._views}
        asked = (self._offsets(view, LATEST, committed=False) for view in views.values())
        found = await asyncio.gather(*asked, return_exceptions=True)
        return {topic: ends for topic, ends in zip(views, found, strict=True) if isinstance(ends, dict)}

    def at_timestamp(self, topic: str, timestamp: int) -> dict[int, int]:
        """Return each partition's first offset at or after `timestamp` (ms); -1 if no record is that late."""
        return self._run(self._with_retries(topic, lambda view: self._offsets(view, timestamp)))

    # -- how ----------------------------------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        try:
            return self._loop.run_until_complete(coroutine)
        except (ConnectionError, TimeoutError) as error:
            raise unreachable(self._options.servers, error) from error

    async def _read(self, known: Offsets, *, checks: bool) -> dict[str, TopicSnapshot]:
        now = self._clock()
        if now - self._asked_at > METADATA_AGE_MAX_S:
            await self._refresh_with_retries()
            self._asked_at = now
        names = [*self._names, *self._unlisted(known)]
        snapshots = await asyncio.gather(*(self._read_topic(name, known.get(name), checks=checks) for name in names))
        self._began = True
        return {snapshot.topic: snapshot for snapshot in snapshots if snapshot is not None}

    async def _refresh_with_retries(self) -> None:
        """Refresh; a query that has begun survives a restart of its brokers, one that begins fails at once."""
        is_over, failures = self._limit(), 0
        while True:
            try:
                return await self._refresh()
            except ConnectionError:
                failures += 1
                if not self._began or is_over(failures):
                    raise
            await asyncio.sleep(self._options.snapshot_retry_interval_ms / 1000)

    def _limit(self) -> Callable[[int], bool]:
        """Return a function that tells after how many failures from now on no retry is left, or no time."""
        options = self._options
        retries, allowed_s = (
            options.snapshot_retries,
            options.snapshot_retries * options.snapshot_retry_interval_ms / 1000,
        )
        deadline = self._clock() + max(allowed_s, SLOW_RETRIES_S)
        return lambda failures: failures > retries or self._clock() > deadline

    async def _refresh(self) -> None:
        """Refresh the set of topics and their settings, and drop the views of topics that have changed."""
        options = self._options
        if options.pattern is None:
            self._names = options.topics
            infos = await self._cluster.topics(self._names)
        else:
            matches = _matcher(options.pattern)
            infos = await self._cluster.topics()
            seen = ((name, info) for name, info in infos.items() if not isinstance(info, ApiError))
            self._names = tuple(sorted(name for name, info in seen if not info.is_internal and matches(name)))
        for name, view in list(self._views.items()):
            info = infos.get(name)
            known = (view.topic_id, view.epochs, view.leaders)
            if info is None or isinstance(info, ApiError) or (info.topic_id, info.epochs, info.leaders) != known:
                del self._views[name]
        elastic = [name for name, view in self._views.items() if view.elastic]
        settings = await self._cluster.settings(elastic) if elastic else {}
        for name, (ordered, cleanup) in settings.items():
            self._views[name] = replace(self._views[name], ordered=ordered, cleanup=cleanup)

    def _unlisted(self, known: Offsets) -> list[str]:
        """Return the topics with offsets that match the pattern and are not in the broker's list."""
        pattern, others = self._options.pattern, sorted(known.keys() - set(self._names))
        return list(filter(_matcher(pattern), others)) if others and pattern is not None else []

    async def _read_topic(self, name: str, known: TopicOffsets | None, *, checks: bool) -> TopicSnapshot | None:
        try:
            return await self._with_retries(
                name, lambda view: self._snapshot(view, known), is_expected=known is not None
            )
        except ApiError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
            if not checks or known is not None or self._options.pattern is not None:
                return None
            raise await self._no_such_topic(name) from None

    async def _no_such_topic(self, name: str) -> OptionError:
        others = await self._cluster.topics()
        question = did_you_mean(name, (other for other, info in others.items() if not isinstance(info, ApiError)))
        option = "subscribe" if self._options.assign is None else "assign"
        create = f"{'Otherwise create' if question else 'Create'} it: anabranch topic create {name}"
        sentences = (f"{option} names topic '{name}', which does not exist.", question, create)
        return OptionError(" ".join(filter(None, sentences)))

    async def _snapshot(self, view: TopicView, known: TopicOffsets | None) -> TopicSnapshot:
        missing = missing_of(known, view.topic_id.hex, view.leaders.keys(), elastic=view.elastic)
        if missing:
            raise ApiError(
                ErrorCode.LEADER_NOT_AVAILABLE,
                f"the brokers name no partition {missing[0]} of topic {view.name}, which had it before: they have not "
                "heard of it yet. If the topic was created again, start the query with a new checkpointLocation",
            )
        starts, ends = await asyncio.gather(self._offsets(view, EARLIEST), self._offsets(view, LATEST))
        ordered = self._options.ordered and view.ordered
        later = {partition: max(end, starts[partition]) for partition, end in ends.items()}
        return TopicSnapshot(
            view.name,
            view.topic_id.hex,
            view.lineage,
            starts,
            later,
            ordered,
            removed=view.removed,
            cleanup=view.cleanup,
            elastic=view.elastic,
        )

    async def _with_retries(
        self, name: str, ask: Callable[[TopicView], Coroutine[Any, Any, R]], *, is_expected: bool = True
    ) -> R:
        """Query a topic; after a retriable error, refresh its view and retry.

        A topic that is expected to exist is asked for again where a broker does not know it, until each known broker
        has said so.
        """
        is_over, turns = self._limit(), Turns()
        errors: list[tuple[int, ApiError | ConnectionError]] = []
        while True:
            try:
                view = self._views.get(name)
                if view is None:
                    view = await self._view(name, turns)
                return await ask(view)
            except (ApiError, ConnectionError) as error:
                is_expected |= self._views.pop(name, None) is not None
                if not _may_pass(error, is_expected=is_expected):
                    raise
                errors.append((_weight(error, is_heard=turns.is_heard), error))
                if is_over(len(errors)) and turns.all_asked(self._cluster.node_ids):
                    recent = errors[-1 - len(self._cluster.node_ids) :]
                    raise max(reversed(recent), key=lambda each: each[0])[1] from None
            await asyncio.sleep(self._options.snapshot_retry_interval_ms / 1000)

    async def _view(self, name: str, turns: Turns) -> TopicView:
        """Ask the broker that has its turn for a topic; it may know a leader that cannot be reached."""
        node_id = turns.next(self._cluster.node_ids)
        try:
            view = await self._cluster.view(name, node_id=node_id)
        except ConnectionError:
            if not self._cluster.is_connected(node_id):
                turns.unreachable()
            raise
        self._views[name] = view
        return view

    async def _offsets(self, view: TopicView, timestamp: int, *, committed: bool | None = None) -> dict[int, int]:
        read_committed = self._options.committed if committed is None else committed
        by_leader: dict[int, dict[TopicPartition, tuple[int, int]]] = {}
        for partition, leader in view.leaders.items():
            if leader < 0:
                raise ApiError(ErrorCode.LEADER_NOT_AVAILABLE, f"{view.name}-{partition} has no leader")
            by_leader.setdefault(leader, {})[TopicPartition(view.name, partition)] = (
                timestamp,
                view.epochs.get(partition, -1),
            )
        requests = (
            self._cluster.ask(offsets_request(partitions, read_committed=read_committed), node_id=leader)
            for leader, partitions in by_leader.items()
        )
        found: dict[int, int] = {}
        for response in await asyncio.gather(*requests):
            for result in (result for topic in response.topics for result in topic.partitions):
                if result.error_code:
                    code = ErrorCode.of(result.error_code)
                    raise ApiError(code, f"the broker names no offset of {view.name}-{result.partition_index}")
                found[result.partition_index] = result.offset
        return found

    async def _by_timestamp(
        self, snapshots: Mapping[str, TopicSnapshot], bound: Bound, name: str
    ) -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = {}
        for topic, snapshot in _mentioned(snapshots, bound.timestamps, name).items():
            assigned = snapshot.starts.keys() if self._options.assign is None else self._options.assign[topic]
            wanted = dict.fromkeys(assigned, bound.timestamp)
            if bound.timestamp is None:
                by_partition = bound.timestamps.get(topic, {})
                _check_partitions(snapshot, by_partition, name)
                wanted.update((partition, by_partition[partition]) for partition in assigned & by_partition.keys())
            found[topic] = {}
            for timestamp in sorted({timestamp for timestamp in wanted.values() if timestamp is not None}):
                offsets = await self._with_retries(topic, lambda view, at=timestamp: self._offsets(view, at))  # type: ignore[misc]
                for partition, offset in offsets.items():
                    if wanted.get(partition) == timestamp:
                        found[topic][partition] = self._or_end(snapshot, partition, offset, timestamp, name)
            for partition, timestamp_ in wanted.items():
                if timestamp_ is None:
                    found[topic][partition] = (
                        snapshot.starts[partition] if _is_start(name) else snapshot.ends[partition]
                    )
        return found

    def _or_end(self, snapshot: TopicSnapshot, partition: int, offset: int, timestamp: int, name: str) -> int:
        if offset >= 0:
            return offset
        retired, is_empty = partition >= snapshot.lineage.count, snapshot.starts[partition] == snapshot.ends[partition]
        if _is_start(name) and not retired and not is_empty and not self._options.latest_if_no_timestamp:
            raise OptionError(
                f"{name}: {TopicPartition(snapshot.topic, partition)} has no record at {timestamp} ms or later. Choose "
                "an earlier time, or set startingOffsetsByTimestampStrategy to latest to begin at the end."
            )
        return snapshot.ends[partition]


def _may_pass(error: ApiError | ConnectionError, *, is_expected: bool = True) -> bool:
    if not isinstance(error, ApiError):
        return True
    return error.retriable and (is_expected or error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


def _weight(error: ApiError | ConnectionError, *, is_heard: bool) -> int:
    """Which of the brokers' last answers counts: that a topic is there more than that it is not, and silence least."""
    if isinstance(error, ApiError):
        return 1 if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION else 2
    return 2 if is_heard else 0


def _is_start(name: str) -> bool:
    return name.startswith("starting")


def reads(options: Options, topic: str) -> bool:
    """Whether the options of a query name a topic, or match it."""
    return topic in options.topics if options.pattern is None else _matcher(options.pattern)(topic)


def _matcher(pattern: str) -> Callable[[str], bool]:
    try:
        return compile_pattern(pattern)
    except ApiError as error:
        raise OptionError(f"subscribePattern: {error.message}") from None


def _mentioned(
    snapshots: Mapping[str, TopicSnapshot], wanted: Mapping[str, Mapping[int, int]], name: str
) -> Mapping[str, TopicSnapshot]:
    """All topics of the query, once it is sure that no other is named."""
    others = sorted(wanted.keys() - snapshots.keys())
    if others:
        raise OptionError(f"{name} names {', '.join(others)}, which this query does not read.")
    return snapshots


def _check_partitions(snapshot: TopicSnapshot, wanted: Mapping[int, int], name: str) -> None:
    """A partition that was removed may still be named; one that never was, may not."""
    never = sorted(p for p in wanted if p not in snapshot.starts and not 0 <= p < max(snapshot.lineage.counts))
    if never:
        has = f"partitions 0 to {max(snapshot.starts)}"
        raise OptionError(f"{name} names partition {never[0]} of {snapshot.topic}, which has {has}.")


def _check_offsets(snapshots: Mapping[str, TopicSnapshot], wanted: Mapping[str, Mapping[int, int]], name: str) -> None:
    """Refuse offsets beyond the logs: an end that is never reached, or a start that skips what is not written yet."""
    for topic, offsets in wanted.items():
        ends = snapshots[topic].high_watermarks or snapshots[topic].ends
        for partition, offset in offsets.items():
            if offset > ends.get(partition, offset):
                raise OptionError(
                    f"{name} names offset {offset} of {TopicPartition(topic, partition)}, which ends at offset "
                    f"{ends[partition]}. Name that offset or a smaller one, or set failOnDataLoss to false to take it."
                )


def _by_offset(snapshot: TopicSnapshot, bound: Bound, name: str) -> dict[int, int]:
    wanted = bound.offsets.get(snapshot.topic, {})
    _check_partitions(snapshot, wanted, name)
    otherwise = bound.everywhere
    if bound.offsets:
        otherwise = EARLIEST if _is_start(name) else LATEST
    chosen = {partition: wanted.get(partition, otherwise) for partition in snapshot.starts}
    named = {EARLIEST: snapshot.starts, LATEST: snapshot.ends}
    return {p: named[offset][p] if offset in named else offset for p, offset in chosen.items()}
