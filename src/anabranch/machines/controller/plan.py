"""One decision in the making: what it will write and send about one topic, readable by the steps that come after.

A plan never touches the state. Its records stand in the order they must become durable: the topic node first, because
everything else follows from it (`roles.due_node`), so that a crash after any of them leaves a state to go on from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller import nodes
from anabranch.machines.controller.effects import (
    Decision,
    InspectLayouts,
    InspectRetiring,
    PublishMetadata,
    SendLeaderAndIsr,
    SendStopReplica,
    decision,
)
from anabranch.machines.controller.layouts import with_ended, without
from anabranch.machines.controller.nodes import (
    Confirmed,
    DeleteNode,
    MetadataRecord,
    PartitionNode,
    Phase,
    Stopped,
    Topic,
    Unconfirmed,
)
from anabranch.machines.controller.roles import count_of, counts, due_node, layout_of, phase_of, phases, role_of
from anabranch.machines.controller.state import ControllerState
from anabranch.machines.outcome import Draft

Given = TypeVar("Given")

RETRY_BACKOFF_MS = 500
"""How long after a failed answer the controller asks again."""
RESIZES_UNTIL_INSPECTION = 64
"""How often a topic is resized before its layouts are looked at, without waiting for the next round of upkeep."""


class Plan:
    """The records, timers and effects of one decision about one topic."""

    def __init__(self, state: ControllerState, topic: Topic) -> None:
        self.state = state
        self.topic = topic
        self.draft: Draft[MetadataRecord] = Draft()
        self._nodes: dict[int, PartitionNode] = {}
        self._confirmed: dict[int, tuple[int, int]] = {}
        self._stopped: set[tuple[int, int]] = set()

    def decision(self, reply: Given) -> Decision[Given]:
        """Give what was planned, with `reply`."""
        return decision(self.draft, reply)

    # What is, and what is planned to be.

    def node(self, partition: int) -> PartitionNode | None:
        """The state node of a partition."""
        return self._nodes.get(partition) or self.state.partitions.get(self.topic.name, {}).get(partition)

    def epoch(self, partition: int) -> int:
        """The leader epoch of a partition that exists."""
        node = self.node(partition)
        assert node is not None, f"{self.topic.name}-{partition} has no state node"
        return node.leader_epoch

    def last_epoch(self, partition: int) -> int:
        """The leader epoch that a partition has, or had when its removal began; -1 if it never had one."""
        node = self.node(partition)
        if node is not None:
            return node.leader_epoch
        gone = self.topic.removed.get(partition)
        return -1 if gone is None else gone.leader_epoch

    def confirmed(self, partition: int) -> bool:
        """Whether the leader of a partition has taken the role that it is to have."""
        node = self.node(partition)
        if node is None:
            return False
        known = self._confirmed.get(partition) or self.state.confirmed.get(self.topic.name, {}).get(partition)
        return known == (layout_of(self.topic, partition), node.leader_epoch)

    def stopped(self, partition: int) -> bool:
        """Whether all replicas of a partition are gone."""
        known = self.state.stopped.get(self.topic.name, set())
        return all(
            (partition, broker) in self._stopped or (partition, broker) in known
            for broker in self.topic.partitions[partition]
        )

    # Records.

    def write(self, topic: Topic) -> None:
        """Change the topic node, then every state node that follows from it."""
        self.topic = topic
        self.draft.write(nodes.put_topic(topic))
        self.write_due()

    def write_due(self) -> None:
        """Write the state nodes that are not what the topic node says: none, unless a crash came between."""
        reaping = frozenset(self.topic.reaping)
        for partition in sorted(self.topic.partitions.keys() - reaping):
            node = self.node(partition)
            due = due_node(self.topic, partition, node, self.state.controller_epoch)
            if due is not node:
                self.write_node(partition, due)

    def write_node(self, partition: int, node: PartitionNode) -> None:
        """Change the state node of a partition."""
        self._nodes[partition] = node
        self.draft.write(nodes.put_partition(self.topic.name, partition, node))

    def note_confirmed(self, roles: dict[int, tuple[int, int]]) -> None:
        """Leaders have taken these roles."""
        self._confirmed.update(roles)
        self.draft.write(Confirmed(self.topic.name, self.topic.topic_id, roles))

    def note_unconfirmed(self, errors: dict[int, ErrorCode]) -> None:
        """Leaders have answered otherwise, or not in time."""
        known = self.state.unconfirmed.get(self.topic.name, {})
        if any(known.get(partition) is not error for partition, error in errors.items()):
            self.draft.write(Unconfirmed(self.topic.name, self.topic.topic_id, errors))

    def note_stopped(self, replicas: frozenset[tuple[int, int]]) -> None:
        """These replicas, (partition, broker) each, are gone."""
        self._stopped |= replicas
        self.draft.write(Stopped(self.topic.name, self.topic.topic_id, replicas))

    # Effects.

    def publish(self) -> None:
        """Let the world see the topic as it now is."""
        self.draft.perform(PublishMetadata((self.topic.name,)))

    def send_roles(self, partitions: Iterable[int], broker_id: int | None = None) -> None:
        """Tell the leaders of `partitions` their roles: those that are there, or only `broker_id`."""
        batches: dict[tuple[int, int], list[int]] = {}
        for partition in partitions:
            node = self.node(partition)
            assert node is not None
            if node.leader in self.state.brokers and broker_id in (None, node.leader):
                batches.setdefault((node.leader, role_of(self.topic, partition, node).layout), []).append(partition)
        for (leader, layout), members in sorted(batches.items()):
            self.draft.perform(
                SendLeaderAndIsr(
                    broker_id=leader,
                    broker_epoch=self.state.brokers[leader].epoch,
                    controller_epoch=self.state.controller_epoch,
                    topic=self.topic.name,
                    topic_id=self.topic.topic_id,
                    initial_partition_count=self.topic.initial_partition_count,
                    undeleted_partition_count=count_of(self.topic, layout),
                    roles=tuple(role_of(self.topic, p, node) for p in members if (node := self.node(p)) is not None),
                )
            )

    def send_stops(self, partitions: Iterable[int], broker_id: int | None = None) -> None:
        """Tell brokers to delete their replicas of `partitions`: those that are there, or only `broker_id`."""
        batches: dict[int, list[tuple[int, int]]] = {}
        for partition in partitions:
            for broker in self.topic.partitions[partition]:
                if broker in self.state.brokers and broker_id in (None, broker):
                    batches.setdefault(broker, []).append((partition, self.last_epoch(partition)))
        for broker, members in sorted(batches.items()):
            self.draft.perform(
                SendStopReplica(
                    broker_id=broker,
                    broker_epoch=self.state.brokers[broker].epoch,
                    controller_epoch=self.state.controller_epoch,
                    topic=self.topic.name,
                    topic_id=self.topic.topic_id,
                    partitions=tuple(members),
                    topic_deleted=self.topic.name in self.state.deleting,
                )
            )

    def send_all(self, broker_id: int | None = None, *, unconfirmed_only: bool = False) -> None:
        """Say again everything that this topic is to be, to everybody or only to `broker_id`."""
        ordered = sorted(self.topic.partitions)
        if self.topic.name in self.state.deleting:
            self.send_stops((p for p in ordered if not self.stopped(p)), broker_id)
            return
        reaping = frozenset(self.topic.reaping)
        live = (p for p in ordered if p not in reaping and not (unconfirmed_only and self.confirmed(p)))
        self.send_roles(live, broker_id)
        self.send_stops((p for p in self.topic.reaping if not self.stopped(p)), broker_id)

    def retry_later(self, now_ms: int) -> None:
        """Come back with `decide_retry` when something was not answered well."""
        self.draft.set_timer(("retry", self.topic.name), now_ms + RETRY_BACKOFF_MS)

    def forget_reaped(self) -> None:
        """Remove the nodes of partitions whose replicas are gone; what is remembered of them stays."""
        reaped = self.topic.reaping
        for partition in reversed(reaped):
            path = nodes.partition_path(self.topic.name, partition)
            self.draft.write(DeleteNode(path), DeleteNode(path.removesuffix("/state")))
        left = {p: replicas for p, replicas in self.topic.partitions.items() if p not in reaped}
        ended = {p: runs for p, runs in self.topic.ended.items() if p in left}
        self.topic = replace(self.topic, partitions=left, ended=ended)
        self.draft.write(nodes.put_topic(self.topic))
        self.publish()
        self.inspect_retiring()

    # The steps of a resize.

    def enter(self, phase: Phase) -> None:
        """Begin a phase: write what it ends and what it starts, then tell the leaders in it."""
        topic, resize = self.topic, self.topic.resize
        assert resize is not None
        old, new = counts(topic)
        if phase is Phase.CUT:
            ended = {p: self.epoch(p) for p in range(min(old, new))}
            topic = replace(topic, ended=with_ended(topic.ended, topic.layouts[-2].number, ended))
        elif phase is Phase.OPEN:
            topic = replace(topic, partitions={**topic.partitions, **resize.assignment})
        self.write(replace(topic, resize=replace(resize, phase=phase)))
        self.send_roles(self.members(phase))

    def members(self, phase: Phase) -> list[int]:
        """The partitions that change their role in a phase of the running resize."""
        old, new = counts(self.topic)
        return [p for p in sorted(self.topic.partitions) if phase_of(p, old, new) is phase]

    def advance(self) -> None:
        """Go on with the running resize for as long as every leader in the current phase has taken its role."""
        while self.topic.resize is not None and all(self.confirmed(p) for p in self.members(self.topic.resize.phase)):
            order = phases(*counts(self.topic))
            following = order[order.index(self.topic.resize.phase) + 1 :]
            if following:
                self.enter(following[0])
            else:
                self._finish()

    def undo(self) -> None:
        """Undo the first phase of the running resize: its layout, of which no record was placed, is gone.

        The leaders that may have adopted the new count adopt the old one again, each under its next epoch. These state
        nodes are written before the topic node: with the layout gone, an epoch that began under it must not be led.
        """
        topic, resize = self.topic, self.topic.resize
        assert resize is not None
        members = self.members(resize.phase)
        for partition in members:
            node = self.node(partition)
            assert node is not None
            epoch = node.leader_epoch + 1
            self.write_node(partition, replace(node, leader_epoch=epoch, controller_epoch=self.state.controller_epoch))
        layouts = topic.layouts[:-1]
        self.topic = replace(topic, layouts=layouts, ended=without(topic.ended, layouts[-1].number), resize=None)
        self.draft.write(nodes.put_topic(self.topic))
        self.publish()
        self.send_roles(members)
        self.inspect_retiring()

    def _finish(self) -> None:
        topic = self.topic
        remembered = {p: gone for p, gone in topic.removed.items() if p not in topic.partitions}
        self.topic = replace(topic, resize=None, removed=remembered)
        self.draft.write(nodes.put_topic(self.topic))
        self.publish()
        self.inspect_retiring()
        if self.topic.newest % RESIZES_UNTIL_INSPECTION == 0:
            self.draft.perform(InspectLayouts((self.topic.name,)))

    def inspect_retiring(self) -> None:
        """Have the retiring partitions looked at, if there are any: they may be empty."""
        if len(self.topic.partitions) > self.topic.undeleted_partition_count:
            self.draft.perform(InspectRetiring((self.topic.name,)))
