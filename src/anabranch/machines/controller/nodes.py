"""The metadata tree: paths, the JSON at each path, and the records that change it (KIP-253, Public Interfaces).

    /brokers/ids/B                        a live broker (ephemeral)
    /brokers/topics/T                     partitions, counts, layouts, the resize that runs
    /brokers/topics/T/partitions/P/state  leader, leader epoch
    /config/topics/T                      overrides of topic configs
    /config/groups/G                      configs of a group, its id percent-encoded
    /admin/delete_topics/T                the topic is being deleted
    /latest_producer_id_block             producer ids below were handed out
    /controller_epoch                     the controller's term

The topic node is the one truth of the lineage: the proposal's `leader_epoch_after_creation` and
`leader_epoch_before_deletion` follow from `layouts` and `ended_epochs` (`views.leader_epochs`), and are not written a
second time.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, unquote
from uuid import UUID

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.machines.controller.layouts import EndedEpochs, EpochRun, Layout, with_ended

CONTROLLER_EPOCH = "/controller_epoch"
BROKERS = "/brokers/ids"
TOPICS = "/brokers/topics"
CONFIGS = "/config/topics"
GROUP_CONFIGS = "/config/groups"
BROKER_CONFIGS = "/config/brokers"
EVERY_BROKER = "<default>"
"""The name of the config node whose values are those of every broker that has none of its own."""
DELETIONS = "/admin/delete_topics"
PRODUCER_IDS = "/latest_producer_id_block"
"""Holds the first producer id that is in no block yet; blocks are handed out in order."""
PRODUCER_ID_BLOCK_SIZE = 1_000
TREE = (CONTROLLER_EPOCH, BROKERS, TOPICS, CONFIGS, GROUP_CONFIGS, BROKER_CONFIGS, DELETIONS)
"""The nodes that a controller loads and folds at its start, with everything below them, parents first."""


@dataclass(frozen=True, slots=True)
class PutNode:
    """`path` now holds `data`; the node, and its parents, are made when they are missing."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """`path` is deleted; children before their parents; a missing node is no error."""

    path: str


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Leaders have taken their roles: (layout, leader epoch) of each. Applied, never persisted."""

    topic: str
    topic_id: UUID
    roles: Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """Leaders have not taken their roles: the error of each, until one confirms. Applied, never persisted."""

    topic: str
    topic_id: UUID
    errors: Mapping[int, ErrorCode]


@dataclass(frozen=True, slots=True)
class Stopped:
    """Replicas are gone: (partition, broker) of each. Applied, never persisted."""

    topic: str
    topic_id: UUID
    replicas: frozenset[tuple[int, int]]


MetadataRecord = PutNode | DeleteNode | Confirmed | Unconfirmed | Stopped


class Phase(StrEnum):
    """A step of a resize; the order of the steps is `resize.PHASES`."""

    CLOSE = "close"
    """The partitions that retire take no more appends: their log end is final."""
    CUT = "cut"
    """The live partitions that stay end their epoch, start the next one, adopt the new count."""
    OPEN = "open"
    """New partitions are made, retiring ones below the new count open again."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A resize that runs: where to, how far, and where the partitions that are new will live."""

    to: int
    phase: Phase
    assignment: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class Removed(NamedTuple):
    """The state kept of a removed partition, so that its next life continues where this one ended."""

    next_offset: int
    leader_epoch: int


@dataclass(frozen=True)
class Topic:
    """The topic node."""

    name: str
    topic_id: UUID
    partitions: Mapping[int, tuple[int, ...]]
    """Replicas of every partition that exists, live and retiring: always 0 .. n-1 without a hole."""
    initial_partition_count: int
    layouts: tuple[Layout, ...]
    """Oldest first; the last one rules, or, while a resize runs, is about to. Those without records are left out."""
    ended: EndedEpochs = field(default_factory=dict)
    """The leader epochs that ended with the layouts before the last."""
    resize: Resize | None = None
    removed: Mapping[int, Removed] = field(default_factory=dict)

    @property
    def undeleted_partition_count(self) -> int:
        """The count that rules, or, while a resize runs, is about to."""
        return self.layouts[-1].count

    @property
    def published(self) -> tuple[Layout, ...]:
        """The layouts that the world may see: not the one that a running resize is still making."""
        return self.layouts if self.resize is None else self.layouts[:-1]

    @property
    def newest(self) -> int:
        """The number of the last layout that the world may see; the epochs that end with it are not shown."""
        return self.published[-1].number

    @cached_property
    def size(self) -> int:
        """The partitions that exist, and those that a running resize is about to make."""
        made = () if self.resize is None else self.resize.assignment.keys() - self.partitions.keys()
        return len(self.partitions) + len(made)

    @cached_property
    def reaping(self) -> tuple[int, ...]:
        """The partitions whose removal has begun, ascending: in `removed` already, not deleted yet."""
        if self.resize is not None or not self.removed:
            return ()
        return tuple(sorted(self.removed.keys() & self.partitions.keys()))


