"""A world for the controller: brokers with logs, producers with stale metadata, a reader, and faults, out of one seed.

Real code: every decision of the controller, the leaders' roles (`leadership`), the producer tables, the lineage.
Imitated: the store (a dict; a crash may leave any prefix of a decision's records), the network (late, doubled, lost
answers; requests of a dead controller that arrive after its successor's election), disks (logs outlive brokers).

After every step the invariants at the end of `World` must hold.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import reduce
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller import leadership, nodes, reaper, resize, terms, topics, views
from anabranch.machines.controller.effects import (
    Accepted,
    Decision,
    Effect,
    InspectRetiring,
    PublishMetadata,
    SendLeaderAndIsr,
    SendStopReplica,
)
from anabranch.machines.controller.nodes import BrokerNode, DeleteNode, PutNode, Record, Topic
from anabranch.machines.controller.reaper import LogRange
from anabranch.machines.controller.state import State, apply
from anabranch.machines.controller.views import TopicView
from anabranch.machines.lineage import Lineage
from anabranch.machines.partition.producers import Accept, Duplicate, ProducerTable
from anabranch.machines.placement import place

TOPIC = "t"
COUNT_MAX = 9
KEYS = 12


class Batch(NamedTuple):
    """A batch of one record, with what the checks want to know of it."""

    base_offset: int
    producer_id: int
    base_sequence: int
    key: int
    number: int
    count: int
    """The partition count that its producer said."""
    layout: int = -1
    """The layout that its leader served."""
    producer_epoch: int = 0
    last_offset_delta: int = 0
    max_timestamp: int = 0
    is_transactional: bool = False
    is_control: bool = False


@dataclass
class Log:
    """A partition's log: it outlives its broker's crashes."""

    start: int
    end: int
    synced: int
    """The high watermark: below it nothing is lost, whatever happens, and nobody reads above it."""
    batches: dict[int, Batch] = field(default_factory=dict)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    table: ProducerTable = field(default_factory=ProducerTable)
    applied: list[Batch] = field(default_factory=list)

    @property
    def latest_epoch(self) -> int:
        return self.epochs[-1][0] if self.epochs else -1

    def start_epoch(self, epoch: int) -> None:
        assert epoch > self.latest_epoch
        self.epochs.append((epoch, self.end))

    def end_offset(self, epoch: int) -> int:
        """Where `epoch` ended: OffsetForLeaderEpoch."""
        return next((start for other, start in self.epochs if other > epoch), self.end)

    def append(self, batch: Batch) -> None:
        self.batches[self.end] = batch
        self.end += 1
        self.table.apply(batch, now_ms=0)
        self.applied.append(batch)

    def lose_power(self) -> None:
        """What was not synced is gone; an epoch that began beyond it begins where the log now ends."""
        latest = self.latest_epoch
        for gone in range(self.synced, self.end):
            del self.batches[gone]
        self.end = self.synced
        self.applied = [batch for batch in self.applied if batch.base_offset < self.end]
        self.epochs = [(epoch, start) for epoch, start in self.epochs if start <= self.end]
        if self.latest_epoch < latest:
            self.epochs.append((latest, self.end))
        self.table = ProducerTable()
        for batch in self.applied:
            self.table.apply(batch, now_ms=0)

    def delete_before(self, offset: int) -> None:
        for gone in range(self.start, offset):
            del self.batches[gone]
        self.start = offset


@dataclass
class Broker:
    """A broker: logs on disk, roles in memory, requests of each controller's connection in order."""

    broker_id: int
    epoch: int = 1
    up: bool = True
    controller_epoch: int = -1
    logs: dict[int, Log] = field(default_factory=dict)
    roles: dict[int, leadership.Leadership] = field(default_factory=dict)
    inbox: dict[int, deque[SendLeaderAndIsr | SendStopReplica]] = field(default_factory=dict)

    def handle(self, request: SendLeaderAndIsr | SendStopReplica) -> dict[int, ErrorCode] | None:
        """Perform a request; None where it is fenced."""
        if request.broker_epoch != self.epoch or request.controller_epoch < self.controller_epoch:
            return None
        self.controller_epoch = request.controller_epoch
        if isinstance(request, SendLeaderAndIsr):
            return {role.partition: self._take(request, role) for role in request.roles}
        return {partition: self._stop(partition, epoch) for partition, epoch in request.partitions}

    def _take(self, request: SendLeaderAndIsr, role: leadership.Role) -> ErrorCode:
        log = self.logs.get(role.partition)
        latest = -1 if log is None else log.latest_epoch
        taken = leadership.take_role(self.roles.get(role.partition), request, role, latest)
        if taken.error is not ErrorCode.NONE:
            return taken.error
        if log is None or (log.start == log.end < role.start_offset):
            log = self.logs[role.partition] = Log(role.start_offset, role.start_offset, role.start_offset)
        if taken.start_epoch is not None:
            log.start_epoch(taken.start_epoch)
        if taken.final_end:
            log.synced = log.end
        assert taken.leadership is not None
        self.roles[role.partition] = taken.leadership
        return ErrorCode.NONE

    def _stop(self, partition: int, epoch: int) -> ErrorCode:
        log = self.logs.get(partition)
        if log is not None and log.latest_epoch > epoch:
            return ErrorCode.FENCED_LEADER_EPOCH
        self.logs.pop(partition, None)
        self.roles.pop(partition, None)
        return ErrorCode.NONE

    def crash(self, *, power: bool = False) -> None:
        """Lose what is in memory, or also what is not on the disk; requests on the wire may still find it later."""
        self.up = False
        if power:
            for log in self.logs.values():
                log.lose_power()
        self.controller_epoch = -1
        self.roles.clear()

    def start(self) -> None:
        """Rebuild what is not on disk: the tables folded from the logs are those that were live."""
        self.up = True
        self.epoch += 1
        for log in self.logs.values():
            table = ProducerTable()
            for batch in log.applied:
                table.apply(batch, now_ms=0)
            assert table == log.table
            assert ProducerTable.restore(log.table.snapshot()) == log.table
            log.table = table


