"""The admin client: topics, settings, offsets, groups (`groups`), and the cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.admin.groups import GroupAdmin
from anabranch.client.admin.load import describe_load
from anabranch.client.admin.transactions import TransactionDescription, description_of
from anabranch.client.cluster.coordinator import TRANSACTION, Coordinator
from anabranch.client.cluster.metadata import (
    TOPIC_RESOURCE,
    Cluster,
    ClusterInfo,
    OffsetAndTimestamp,
    PartitionInfo,
    TopicInfo,
)
from anabranch.client.producer.transactions import PreparedTransaction, Transactions
from anabranch.client.settings import AdminSettings, as_keywords, configured_by
from anabranch.machines.clients.fetching import EARLIEST, LATEST
from anabranch.machines.cuts import newest_segments
from anabranch.machines.key_history import KeyHistory, Log, history_of, homes
from anabranch.machines.lineage import GateWait, Lineage, Segment
from anabranch.machines.partition.load import PartitionLoad
from anabranch.protocol.messages.cancel_topic_resizes import CancelTopicResizesRequest
from anabranch.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from anabranch.protocol.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from anabranch.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.describe_transactions import DescribeTransactionsRequest
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.protocol.messages.list_topic_resizes import ListTopicResizesRequest

BROKER_RESOURCE = 4
RESOURCES = {"topic": TOPIC_RESOURCE, "broker": BROKER_RESOURCE, "group": 32}
SET, DELETE = 0, 1
POLL_INTERVAL_S = 0.05
SEGMENTS_DESCRIBED_MAX = 100


class ConfigEntry(NamedTuple):
    """A setting of a topic or broker. `source` is Kafka's number; 1 means set on the resource itself."""

    name: str
    value: str | None
    source: int
    read_only: bool
    sensitive: bool

    @property
    def is_default(self) -> bool:
        """Whether the value is not set on the resource itself."""
        return self.source != 1


class OffsetSpan(NamedTuple):
    """The offsets of a partition: `start` to `end`, `end` exclusive."""

    start: int
    end: int


OFFLINE = OffsetSpan(-1, -1)
"""Of a partition whose log cannot be opened, or whose leader is not running."""


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """A partition with its segments, and the gates of a reader at its log start; neither if it is offline."""

    info: PartitionInfo
    offsets: OffsetSpan
    """-1 and -1 while its log cannot be opened."""
    segments: tuple[Segment, ...]
    """The newest SEGMENTS_DESCRIBED_MAX of those with records, oldest first, and the one that grows."""
    segment_count: int
    """How many there are in all."""
    waits: tuple[GateWait, ...]


