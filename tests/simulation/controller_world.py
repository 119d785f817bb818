"""A world for the controller: shipped brokers, producers with stale metadata, a reader, and faults, out of one seed.

Time passes on a virtual loop; every step of the world begins an incident, while the shells go on by themselves.
Producers and the reader are models of clients: they talk to the partitions of the brokers, whose logs are read back.
After every step the rules must hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.controller import leadership, resize, topics, views
from anabranch.machines.controller.roles import may_undo
from anabranch.machines.controller.state import ControllerState
from anabranch.machines.controller.views import TopicView
from anabranch.machines.lineage import Lineage
from anabranch.machines.placement import place
from anabranch.server.partitions.appending import Appender, Produced
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.removed import RemovedPartition
from tests.simulation.controller_cluster import SETTINGS, Cluster, Machine
from tests.simulation.controller_rules import TOPIC, Rules, Sent, hash_of, read_log
from tests.simulation.virtual_time import Process, VirtualClock, VirtualLoop
from tests.support.batches import make_keyed_batch

COUNT_MAX = 9
KEYS = 12
STEP_S = 0.02
RECORDS_PER_PART_MAX = 5


class Outcome(Enum):
    """The outcome of a sent part, as its producer knows it."""

    APPENDED = "appended"
    REJECTED = "rejected for certain"
    UNKNOWN = "to be asked again"


@dataclass
class Part:
    """A batch that a producer sent to one partition, until its outcome is known."""

    base_sequence: int
    records: list[Sent] = field(default_factory=list)
    unknown: bool = False
    """An earlier attempt may have been appended."""
    acknowledgment: asyncio.Future[None] | None = None
    """Of the broker's disk."""
    broker: Process | None = None


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
    rests_until_s: float = 0


@dataclass
class Reader:
    """A reader of the whole topic, that obeys the gates."""

    view: TopicView | None = None
    lineage: Lineage | None = None
    positions: dict[int, int] = field(default_factory=dict)


