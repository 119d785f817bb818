"""The metadata of the cluster: brokers, topics, leaders, and the lineage of elastic topics.

`Cluster` finds the brokers from a bootstrap list, keeps a route to each, and requests topics on demand. A lineage is
read as `client.cluster.lineages` describes; on a broker without elasticity every lineage is flat.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from anabranch.base.errors import AnabranchError, ApiError, DecodeError, ErrorCode
from anabranch.base.ids import NO_LEADER_EPOCH, NO_TOPIC_ID, TopicPartition, is_whole
from anabranch.client.cluster.connection import ConnectError, Connection, ConnectionSettings, DisconnectedError, Lane
from anabranch.client.cluster.lineages import Lineages
from anabranch.machines.clients.fetching import TopicView
from anabranch.machines.controller.layouts import Layout, Runs
from anabranch.machines.lineage import Lineage
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse, TopicLayout

ATTEMPTS_MAX = 30
RETRY_BACKOFF_MS = 100
REQUEST_TIMEOUT_MS = 30_000
ORDERED_DELIVERY = "enable.ordered.delivery"
CLEANUP_POLICY = "cleanup.policy"
TOPIC_RESOURCE = 2


class TopicSettings(NamedTuple):
    """What a topic's configs say to readers."""

    ordered: bool = True
    cleanup: frozenset[str] = frozenset()
    """Its `cleanup.policy`; empty where it is not known."""


@dataclass(frozen=True, slots=True)
class Node:
    """A broker."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition in the metadata."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...] = ()
    isr: tuple[int, ...] = ()
    retiring: bool = False
    """Closed for appends; readable until it is empty, and then removed."""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic in the metadata."""

    name: str
    topic_id: UUID
    partitions: Mapping[int, PartitionInfo]
    initial_partition_count: int
    partition_count: int
    """The number of partitions open for appends, without the retiring ones."""
    layouts: tuple[Layout, ...]
    """Those of which a log holds records, oldest first, with their numbers; the last one rules."""
    elastic: bool
    """Whether the broker supports resizing."""
    is_internal: bool = False
    removed: Mapping[int, int] = field(default_factory=dict)
    """Partitions that were removed and have not been created again, to the offset at which each ended."""

    @property
    def leaders(self) -> dict[int, int]:
        """Partition to leader, -1 without a leader."""
        return {number: partition.leader for number, partition in self.partitions.items()}

    @property
    def epochs(self) -> dict[int, int]:
        """Partition to leader epoch."""
        return {number: partition.leader_epoch for number, partition in self.partitions.items()}


