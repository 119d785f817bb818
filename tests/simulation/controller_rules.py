"""The invariants of a cluster, checked after every event: the rules of a resize, read from tree, roles and logs.

- Metadata never shows half a layout; the tree and the controller's state are equal; leader epochs never go back.
- An append under a layout is accepted only after the leaders of earlier turns have taken their roles (ordering.md, 4).
- A record lies in the segment of the layout that its producer counted with; the ends of segments never move.
- A partition's producer table survives every restart.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

from anabranch.machines.controller import nodes, views
from anabranch.machines.controller.effects import Decision
from anabranch.machines.controller.layouts import ended_epoch, ended_with
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.controller.nodes import PutNode, Topic
from anabranch.machines.controller.state import ControllerState, apply
from anabranch.machines.controller.views import TopicView
from anabranch.machines.cuts import lineage_of
from anabranch.machines.lineage import Cuts, Lineage
from anabranch.machines.partition.producers import ProducerTable
from anabranch.machines.placement import place
from anabranch.records.batch import headers
from anabranch.records.key_values import decode_pairs
from anabranch.server.cluster.view import ClusterUpdate
from anabranch.server.partitions.appending import Produced
from anabranch.server.partitions.partition import Partition
from anabranch.storage.interface import Slice
from tests.simulation.controller_cluster import Cluster, Machine
from tests.simulation.virtual_time import VirtualLoop

TOPIC = "t"


class Sent(NamedTuple):
    """A record read back from a log, with the data for the checks."""

    producer_id: int
    key: int
    number: int
    count_said: int
    """The partition count in its produce request."""

    @property
    def name(self) -> tuple[int, int, int]:
        return self[:3]


class Rules:
    """The invariants of one cluster, with the history they need."""

    def __init__(self, loop: VirtualLoop, cluster: Cluster) -> None:
        self.loop = loop
        self.chance = loop.chance
        self.cluster = cluster
        cluster.on_published = self._on_published
        self.published: list[TopicView] = []
        self.layouts: dict[tuple[int, int, int], int] = {}
        """Record to the layout of its leader at the last append."""
        self.tables: dict[tuple[int, int], tuple[int, ProducerTable]] = {}
        """(broker, partition) to the log end and the producer table when the broker was killed."""
        self.placed_early: set[tuple[int, int, int]] = set()
        """Records that a leader took by the count of a resize that was canceled later, or had been."""
        self.cancels = 0
        self._canceled: list[tuple[int, dict[int, int]]] = []
        """Of each canceled resize: the number of its layout, and the leader epochs that came after it."""
        self._newest: Topic | None = None
        self._cuts: dict[tuple[int, int], int] = {}
        self._ends: dict[tuple[int, int], int] = {}
        self._newest_epochs: dict[int, int] = {}
        self._checked: Topic | None = None

    @property
    def state(self) -> ControllerState | None:
        return self.cluster.state

    @property
    def topic(self) -> Topic | None:
        """Return the topic node of the tree."""
        data = self.cluster.tree.nodes.get(nodes.topic_path(TOPIC))
        return None if data is None else _read_topic(data)

    @property
    def layouts_made(self) -> int:
        return 0 if self.topic is None else self.topic.layouts[-1].number

    @property
    def machines(self) -> list[Machine]:
        return list(self.cluster.machines.values())

    def partitions(self) -> Iterator[tuple[Machine, Partition]]:
        """Return all partitions with a role, with their brokers."""
        for machine in self.machines:
            for found in machine.replicas if machine.up else ():
                if found.leadership is not None and found.name.topic == TOPIC:
                    yield machine, found

    def _on_published(self, update: ClusterUpdate) -> None:
        """After a decision was persisted and applied, check that the tree and the state are equal."""
        assert self.cluster.wire is not None
        if self.chance.random() < 0.05:
            self._check_replay(self.cluster.wire.controller.state)
        self._note_cancel(self.cluster.wire.controller.state)
        snapshot = update.topics.get(TOPIC)
        if snapshot is None or snapshot.deleting or (self.published and self.published[-1] == snapshot.view):
            return
        check_view(snapshot.view)
        self.published.append(snapshot.view)

    def _note_cancel(self, state: ControllerState) -> None:
        """Notice that a resize was canceled: its layout is gone, and its records are of the layout before."""
        before, now = self._newest, state.topics.get(TOPIC)
        self._newest = now
        if before is None or now is None or before.topic_id != now.topic_id:
            return
        number, count = before.layouts[-1].number, before.layouts[-1].count
        newest = now.layouts[-1]
        if newest.number > number or (newest.number, newest.count) == (number, count):
            return
        self.cancels += 1
        epochs = {partition: node.leader_epoch for partition, node in state.partitions[TOPIC].items()}
        self._canceled.append((number, epochs))
        self.placed_early |= {name for name, layout in self.layouts.items() if layout == number}
        self.layouts = {name: min(layout, number - 1) for name, layout in self.layouts.items()}
        self._cuts = {(layout, p): epoch for (layout, p), epoch in self._cuts.items() if layout < number - 1}

    def note_appended(self, number: int, role: Leadership, records: list[Sent]) -> None:
        """Note the layout in which the leader of partition `number` has appended records."""
        layout = self.layout_of(number, role)
        if layout != role.layout:
            self.placed_early |= {record.name for record in records}
        self.layouts.update({record.name: layout for record in records})

    def layout_of(self, number: int, role: Leadership) -> int:
        """Return the layout of a role; the one before if the role is of a canceled resize.

        A leader may miss a cancel, and the next resize has the number of the canceled one again.
        """
        layout = role.layout
        for canceled, epochs in self._canceled:
            if layout == canceled and role.leader_epoch < epochs.get(number, 0):
                layout = canceled - 1
        return layout

    def leader(self, view: TopicView, partition: int) -> Machine | None:
        """Return the leader for a client with this metadata, if running."""
        if partition >= len(view.partitions):
            return None
        machine = self.cluster.machines.get(view.partitions[partition].leader)
        return machine if machine is not None and machine.up else None

    def led(self, view: TopicView, number: int) -> Partition | None:
        machine = self.leader(view, number)
        return None if machine is None else machine.partition(TOPIC, number)

    def lineage(self, view: TopicView) -> Lineage | None:
        """Return the lineage as a client does: layouts from metadata, offsets from the leaders, epochs checked."""
        topic = self.topic
        assert topic is not None
        ends: dict[int, dict[int, int]] = {}
        for seen in view.partitions:
            partition = self.led(view, seen.partition)
            if partition is None or partition.leader_epoch != seen.leader_epoch:
                return None
            ends[seen.partition] = {}
            for known in view.layouts[:-1]:
                epoch = ended_epoch(topic.ended.get(seen.partition, ()), known.number)
                if epoch is not None:
                    ends[seen.partition][known.number] = partition.log.end_offset_for_epoch(epoch)[1]
        self._check_ends(view, ends)
        cuts = {number: Cuts.of(known.items()) for number, known in ends.items()}
        return lineage_of(view.initial_partition_count, view.layouts, cuts, {})

    # Invariants.

    def check(self) -> None:
        """Check the cheap invariants, and now and then every record."""
        topic = self.topic
        if topic is None:
            return
        if topic is not self._checked:
            self._checked = topic
            self._check_cuts(topic)
        self._check_epochs(topic)
        self._check_tables()
        if self.chance.random() < 0.01:
            self.check_segments()

    async def check_replay(self) -> None:
        """Replay equals live, between two decisions."""

        def compare(state: ControllerState) -> Decision[None]:
            self._check_replay(state)
            return Decision(reply=None)

        await self.cluster.submit(compare)

    def _check_replay(self, state: ControllerState) -> None:
        """Check that replay equals live: the folded decisions give the current tree."""
        loaded = [PutNode(path, data) for path, data in sorted(self.cluster.tree.nodes.items()) if data]
        assert reduce(apply, loaded, ControllerState()) == state

    def _check_cuts(self, topic: Topic) -> None:
        """Check that no layout and partition has two end epochs."""
        for known in topic.layouts:
            for partition, epoch in ended_with(topic.ended, known.number).items():
                assert self._cuts.setdefault((known.number, partition), epoch) == epoch

    def _check_epochs(self, topic: Topic) -> None:
        """Check that epochs never go back, at the leaders and in the tree, through removal and return."""
        for partition in topic.partitions:
            data = self.cluster.tree.nodes.get(nodes.partition_path(TOPIC, partition))
            if data:
                epoch = _leader_epoch(data)
                newest = self._newest_epochs.get(partition, -1)
                assert epoch >= newest, f"the leader epoch of partition {partition} went back from {newest} to {epoch}"
                self._newest_epochs[partition] = epoch
        for _, led in self.partitions():
            entries = led.log.epochs.entries
            assert all(one[0] < two[0] and one[1] <= two[1] for one, two in itertools.pairwise(entries))
            assert led.log.epochs.latest <= self._newest_epochs.get(led.name.partition, -1)

    def _check_tables(self) -> None:
        """Check that a started partition has its earlier producer table, if no record was lost."""
        for machine, partition in self.partitions() if self.tables else ():
            end, known = self.tables.pop((machine.broker_id, partition.name.partition), (-1, None))
            if known is not None and end == partition.log.end:
                assert _remembered(partition.table) == _remembered(known), (
                    f"producers of {partition.name} are forgotten: {_remembered(partition.table)}, {_remembered(known)}"
                )
                assert ProducerTable.restore(known.snapshot()) == known

    def check_segments(self) -> None:
        """Check that every record is in the segment of the layout with the count of its produce request."""
        view = None if self.state is None else views.topic_view(self.state, TOPIC)
        if self.state is None or view is None or self.state.topics[TOPIC].resize is not None:
            return
        lineage = self.lineage(view)
        if lineage is None:
            return
        for seen in view.partitions:
            found = self.led(view, seen.partition)
            assert found is not None
            for offset, record in read_log(found, found.log.log_start, found.log.end):
                layout = lineage.layout_at(seen.partition, offset)
                assert layout == self.layouts[record.name], (
                    f"{record} at {offset} of {found.name} lies in the segment of layout {layout}, but was appended "
                    f"under {self.layouts[record.name]}; {lineage}; {found.log.epochs.entries}"
                )
                if record.name not in self.placed_early:
                    assert lineage.count_in(layout) == record.count_said
                assert seen.partition == place_of(record, view.initial_partition_count, lineage.count_in(layout)), (
                    f"{record} at {offset} of {found.name} is not where layout {layout} places it"
                )

    def _check_ends(self, view: TopicView, ends: dict[int, dict[int, int]]) -> None:
        """Check that known ends never move."""
        for number, known in ends.items():
            for layout, end in known.items():
                before = self._ends.setdefault((layout, number), end)
                found = self.led(view, number)
                assert found is not None
                # A partition that was removed and recreated has lost the epochs of its earlier life.
                assert end == before or before < end <= found.log.log_start, (
                    f"end({number}, {layout}) moved from {before} to {end}"
                )

    def check_duplicate(self, partition: Partition, records: list[Sent], produced: Produced) -> None:
        """Check that a batch answered as a duplicate is the one in the log."""
        if produced.base_offset >= partition.log.log_start:
            last = produced.base_offset + len(records)
            assert last <= partition.log.end, f"{records}, appended at {produced.base_offset}: records were lost"
            found = [record for _, record in read_log(partition, produced.base_offset, last)]
            assert found == records

    def check_order_of_phases(self, number: int, role: Leadership) -> None:
        """Check that an append under a layout came after the roles of all leaders of earlier turns (ordering.md, 4)."""
        topic, layout = self.topic, self.layout_of(number, role)
        assert topic is not None
        if layout == 0 or topic.resize is None or layout != topic.layouts[-1].number:
            return
        old, new = topic.layouts[-2].count, topic.layouts[-1].count
        earlier = range(new, old) if new < old and number < new else range(old) if number >= old else ()
        for _, other in self.partitions():
            taken, partition = other.leadership, other.name.partition
            assert taken is None or partition not in earlier or self.layout_of(partition, taken) >= layout, (
                f"partition {number} takes appends of layout {layout} while {other.name} still takes those before"
            )


def check_view(view: TopicView) -> None:
    """Check that Metadata never shows half a layout."""
    count = view.undeleted_partition_count
    assert view.layouts[-1].count == count
    assert [seen.partition for seen in view.partitions] == list(range(len(view.partitions)))
    assert len(view.partitions) >= count
    assert all(seen.retiring == (seen.partition >= count) for seen in view.partitions)


def place_of(record: Sent, initial: int, count: int) -> int:
    """Return the partition of a record's key."""
    return place(hash_of(record.key), initial, count)


