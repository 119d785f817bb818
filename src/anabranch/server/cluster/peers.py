"""A broker's requests to the brokers of its cluster, itself included: the controller's orders, and leaders' offsets.

Every method is about partitions led by some broker. Here this process leads all of them, so that orders are carried out
at once and responses are never late. Over the wire an order may be answered late, twice or never; another leader's
offsets are requested and cached, and missing in the response until they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.effects import SendLeaderAndIsr, SendStopReplica
from anabranch.machines.controller.folding import HeldLayouts
from anabranch.machines.controller.nodes import Topic
from anabranch.machines.controller.reaper import LogRange
from anabranch.machines.keyspace import Interval
from anabranch.machines.lineage import Cuts
from anabranch.machines.partition.load import UNOBSERVED, PartitionLoad
from anabranch.machines.progress import NEVER_REWRITTEN, Rewritten
from anabranch.protocol.messages.write_txn_markers import WriteTxnMarkersRequest, WriteTxnMarkersResponse
from anabranch.runtime.turns import in_turns
from anabranch.server.cluster.lineages import prepare
from anabranch.server.cluster.view import ClusterUpdate, ClusterView, name_of
from anabranch.server.partitions.cutting import cuts_of, held_layouts
from anabranch.server.partitions.offsets import next_record
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas

LoadOf = Callable[[Partition], PartitionLoad]

LOOKED_AT_AT_A_TIME = 500
"""Partitions that are looked at before other work has its turn."""


class Peers(Protocol):
    """The controller's orders to brokers, and the group coordinators' requests to leaders."""

    async def take_roles(self, broker: int, order: SendLeaderAndIsr) -> Mapping[int, ErrorCode]:
        """Have a broker carry out a LeaderAndIsr; an error code for each partition. OSError."""

    async def stop_replicas(self, broker: int, order: SendStopReplica) -> Mapping[int, ErrorCode]:
        """Have a broker carry out a StopReplica; an error code for each partition. OSError."""

    async def prepare(self, update: ClusterUpdate) -> None:
        """Have at hand what is looked up as soon as an update is published; it must not raise."""

    def publish(self, update: ClusterUpdate) -> None:
        """Give every broker's view this update, after those that were published before."""

    async def apply_configs(self, update: ClusterUpdate) -> None:
        """Have the configs of a published update apply to the logs of every broker before this returns."""

    async def retiring_ranges(self, topic: str) -> Mapping[int, LogRange]:
        """The log starts and ends of a topic's retiring partitions that have no open transaction."""

    async def held_layouts(self, topic: str) -> HeldLayouts | None:
        """The layouts that a topic's logs hold records of; None while the logs of some partitions are not known."""

    def cuts(self, topic: Topic, partition: int) -> Cuts | None:
        """The cuts of a partition for the published layouts of its topic; None while its leader does not know them."""

    def opened(self, topic: str) -> int:
        """How many logs of a topic are open, or damaged for good; each of the others may be opened at any time."""

    def is_open(self, topic: str, partition: int) -> bool:
        """Whether a partition's log is open: what is told of its offsets is known."""

    def log_start(self, topic: str, partition: int) -> int:
        """The first offset of a partition's log; 0 where it is not known now."""

    def rewritten(self, topic: str, partition: int) -> Rewritten:
        """Which records of a partition's log compaction may have dropped; none where it is not known now."""

    def log_end(self, topic: str, partition: int) -> int:
        """The end of a partition's log; 0 where it is not known now."""

    def stable_end(self, topic: str, partition: int) -> int:
        """Where the first open transaction of a partition begins, or the log end; 0 where it is not known now."""

    def load(self, topic: str, partition: int, held: Interval) -> Sequence[float]:
        """What equal parts of a partition's interval cost readers, ascending; empty where it is not known well."""

    async def next_records(self, topic: str, offsets: Mapping[int, int]) -> Mapping[int, int]:
        """By partition, the first offset not below the given one of a record that a reader can still be given.

        The log end where none is left. A partition whose log cannot be read now is missing, and so is one whose log
        was deleted at its offset.
        """