class OffsetAndTimestamp(NamedTuple):
    """The offset and timestamp of a record, or -1 and -1 if no record matches."""

    offset: int
    timestamp: int
    leader_epoch: int = NO_LEADER_EPOCH


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The brokers in the metadata."""

    cluster_id: str | None
    controller_id: int
    nodes: tuple[Node, ...]


def parse_servers(servers: str | Iterable[str]) -> list[tuple[str, int]]:
    """Parse a bootstrap list: `host:port`, separated by commas or as a list; the default port is 9092."""
    names = servers.split(",") if isinstance(servers, str) else list(servers)
    found: list[tuple[str, int]] = []
    for name in (name.strip() for name in names):
        if not name:
            continue
        host, colon, port = name.rpartition(":")
        if not colon:
            host, port = name, "9092"
        if not host or not is_whole(port) or not 0 < int(port) < 65536:
            raise ValueError(f"bootstrap.servers: '{name}' is not host:port, for example localhost:9092")
        found.append((host.strip("[]"), int(port)))
    if not found:
        raise ValueError("bootstrap.servers is empty; name at least one broker, for example localhost:9092")
    return found


class Cluster:
    """The brokers and topics of a cluster, and the routes to the brokers. Belongs to one event loop."""

    def __init__(self, bootstrap_servers: str | Iterable[str], settings: ConnectionSettings) -> None:
        self._bootstrap = parse_servers(bootstrap_servers)
        self._settings = settings
        self._nodes: dict[int, Node] = {}
        self._controller = -1
        self._cluster_id: str | None = None
        self._lanes: dict[tuple[str, int, str], Lane] = {}
        self._closed = False
        self._lineages = Lineages(self.ask)

    @property
    def node_ids(self) -> Collection[int]:
        """The known brokers."""
        return self._nodes.keys()

    # -- the routes to brokers ----------------------------------------------------------------------------------------

    def _lane(self, host: str, port: int, purpose: str) -> Lane:
        if self._closed:
            raise ConnectError(f"no connection to {host}:{port} is made: the client is closed")
        lane = self._lanes.get((host, port, purpose))
        if lane is None:
            lane = self._lanes[host, port, purpose] = Lane(host, port, self._settings)
        return lane

    async def connection(self, node_id: int, purpose: str = "control") -> Connection:
        """Return the connection to a broker; `purpose` separates requests with long waits (fetches)."""
        node = self._nodes.get(node_id)
        if node is None:
            await self.refresh()
            node = self._nodes.get(node_id)
        if node is None:
            raise ConnectError(f"broker {node_id} is not among the brokers of the cluster {sorted(self._nodes)}")
        return await self._lane(node.host, node.port, purpose).connection()

    def open_connection(self, node_id: int, purpose: str) -> Connection | None:
        """Return the open connection to a broker, if any."""
        node = self._nodes.get(node_id)
        lane = None if node is None else self._lanes.get((node.host, node.port, purpose))
        return None if lane is None else lane.open_connection

    def is_connected(self, node_id: int | None) -> bool:
        """Whether the connection to a broker is open, or any to a known broker."""
        asked = self._nodes if node_id is None else (node_id,)
        return any(self.open_connection(each, "control") is not None for each in asked)

    async def connection_to(self, host: str, port: int, purpose: str) -> Connection:
        """Return the connection to a broker by its address, as given by another broker."""
        return await self._lane(host, port, purpose).connection()

    async def any_connection(self) -> Connection:
        """Return a connection to any reachable broker."""
        known = [(node.host, node.port) for node in self._nodes.values()]
        random.shuffle(known)
        addresses = list(dict.fromkeys([*known, *self._bootstrap]))
        addresses.sort(key=lambda address: not self._is_open(*address))
        failures: list[str] = []
        for host, port in addresses:
            try:
                return await self._lane(host, port, "control").connection()
            except (ConnectError, DisconnectedError) as error:
                failures.append(str(error))
        raise ConnectError(" ".join(failures))

    def _is_open(self, host: str, port: int) -> bool:
        lane = self._lanes.get((host, port, "control"))
        return lane is not None and lane.open_connection is not None

    async def close(self) -> None:
        """Close all connections, and refuse new ones."""
        self._closed = True
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            await lane.close()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def ask(self, message: Any, *, node_id: int | None = None, timeout_ms: int | None = None) -> Any:
        """Send an idempotent request to a broker, by default to any; send it again if the connection ends."""
        for attempt in range(1, 4):
            try:
                connection = await (self.any_connection() if node_id is None else self.connection(node_id))
                return await connection.send(message, timeout_ms=timeout_ms or self._settings.request_timeout_ms)
            except DisconnectedError:
                if attempt == 3:
                    raise
        raise AssertionError

    async def controller(self) -> int:
        """Return the id of the controller."""
        await self.refresh()
        return self._controller

    # -- topics -------------------------------------------------------------------------------------------------------

    async def refresh(self) -> ClusterInfo:
        """Refresh the list of brokers."""
        await self._metadata([])
        return ClusterInfo(self._cluster_id, self._controller, tuple(self._nodes.values()))

    async def _metadata(
        self, topics: Sequence[str] | None, *, create: bool = False, node_id: int | None = None
    ) -> MetadataResponse:
        asked = None if topics is None else [MetadataRequestTopic(name=name) for name in topics]
        request = MetadataRequest(topics=asked, allow_auto_topic_creation=create, include_lineage=True)
        response: MetadataResponse = await self.ask(request, node_id=node_id)
        nodes = {
            broker.node_id: Node(broker.node_id, broker.host, broker.port, broker.rack) for broker in response.brokers
        }
        if nodes:
            self._nodes = nodes
        self._controller, self._cluster_id = response.controller_id, response.cluster_id
        return response

    async def topics(
        self, names: Sequence[str] | None = None, *, create: bool = False, node_id: int | None = None
    ) -> dict[str, TopicInfo | ApiError]:
        """Return topics, by default all, as any broker or `node_id` knows them.

        A topic that cannot be described maps to its error.
        """
        response = await self._metadata(names, create=create, node_id=node_id)
        found: dict[str, TopicInfo | ApiError] = {}
        for topic in response.topics:
            if topic.name is None:
                continue
            if topic.error_code:
                code = ErrorCode.of(topic.error_code)
                found[topic.name] = ApiError(code, _why_no_topic(topic.name, code))
            else:
                found[topic.name] = _topic_info(topic)
        for name in names or ():
            if name not in found:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                found[name] = ApiError(code, _why_no_topic(name, code))
        return found

    async def topics_by_id(self, topic_ids: Iterable[UUID]) -> dict[UUID, TopicInfo]:
        """Return topics by their ids; those that do not exist are left out."""
        wanted = list(topic_ids)
        if not wanted:
            return {}
        request = MetadataRequest(
            topics=[MetadataRequestTopic(topic_id=topic_id, name=None) for topic_id in wanted],
            allow_auto_topic_creation=False,
        )
        response: MetadataResponse = await self.ask(request)
        return {
            topic.topic_id: _topic_info(topic)
            for topic in response.topics
            if not topic.error_code and topic.name is not None
        }

    async def topic(self, name: str, *, create: bool = False, node_id: int | None = None) -> TopicInfo:
        """Return one topic, as any broker or `node_id` knows it. Raises `ApiError` if it cannot be described."""
        info = (await self.topics([name], create=create, node_id=node_id))[name]
        if isinstance(info, ApiError):
            raise info
        return info

    async def offsets(
        self, wanted: Mapping[TopicPartition, int], *, read_committed: bool = False, skip_offline: bool = False
    ) -> dict[TopicPartition, OffsetAndTimestamp]:
        """Return each partition's offset at a timestamp in ms (or EARLIEST, LATEST, ...); -1 if none is that late.

        `skip_offline`: leave out partitions without a leader, or with a log that cannot be opened.
        """
        found: dict[TopicPartition, OffsetAndTimestamp] = {}
        offline: set[TopicPartition] = set()
        error: AnabranchError | None = None
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                await asyncio.sleep(RETRY_BACKOFF_MS / 1000)
            missing = {tp: timestamp for tp, timestamp in wanted.items() if tp not in found and tp not in offline}
            if not missing:
                return found
            by_leader: dict[int, dict[TopicPartition, tuple[int, int]]] = {}
            topics = await self.topics(sorted({tp.topic for tp in missing}))
            for tp, timestamp in missing.items():
                info = topics[tp.topic]
                if isinstance(info, ApiError):
                    raise info
                partition = info.partitions.get(tp.partition)
                if partition is None:
                    numbers = ", ".join(str(number) for number in info.partitions)
                    text = f"topic {tp.topic} has no partition {tp.partition}; it has {numbers}"
                    raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
                if partition.leader < 0 and skip_offline:
                    offline.add(tp)
                elif partition.leader >= 0:
                    by_leader.setdefault(partition.leader, {})[tp] = (timestamp, partition.leader_epoch)
            for leader, partitions in by_leader.items():
                request = offsets_request(partitions, read_committed=read_committed)
                response = await self.ask(request, node_id=leader)
                for topic in response.topics:
                    for result in topic.partitions:
                        tp = TopicPartition(topic.name, result.partition_index)
                        code = ErrorCode.of(result.error_code)
                        if code is ErrorCode.KAFKA_STORAGE_ERROR and skip_offline:
                            offline.add(tp)
                        elif code is ErrorCode.NONE:
                            found[tp] = OffsetAndTimestamp(result.offset, result.timestamp, result.leader_epoch)
                        else:
                            error = ApiError(code, f"the broker names no offset of {tp}")
                            if not code.retriable:
                                raise error
        raise error or ApiError(ErrorCode.LEADER_NOT_AVAILABLE, "some partitions have no leader")

    # -- lineage ------------------------------------------------------------------------------------------------------

    async def view(self, name: str, *, node_id: int | None = None) -> TopicView:
        """Return a view of a topic with its lineage, all of one moment, as any broker or `node_id` knows it.

        Raises ApiError: the broker's refusal, or a sentence that says why the lineage cannot be read.
        """
        info, lineage = await self.info_and_lineage(name, node_id=node_id)
        settings = (await self.settings([name], node_id=node_id)).get(name) if info.elastic else None
        ordered, cleanup = settings or TopicSettings()
        return TopicView(
            name,
            info.topic_id,
            lineage,
            info.leaders,
            info.epochs,
            info.elastic,
            ordered=ordered,
            removed=info.removed,
            cleanup=cleanup,
        )

    async def info_and_lineage(self, name: str, *, node_id: int | None = None) -> tuple[TopicInfo, Lineage]:
        """Return a topic and its lineage, both of one moment; errors as those of `view`."""
        reason = ""
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                await asyncio.sleep(RETRY_BACKOFF_MS / 1000)
            info = await self.topic(name, node_id=node_id)
            if not info.elastic:
                return info, Lineage.flat(max(1, info.partition_count))
            try:
                return info, await self._lineages.read(info)
            except ApiError as refused:
                if not refused.retriable:
                    raise
                reason = str(refused)
            except DecodeError as error:
                reason = str(error)
                break
        raise ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the lineage of topic {name} cannot be read: {reason}")

    async def lineage(self, name: str) -> Lineage:
        """Return the current lineage of a topic."""
        return (await self.info_and_lineage(name))[1]

    async def ended_epochs(self, info: TopicInfo, partitions: Iterable[int]) -> dict[int, Runs]:
        """Return the leader epochs that ended with each layout of a topic, of a few of its partitions."""
        return await self._lineages.epochs(info, partitions)

    async def settings(self, names: Iterable[str], *, node_id: int | None = None) -> dict[str, TopicSettings]:
        """Return what topics' configs say to readers; without those that cannot be described."""
        keys = [ORDERED_DELIVERY, CLEANUP_POLICY]
        resources = [
            DescribeConfigsResource(resource_type=TOPIC_RESOURCE, resource_name=name, configuration_keys=keys)
            for name in names
        ]
        response = await self.ask(DescribeConfigsRequest(resources=resources), node_id=node_id)
        return {
            result.resource_name: _settings({config.name: config.value for config in result.configs})
            for result in response.results
            if not result.error_code
        }