class Outcome(Enum):
    """What a producer knows of a part that it sent."""

    APPENDED = "appended"
    REJECTED = "rejected for certain"
    UNKNOWN = "to be asked again"
    GONE = "never to be known"


@dataclass
class Part:
    """What a producer sent to one partition, until its outcome is known."""

    batches: list[Batch]
    unknown: bool = False
    """An earlier attempt may have been appended."""


@dataclass
class Producer:
    """An idempotent producer that follows ordering.md, section 5."""

    producer_id: int
    view: TopicView | None = None
    early_count: int | None = None
    """A count that it has heard of before it was published."""
    queue: list[tuple[int, int]] = field(default_factory=list)
    """Unacknowledged records, (key, number), in the order they were sent."""
    parts: dict[int, Part] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)


@dataclass
class Reader:
    """A reader of the whole topic, that obeys the gates."""

    view: TopicView | None = None
    lineage: Lineage | None = None
    positions: dict[int, int] = field(default_factory=dict)


class CrashError(Exception):
    """The controller dies in the middle of something."""


class World:
    """Everything, and one source of chance. `faults` are probabilities in percent."""

    def __init__(self, seed: int, *, brokers: int = 2, faults: bool = True) -> None:
        self.chance = random.Random(seed)
        self.faults = faults
        self.tree: dict[str, bytes] = {}
        self.state: State | None = None
        self.journal: list[Record] = []
        self.crash_in: int | None = None
        self.brokers = {b: Broker(b) for b in range(1, brokers + 1)}
        self.answers: list[Callable[[State], Decision[None]]] = []
        self.reports: list[dict[int, LogRange]] = []
        self.published: list[TopicView] = []
        self.producers = [Producer(producer_id) for producer_id in range(3)]
        self.reader = Reader()
        self.numbers: dict[tuple[int, int], int] = {}
        self.delivered: dict[tuple[int, int], list[int]] = {}
        self.forgotten: set[tuple[int, int, int]] = set()
        """Records deleted before they were read, or given up because their partition is gone."""
        self.cuts: dict[tuple[int, int], int] = {}
        self.ends: dict[tuple[int, int], int] = {}
        self.newest_epochs: dict[int, int] = {}
        self.layouts_made = 0
        self.crashes = 0
        self.reaped = 0
        self.topic: Topic | None = None
        """The topic node as it is in the tree, whoever controls."""
        self._dirty = True

    # The shell.

    def store(self, record: Record) -> None:
        self._dirty = True
        match record:
            case PutNode(path, data):
                self.tree[path] = data
            case DeleteNode(path):
                assert not any(other.startswith(path + "/") for other in self.tree), f"{path} has children"
                self.tree.pop(path, None)

    def tick(self) -> None:
        """A point at which the controller may die."""
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                self.crash_in = None
                raise CrashError

    def submit(self, decide: Callable[[State], Decision[object]]) -> object:
        """Decide, persist, apply, perform, as the server does. None where the controller is dead, or dies of it."""
        if self.state is None:
            return None
        try:
            self.tick()
            decision = decide(self.state)
            for record in decision.records:
                self.store(record)
                self.tick()
            reduce(apply, decision.records, self.state)
            self.journal += [r for r in decision.records if isinstance(r, PutNode | DeleteNode)]
            for effect in decision.effects:
                self.perform(effect)
                self.tick()
        except CrashError:
            self.crash_controller()
            return None
        return decision.reply

    def perform(self, effect: Effect) -> None:
        assert self.state is not None
        match effect:
            case SendLeaderAndIsr() | SendStopReplica():
                inbox = self.brokers[effect.broker_id].inbox
                inbox.setdefault(effect.controller_epoch, deque()).append(effect)
            case PublishMetadata():
                view = views.topic_view(self.state, TOPIC)
                if view is not None and (not self.published or self.published[-1] != view):
                    check_view(view)
                    self.published.append(view)
            case InspectRetiring():
                self.report()

    def crash_controller(self) -> None:
        """Whatever it had sent may be lost with it, or not."""
        self.state = None
        self.crashes += 1
        if self.chance.random() < 0.5:
            for broker in self.brokers.values():
                broker.inbox.clear()

    def elect(self) -> None:
        """A controller comes: it loads the whole tree, in any order that has parents first."""
        self.journal = [PutNode(path, data) for path, data in sorted(self.tree.items())]
        self.state = reduce(apply, self.journal, State())
        self.submit(terms.decide_elected)

    def register(self, *, unclean: bool = False) -> None:
        """Brokers that the controller does not know, as they now are, tell it."""
        for broker in self.brokers.values():
            if self.state is None:
                return
            known = self.state.brokers.get(broker.broker_id)
            if broker.up and (known is None or known.epoch != broker.epoch):
                node = BrokerNode(broker.broker_id, broker.epoch)
                self.submit(lambda s, node=node: terms.decide_register_broker(s, node, unclean=unclean))  # type: ignore[misc]

    # What happens.

    def deliver_request(self, broker: Broker, *, lose: bool = False, double: bool = False) -> None:
        if not broker.inbox or not broker.up:
            return
        # What a controller that died had sent may arrive long after its successor began.
        connection = max(broker.inbox) if self.chance.random() < 0.95 else min(broker.inbox)
        request = broker.inbox[connection].popleft()
        if not broker.inbox[connection]:
            del broker.inbox[connection]
        self._dirty = True
        errors = broker.handle(request)
        if errors is None or lose:
            errors = {}
        self.answers += [_answer(request, errors)] * (2 if double else 1)

    def deliver_answer(self) -> None:
        if self.answers:
            answer = self.answers.pop(self.chance.randrange(len(self.answers)) if self.faults else 0)
            self.submit(answer)

    def report(self) -> None:
        """Leaders say what their retiring partitions hold; it may arrive much later."""
        seen = {
            partition: LogRange(broker.logs[partition].start, broker.logs[partition].end, role.leader_epoch)
            for broker in self.brokers.values()
            for partition, role in broker.roles.items()
            if broker.up and role.retiring
        }
        self.reports.append(seen)

    def reap(self) -> None:
        if self.reports:
            logs = self.reports.pop(self.chance.randrange(len(self.reports)))
            reaped = self.submit(lambda state: reaper.decide_reap(state, TOPIC, logs))
            self.reaped += len(reaped) if isinstance(reaped, tuple) else 0

    def resize(self, count: int) -> object:
        reply = self.submit(lambda state: resize.decide_resize_topic(state, resize.ResizeTopic(TOPIC, count)))
        self.layouts_made += isinstance(reply, Accepted)
        return reply

    def leader(self, view: TopicView, partition: int) -> Broker | None:
        """The broker that a client with this metadata turns to, if it is there."""
        if partition >= len(view.partitions) or view.partitions[partition].leader not in self.brokers:
            return None
        broker = self.brokers[view.partitions[partition].leader]
        return broker if broker.up else None

    def a_view(self) -> TopicView | None:
        """Metadata as some broker has it: not always the newest."""
        if not self.published:
            return None
        return self.published[-1] if self.chance.random() < 0.8 else self.chance.choice(self.published[-3:])

    def produce(self, producer: Producer) -> None:
        """Send a round of records, each partition's part on its own way; or carry on with the round that is on."""
        if not producer.parts:
            self._begin_round(producer)
            return
        partition = self.chance.choice(sorted(producer.parts))
        part = producer.parts[partition]
        outcome = self._attempt(partition, part)
        if outcome is Outcome.UNKNOWN:
            return
        for batch in part.batches if outcome is not Outcome.REJECTED else ():
            producer.queue.remove((batch.key, batch.number))
            if outcome is Outcome.GONE:
                self.forgotten.add((producer.producer_id, batch.key, batch.number))
        if outcome is Outcome.APPENDED:
            producer.sequences[partition] = part.batches[-1].base_sequence + 1
        elif outcome is Outcome.GONE:
            producer.sequences.pop(partition, None)
        del producer.parts[partition]
        if not producer.parts and producer.queue:
            producer.view = None

    def _begin_round(self, producer: Producer) -> None:
        if producer.view is None or self.chance.random() < 0.05:
            producer.view = self.a_view()
            producer.early_count = None
            if self.state is not None and TOPIC in self.state.topics and self.chance.random() < 0.3:
                producer.early_count = self.state.topics[TOPIC].undeleted_partition_count
        if producer.view is None:
            return
        while len(producer.queue) < 4:
            key = self.chance.randrange(KEYS)
            number = self.numbers.get((producer.producer_id, key), 0)
            self.numbers[producer.producer_id, key] = number + 1
            producer.queue.append((key, number))
        self._send_round(producer, producer.early_count or producer.view.undeleted_partition_count)

    def _send_round(self, producer: Producer, count: int) -> None:
        assert producer.view is not None
        for key, number in producer.queue:
            partition = place(key * 2654435761 % 2**31, producer.view.initial_partition_count, count)
            part = producer.parts.setdefault(partition, Part([]))
            sequence = producer.sequences.get(partition, 0) + len(part.batches)
            part.batches.append(Batch(-1, producer.producer_id, sequence, key, number, count))

    def _attempt(self, partition: int, part: Part) -> Outcome:
        assert self.published
        view = self.published[-1]
        broker = self.leader(view, partition)
        role = None if broker is None else broker.roles.get(partition)
        if broker is None or role is None:
            if not part.unknown:
                return Outcome.REJECTED
            return Outcome.GONE if partition >= len(view.partitions) else Outcome.UNKNOWN
        log = broker.logs[partition]
        for batch in part.batches:
            verdict = log.table.check(batch)
            if isinstance(verdict, Duplicate):
                original = log.batches.get(verdict.base_offset)
                assert original is None or original[1:5] == batch[1:5]
                continue
            error = leadership.refuse_produce(role, batch.count)
            if error is not ErrorCode.NONE:
                assert batch is part.batches[0], "a part is appended whole, or not at all"
                return Outcome.REJECTED
            assert verdict == Accept(), f"{batch} after {log.table}: {verdict}"
            self._check_order_of_phases(broker, partition)
            log.append(batch._replace(base_offset=log.end, layout=role.layout))
        if self.faults and self.chance.random() < 0.35:
            part.unknown = True
            return Outcome.UNKNOWN
        log.synced = log.end
        return Outcome.APPENDED

    def read(self) -> None:
        """Deliver a few records of some partition, if the gates, the leader and its fences allow."""
        reader = self.reader
        if reader.lineage is None or reader.view is None or self.chance.random() < 0.05:
            reader.view = self.a_view()
            reader.lineage = None if reader.view is None else self.lineage(reader.view)
        view, lineage = reader.view, reader.lineage
        if view is None or lineage is None:
            return
        partition = self.chance.randrange(len(view.partitions))
        broker = self.leader(view, partition)
        role = None if broker is None else broker.roles.get(partition)
        if broker is None or role is None:
            reader.lineage = None
            return
        seen = view.partitions[partition]
        error = leadership.refuse_read(role, view.undeleted_partition_count, seen.leader_epoch)
        if error is not ErrorCode.NONE:
            reader.lineage = None
            return
        log = broker.logs[partition]
        # A partition without a committed offset stands at its log start, as it was when the lineage was made or later.
        for p in range(len(view.partitions)):
            other = self.leader(view, p)
            if other is None or p not in other.roles:
                return
            reader.positions[p] = max(reader.positions.get(p, 0), other.logs[p].start)
        positions = {p: reader.positions[p] for p in range(len(view.partitions))}
        limit = lineage.deliverable(positions)[partition]
        stop = min(log.synced, positions[partition] + self.chance.randint(1, 12))
        stop = stop if limit is None else min(stop, limit)
        for offset in range(positions[partition], stop):
            self._deliver(log.batches[offset])
        reader.positions[partition] = max(stop, positions[partition])

    def lineage(self, view: TopicView) -> Lineage | None:
        """The lineage as a client makes it: layouts from metadata, offsets from the leaders, epochs checked."""
        ends: list[dict[int, int]] = [{} for _ in view.layouts[:-1]]
        for seen in view.partitions:
            broker = self.leader(view, seen.partition)
            role = None if broker is None else broker.roles.get(seen.partition)
            if broker is None or role is None or role.leader_epoch != seen.leader_epoch:
                return None
            for layout, known in enumerate(view.layouts[:-1]):
                if seen.partition in known.ended_epochs:
                    ends[layout][seen.partition] = broker.logs[seen.partition].end_offset(
                        known.ended_epochs[seen.partition]
                    )
        counts = tuple(layout.count for layout in view.layouts)
        return Lineage(view.initial_partition_count, counts, tuple(ends))

    def retain(self) -> None:
        """Retention or DeleteRecords: mostly what was read, sometimes more."""
        broker = self.chance.choice(list(self.brokers.values()))
        if not broker.up or not broker.roles:
            return
        retiring = sorted(p for p, role in broker.roles.items() if role.retiring)
        partition = self.chance.choice(retiring if retiring and self.chance.random() < 0.7 else sorted(broker.roles))
        log = broker.logs[partition]
        read = min(max(self.reader.positions.get(partition, 0), log.start), log.synced)
        until = log.synced if self.chance.random() < 0.05 else read
        for offset in range(max(read, log.start), until):
            batch = log.batches[offset]
            self.forgotten.add((batch.producer_id, batch.key, batch.number))
        log.delete_before(until)

    def _deliver(self, batch: Batch) -> None:
        line = self.delivered.setdefault((batch.producer_id, batch.key), [])
        assert not line or batch.number > line[-1], f"record {batch.number} of key {batch.key} after record {line[-1]}"
        line.append(batch.number)

    # Running.

    def begin(self, initial: int) -> None:
        self.elect()
        self.register()
        self.submit(lambda state: topics.decide_create_topic(state, topics.CreateTopic(TOPIC, UUID(int=7), initial)))
        self.check()

    def step(self) -> None:
        """One thing happens."""
        chance = self.chance
        if self.state is None:
            if chance.random() < 0.2:
                self.elect()
        elif chance.random() < 0.015:
            self.crash_in = chance.randrange(12)
        for broker in self.brokers.values():
            if not broker.up and chance.random() < 0.1:
                broker.start()
        what = chance.choices(range(len(_STEPS)), weights=[weight for weight, _ in _STEPS])[0]
        _STEPS[what][1](self)
        self.check()

    def heal(self) -> None:
        """No more faults: whatever was going on must now end."""
        self.crash_in = None
        for broker in self.brokers.values():
            if not broker.up:
                broker.start()
        if self.state is None:
            self.elect()
        self.register()
        for _ in range(200):
            for broker in self.brokers.values():
                while broker.inbox:
                    self.deliver_request(broker)
            while self.answers:
                self.deliver_answer()
            assert self.state is not None
            self.perform(PublishMetadata((TOPIC,)))
            self.check()
            described = views.describe(self.state, TOPIC)
            if views.idle(self.state, TOPIC) and (described is None or not described.waiting_for):
                self.check_replay()
                return
            self.submit(lambda state: resize.decide_retry(state, TOPIC))
        raise AssertionError(f"stuck: {views.describe(self.state, TOPIC)}")

    def drain(self) -> None:
        """Every producer ends what it began; the reader reads everything; then every record was there once."""
        self.published = self.published[-1:]
        self.faults = False
        for producer in self.producers:
            for _ in range(1_000):
                if producer.queue and not producer.parts:
                    producer.view = self.published[-1]
                    self._send_round(producer, producer.view.undeleted_partition_count)
                if producer.parts:
                    self.produce(producer)
            assert not producer.queue, f"a producer is stuck with {producer.parts}"
        for broker in self.brokers.values():
            for log in broker.logs.values():
                log.synced = log.end
        self.reader.lineage = None
        for _ in range(50_000):
            self.read()
            if all(
                self.reader.positions.get(p, 0) >= broker.logs[p].end
                for broker in self.brokers.values()
                for p in broker.roles
            ):
                break
        else:
            raise AssertionError(f"the reader is stuck at {self.reader.positions}")
        for (producer_id, key), count in self.numbers.items():
            line = self.delivered.get((producer_id, key), [])
            missing = {number for number in range(count) if (producer_id, key, number) not in self.forgotten} - set(
                line
            )
            assert not missing, f"records {missing} of key {key} were lost"

    # Invariants.

    def check(self) -> None:
        """Check what may have changed; now and then, check everything."""
        if self._dirty:
            self._dirty = False
            data = self.tree.get(nodes.topic_path(TOPIC))
            self.topic = None if data is None else nodes.read_topic(TOPIC, data)
            if self.topic is not None:
                self._check_cuts(self.topic)
                self._check_epochs(self.topic)
        if self.topic is not None and self.state is not None and self.chance.random() < 0.05:
            self.check_replay()
            view = views.topic_view(self.state, TOPIC)
            assert view is not None
            check_view(view)
            if self.topic.resize is None:
                self._check_segments(view)

    def check_replay(self) -> None:
        """Replay equals live: of every record since the start of the term, and of the tree as it stands."""
        assert reduce(apply, self.journal, State()) == self.state
        loaded = [PutNode(path, data) for path, data in sorted(self.tree.items())]
        assert reduce(apply, loaded, State()) == self.state

    def _check_cuts(self, topic: Topic) -> None:
        """Never two epochs cut for one layout and partition."""
        for layout, known in enumerate(topic.layouts):
            for partition, epoch in known.ended_epochs.items():
                assert self.cuts.setdefault((layout, partition), epoch) == epoch

    def _check_epochs(self, topic: Topic) -> None:
        """Epochs never go back, at the leaders and in the tree, through removal and return."""
        for partition in topic.partitions:
            data = self.tree.get(nodes.partition_path(TOPIC, partition))
            if data is not None:
                epoch = nodes.read_partition("", data).leader_epoch
                assert epoch >= self.newest_epochs.get(partition, -1)
                self.newest_epochs[partition] = epoch
        for broker in self.brokers.values():
            for partition, log in broker.logs.items():
                assert all(
                    one[0] < two[0] and one[1] <= two[1] for one, two in zip(log.epochs, log.epochs[1:], strict=False)
                )
                assert log.latest_epoch <= self.newest_epochs.get(partition, -1)

    def _check_segments(self, view: TopicView) -> None:
        """A record lies in the segment of the layout whose count its producer said; ends, once known, never move."""
        lineage = self.lineage(view)
        if lineage is None:
            return
        for layout, ends in enumerate(lineage.ends):
            for partition, end in ends.items():
                known = self.ends.setdefault((layout, partition), end)
                start = self.brokers[view.partitions[partition].leader].logs[partition].start
                # A partition that was removed and made again has forgotten the epochs of its earlier life.
                assert end == known or known < end <= start, f"end({partition}, {layout}) moved from {known} to {end}"
        for seen in view.partitions:
            for offset, batch in self.brokers[seen.leader].logs[seen.partition].batches.items():
                layout = lineage.layout_at(seen.partition, offset)
                assert layout == batch.layout, f"{batch} lies in the segment of layout {layout}"
                assert lineage.counts[layout] == batch.count

    def _check_order_of_phases(self, broker: Broker, partition: int) -> None:
        """Who takes an append under a layout can rely on everyone whose turn was before: ordering.md, section 4."""
        topic = self.topic
        assert topic is not None
        layout = broker.roles[partition].layout
        if layout == 0 or topic.resize is None or layout != len(topic.layouts) - 1:
            return
        old, new = topic.layouts[-2].count, topic.layouts[-1].count
        earlier = range(new, old) if new < old and partition < new else range(old) if partition >= old else ()
        for other in earlier:
            for host in self.brokers.values():
                role = host.roles.get(other)
                assert role is None or role.layout >= layout, (
                    f"partition {partition} takes appends of layout {layout} while {other} still takes those before"
                )


