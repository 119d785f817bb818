"""Histories of a stock producer with five batches in flight, whose partition retires, is removed and comes back.

It says no partition count, keeps one sequence for its partition, and repeats what failed, oldest first. What becomes
of a batch is decided by the machine that ships; disks refuse, answers are lost, connections break. The promise: every
batch is appended once, in order, and none is refused as out of order once all before it are acknowledged.
"""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_TOPIC_ID
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.partition.appending import Duplicate, Redirect, Refuse, decide_append
from anabranch.machines.partition.producers import ProducerTable

NUMBER, IN_FLIGHT = 5, 5
BATCHES = 60


class Batch(NamedTuple):
    base_sequence: int
    base_offset: int = -1
    producer_id: int = 7
    producer_epoch: int = 0
    last_offset_delta: int = 0
    max_timestamp: int = 0
    is_transactional: bool = False
    is_control: bool = False


class Replica:
    def __init__(self, number: int) -> None:
        self.number = number
        self.leadership: Leadership | None = None
        self.table = ProducerTable()


class Broker:
    """Partition 5 and its ancestors, 1 and 0. Sabotaged ones override `remember` or `ancestors`."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.table = ProducerTable()
        self.replicas = [Replica(1), Replica(0)]
        self.count, self.layout = 6, 0
        self.log: list[int] = []
        self.take_roles()

    def remember(self, table: ProducerTable, batch: Batch) -> None:
        table.refused(batch)

    def ancestors(self) -> list[Replica]:
        return self.replicas

    def resize(self) -> None:
        """The partition's role changes; its survivor may take its own later."""
        self.count = self.chance.choice((6, 2, 1))
        self.layout += 1
        if self.chance.random() < 0.5:
            self.take_roles()

    def take_roles(self) -> None:
        for replica in self.replicas:
            replica.leadership = self.role(replica.number)

    def role(self, number: int) -> Leadership:
        return Leadership(NO_TOPIC_ID, number, self.layout, 0, 1, self.count, retiring=number >= self.count)

    def append(self, batch: Batch) -> ErrorCode:
        role = self.role(NUMBER)
        decision = decide_append(role, self.table, self.ancestors(), batch, COUNT_NOT_SAID)
        if isinstance(decision, Duplicate):
            assert self.log[decision.of.base_offset] == batch.base_sequence
            return ErrorCode.NONE
        if isinstance(decision, Refuse):
            if decision.remember:
                self.remember(self.table, batch)
            return decision.code
        if self.chance.random() < (0.1 if self.log else 0.5):
            self.remember(self.table, batch)
            return ErrorCode.KAFKA_STORAGE_ERROR
        table, sent = self.table, batch
        if isinstance(decision, Redirect):
            table, sent = decision.to.table, batch._replace(producer_id=decision.producer_id)
            self.table.forget_refusal(batch.producer_id)
        table.apply(sent._replace(base_offset=len(self.log)), 0)
        self.log.append(batch.base_sequence)
        return ErrorCode.NONE


def run(seed: int, broker_class: type[Broker] = Broker) -> None:
    chance = random.Random(seed)
    broker = broker_class(chance)
    to_send: list[int] = []
    wire: deque[int] = deque()
    unacknowledged: set[int] = set()
    sent = 0
    for _ in range(5_000):
        event = chance.random()
        if event < 0.05:
            broker.resize()
        elif event < 0.1:
            broker.take_roles()
        elif event < 0.12:
            to_send = sorted({*to_send, *wire})
            wire.clear()
        elif event < 0.5 and len(wire) < IN_FLIGHT:
            if to_send:
                wire.append(to_send.pop(0))
            elif sent < min(BATCHES, min(unacknowledged, default=sent) + IN_FLIGHT):
                wire.append(sent)
                unacknowledged.add(sent)
                sent += 1
        elif wire:
            number = wire.popleft()
            code = broker.append(Batch(number))
            if code is ErrorCode.NONE and chance.random() < 0.9:
                unacknowledged.discard(number)
                continue
            first = code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and number == min(unacknowledged)
            assert not first, f"batch {number} is out of order for ever"
            to_send = sorted({*to_send, number})
        elif sent == BATCHES and not unacknowledged:
            break
    assert not unacknowledged
    assert broker.log == list(range(BATCHES)), "lost, doubled, or out of order"


@pytest.mark.parametrize("block", range(4))
def test_a_stock_producer_is_appended_once_and_in_order_wherever_its_partition_is(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        try:
            run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


class Forgetful(Broker):
    """Does not remember what it refused."""

    def remember(self, table: ProducerTable, batch: Batch) -> None:
        pass


class Nearsighted(Broker):
    """Looks for what was redirected only where it would redirect now."""

    def ancestors(self) -> list[Replica]:
        survivor = self.role(NUMBER).survivor
        return [replica for replica in self.replicas if replica.number == survivor]


@pytest.mark.parametrize("sabotaged", [Forgetful, Nearsighted])
def test_a_broker_that_decides_by_less_is_caught(sabotaged: type[Broker]) -> None:
    caught = 0
    for seed in range(40):
        try:
            run(seed, sabotaged)
        except AssertionError:
            caught += 1
    assert caught > 4