class MarkerPeers(Protocol):
    """The transaction coordinators' requests to leaders.

    Apart from `Peers`, because a leader of `__consumer_offsets` has its group coordinator write the marker, and group
    coordinators use `Peers` themselves.
    """

    async def write_markers(self, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
        """Write markers into the partitions they name, durably; an error code for each partition."""


class LocalPeers:
    """The `Peers` of a cluster of one process."""

    def __init__(self, replicas: Replicas, view: ClusterView, loads: LoadOf = lambda _: UNOBSERVED) -> None:
        self._replicas = replicas
        self._view = view
        self._loads = loads

    async def take_roles(self, broker: int, order: SendLeaderAndIsr) -> Mapping[int, ErrorCode]:
        """As `Peers.take_roles`."""
        return await self._replicas.take_roles(order)

    async def stop_replicas(self, broker: int, order: SendStopReplica) -> Mapping[int, ErrorCode]:
        """As `Peers.stop_replicas`."""
        return await self._replicas.stop(order)

    async def prepare(self, update: ClusterUpdate) -> None:
        """As `Peers.prepare`: the lineage of topics with a new layout."""
        for topic in update.topics.values():
            if topic is None or topic.deleting or len(topic.layouts) == 1:
                continue
            known = self._view.topic(topic.name)
            if known is None or known.topic is not topic.topic:
                await prepare(topic, self.cuts)

    def publish(self, update: ClusterUpdate) -> None:
        """As `Peers.publish`."""
        self._view.update(update)

    async def apply_configs(self, update: ClusterUpdate) -> None:
        """As `Peers.apply_configs`, in steps: a topic may have 100,000 partitions, and there may be as many topics."""
        for topic in map(name_of, self._view.topics()) if update.broker_configs else update.configs:
            await self._replicas.apply_settings(topic)

    async def retiring_ranges(self, topic: str) -> Mapping[int, LogRange]:
        """As `Peers.retiring_ranges`."""
        found = dict[int, LogRange]()
        async for partition in in_turns(self._replicas.of_topic(topic), LOOKED_AT_AT_A_TIME):
            found |= retiring_ranges((partition,))
        return found

    async def held_layouts(self, topic: str) -> HeldLayouts | None:
        """As `Peers.held_layouts`."""
        found = self._view.topic(topic)
        return None if found is None else await held_layouts(found.topic, partial(self._replicas.get, topic))

    def cuts(self, topic: Topic, partition: int) -> Cuts | None:
        """As `Peers.cuts`; None while the log of the partition cannot be opened."""
        return cuts_of(self._replicas.get(topic.name, partition), topic)

    def opened(self, topic: str) -> int:
        """As `Peers.opened`."""
        return self._replicas.count_of(topic)

    def is_open(self, topic: str, partition: int) -> bool:
        """As `Peers.is_open`."""
        found = self._replicas.get(topic, partition)
        return found is not None and found.offline_reason is None

    def log_start(self, topic: str, partition: int) -> int:
        """As `Peers.log_start`."""
        found = self._replicas.get(topic, partition)
        return 0 if found is None else found.log.log_start

    def rewritten(self, topic: str, partition: int) -> Rewritten:
        """As `Peers.rewritten`."""
        found = self._replicas.get(topic, partition)
        return NEVER_REWRITTEN if found is None else found.log.rewritten

    def log_end(self, topic: str, partition: int) -> int:
        """As `Peers.log_end`."""
        found = self._replicas.get(topic, partition)
        return 0 if found is None else found.log.end

    def stable_end(self, topic: str, partition: int) -> int:
        """As `Peers.stable_end`."""
        found = self._replicas.get(topic, partition)
        return 0 if found is None else found.last_stable_offset

    def load(self, topic: str, partition: int, held: Interval) -> Sequence[float]:
        """As `Peers.load`."""
        found = self._replicas.get(topic, partition)
        return () if found is None else self._loads(found).for_cuts(held)

    async def next_records(self, topic: str, offsets: Mapping[int, int]) -> Mapping[int, int]:
        """As `Peers.next_records`; the disk is read in threads."""
        found: dict[int, int] = {}
        for number, offset in offsets.items():
            partition = self._replicas.get(topic, number)
            answer = None if partition is None else await next_record(partition, offset)
            if answer is not None:
                found[number] = answer
        return found


def retiring_ranges(partitions: Iterable[Partition]) -> dict[int, LogRange]:
    """The log starts and ends of those partitions that retire, without those where a transaction is open."""
    return {
        partition.name.partition: LogRange(
            partition.log.log_start, partition.log.end, partition.leadership.leader_epoch
        )
        for partition in partitions
        if partition.leadership is not None
        and partition.retiring
        and partition.offline_reason is None
        and not partition.table.transactions
    }