@dataclass(frozen=True, slots=True)
class PartitionNode:
    """The state node of a partition."""

    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    controller_epoch: int
    start_offset: int = 0
    """The start offset of a log that must be created: the next offset of the removed partition."""
    born: int = 0
    """The leader epoch that its present life began with: 0 of a partition that was never removed."""


@dataclass(frozen=True, slots=True)
class BrokerNode:
    """A live broker. `epoch` grows with each of its starts; `endpoints` are its addresses for clients."""

    broker_id: int
    epoch: int
    rack: str | None = None
    endpoints: tuple[str, ...] = ()


def collapsed(topic: str) -> str:
    """The name of a topic in metrics, where '.' and '_' are one character."""
    return topic.replace(".", "_")


def topic_path(topic: str) -> str:
    """The path of a topic's node."""
    return f"{TOPICS}/{topic}"


def partition_path(topic: str, partition: int) -> str:
    """The path of a partition's state node."""
    return f"{TOPICS}/{topic}/partitions/{partition}/state"


def config_path(topic: str) -> str:
    """The path of a topic's config overrides."""
    return f"{CONFIGS}/{topic}"


def group_config_path(group: str) -> str:
    """The path of a group's configs: a group id may be any text, a name in the tree may not."""
    name = quote(group, safe="")
    return f"{GROUP_CONFIGS}/{name if name.strip('.') else name.replace('.', '%2E')}"


def deletion_path(topic: str) -> str:
    """The path of a topic's deletion mark."""
    return f"{DELETIONS}/{topic}"


def broker_path(broker_id: int) -> str:
    """The path of a broker's ephemeral node."""
    return f"{BROKERS}/{broker_id}"


def put_topic(topic: Topic) -> PutNode:
    """The record that writes a topic node."""
    resize = topic.resize
    return _put(
        topic_path(topic.name),
        {
            "version": 4,
            "topic_id": _text(topic.topic_id),
            "partitions": {str(p): list(replicas) for p, replicas in sorted(topic.partitions.items())},
            "initial_partition_count": topic.initial_partition_count,
            "undeleted_partition_count": topic.undeleted_partition_count,
            "layouts": [[layout.number, layout.count] for layout in topic.layouts],
            "ended_epochs": {str(p): runs for p, runs in sorted(topic.ended.items())},
            "resize": None
            if resize is None
            else {
                "to": resize.to,
                "phase": resize.phase.value,
                "assignment": {str(p): list(replicas) for p, replicas in sorted(resize.assignment.items())},
            },
            "removed": {
                str(p): {"next_offset": gone.next_offset, "leader_epoch": gone.leader_epoch}
                for p, gone in sorted(topic.removed.items())
            },
        },
    )


def put_partition(topic: str, partition: int, node: PartitionNode) -> PutNode:
    """The record that writes a partition's state node."""
    return _put(
        partition_path(topic, partition),
        {
            "controller_epoch": node.controller_epoch,
            "leader": node.leader,
            "version": 1,
            "leader_epoch": node.leader_epoch,
            "isr": list(node.isr),
            "start_offset": node.start_offset,
            "born": node.born,
        },
    )


def put_configs(topic: str, overrides: Mapping[str, str]) -> PutNode:
    """The record that writes a topic's config overrides."""
    return _put(config_path(topic), {"version": 1, "config": dict(sorted(overrides.items()))})


def put_group_configs(group: str, overrides: Mapping[str, str]) -> PutNode:
    """The record that writes a group's configs."""
    return _put(group_config_path(group), {"version": 1, "config": dict(sorted(overrides.items()))})


def delete_group_configs(group: str) -> DeleteNode:
    """The record that removes them."""
    return DeleteNode(group_config_path(group))


def put_broker_configs(broker: str, values: Mapping[str, str]) -> PutNode:
    """The record that writes the dynamic settings of a broker, or of EVERY_BROKER."""
    return _put(f"{BROKER_CONFIGS}/{broker}", {"version": 1, "config": dict(sorted(values.items()))})


def group_of(name: str) -> str:
    """The group id encoded in the name of a config node."""
    return unquote(name)


