"""This broker's view of its cluster: topics, leaders, brokers and configs, as the controller published them last.

The controller publishes a `ClusterUpdate` after every change of its state; the view takes it in one step and then
calls its observers in the order in which they began to watch. The rule: handlers and coordinators read nothing else
about the cluster, and a snapshot they hold never changes. In this process the view is as new as the controller's
state; over the wire it may lag.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from uuid import UUID

from anabranch.machines.controller.broker_configs import DYNAMIC
from anabranch.machines.controller.configs import BrokerSettings
from anabranch.machines.controller.layouts import Layout
from anabranch.machines.controller.nodes import EVERY_BROKER, BrokerNode, PartitionNode, Topic
from anabranch.machines.controller.views import TopicView, view_of, visible_partitions
from anabranch.server.settings import parse_address

NO_CONTROLLER = -1
NO_CONFIGS: Mapping[str, str] = {}


class BrokerEndpoint(NamedTuple):
    """A live broker, and where clients find it."""

    node_id: int
    host: str
    port: int
    rack: str | None


@dataclass(frozen=True)
class TopicSnapshot:
    """One topic as it was published. While a resize runs, its layouts and partitions are those from before."""

    topic: Topic
    nodes: Mapping[int, PartitionNode]
    """The state of every partition that has one."""
    live_brokers: Collection[int]
    deleting: bool = False
    derived: dict[object, object] = field(default_factory=dict, compare=False, repr=False)
    """Values that readers derive from this snapshot and cache for its lifetime, by a key of their own."""

    @property
    def name(self) -> str:
        """The topic's name."""
        return self.topic.name

    @property
    def topic_id(self) -> UUID:
        """The topic's id."""
        return self.topic.topic_id

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The published layouts, oldest first."""
        return self.topic.published

    @property
    def undeleted_partition_count(self) -> int:
        """The partition count of the last published layout."""
        return self.topic.published[-1].count

    @property
    def resizing(self) -> bool:
        """Whether a resize runs."""
        return self.topic.resize is not None

    @cached_property
    def view(self) -> TopicView:
        """The topic as Metadata describes it."""
        return view_of(self.topic, self.nodes, self.live_brokers)

    @cached_property
    def visible_partitions(self) -> Sequence[int]:
        """The published partitions, ascending: live ones, then retiring ones."""
        return visible_partitions(self.topic, self.nodes)

    def exists(self, partition: int) -> bool:
        """Whether the partition exists, published or not."""
        return partition in self.topic.partitions


@dataclass(frozen=True, slots=True)
class ClusterUpdate:
    """The controller's update after a change; fields without an entry have not changed."""

    topics: Mapping[str, TopicSnapshot | None] = field(default_factory=dict)
    """None for a topic that does not exist any more."""
    brokers: Mapping[int, BrokerNode] | None = None
    """All live brokers, if any of them came, went or changed."""
    configs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """All overrides of each topic named; empty if it has none."""
    group_configs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """All configs of each group named; empty if it has none."""
    broker_configs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """All dynamic settings of each broker named, and of EVERY_BROKER; empty if it has none."""
    controller_id: int | None = None


Observer = Callable[[ClusterUpdate], None]


