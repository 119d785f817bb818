"""Histories of a producer beside a model broker that is resized, crashes and loses answers, one per seed.

What becomes of a batch is decided by the machine that ships; its log is a list. The broker keeps one list of
everything it ever appended, so the promise is read off it: every record once, and the records of a key in the order
they were sent. Some topics are deleted and created again with another count at creation; then the promise is read off
what the last topic of the name has. The broker follows the resize of ordering.md step by step, other events between.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.machines.clients.sending import (
    Batcher,
    BatcherSettings,
    Delivered,
    Encode,
    Encoded,
    Placement,
    ProduceResult,
    ProducerWork,
    Send,
    outcomes,
)
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.partition import appending
from anabranch.machines.partition.appending import Append, Duplicate, Refuse
from anabranch.machines.partition.producers import ProducerTable
from anabranch.machines.placement import place

TOPIC = "t"
INITIAL = 2
NODES = 2
PRODUCER = 7
QUIET_MS = 200
"""How far time goes on at once while nothing is on its way."""
Record = tuple[int, int]
"""(key, number): numbers grow with sending."""


class Rows(list[Record]):
    @property
    def record_count(self) -> int:
        return len(self)


class Batch(NamedTuple):
    """What is decided about: a batch's header."""

    producer_epoch: int
    base_sequence: int
    record_count: int
    base_offset: int = -1
    producer_id: int = PRODUCER
    max_timestamp: int = 0
    is_transactional: bool = False
    is_control: bool = False

    @property
    def last_offset_delta(self) -> int:
        return self.record_count - 1


Decision = Append | Duplicate[appending.Replica] | Refuse


class Broker:
    """The decision that ships. Sabotaged ones override it."""

    def decide(
        self, role: Leadership, table: ProducerTable, batch: Batch, count_said: int, topic_id_said: UUID
    ) -> Decision:
        decision = appending.decide_append(role, table, (), batch, count_said, topic_id_said=topic_id_said)
        assert isinstance(decision, Append | Duplicate | Refuse)
        return decision


@dataclass
class Log:
    role: Leadership
    table: ProducerTable = field(default_factory=ProducerTable)
    appended: list[Record] = field(default_factory=list)


@dataclass
class Wire:
    """One connection: requests are worked off in order, answers come back in order."""

    requests: deque[Send] = field(default_factory=deque)
    answers: deque[tuple[int, dict[tuple[str, int], ProduceResult]]] = field(default_factory=deque)


