"""The state of the controller: a fold over changes of the metadata tree, and the confirmations of its own term.

`apply` is the only code that changes a `ControllerState`, live and on reload. It works in place (a topic may have
100,000 partitions) and returns the state, for `reduce(apply, journal, ControllerState())`; decisions only read it.
`applied` folds into a state of its own, for readers in other threads.
A node that came into being without its parent (a crash between two writes) is kept and waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller import nodes
from anabranch.machines.controller.nodes import (
    BrokerNode,
    Confirmed,
    DeleteNode,
    MetadataRecord,
    PartitionNode,
    PutNode,
    Stopped,
    Topic,
    Unconfirmed,
)


@dataclass
class ControllerState:
    """The durable state, and below it the state of the controller's term."""

    controller_epoch: int = 0
    brokers: dict[int, BrokerNode] = field(default_factory=dict)
    topics: dict[str, Topic] = field(default_factory=dict)
    partitions: dict[str, dict[int, PartitionNode]] = field(default_factory=dict)
    configs: dict[str, dict[str, str]] = field(default_factory=dict)
    group_configs: dict[str, dict[str, str]] = field(default_factory=dict)
    broker_configs: dict[str, dict[str, str]] = field(default_factory=dict)
    """Dynamic settings, by broker id and for every broker (`nodes.EVERY_BROKER`)."""
    deleting: set[str] = field(default_factory=set)
    names: dict[UUID, str] = field(default_factory=dict)
    """Topic names by id."""
    collapsed: dict[str, str] = field(default_factory=dict, compare=False)
    """Topic names by what metrics make of them (`nodes.collapsed`)."""
    resizing: set[str] = field(default_factory=set, compare=False)
    """The topics whose resize runs."""
    partition_count: int = field(default=0, compare=False)
    """Partitions of all topics, those included that running resizes are about to make."""

    confirmed: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict, compare=False)
    """(layout, leader epoch) of the newest role that each leader has taken, as far as this term has heard."""
    unconfirmed: dict[str, dict[int, ErrorCode]] = field(default_factory=dict, compare=False)
    """The error of each leader that answered its last order otherwise, as far as this term has heard."""
    stopped: dict[str, set[tuple[int, int]]] = field(default_factory=dict, compare=False)
    """(partition, broker) of the replicas that are gone, as far as this term has heard."""


def apply(state: ControllerState, record: MetadataRecord) -> ControllerState:
    """Fold one record into the state; the tree is loaded by applying a `PutNode` for each of its nodes."""
    match record:
        case PutNode(path, data):
            _put(state, path, data)
        case DeleteNode(path):
            _delete(state, path)
        case Confirmed(name, topic_id, roles):
            topic = state.topics.get(name)
            if topic is not None and topic.topic_id == topic_id:
                known = state.confirmed.setdefault(name, {})
                # Layouts go back where a resize was canceled, leader epochs never.
                known.update((p, role) for p, role in roles.items() if role[::-1] > known.get(p, (-1, -1))[::-1])
                for partition in roles:
                    state.unconfirmed.get(name, {}).pop(partition, None)
        case Unconfirmed(name, topic_id, errors):
            topic = state.topics.get(name)
            if topic is not None and topic.topic_id == topic_id:
                state.unconfirmed.setdefault(name, {}).update(errors)
        case Stopped(name, topic_id, replicas):
            topic = state.topics.get(name)
            if topic is not None and topic.topic_id == topic_id:
                state.stopped.setdefault(name, set()).update(replicas)
    return state


def applied(state: ControllerState, records: Iterable[MetadataRecord]) -> ControllerState:
    """Fold records into another state, which shares with `state` what they do not touch; `state` stays as it is."""
    records = tuple(records)
    other = replace(
        state,
        brokers=dict(state.brokers),
        topics=dict(state.topics),
        partitions=dict(state.partitions),
        configs=dict(state.configs),
        group_configs=dict(state.group_configs),
        deleting=set(state.deleting),
        names=dict(state.names),
        resizing=set(state.resizing),
        collapsed=dict(state.collapsed),
        confirmed=dict(state.confirmed),
        unconfirmed=dict(state.unconfirmed),
        stopped=dict(state.stopped),
    )
    for name in _touched(state, records):
        if name in state.partitions:
            other.partitions[name] = dict(state.partitions[name])
        if name in state.confirmed:
            other.confirmed[name] = dict(state.confirmed[name])
        if name in state.unconfirmed:
            other.unconfirmed[name] = dict(state.unconfirmed[name])
        if name in state.stopped:
            other.stopped[name] = set(state.stopped[name])
    return reduce(apply, records, other)