class ClusterView:
    """The topics, brokers and configs of the cluster; empty until the first update."""

    def __init__(self, node_id: int = 0, static: Mapping[str, str] = NO_CONFIGS) -> None:
        """`static`: the settings that this broker was started with, as far as they differ from their defaults."""
        self._node_id = node_id
        self._static = static
        self.broker_settings = BrokerSettings(static=static)
        """What this broker was told of its settings, now."""
        self.version = 0
        """Grows by one with every update."""
        self.controller_id = NO_CONTROLLER
        self.brokers: Mapping[int, BrokerEndpoint] = {}
        """The live brokers that clients can reach, by node id, ascending."""
        self._topics: dict[str, TopicSnapshot] = {}
        self._in_order: list[TopicSnapshot] = []
        """Those that are not being deleted, by name: to sort 100,000 takes 50 ms, in which no other thread works."""
        self._resizing: set[str] = set()
        self._names: dict[UUID, str] = {}
        self._configs: dict[str, Mapping[str, str]] = {}
        self._group_configs: dict[str, Mapping[str, str]] = {}
        self._broker_configs: dict[str, Mapping[str, str]] = {}
        self._observers: list[Observer] = []

    # -- reading -----------------------------------------------------------------------------------------------------

    def topic(self, name: str) -> TopicSnapshot | None:
        """The topic; None if it does not exist or is being deleted."""
        found = self._topics.get(name)
        return None if found is None or found.deleting else found

    def find(self, name: str) -> TopicSnapshot | None:
        """The topic, also while it is being deleted; None if it does not exist."""
        return self._topics.get(name)

    def topics(self, since: str = "") -> list[TopicSnapshot]:
        """All topics but those that are being deleted, by name, from a name on.

        To copy 100,000 is cheap, to look at each of them is not: that is for a thread, or for many turns.
        """
        return self._in_order[self._place(since) :]

    def known(self) -> list[str]:
        """The names of all topics, also of those that are being deleted, in any order."""
        return list(self._topics)

    @property
    def topic_count(self) -> int:
        """How many topics exist, those that are being deleted included."""
        return len(self._topics)

    @property
    def resizing_count(self) -> int:
        """How many topics are being resized."""
        return len(self._resizing)

    def name_of(self, topic_id: UUID) -> str | None:
        """The name of the topic with this id, also while it is being deleted."""
        return self._names.get(topic_id)

    def has_removed(self, topic: str, partition: int) -> bool:
        """Whether the partition was retired and removed; clients may still use it."""
        found = self.topic(topic)
        return found is not None and partition in found.topic.removed

    def configs(self, topic: str) -> Mapping[str, str]:
        """The config overrides of a topic."""
        return self._configs.get(topic, NO_CONFIGS)

    def group_configs(self, group: str) -> Mapping[str, str]:
        """The configs of a group that differ from the broker's settings."""
        return self._group_configs.get(group, NO_CONFIGS)

    def configured_groups(self) -> list[str]:
        """The groups that have configs of their own, sorted."""
        return sorted(self._group_configs)

    @property
    def configured_group_count(self) -> int:
        """How many groups have configs of their own."""
        return len(self._group_configs)

    def broker_configs(self, broker: str) -> Mapping[str, str]:
        """The dynamic settings of a broker, or of EVERY_BROKER."""
        return self._broker_configs.get(broker, NO_CONFIGS)

    def setting(self, name: str) -> int:
        """The value of a dynamic setting that is a number, now."""
        told = self.broker_settings.sources(name)
        return int(told[0].value if told else DYNAMIC[name].default)

    # -- changing ----------------------------------------------------------------------------------------------------

    def watch(self, observer: Observer) -> None:
        """Call `observer` with every update from now on, after the view has taken it; it must not raise."""
        self._observers.append(observer)

    def update(self, update: ClusterUpdate) -> None:
        """Apply an update, then notify the observers."""
        for name, topic in update.topics.items():
            before = self._topics.get(name)
            if before is not None:
                self._names.pop(before.topic_id, None)
            if topic is not None:
                self._topics[name] = topic
                self._names[topic.topic_id] = name
            elif before is not None:
                del self._topics[name]
            self._put_in_order(name, topic)
        if update.brokers is not None:
            self.brokers = {id_: _endpoint(node) for id_, node in sorted(update.brokers.items()) if node.endpoints}
        if update.controller_id is not None:
            self.controller_id = update.controller_id
        _replace(self._configs, update.configs)
        _replace(self._group_configs, update.group_configs)
        if update.broker_configs:
            _replace(self._broker_configs, update.broker_configs)
            self.broker_settings = BrokerSettings(
                self.broker_configs(str(self._node_id)), self.broker_configs(EVERY_BROKER), self._static
            )
        self.version += 1
        for observer in self._observers:
            observer(update)

    def _put_in_order(self, name: str, topic: TopicSnapshot | None) -> None:
        """Put a changed topic into its place among the others, or take it away."""
        if topic is not None and topic.resizing:
            self._resizing.add(name)
        else:
            self._resizing.discard(name)
        place = self._place(name)
        there = place < len(self._in_order) and self._in_order[place].name == name
        shown = [] if topic is None or topic.deleting else [topic]
        self._in_order[place : place + there] = shown

    def _place(self, name: str) -> int:
        """The place of a topic among those in order, or that of the next one."""
        return bisect_left(self._in_order, name, key=name_of)


def name_of(topic: TopicSnapshot) -> str:
    """The topic's name."""
    return topic.topic.name


def _endpoint(node: BrokerNode) -> BrokerEndpoint:
    address = parse_address(node.endpoints[0])
    return BrokerEndpoint(node.broker_id, address.host, address.port, node.rack)


def _replace(configs: dict[str, Mapping[str, str]], changed: Mapping[str, Mapping[str, str]]) -> None:
    for name, overrides in changed.items():
        if overrides:
            configs[name] = overrides
        else:
            configs.pop(name, None)