def put_deletion(topic: Topic) -> PutNode:
    """The record that marks a topic as being deleted."""
    return _put(deletion_path(topic.name), {"version": 1, "topic_id": _text(topic.topic_id)})


def put_broker(broker: BrokerNode) -> PutNode:
    """The record that registers a broker."""
    return _put(
        broker_path(broker.broker_id),
        {"version": 5, "epoch": broker.epoch, "rack": broker.rack, "endpoints": list(broker.endpoints)},
    )


def put_controller_epoch(epoch: int) -> PutNode:
    """The record that begins a controller's term."""
    return PutNode(CONTROLLER_EPOCH, str(epoch).encode())


def read_topic(name: str, data: bytes) -> Topic:
    """Read a topic node; a node without resizing fields is a topic that was never resized."""
    with _Reading(topic_path(name)):
        raw = json.loads(data)
        partitions = {int(p): _same(tuple(replicas)) for p, replicas in raw["partitions"].items()}
        resize = raw.get("resize")
        if not partitions or sorted(partitions) != list(range(len(partitions))) or raw.get("layouts") == []:
            raise ValueError("a topic has partitions 0 to n-1, and a layout")
        layouts, ended = _read_layouts(raw, len(partitions))
        return Topic(
            name=name,
            topic_id=UUID(bytes=urlsafe_b64decode(raw["topic_id"] + "==")),
            partitions=partitions,
            initial_partition_count=raw.get("initial_partition_count", len(partitions)),
            layouts=layouts,
            ended=ended,
            resize=None
            if resize is None
            else Resize(
                to=resize["to"],
                phase=Phase(resize["phase"]),
                assignment={int(p): tuple(replicas) for p, replicas in resize["assignment"].items()},
            ),
            removed={
                int(p): Removed(gone["next_offset"], gone["leader_epoch"]) for p, gone in raw.get("removed", {}).items()
            },
        )


def _read_layouts(raw: Mapping[str, Any], existing: int) -> tuple[tuple[Layout, ...], EndedEpochs]:
    """Read the layouts; up to version 3 each has its epochs beside its count, and its number is its place."""
    if "ended_epochs" in raw:
        layouts = tuple(Layout(number, count) for number, count in raw["layouts"])
        runs = {int(p): tuple(EpochRun(*run) for run in listed) for p, listed in raw["ended_epochs"].items()}
        return layouts, runs
    ended: EndedEpochs = {}
    found = raw.get("layouts", [{"count": existing, "ended_epochs": {}}])
    for number, layout in enumerate(found):
        epochs = {int(p): epoch for p, epoch in layout["ended_epochs"].items()}
        ended = with_ended(ended, number, {p: epoch for p, epoch in epochs.items() if p < existing})
    return tuple(Layout(number, layout["count"]) for number, layout in enumerate(found)), ended


def read_partition(path: str, data: bytes) -> PartitionNode:
    """Read a partition's state node."""
    with _Reading(path):
        raw = json.loads(data)
        return PartitionNode(
            leader=raw["leader"],
            leader_epoch=raw["leader_epoch"],
            isr=_same(tuple(raw["isr"])),
            controller_epoch=raw["controller_epoch"],
            start_offset=raw.get("start_offset", 0),
            born=raw.get("born", 0),
        )


def read_configs(path: str, data: bytes) -> dict[str, str]:
    """Read a topic's config overrides."""
    with _Reading(path):
        return {str(name): str(value) for name, value in json.loads(data)["config"].items()}


def read_broker(broker_id: int, data: bytes) -> BrokerNode:
    """Read a broker's ephemeral node."""
    with _Reading(broker_path(broker_id)):
        raw = json.loads(data)
        return BrokerNode(broker_id, raw["epoch"], raw.get("rack"), tuple(raw.get("endpoints", ())))


def read_controller_epoch(data: bytes) -> int:
    """Read the controller's term."""
    with _Reading(CONTROLLER_EPOCH):
        return int(data)


class _Reading:
    """Turns whatever a broken node makes go wrong into a `DecodeError` that names the node."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, TypeError, KeyError, AttributeError, RecursionError)):
            raise DecodeError(f"metadata node {self._path} is not what it should be: {error!r}") from error


def _put(path: str, content: Mapping[str, Any]) -> PutNode:
    return PutNode(path, json.dumps(content, separators=(",", ":")).encode())


@lru_cache(maxsize=1_000)
def _same(replicas: tuple[int, ...]) -> tuple[int, ...]:
    """Of equal tuples keep one: many partitions have the same replicas."""
    return replicas


def _text(topic_id: UUID) -> str:
    return urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")