def check_view(view: TopicView) -> None:
    """Nobody sees half a layout."""
    count = view.undeleted_partition_count
    assert view.layouts[-1].count == count
    assert not view.layouts[-1].ended_epochs
    assert [seen.partition for seen in view.partitions] == list(range(len(view.partitions)))
    assert len(view.partitions) >= count
    assert all(seen.retiring == (seen.partition >= count) for seen in view.partitions)
    for layout in view.layouts[:-1]:
        assert set(layout.ended_epochs) >= set(range(layout.count))
        assert sorted(layout.ended_epochs) == list(range(len(layout.ended_epochs)))


def _answer(
    request: SendLeaderAndIsr | SendStopReplica, errors: Mapping[int, ErrorCode]
) -> Callable[[State], Decision[None]]:
    if isinstance(request, SendLeaderAndIsr):
        return lambda state: resize.decide_leader_and_isr_answered(state, request, errors, now_ms=0)
    return lambda state: topics.decide_stop_replica_answered(state, request, errors, now_ms=0)


def _broker_step(world: World) -> None:
    broker = world.chance.choice(list(world.brokers.values()))
    if broker.up:
        broker.crash(power=world.chance.random() < 0.5)
        if world.chance.random() < 0.5:
            world.submit(lambda state: terms.decide_broker_left(state, broker.broker_id))


def _network_step(world: World) -> None:
    """Some requests arrive, then some answers, of these and of earlier ones."""
    for broker in world.brokers.values():
        if world.chance.random() < 0.7:
            world.deliver_request(broker, lose=world.chance.random() < 0.08, double=world.chance.random() < 0.2)
    for _ in range(world.chance.randint(0, 2)):
        world.deliver_answer()


_STEPS: tuple[tuple[int, Callable[[World], object]], ...] = (
    (70, lambda world: world.produce(world.chance.choice(world.producers))),
    (60, World.read),
    (60, _network_step),
    (8, lambda world: world.resize(world.chance.randint(1, COUNT_MAX))),
    (6, lambda world: world.submit(lambda state: resize.decide_retry(state, TOPIC))),
    (2, _broker_step),
    (16, lambda world: world.register(unclean=world.chance.random() < 0.5)),
    (10, World.retain),
    (4, World.report),
    (5, World.reap),
)