def _settings(configs: Mapping[str, str | None]) -> TopicSettings:
    cleanup = frozenset((configs.get(CLEANUP_POLICY) or "").replace(" ", "").split(",")) - {""}
    return TopicSettings(configs.get(ORDERED_DELIVERY) != "false", cleanup)


def offsets_request(
    partitions: Mapping[TopicPartition, tuple[int, int]], *, read_committed: bool
) -> ListOffsetsRequest:
    """Ask for the offset at a timestamp, of each partition: (timestamp, leader epoch)."""
    topics: dict[str, list[ListOffsetsPartition]] = {}
    for tp, (timestamp, epoch) in partitions.items():
        topics.setdefault(tp.topic, []).append(
            ListOffsetsPartition(partition_index=tp.partition, current_leader_epoch=epoch, timestamp=timestamp)
        )
    return ListOffsetsRequest(
        replica_id=-1,
        isolation_level=int(read_committed),
        topics=[ListOffsetsTopic(name=name, partitions=listed) for name, listed in topics.items()],
        timeout_ms=REQUEST_TIMEOUT_MS,
    )


def _topic_info(topic: Any) -> TopicInfo:
    partitions = {
        partition.partition_index: PartitionInfo(
            partition.partition_index,
            partition.leader_id,
            partition.leader_epoch,
            tuple(partition.replica_nodes),
            tuple(partition.isr_nodes),
            partition.retiring,
        )
        for partition in sorted(topic.partitions, key=lambda partition: partition.partition_index)
    }
    elastic = topic.undeleted_partition_count >= 0
    count = topic.undeleted_partition_count if elastic else len(partitions)
    initial = topic.initial_partition_count if elastic else count
    layouts = _numbered(topic.layouts) or (Layout(0, count),)
    topic_id = topic.topic_id or NO_TOPIC_ID
    removed = {gone.partition: gone.next_offset for gone in topic.removed}
    internal = bool(topic.is_internal)
    return TopicInfo(topic.name, topic_id, partitions, initial, count, layouts, elastic, internal, removed)


def _numbered(layouts: Iterable[TopicLayout]) -> tuple[Layout, ...]:
    """Number the layouts: one that says no number follows the one before it."""
    found: list[Layout] = []
    for layout in layouts:
        following = found[-1].number + 1 if found else 0
        found.append(Layout(layout.number if layout.number >= 0 else following, layout.count))
    return tuple(found)


def _why_no_topic(name: str, code: ErrorCode) -> str:
    if code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return f"there is no topic '{name}'; create it first: anabranch topic create {name} --partitions 2"
    if code is ErrorCode.INVALID_TOPIC_EXCEPTION:
        return f"'{name}' is not a topic name: letters, digits, '.', '_' and '-', at most 249 of them"
    return f"the broker returns no metadata of topic '{name}'"
