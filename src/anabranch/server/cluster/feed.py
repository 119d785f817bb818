"""Translates changes of the controller's state into updates for the views of the cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.machines.controller import nodes
from anabranch.machines.controller.nodes import Confirmed, DeleteNode, MetadataRecord, PutNode, Stopped, Unconfirmed
from anabranch.machines.controller.state import ControllerState
from anabranch.server.cluster.view import ClusterUpdate, TopicSnapshot


def everything(state: ControllerState, controller_id: int) -> ClusterUpdate:
    """Return the update from an empty view to the whole state."""
    return ClusterUpdate(
        topics={name: _snapshot(state, name) for name in state.topics},
        brokers=dict(state.brokers),
        configs=dict(state.configs),
        group_configs=dict(state.group_configs),
        broker_configs=dict(state.broker_configs),
        controller_id=controller_id,
    )


def update_after(state: ControllerState, records: Iterable[MetadataRecord]) -> ClusterUpdate:
    """Return the update for these applied records. A topic with newly confirmed roles is included."""
    topics: dict[str, None] = {}
    configs: dict[str, None] = {}
    groups: dict[str, None] = {}
    configured: dict[str, None] = {}
    brokers = False
    for record in records:
        match record:
            case PutNode(path) | DeleteNode(path):
                match path.split("/")[1:]:
                    case ["brokers", "topics", name, *_] | ["admin", "delete_topics", name]:
                        topics[name] = None
                    case ["brokers", "ids", _]:
                        brokers = True
                    case ["config", "topics", name]:
                        configs[name] = None
                    case ["config", "groups", name]:
                        groups[nodes.group_of(name)] = None
                    case ["config", "brokers", name]:
                        configured[name] = None
            case Confirmed(name) | Unconfirmed(name) | Stopped(name):
                topics[name] = None
    if brokers:  # A partition without a live leader is published without one.
        topics.update(dict.fromkeys(state.topics))
    return ClusterUpdate(
        topics={name: _snapshot(state, name) for name in topics},
        brokers=dict(state.brokers) if brokers else None,
        configs={name: state.configs.get(name, {}) for name in configs},
        group_configs={name: state.group_configs.get(name, {}) for name in groups},
        broker_configs={name: state.broker_configs.get(name, {}) for name in configured},
    )


def _snapshot(state: ControllerState, name: str) -> TopicSnapshot | None:
    topic = state.topics.get(name)
    if topic is None:
        return None
    partitions = dict(state.partitions.get(name, {}))
    return TopicSnapshot(topic, partitions, frozenset(state.brokers), deleting=name in state.deleting)