class World:
    """The batcher, the network and the brokers under one seed."""

    def __init__(
        self,
        seed: int,
        batcher_class: type[Batcher] = Batcher,
        broker: Broker | None = None,
        *,
        recreates: bool = False,
    ) -> None:
        self.recreates = recreates
        self.recreated = 0
        self.refused_ids = 0
        self.initial = INITIAL
        self.topic_id = UUID(int=1)
        self.before: list[Record] = []
        """Everything that earlier topics of the name had."""
        self.chance = random.Random(seed)
        self.broker = broker or Broker()
        settings = BatcherSettings(
            linger_ms=self.chance.choice([0, 5]), batch_size=6, delivery_timeout_ms=10**9, max_block_ms=10**9
        )
        self.batcher = batcher_class(settings, Rows)
        self.now = 0
        self.sent = 0
        self.poison = {self.chance.randint(1, 200) for _ in range(self.chance.choice([0, 0, 3]))}
        """Records that the broker refuses for good."""
        self.logs = {partition: Log(self.role(partition, INITIAL)) for partition in range(INITIAL)}
        self.removed: dict[int, ProducerTable] | None = {} if self.chance.random() < 0.5 else None
        """The producers of removed partitions; None where the producer reaches a broker that never had them."""
        self.published = INITIAL
        self.resizing: Iterator[None] | None = None
        self.everything: list[Record] = []
        self.acknowledged: list[Record] = []
        self.failed: list[tuple[Rows, ApiError]] = []
        self.reaped = 0
        self.wires = {node: Wire() for node in range(NODES)}
        self.jobs: deque[Encode] = deque()
        self.refreshes = 0
        self.inits = 0
        self.epochs = 0

    # -- the broker's side --------------------------------------------------------------------------------------------

    def role(self, partition: int, count: int, *, retiring: bool = False) -> Leadership:
        """The role of a partition of the topic; the model has no epochs."""
        return Leadership(self.topic_id, partition, 0, 0, self.initial, count, retiring)

    def recreate(self) -> None:
        """Delete the topic and create it again, often with the count that it had."""
        self.recreated += 1
        self.topic_id = UUID(int=self.topic_id.int + 1)
        self.initial = self.chance.choice([1, 2, 3, min(4, self.published)])
        self.published = self.chance.choice([max(self.initial, self.published), self.initial])
        self.logs = {partition: Log(self.role(partition, self.published)) for partition in range(self.published)}
        self.removed, self.resizing = None if self.removed is None else {}, None
        self.before += self.everything
        self.everything = []

    def resize(self, to: int) -> Iterator[None]:
        old = self.published
        logs = self.logs
        if to > old:
            for partition in self.chance.sample(range(old), old):
                logs[partition].role = self.role(partition, to)
                yield
            for partition in range(old, to):
                if partition not in logs:
                    inherited = (self.removed or {}).pop(partition, None)
                    logs[partition] = Log(self.role(partition, to), inherited or ProducerTable())
                logs[partition].role = self.role(partition, to)
        else:
            for partition in self.chance.sample(range(to, old), old - to):
                logs[partition].role = self.role(partition, to, retiring=True)
                yield
            for partition in self.chance.sample(range(to), to):
                logs[partition].role = self.role(partition, to)
                yield
        yield
        self.published = to

    def reap(self) -> None:
        """Remove retiring partitions: every one whose producers are remembered, others if nothing was appended."""
        for partition in sorted(self.logs, reverse=True):
            log = self.logs[partition]
            if not log.role.retiring or (self.removed is None and log.appended):
                return
            del self.logs[partition]
            if self.removed is not None:
                self.removed[partition] = log.table
            self.reaped += 1

    def produce(self, send: Send) -> dict[tuple[str, int], ProduceResult]:
        answers = {}
        for batch in send.batches:
            answers[TOPIC, batch.partition] = self.append(send, batch.partition, batch.sequence, Rows(batch.rows))
        return answers

    def append(self, send: Send, partition: int, sequence: int, rows: Rows) -> ProduceResult:
        topic_id = send.topic_ids[TOPIC]
        log = self.logs.get(partition)
        if log is None and topic_id != self.topic_id:
            self.refused_ids += 1
            return ProduceResult(ErrorCode.UNKNOWN_TOPIC_ID)
        if log is None and (self.removed is None or partition not in self.removed):
            return ProduceResult(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if log is None:
            assert self.removed is not None
            log = Log(self.logs[0].role.of_removed(partition), self.removed[partition])
        batch = Batch(send.producer_epoch, sequence, len(rows))
        trouble = self.chance.random()
        decision = self.broker.decide(log.role, log.table, batch, send.counts[TOPIC], topic_id)
        if isinstance(decision, Duplicate):
            return ProduceResult(base_offset=decision.of.base_offset)
        if isinstance(decision, Refuse):
            if decision.remember:
                log.table.refused(batch)
            self.refused_ids += decision.code is ErrorCode.UNKNOWN_TOPIC_ID
            return ProduceResult(decision.code)
        assert not log.role.retiring
        if trouble < 0.02:
            log.table.refused(batch)
            return ProduceResult(ErrorCode.NOT_ENOUGH_REPLICAS)
        if any(number in self.poison for _, number in rows):
            return ProduceResult(ErrorCode.MESSAGE_TOO_LARGE)
        count = log.role.undeleted_partition_count
        assert {place(hash_of(row), self.initial, count) for row in rows} == {partition}, "placed by another layout"
        base = len(log.appended)
        log.table.apply(batch._replace(base_offset=base), 0)
        log.appended.extend(rows)
        self.everything.extend(rows)
        return ProduceResult(ErrorCode.REQUEST_TIMED_OUT) if trouble > 0.98 else ProduceResult(base_offset=base)

    # -- the producer's side ------------------------------------------------------------------------------------------

    def drain(self) -> None:
        work = self.batcher.drain(self.now)
        self.carry_out(work)

    def carry_out(self, work: ProducerWork) -> None:
        for send in work.sends:
            self.wires[send.node].requests.append(send)
        self.jobs.extend(work.encodes)
        self.refreshes += len(work.refresh)
        self.inits += work.init_producer is not None
        for outcome in work.outcomes:
            if isinstance(outcome, Delivered):
                self.acknowledged.extend(outcome.batch.rows)  # type: ignore[call-overload]
            else:
                self.failed.append((Rows(outcome.rows), outcome.error))  # type: ignore[call-overload]
        if work.wake_at_ms is not None and work.wake_at_ms < self.now + 10_000 and self.chance.random() < 0.5:
            self.now = max(self.now, work.wake_at_ms)

    def encode(self, job: Encode) -> None:
        parts: dict[int, list[Rows]] = {}
        for record in job.rows:  # type: ignore[attr-defined]
            partition = place(hash_of(record), job.placement.initial, job.placement.count)
            batches = parts.setdefault(partition, [Rows()])
            if len(batches[-1]) == 3:
                batches.append(Rows())
            batches[-1].append(record)
        encoded = [Encoded(p, rows, bytearray(len(rows))) for p, batches in parts.items() for rows in batches]
        self.batcher.encoded(job.job, job.topic, encoded)

    def break_wire(self, node: int) -> None:
        """The connection ends: some requests were still worked off, no answer comes; a copy may be worked off again."""
        wire = self.wires[node]
        self.wires[node] = Wire()
        lost = [request_id for request_id, _ in wire.answers]
        reached = self.chance.randint(0, len(wire.requests))
        for index, send in enumerate(wire.requests):
            if index < reached:
                self.produce(send)
                if self.chance.random() < 0.1:
                    self.produce(send)
            lost.append(send.request_id)
        for request_id in lost:
            self.batcher.lost(request_id, self.now)

    def step(self) -> None:
        chance = self.chance
        self.now += chance.choice([0, 0, 1, 20])
        event = chance.random()
        if event < 0.3:
            for _ in range(chance.randint(1, 6)):
                self.sent += 1
                self.batcher.append(TOPIC, [(chance.randint(0, 9), self.sent)], 1, self.now)
        elif event < 0.35:
            rows = Rows()
            for _ in range(chance.randint(1, 12)):
                self.sent += 1
                rows.append((chance.randint(0, 9), self.sent))
            self.batcher.append_rows(TOPIC, rows, len(rows), self.now)
        elif event < 0.38 and self.resizing is None:
            self.resizing = self.resize(chance.choice([n for n in range(self.initial, 9) if n != self.published]))
        elif event < 0.39 and self.resizing is None:
            self.reap()
        elif event < 0.41:
            self.break_wire(chance.randrange(NODES))
        elif event < 0.42 and self.recreates:
            self.recreate()
        elif event < 0.415:
            for node in range(NODES):
                self.break_wire(node)
        else:
            self.progress()
        self.drain()

    def progress(self) -> bool:
        """One thing that was on its way arrives; whether anything was."""
        wires = self.wires
        ways = [("work", node) for node in wires if wires[node].requests]
        ways += [("answer", node) for node in wires if wires[node].answers]
        ways += [("encode", 0)] * bool(self.jobs) + [("refresh", 0)] * bool(self.refreshes)
        ways += [("init", 0)] * bool(self.inits) + [("resize", 0)] * (self.resizing is not None)
        if not ways:
            return False
        way, node = self.chance.choice(ways)
        if way == "work":
            send = wires[node].requests.popleft()
            wires[node].answers.append((send.request_id, self.produce(send)))
        elif way == "answer":
            self.batcher.answered(*wires[node].answers.popleft(), self.now)
        elif way == "encode":
            self.jobs.rotate(self.chance.randint(0, 1))
            self.encode(self.jobs.popleft())
        elif way == "refresh":
            self.refreshes -= 1
            leaders = {partition: partition % NODES for partition in self.logs}
            self.batcher.topic_known(TOPIC, self.placement, leaders, self.now)
        elif way == "init":
            self.inits -= 1
            self.epochs += 1
            self.batcher.producer_known(PRODUCER, self.epochs)
        elif self.resizing is not None and next(self.resizing, "done") == "done":
            self.resizing = None
        return True

    @property
    def placement(self) -> Placement:
        return Placement(self.initial, self.published, topic_id=self.topic_id)

    def finish(self) -> None:
        self.batcher.flush()
        for _ in range(20_000):
            self.now += 10 if self.progress() else QUIET_MS
            self.drain()
            if self.batcher.idle:
                return
        raise AssertionError("the producer did not come to rest")

    def check(self) -> None:
        for rows, error in self.failed:
            removed = self.removed is None and self.reaped > 0 and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            assert removed or any(number in self.poison for _, number in rows), f"failed for no reason: {error}"
        failed = sum(len(rows) for rows, _ in self.failed)
        appended = set(self.everything) | set(self.before)
        assert len(self.everything) == len(set(self.everything)), "doubled"
        assert len(appended) == self.sent - failed, "lost"
        assert sorted(self.acknowledged) == sorted(appended)
        last: dict[int, int] = {}
        for key, number in self.everything:
            assert number > last.get(key, 0), f"key {key}: {number} was appended after {last[key]}"
            last[key] = number
        assert self.batcher.buffered_size == 0


def hash_of(record: Record) -> int:
    return record[0] * 2_654_435_761 & 0x7FFFFFFF


def run(
    seed: int, batcher_class: type[Batcher] = Batcher, broker: Broker | None = None, *, recreates: bool = False
) -> World:
    world = World(seed, batcher_class, broker, recreates=recreates)
    for _ in range(150):
        world.step()
    world.finish()
    world.check()
    return world


@pytest.mark.parametrize("block", range(4))
def test_every_record_is_appended_once_and_in_order_of_its_key(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        try:
            run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_records_for_a_topic_that_is_created_again_are_placed_by_its_own_layout_in_order() -> None:
    recreated = refused = 0
    for seed in range(120):
        try:
            world = run(seed, recreates=True)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        recreated += world.recreated
        refused += world.refused_ids
    assert recreated > 50 and refused > 50


class Hasty(Batcher):
    """Places records anew before it knows what became of them."""

    def lost(self, request_id: int, now_ms: int) -> None:
        for batch in outcomes.take_request(self.state, request_id):
            topic, partition = self.state.owner(batch)
            outcomes.take_back(batch, partition)
            topic.moving = topic.needs_metadata = True


class CountFirst(Broker):
    """Checks the count before it looks for the batch."""

    def decide(
        self, role: Leadership, table: ProducerTable, batch: Batch, count_said: int, topic_id_said: UUID
    ) -> Decision:
        if count_said != role.undeleted_partition_count:
            return Refuse(ErrorCode.INVALID_PARTITION_METADATA)
        return super().decide(role, table, batch, count_said, topic_id_said)


class WithoutCount(Broker):
    """Does not check the count."""

    def decide(
        self, role: Leadership, table: ProducerTable, batch: Batch, count_said: int, topic_id_said: UUID
    ) -> Decision:
        count = role.undeleted_partition_count
        return super().decide(replace(role, retiring=False), table, batch, count, topic_id_said)


class WithoutId(Broker):
    """Does not check the topic's id."""

    def decide(
        self, role: Leadership, table: ProducerTable, batch: Batch, count_said: int, topic_id_said: UUID
    ) -> Decision:
        return super().decide(role, table, batch, count_said, NO_TOPIC_ID)


class WithoutIds(Batcher):
    """Does not tell a topic that was created again from the one before."""

    def topic_known(self, name: str, placement: Placement, leaders: Mapping[int, int], now_ms: int) -> None:
        super().topic_known(name, replace(placement, topic_id=NO_TOPIC_ID), leaders, now_ms)


def caught(batcher_class: type[Batcher] = Batcher, broker: Broker | None = None, *, recreates: bool = False) -> bool:
    """Whether five of forty seeds fail."""
    found = 0
    for seed in range(40):
        try:
            run(seed, batcher_class, broker, recreates=recreates)
        except AssertionError:
            found += 1
            if found == 5:
                return True
    return False


def test_a_producer_that_does_not_wait_for_outcomes_is_caught() -> None:
    assert caught(Hasty)


@pytest.mark.parametrize("sabotaged", [CountFirst, WithoutCount])
def test_a_broker_that_decides_otherwise_is_caught(sabotaged: type[Broker]) -> None:
    assert caught(broker=sabotaged())


def test_a_broker_or_a_producer_that_does_not_look_at_ids_is_caught() -> None:
    assert caught(broker=WithoutId(), recreates=True)
    assert caught(WithoutIds, recreates=True)