def hash_of(key: int) -> int:
    """Return the hash of a key."""
    return key * 2654435761 % 2**31


def _remembered(table: ProducerTable) -> dict[int, object]:
    """Return a table's producers, without the times of their last activity."""
    return {producer_id: known._replace(seen_ms=0) for producer_id, known in table}


def read_log(partition: Partition, start: int, stop: int) -> Iterator[tuple[int, Sent]]:
    """Return the records of a log from one offset to another, as on its disk."""
    offset = start
    while offset < stop:
        part = partition.log.read(offset, 1 << 20, end=partition.log.end)
        if part is None:
            return
        assert isinstance(part, Slice)
        view = part.view()
        for position, header in headers(view):
            records = _records(bytes(view[position : position + header.size]), header.producer_id)
            for at, record in enumerate(records, header.base_offset):
                if offset <= at < stop:
                    yield at, record
            offset = max(offset, header.next_offset)


@functools.lru_cache(20_000)
def _records(batch: bytes, producer_id: int) -> list[Sent]:
    _, header = next(iter(headers(batch)))
    found = []
    for key, value in decode_pairs(memoryview(batch), header):
        assert key is not None and value is not None
        found.append(Sent(producer_id, int(key), *map(int, value.split())))
    return found


@functools.lru_cache(1_000)
def _read_topic(data: bytes) -> Topic:
    return nodes.read_topic(TOPIC, data)


@functools.lru_cache(1_000)
def _leader_epoch(data: bytes) -> int:
    return nodes.read_partition("", data).leader_epoch