def _touched(state: ControllerState, records: Iterable[MetadataRecord]) -> set[str]:
    """The topics with entries that records change; all that brokers have confirmed where one comes or goes."""
    found: set[str] = set()
    for record in records:
        match record:
            case PutNode(path) | DeleteNode(path):
                match path.split("/", 4)[1:]:
                    case ["brokers", "topics", name, *_]:
                        found.add(name)
                    case ["brokers", "ids", _]:
                        found |= state.confirmed.keys()
            case Confirmed(name) | Unconfirmed(name) | Stopped(name):
                found.add(name)
    return found


def _put(state: ControllerState, path: str, data: bytes) -> None:
    match path.split("/")[1:]:
        case ["controller_epoch"]:
            state.controller_epoch = nodes.read_controller_epoch(data)
        case ["brokers", "ids", broker]:
            _put_broker(state, nodes.read_broker(int(broker), data))
        case ["brokers", "topics", name]:
            _put_topic(state, nodes.read_topic(name, data))
        case ["brokers", "topics", name, "partitions", partition, "state"]:
            state.partitions.setdefault(name, {})[int(partition)] = nodes.read_partition(path, data)
        case ["config", "topics", name]:
            state.configs[name] = nodes.read_configs(path, data)
        case ["config", "groups", name]:
            state.group_configs[nodes.group_of(name)] = nodes.read_configs(path, data)
        case ["config", "brokers", name]:
            state.broker_configs[name] = nodes.read_configs(path, data)
        case ["admin", "delete_topics", name]:
            state.deleting.add(name)


def _delete(state: ControllerState, path: str) -> None:
    match path.split("/")[1:]:
        case ["brokers", "ids", broker]:
            _forget_roles(state, int(broker))
            state.brokers.pop(int(broker), None)
        case ["brokers", "topics", name]:
            gone = state.topics.pop(name, None)
            if gone is not None:
                state.names.pop(gone.topic_id, None)
                state.resizing.discard(name)
                state.partition_count -= gone.size
                if state.collapsed.get(nodes.collapsed(name)) == name:
                    del state.collapsed[nodes.collapsed(name)]
            state.confirmed.pop(name, None)
            state.unconfirmed.pop(name, None)
            state.stopped.pop(name, None)
        case ["brokers", "topics", name, "partitions", partition, "state"]:
            siblings = state.partitions.get(name, {})
            siblings.pop(int(partition), None)
            if not siblings:
                state.partitions.pop(name, None)
        case ["config", "topics", name]:
            state.configs.pop(name, None)
        case ["config", "groups", name]:
            state.group_configs.pop(nodes.group_of(name), None)
        case ["admin", "delete_topics", name]:
            state.deleting.discard(name)


def _put_topic(state: ControllerState, topic: Topic) -> None:
    before = state.topics.get(topic.name)
    state.topics[topic.name] = topic
    state.names[topic.topic_id] = topic.name
    (state.resizing.discard if topic.resize is None else state.resizing.add)(topic.name)
    state.collapsed.setdefault(nodes.collapsed(topic.name), topic.name)
    state.partition_count += topic.size - (0 if before is None else before.size)
    if before is not None:
        for gone in before.partitions.keys() - topic.partitions.keys():
            state.confirmed.get(topic.name, {}).pop(gone, None)
            state.unconfirmed.get(topic.name, {}).pop(gone, None)
            stopped = state.stopped.get(topic.name, set())
            stopped.difference_update({replica for replica in stopped if replica[0] == gone})


def _put_broker(state: ControllerState, broker: BrokerNode) -> None:
    before = state.brokers.get(broker.broker_id)
    if before is None or before.epoch != broker.epoch:
        _forget_roles(state, broker.broker_id)
    state.brokers[broker.broker_id] = broker


def _forget_roles(state: ControllerState, broker_id: int) -> None:
    """A restarted broker has forgotten the roles it took."""
    for name, known in state.confirmed.items():
        siblings = state.partitions.get(name, {})
        for partition in [p for p in known if p in siblings and siblings[p].leader == broker_id]:
            del known[partition]