class World(Rules):
    """Everything, and one source of chance."""

    def __init__(self, loop: VirtualLoop, *, brokers: int = 2, faults: bool = True) -> None:
        super().__init__(loop, Cluster(loop, brokers, faults=faults))
        self.clock = VirtualClock(loop)
        self.producers = [Producer(producer_id) for producer_id in range(3)]
        self.reader = Reader()
        self.numbers: dict[tuple[int, int], int] = {}
        self.delivered: dict[tuple[int, int], list[int]] = {}
        self.forgotten: set[tuple[int, int, int]] = set()
        """Records deleted before they were read."""
        self.homes: dict[int, int] = {}
        """Partition to the broker that has it, or had it when it was removed."""

    # Incidents of the cluster.

    async def elect(self) -> None:
        up = [machine for machine in self.machines if machine.up]
        if self.cluster.process is None and up:
            await self.cluster.elect(self.chance.choice(up))

    async def register(self, *, unclean: bool = False) -> None:
        """Register every broker whose present life the controller does not know."""
        for machine in self.machines:
            await self.cluster.register(machine, unclean=unclean)

    async def resize(self, count: int, timeout_ms: int = 300) -> None:
        """Have the topic resized, and wait for a while until it is."""
        controller, process = self.cluster.controller, self.cluster.process
        if controller is None or process is None:
            return
        command = resize.ResizeTopic(TOPIC, count, self._assignments(controller.state, count))
        try:
            await process.perform(controller.command(lambda s: resize.decide_resize_topic(s, command), timeout_ms))
        except ApiError as error:
            if error.code not in (
                ErrorCode.REQUEST_TIMED_OUT,
                ErrorCode.INVALID_PARTITIONS,
                ErrorCode.REASSIGNMENT_IN_PROGRESS,
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                ErrorCode.NO_REASSIGNMENT_IN_PROGRESS,
            ):
                raise

    async def cancel(self) -> None:
        """Cancel the resize that runs, if it still can be."""
        await self.cluster.submit(lambda state: resize.decide_cancel_resize(state, TOPIC))

    async def try_cancel(self) -> None:
        """As `cancel`; the controller may die meanwhile."""
        await self.cluster.begin(self.cancel())

    async def reconsider(self) -> None:
        """Begin a resize and cancel it in its first phase, as often as it takes until one was canceled."""
        canceled = self.cancels
        while self.cancels == canceled:
            self.cluster.begin(self.resize(self.chance.randint(1, COUNT_MAX)))
            for _ in range(20):
                topic = None if self.state is None else self.state.topics.get(TOPIC)
                if topic is not None and may_undo(topic):
                    await self.cancel()
                    break
                await asyncio.sleep(self.chance.uniform(0, STEP_S / 10))
            await asyncio.sleep(self.chance.uniform(0, 10 * STEP_S))

    def _assignments(self, state: ControllerState, count: int) -> list[tuple[int, ...]] | None:
        """Brokers for the partitions that a resize makes: where they were before, if they were removed.

        The producers of a removed partition stay at its broker.
        """
        topic = state.topics.get(TOPIC)
        if topic is None or not self.cluster.faults:
            return None
        self.homes.update({partition: replicas[0] for partition, replicas in topic.partitions.items()})
        brokers = sorted(self.cluster.machines)
        grown = range(topic.undeleted_partition_count, count)
        return [(self.homes.setdefault(partition, self.chance.choice(brokers)),) for partition in grown] or None

    async def reap(self) -> None:
        """The reaper's round, upon some report."""
        if self.cluster.controller is not None and self.cluster.process is not None:
            await self.cluster.process.perform(self.cluster.controller.inspect_retiring(TOPIC))

    async def try_resize(self, count: int) -> None:
        """As `resize`; the controller may die meanwhile."""
        await self.cluster.begin(self.resize(count))

    async def try_reap(self) -> None:
        """As `reap`, upon a report made now; the controller may die meanwhile."""
        self.cluster.note_report(TOPIC)
        await self.cluster.begin(self.reap())

    async def fold(self) -> None:
        """Have a leaders' report on the layouts that their logs hold inspected."""
        if self.cluster.controller is not None and self.cluster.process is not None:
            await self.cluster.process.perform(self.cluster.controller.inspect_layouts(TOPIC))

    async def try_fold(self) -> None:
        """As `fold`, upon a report made now or before; the controller may die meanwhile."""
        await self.cluster.note_layouts(TOPIC)
        await self.cluster.begin(self.fold())

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        await asyncio.sleep(seconds)

    async def lose_power(self, machine: Machine) -> None:
        """The disk becomes slow, then the power goes; most interesting while the topic is resized."""
        machine.disk_fails_until_s = self.loop.time() + 0.6
        self.cluster.begin(self.resize(self.chance.randint(1, COUNT_MAX)))
        await asyncio.sleep(self.chance.uniform(0, 0.5))
        if machine.up and self.cluster.faults:
            self.crash_broker(machine, power=True)

    def crash_broker(self, machine: Machine, *, power: bool) -> None:
        if self.cluster.wire is not None and self.cluster.wire.home is machine:
            self.cluster.crash_controller()
        for found in machine.replicas if machine.up else ():
            log = found.log
            if found.leadership is not None and (not power or log.flushed == log.end):
                self.tables[machine.broker_id, found.name.partition] = (log.end, found.table)
        machine.crash(power=power)

    def retain(self) -> None:
        """Retention or DeleteRecords: deletes mostly records that were read, sometimes more."""
        machine = self.chance.choice(self.machines)
        mine = [found for other, found in self.partitions() if other is machine]
        if not mine:
            return
        retiring = [found for found in mine if found.retiring]
        partition = self.chance.choice(retiring if retiring and self.chance.random() < 0.7 else mine)
        log = partition.log
        position = self.reader.positions.get(partition.name.partition, 0)
        read = min(max(position, log.log_start), log.high_watermark)
        until = log.high_watermark if self.chance.random() < 0.05 else read
        self.forgotten |= {record.name for offset, record in read_log(partition, read, until)}
        machine.process.call(log.delete_before, until)
        machine.process.call(partition.changed)

    # Producers.

    def a_view(self) -> TopicView | None:
        """Metadata as some broker has it: not always the newest."""
        if not self.published:
            return None
        return self.published[-1] if self.chance.random() < 0.8 else self.chance.choice(self.published[-3:])

    def produce(self, producer: Producer) -> None:
        """Send a round of records, each partition's part on its own way; or carry on with the round that is on."""
        if self.cluster.faults and self.loop.time() < producer.rests_until_s:
            return
        if not producer.parts:
            self._begin_round(producer)
            return
        if self.chance.random() < 0.01:
            producer.rests_until_s = self.loop.time() + self.chance.uniform(0, 2)
        partition = self.chance.choice(sorted(producer.parts))
        part = producer.parts[partition]
        outcome = self._attempt(partition, part) if part.acknowledgment is None else self._acknowledged(part)
        if outcome is None or outcome is Outcome.UNKNOWN:
            return
        if outcome is Outcome.APPENDED:
            for record in part.records:
                producer.queue.remove((record.key, record.number))
            producer.sequences[partition] = part.base_sequence + len(part.records)
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
            partition = place(hash_of(key), producer.view.initial_partition_count, count)
            if partition not in producer.parts:
                producer.parts[partition] = Part(producer.sequences.get(partition, 0))
            producer.parts[partition].records.append(Sent(producer.producer_id, key, number, count))

    def _attempt(self, number: int, part: Part) -> Outcome | None:
        """Send a part; None where the broker's disk has yet to acknowledge it."""
        view = self.published[-1]
        machine = self.leader(view, number)
        partition = None if machine is None else machine.partition(TOPIC, number)
        if machine is None or partition is None:
            if not part.unknown:
                return Outcome.REJECTED
            return self._ask_removed(number, part) if number >= len(view.partitions) else Outcome.UNKNOWN
        role, end = partition.leadership, partition.log.end
        assert role is not None
        produced = self._produce(machine, partition, part)
        if produced.error is ErrorCode.INVALID_PARTITION_METADATA:
            return Outcome.REJECTED
        if produced.error is ErrorCode.KAFKA_STORAGE_ERROR:
            part.unknown = True
            return Outcome.UNKNOWN
        assert produced.error is ErrorCode.NONE, f"{part} is refused: {produced.error.name}"
        if partition.log.end > end:
            self.check_order_of_phases(number, role)
            self.note_appended(number, role, part.records)
        else:
            self.check_duplicate(partition, part.records, produced)
        if not produced.unsynced:
            return Outcome.APPENDED
        commit = machine.process.call(machine.replicas.commit, partition)
        if self.cluster.faults and self.chance.random() < 0.35:
            part.unknown = True
            return Outcome.UNKNOWN
        part.acknowledgment, part.broker = commit, machine.process
        return None

    def _acknowledged(self, part: Part) -> Outcome | None:
        commit, broker = part.acknowledgment, part.broker
        assert commit is not None and broker is not None
        if not commit.done() and broker.alive and (not self.cluster.faults or self.chance.random() < 0.9):
            return None
        part.acknowledgment = None
        if commit.done() and commit.exception() is None and broker.alive:
            return Outcome.APPENDED
        part.unknown = True
        return Outcome.UNKNOWN

    def _ask_removed(self, number: int, part: Part) -> Outcome:
        """Send a part again to the broker that had its partition, which is removed, or about to be."""
        machine = self.cluster.machines[self.homes[number]]
        role = next((found.leadership for _, found in self.partitions()), None)
        if not machine.up or role is None:
            return Outcome.UNKNOWN
        hidden = machine.replicas.get(TOPIC, number)
        if hidden is not None:
            return Outcome.UNKNOWN if hidden.leadership is None else self._ask_hidden(machine, hidden, part)
        name = TopicPartition(TOPIC, number)
        table = machine.process.call(machine.replicas._producers_of_removed, name, role.topic_id)
        if table is None:
            return Outcome.UNKNOWN
        produced = self._produce(machine, RemovedPartition(name, role.of_removed(number), table, SETTINGS), part)
        return Outcome.APPENDED if produced.error is ErrorCode.NONE else Outcome.REJECTED

    def _ask_hidden(self, machine: Machine, partition: Partition, part: Part) -> Outcome:
        """Send a part again to a partition that metadata does not show any more."""
        produced = self._produce(machine, partition, part)
        if produced.error is ErrorCode.INVALID_PARTITION_METADATA:
            return Outcome.REJECTED
        return Outcome.APPENDED if produced.error is ErrorCode.NONE and not produced.unsynced else Outcome.UNKNOWN

    def _produce(self, machine: Machine, partition: Partition | RemovedPartition, part: Part) -> Produced:
        appender = Appender(machine.replicas, self.clock.now_ms())
        return machine.process.call(appender.produce, partition, batch_of(part), part.records[0].count_said)

    # The reader.

    def read(self) -> None:
        """Deliver a few records of some partition, if the gates, the leader and its fences allow."""
        reader = self.reader
        if reader.lineage is None or reader.view is None or self.chance.random() < 0.05:
            reader.view = self.a_view()
            reader.lineage = None if reader.view is None else self.lineage(reader.view)
        view, lineage = reader.view, reader.lineage
        if view is None or lineage is None:
            return
        number = self.chance.randrange(len(view.partitions))
        partition = self.led(view, number)
        if partition is None or partition.leadership is None:
            reader.lineage = None
            return
        epoch = view.partitions[number].leader_epoch
        error = leadership.refuse_read(partition.leadership, view.undeleted_partition_count, epoch)
        if error is not ErrorCode.NONE:
            reader.lineage = None
            return
        # A partition without a committed offset stands at its log start, as it was when the lineage was made or later.
        for p in range(len(view.partitions)):
            other = self.led(view, p)
            if other is None:
                return
            reader.positions[p] = max(reader.positions.get(p, 0), other.log.log_start)
        positions = {p: reader.positions[p] for p in range(len(view.partitions))}
        limit = lineage.deliverable(positions)[number]
        stop = min(partition.log.high_watermark, positions[number] + self.chance.randint(1, 12))
        stop = stop if limit is None else min(stop, limit)
        for _, record in read_log(partition, positions[number], stop):
            self._deliver(record)
        reader.positions[number] = max(stop, positions[number])

    def _deliver(self, record: Sent) -> None:
        line = self.delivered.setdefault((record.producer_id, record.key), [])
        assert not line or record.number > line[-1], (
            f"record {record.number} of key {record.key} after record {line[-1]}"
        )
        line.append(record.number)

    # Running.

    async def begin(self, initial: int) -> None:
        await self.elect()
        await self.register()
        command = topics.CreateTopic(TOPIC, UUID(int=7), initial)
        for _ in range(20):
            await self.cluster.submit(lambda state: topics.decide_create_topic(state, command))
            if self.state is not None and TOPIC in self.state.topics:
                return
            await self.elect()
            await self.register()
        raise AssertionError("the topic is not made")

    async def step(self) -> None:
        """One thing happens, then a little time passes."""
        chance, cluster = self.chance, self.cluster
        if cluster.process is None:
            if chance.random() < 0.2:
                cluster.begin(self.elect())
        elif chance.random() < 0.015:
            if chance.random() < 0.3:
                cluster.tree.tear_in = chance.randrange(12)
            else:
                cluster.process.kill_in(chance.randrange(60))
        for machine in self.machines:
            if not machine.up and chance.random() < 0.1:
                machine.start()
        what = chance.choices(range(len(_STEPS)), weights=[weight for weight, _ in _STEPS])[0]
        work = _STEPS[what][1](self)
        if asyncio.iscoroutine(work):
            cluster.begin(work)
        self.check()
        await asyncio.sleep(chance.uniform(0, STEP_S))

    async def heal(self) -> None:
        """End all faults; every change that was begun must now end."""
        cluster = self.cluster
        cluster.faults = False
        cluster.tree.tear_in = None
        if cluster.process is not None:
            cluster.process.kill_in(None)
        for machine in self.machines:
            if not machine.up:
                machine.start()
        for _ in range(200):
            await self.elect()
            await self.register()
            await asyncio.sleep(0.5)
            self.check()
            if self.state is None:
                continue
            described = views.describe(self.state, TOPIC)
            if (
                self.cluster.all_registered
                and views.idle(self.state, TOPIC)
                and (described is None or not described.waiting_for)
            ):
                await self.check_replay()
                self.check_segments()
                return
            await cluster.submit(lambda state: resize.decide_retry(state, TOPIC))
        assert self.state is not None
        raise AssertionError(f"the topic is stuck: {views.describe(self.state, TOPIC)}")

    @property
    def settled(self) -> bool:
        """Whether a controller rules, and all that it and its predecessors began has ended."""
        if self.state is None or not self.cluster.all_registered or not views.idle(self.state, TOPIC):
            return False
        described = views.describe(self.state, TOPIC)
        return described is None or not described.waiting_for

    async def drain(self) -> None:
        """Every producer finishes; the reader reads everything, and has then read every record exactly once."""
        self.published = self.published[-1:]
        for producer in self.producers:
            for _ in range(1_000):
                if producer.queue and not producer.parts:
                    producer.view = self.published[-1]
                    self._send_round(producer, producer.view.undeleted_partition_count)
                if producer.parts:
                    self.produce(producer)
                if any(part.acknowledgment is not None for part in producer.parts.values()):
                    await asyncio.sleep(0.01)
            assert not producer.queue, f"a producer is stuck with {producer}"
        await asyncio.sleep(1)
        self.reader.lineage = None
        for _ in range(50_000):
            self.read()
            view = self.reader.view
            if view is not None and all(
                self.reader.positions.get(p, 0) >= found.log.end
                for p in range(len(view.partitions))
                if (found := self.led(view, p)) is not None
            ):
                break
        else:
            raise AssertionError(f"the reader is stuck at {self.reader.positions}")
        self.check_segments()
        for (producer_id, key), count in self.numbers.items():
            line = self.delivered.get((producer_id, key), [])
            missing = {number for number in range(count) if (producer_id, key, number) not in self.forgotten} - set(
                line
            )
            assert not missing, f"records {missing} of key {key} were lost"