class ResizeWait(NamedTuple):
    """A partition that holds a resize up."""

    partition: int
    broker_id: int
    error: ErrorCode
    waiting_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResizeDescription:
    """A resize that runs."""

    topic: str
    from_count: int
    to_count: int
    phase: str
    """`close`, `cut` or `open`."""
    cancelable: bool
    """Whether `Admin.cancel_resize` can still undo it."""
    wait_count: int
    """How many partitions hold it up; `waits` names the first 100."""
    waits: tuple[ResizeWait, ...]


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic with its lineage and its partitions."""

    info: TopicInfo
    lineage: Lineage
    ordered: bool
    partitions: tuple[PartitionDescription, ...]
    resize: ResizeDescription | None = None
    """The resize that runs."""


class Admin(GroupAdmin):
    """Administers topics and groups.

    Its keyword arguments are the settings of `anabranch.client.settings.AdminSettings` (docs/client-settings.md).
    Use as `async with Admin(bootstrap_servers=...) as admin`, or call `close` at the end.
    """

    @configured_by(AdminSettings)
    def __init__(self, settings: AdminSettings) -> None:
        self._timeout_ms = settings.request_timeout_ms
        self._api_timeout_ms = settings.default_api_timeout_ms
        self._cluster = Cluster(settings.bootstrap_servers, settings.connection())

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a client for settings by Kafka's dotted names, as in `{"bootstrap.servers": "..."}`."""
        return cls(**as_keywords(cls, config))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._cluster.close()

    # -- topics -------------------------------------------------------------------------------------------------------

    async def create_topics(
        self,
        topics: str | Iterable[str],
        *,
        partitions: int = -1,
        replication_factor: int = -1,
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> None:
        """Create topics of `partitions` partitions (-1: the broker's `num.partitions`); wait until all are usable.

        The count is the topic's initial count, the minimum of all later resizes.
        """
        names = [topics] if isinstance(topics, str) else list(topics)
        request = CreateTopicsRequest(
            topics=[
                CreatableTopic(
                    name=name,
                    num_partitions=partitions,
                    replication_factor=replication_factor,
                    configs=[CreatableTopicConfig(name=key, value=value) for key, value in (configs or {}).items()],
                )
                for name in names
            ],
            timeout_ms=self._timeout_ms,
            validate_only=validate_only,
        )
        response = await self._decide(request, lambda response: [topic.error_code for topic in response.topics])
        for topic in response.topics:
            _check(topic.error_code, topic.error_message, f"topic '{topic.name}' cannot be created")
        if not validate_only:
            for name in names:
                await self._until(name, _has_leaders, "has no leaders yet")

    async def delete_topics(self, topics: str | Iterable[str]) -> None:
        """Delete topics with all their records; wait until they no longer exist."""
        names = [topics] if isinstance(topics, str) else list(topics)
        request = DeleteTopicsRequest(
            topics=[DeleteTopicState(name=name) for name in names], topic_names=names, timeout_ms=self._timeout_ms
        )
        response = await self._decide(request, lambda response: [topic.error_code for topic in response.responses])
        for topic in response.responses:
            _check(topic.error_code, topic.error_message, f"topic '{topic.name}' cannot be deleted")
        deadline = time.monotonic() + self._api_timeout_ms / 1000
        while any(not isinstance(info, ApiError) for info in (await self._cluster.topics(names)).values()):
            if time.monotonic() > deadline:
                raise ApiError(ErrorCode.REQUEST_TIMED_OUT, f"the topics {', '.join(names)} still exist")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def list_topics(self, *, internal: bool = False) -> list[str]:
        """Return the names of all topics, sorted."""
        topics = await self._cluster.topics()
        return sorted(name for name, info in topics.items() if internal or not getattr(info, "is_internal", False))

    async def topics(self, names: Sequence[str] | None = None) -> dict[str, TopicInfo]:
        """Return the metadata of topics, by default of all. Raises `ApiError` for a topic that does not exist."""
        found: dict[str, TopicInfo] = {}
        for name, info in (await self._cluster.topics(names)).items():
            if isinstance(info, TopicInfo):
                found[name] = info
            elif names is not None:
                raise info
        return found

    async def describe_topics(self, topics: str | Iterable[str]) -> dict[str, TopicDescription]:
        """Describe topics: layouts, leaders, epochs, segments, retiring partitions, and closed gates."""
        names = [topics] if isinstance(topics, str) else list(topics)
        found: dict[str, TopicDescription] = {}
        for name in names:
            try:
                found[name] = await self._describe(name)
            except ApiError as error:
                if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise
                found[name] = await self._describe(name)  # A retiring partition may have been removed meanwhile.
        return found

    async def _describe(self, name: str) -> TopicDescription:
        info, view = await self._cluster.topic(name), await self._cluster.view(name)
        lineage = view.lineage
        numbers = [TopicPartition(name, number) for number in view.leaders if number in info.partitions]
        starts = await self._cluster.offsets(dict.fromkeys(numbers, EARLIEST), skip_offline=True)
        ends = await self._cluster.offsets(dict.fromkeys(starts, LATEST), skip_offline=True)
        spans = {tp.partition: OffsetSpan(starts[tp].offset, end.offset) for tp, end in ends.items()}
        gates = lineage.gates({partition: span.start for partition, span in spans.items()})
        resizes = await self.resizes([name])
        partitions = []
        for _, number in numbers:
            span = spans.get(number)
            if span is None:
                partitions.append(PartitionDescription(info.partitions[number], OFFLINE, (), 0, ()))
                continue
            segments, count = newest_segments(lineage, number, span.start, SEGMENTS_DESCRIBED_MAX)
            waits = gates.waits(number) if view.ordered else ()
            partitions.append(PartitionDescription(info.partitions[number], span, segments, count, waits))
        return TopicDescription(info, lineage, view.ordered, tuple(partitions), resizes.get(name))

    async def explain(self, topic: str, key: bytes) -> KeyHistory:
        """Return where the records of a key lie: in each layout that is left, the partition and the offsets.

        Raises ApiError: the topic does not exist, or its broker knows nothing of layouts.
        """
        info, lineage = await self._cluster.info_and_lineage(topic)
        if not info.elastic:
            text = f"the broker of topic {topic} knows nothing of layouts: its keys are placed by their producers alone"
            raise ApiError(ErrorCode.UNSUPPORTED_VERSION, text)
        asked = sorted({*homes(key, lineage.initial, info.layouts)} & info.partitions.keys() - lineage.unknown.keys())
        epochs = await self._cluster.ended_epochs(info, asked)
        numbers = [TopicPartition(topic, partition) for partition in asked]
        starts = await self._cluster.offsets(dict.fromkeys(numbers, EARLIEST), skip_offline=True)
        ends = await self._cluster.offsets(dict.fromkeys(starts, LATEST), skip_offline=True)
        logs = {
            tp.partition: Log(starts[tp].offset, end.offset, info.partitions[tp.partition].leader_epoch)
            for tp, end in ends.items()
        }
        return history_of(key, lineage, info.layouts, logs, epochs)

    async def describe_load(self, topics: str | Iterable[str]) -> dict[TopicPartition, PartitionLoad]:
        """Return how many records and bytes a second are appended to each part of the key space of each partition.

        Of topics with `accept.range.fetch=true`; a record counts half as much after five minutes. Partitions that are
        offline are left out. `anabranch.machines.keyspace.cuts_by_load` makes shares of it. Raises `ApiError`: a topic
        does not exist, or does not allow fetches of ranges.
        """
        return await describe_load(self._cluster, [topics] if isinstance(topics, str) else list(topics))

    async def lineage(self, topic: str) -> Lineage:
        """Return the lineage of a topic: its layouts and the offsets at which they end."""
        return await self._cluster.lineage(topic)

    async def resize(self, topic: str, partitions: int) -> None:
        """Change the partition count of a topic; wait until the new layout is in effect.

        A count can be lower than before only on an elastic broker, and never below the initial count. Keys keep their
        order through the resize.
        """
        request = CreatePartitionsRequest(
            topics=[CreatePartitionsTopic(name=topic, count=partitions, assignments=None)],
            timeout_ms=self._timeout_ms,
            validate_only=False,
        )
        response = await self._decide(request, lambda response: [result.error_code for result in response.results])
        for result in response.results:
            _check(result.error_code, result.error_message, f"topic '{topic}' cannot have {partitions} partitions")
        await self._until(
            topic,
            lambda info: info.partition_count == partitions and _has_leaders(info),
            f"does not have {partitions} partitions yet; the broker goes on with the resize",
        )

    async def resizes(self, topics: Iterable[str] | None = None) -> dict[str, ResizeDescription]:
        """Return the resizes that run, by default of all topics, and the partitions that hold them up.

        A broker without elasticity has none.
        """
        node = await self._cluster.controller()
        connection = await self._cluster.connection(node)
        if not connection.serves(ListTopicResizesRequest):
            return {}
        request = ListTopicResizesRequest(topics=None if topics is None else list(topics))
        response = await self._cluster.ask(request, node_id=node)
        _check(response.error_code, None, "the resizes cannot be listed")
        return {
            found.name: ResizeDescription(
                found.name,
                found.from_count,
                found.to_count,
                found.phase,
                found.cancelable,
                found.wait_count,
                tuple(
                    ResizeWait(it.partition, it.broker_id, ErrorCode.of(it.error_code), it.waiting_ms, it.reason)
                    for it in found.waits
                ),
            )
            for found in response.topics
        }

    async def cancel_resize(self, topic: str) -> None:
        """Cancel the resize of a topic that runs: the count from before goes on to rule.

        Raises `ApiError` NO_REASSIGNMENT_IN_PROGRESS if no resize runs, and REASSIGNMENT_IN_PROGRESS, with what to do,
        if records may have been placed by the new count already.
        """
        request = CancelTopicResizesRequest(topics=[topic])
        response = await self._decide(request, lambda response: [result.error_code for result in response.results])
        for result in response.results:
            _check(result.error_code, result.error_message, f"the resize of topic '{topic}' cannot be canceled")

    async def delete_records(self, offsets: Mapping[tuple[str, int], int]) -> dict[TopicPartition, int]:
        """Delete the records below an offset of each partition (-1: all records); return the new log starts."""
        leaders = {
            name: info.leaders for name, info in (await self.topics(sorted({topic for topic, _ in offsets}))).items()
        }
        by_leader: dict[int, dict[str, list[DeleteRecordsPartition]]] = {}
        for (name, number), offset in offsets.items():
            if number not in leaders[name]:
                text = f"topic {name} has no partition {number}; it has {', '.join(map(str, leaders[name]))}"
                raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
            topics = by_leader.setdefault(leaders[name][number], {})
            topics.setdefault(name, []).append(DeleteRecordsPartition(partition_index=number, offset=offset))
        starts: dict[TopicPartition, int] = {}
        for leader, topics in by_leader.items():
            request = DeleteRecordsRequest(
                topics=[DeleteRecordsTopic(name=name, partitions=listed) for name, listed in topics.items()],
                timeout_ms=self._timeout_ms,
            )
            response = await self._cluster.ask(request, node_id=leader)
            for answered in response.topics:
                for partition in answered.partitions:
                    tp = TopicPartition(answered.name, partition.partition_index)
                    _check(partition.error_code, None, f"records of {tp} cannot be deleted")
                    starts[tp] = partition.low_watermark
        return starts

    async def list_offsets(
        self, partitions: Mapping[tuple[str, int], int], *, isolation_level: str = "read_uncommitted"
    ) -> dict[TopicPartition, OffsetAndTimestamp]:
        """Return each partition's first offset at or after a timestamp in ms; -1 if no record is that late.

        Timestamp -2 means the log start, -1 the log end.
        """
        wanted = {TopicPartition(*partition): timestamp for partition, timestamp in partitions.items()}
        return await self._cluster.offsets(wanted, read_committed=isolation_level == "read_committed")

    async def topic_offsets(self, topic: str) -> dict[int, OffsetSpan]:
        """Return the offsets of every partition of a topic."""
        info = await self._cluster.topic(topic)
        partitions = [TopicPartition(topic, number) for number in info.partitions]
        starts = await self._cluster.offsets(dict.fromkeys(partitions, EARLIEST))
        ends = await self._cluster.offsets(dict.fromkeys(partitions, LATEST))
        return {tp.partition: OffsetSpan(starts[tp].offset, ends[tp].offset) for tp in partitions}

    # -- settings -----------------------------------------------------------------------------------------------------

    async def describe_configs(self, resource: str, name: str) -> dict[str, ConfigEntry]:
        """Return the settings of a resource: 'topic' or 'group' with its name, 'broker' with its id."""
        wanted = DescribeConfigsResource(resource_type=_resource(resource), resource_name=name, configuration_keys=None)
        node_id = int(name) if resource == "broker" else None
        response = await self._cluster.ask(DescribeConfigsRequest(resources=[wanted]), node_id=node_id)
        for result in response.results:
            _check(result.error_code, result.error_message, f"the settings of {resource} '{name}' cannot be read")
        return {
            config.name: ConfigEntry(
                config.name, config.value, config.config_source, config.read_only, config.is_sensitive
            )
            for result in response.results
            for config in result.configs
        }

    async def alter_configs(
        self, resource: str, name: str, configs: Mapping[str, str | None], *, validate_only: bool = False
    ) -> None:
        """Change settings of a resource; None restores a default. Other settings keep their values."""
        changes = [
            AlterableConfig(name=key, config_operation=DELETE if value is None else SET, value=value)
            for key, value in configs.items()
        ]
        wanted = AlterConfigsResource(resource_type=_resource(resource), resource_name=name, configs=changes)
        request = IncrementalAlterConfigsRequest(resources=[wanted], validate_only=validate_only)
        if resource == "broker":
            response = await self._cluster.ask(request, node_id=int(name))
        else:
            response = await self._decide(request, lambda response: [one.error_code for one in response.responses])
        for result in response.responses:
            _check(result.error_code, result.error_message, f"the settings of {resource} '{name}' cannot be changed")

    async def end_transaction(self, prepared: PreparedTransaction, *, commit: bool) -> None:
        """Commit or abort a transaction that a producer has prepared, in this process or another; repeat it at will.

        Raises `ApiError` with a code of `anabranch.client.producer.transactions.FENCED` if it was aborted meanwhile.
        """
        await Transactions.end_prepared(
            self._cluster,
            prepared,
            commit=commit,
            request_timeout_ms=self._timeout_ms,
            max_block_ms=self._api_timeout_ms,
        )

    async def describe_transactions(self, transactional_ids: str | Iterable[str]) -> dict[str, TransactionDescription]:
        """Describe the newest transactions of transactional ids; ids that their coordinators do not know are left out.

        Raises `ApiError` UNSUPPORTED_VERSION for a broker older than Apache Kafka 3.0.
        """
        found: dict[str, TransactionDescription] = {}
        for name in [transactional_ids] if isinstance(transactional_ids, str) else transactional_ids:
            response = await self._ask(
                Coordinator(self._cluster, name, TRANSACTION),
                DescribeTransactionsRequest(transactional_ids=[name]),
                lambda response: [each.error_code for each in response.transaction_states],
            )
            described = description_of(response.transaction_states[0])
            if described is not None:
                found[name] = described
        return found

    async def describe_cluster(self) -> ClusterInfo:
        """Return the brokers and the controller."""
        return await self._cluster.refresh()

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _decide(self, request: Any, codes: Any) -> Any:
        """Send a request to the controller; after a change of controller, send it to the new one."""
        deadline = time.monotonic() + self._api_timeout_ms / 1000
        while True:
            node = await self._cluster.controller()
            if node >= 0:
                timeout_ms = self._timeout_ms + 5_000
                response = await self._cluster.ask(request, node_id=node, timeout_ms=timeout_ms)
                if ErrorCode.NOT_CONTROLLER not in codes(response):
                    return response
            if time.monotonic() > deadline:
                text = f"the cluster has no controller for {self._api_timeout_ms} ms; check that its brokers run"
                raise ApiError(ErrorCode.NOT_CONTROLLER, text)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _until(self, name: str, holds: Any, otherwise: str) -> None:
        deadline = time.monotonic() + self._api_timeout_ms / 1000
        while True:
            info = (await self._cluster.topics([name]))[name]
            if isinstance(info, TopicInfo) and holds(info):
                return
            if isinstance(info, ApiError) and not info.retriable:
                raise info
            if time.monotonic() > deadline:
                raise ApiError(ErrorCode.REQUEST_TIMED_OUT, f"topic '{name}' {otherwise}")
            await asyncio.sleep(POLL_INTERVAL_S)


def _has_leaders(info: TopicInfo) -> bool:
    return bool(info.partitions) and all(partition.leader >= 0 for partition in info.partitions.values())


def _resource(name: str) -> int:
    if name not in RESOURCES:
        raise ValueError(f"there are no settings of a '{name}'; a resource is {', '.join(RESOURCES)}")
    return RESOURCES[name]


def _check(error_code: int, message: str | None, what: str) -> None:
    if error_code:
        raise ApiError(ErrorCode.of(error_code), f"{what}: {message}" if message else what)