def batch_of(part: Part) -> memoryview:
    """A part as a record batch; anew for every attempt, because a log stamps offsets into it."""
    rows: list[tuple[bytes | None, bytes | None]] = [
        (b"%d" % record.key, b"%d %d" % (record.number, record.count_said)) for record in part.records
    ]
    producer_id = part.records[0].producer_id
    return memoryview(make_keyed_batch(rows, producer_id=producer_id, base_sequence=part.base_sequence))


def _broker_step(world: World) -> Coroutine[Any, Any, None] | None:
    machine = world.chance.choice(world.machines)
    if not machine.up:
        return None
    if world.chance.random() < 0.5:
        return world.lose_power(machine)
    world.crash_broker(machine, power=False)
    return world.cluster.broker_left(machine) if world.chance.random() < 0.5 else None


_STEPS: tuple[tuple[int, Callable[[World], Coroutine[Any, Any, object] | None]], ...] = (
    (70, lambda world: world.produce(world.chance.choice(world.producers))),
    (60, World.read),
    (8, lambda world: world.resize(world.chance.randint(1, COUNT_MAX))),
    (3, World.cancel),
    (6, lambda world: world.cluster.submit(lambda state: resize.decide_retry(state, TOPIC))),
    (2, _broker_step),
    (16, lambda world: world.register(unclean=world.chance.random() < 0.5)),
    (10, World.retain),
    (4, lambda world: world.cluster.note_report(TOPIC)),
    (5, World.reap),
    (4, lambda world: world.cluster.note_layouts(TOPIC)),
    (5, World.fold),
)
