"""Transactions that commit offsets: the applications that use them, and what their coordinator decides and delivers.

An application commits what it was handed with TxnOffsetCommit, and then ends the transaction, well or not (KIP-447).
Where it dies, stands still or gets no answer, its transaction is aborted after a while. The end is decided at once; the
marker arrives in the group's log later, perhaps after a fail-over. Until then what was committed is in doubt.

    open -> ending, as the application or the timeout says -> none, when the marker is durable

The transaction coordinator itself is another machine, with a simulation of its own (`test_transactions`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)

if TYPE_CHECKING:
    from tests.simulation.groups_client import Client
    from tests.simulation.groups_shard import Broker
    from tests.simulation.groups_world import World

EPOCH = 1
TIMEOUTS_MS = (3_000, 8_000, 15_000)
DELIVER_AGAIN_MS = 300
ABORTS = 0.15
"""The share of transactions that their applications abort, as long as there are faults."""
RETRIABLE = frozenset(
    {
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.CONCURRENT_TRANSACTIONS,
    }
)


@dataclass(slots=True)
class Transaction:
    """The transaction of a producer that is not over."""

    producer_id: int
    broker: Broker
    begun_ms: int
    committed: bool | None = None
    """None: it is open."""
    under_way: tuple[int, asyncio.Task[None]] | None = None
    """The delivery of its marker, and the life of the broker that it was given to."""


@dataclass(slots=True)
class Transactions:
    """All transactions of the world's applications; each producer has one at a time."""

    world: World
    _last_producer: int = 999
    _open: dict[int, Transaction] = field(default_factory=dict)

    def producer(self) -> int:
        """Return the id of a new producer."""
        self._last_producer += 1
        return self._last_producer

    def begin(self, producer_id: int, broker: Broker) -> Transaction | None:
        """Begin a transaction; None while the producer's last one is not over."""
        if producer_id in self._open:
            return None
        begun = self._open[producer_id] = Transaction(producer_id, broker, self.world.now_ms)
        self.world.after(self.world.chance.choice(TIMEOUTS_MS), self._too_late, begun)
        return begun

    def verify(self, transactional_id: str, partition: object, producer_id: int, producer_epoch: int) -> ErrorCode:
        """What `TransactionCoordinators.verify` answers: whether offsets may be committed with a transaction."""
        found = self._open.get(producer_id)
        assert producer_epoch == EPOCH, (transactional_id, partition, producer_epoch)
        if found is None:
            return ErrorCode.INVALID_TXN_STATE
        return ErrorCode.NONE if found.committed is None else ErrorCode.CONCURRENT_TRANSACTIONS

    def begun_ms(self, transactional_id: str) -> int:
        """What `TransactionCoordinators.begun_ms` answers."""
        found = self._open.get(int(transactional_id))
        return -1 if found is None else found.begun_ms

    def end(self, transaction: Transaction, *, committed: bool) -> bool:
        """Decide how a transaction ends; return whether it was open. Its marker is delivered after a while."""
        if transaction.committed is not None:
            return False
        transaction.committed = committed
        self.world.say("transaction of %d %s", transaction.producer_id, "commits" if committed else "aborts")
        self.world.rules.counts["transactions" if committed else "aborts"] += 1
        self.world.after(self.world.delay_ms(), self._deliver, transaction)
        return True

    def open(self) -> Mapping[int, Transaction]:
        """The transactions without a durable marker, by producer."""
        return self._open

    def _too_late(self, transaction: Transaction) -> None:
        self.end(transaction, committed=False)

    def _deliver(self, transaction: Transaction) -> None:
        """Have the marker written, until it is durable."""
        broker, under_way = transaction.broker, transaction.under_way
        if self._open.get(transaction.producer_id) is not transaction:
            return
        self.world.after(DELIVER_AGAIN_MS, self._deliver, transaction)
        is_lost = under_way is None or under_way[0] != broker.lives or under_way[1].done()
        if not is_lost or broker.machine is None:
            return
        assert broker.shard is not None
        assert transaction.committed is not None
        delivery = broker.process.create_task(
            broker.shard.end_transaction(
                transaction.producer_id, EPOCH, committed=transaction.committed, coordinator_epoch=0
            )
        )
        transaction.under_way = broker.lives, delivery
        delivery.add_done_callback(lambda task: self._delivered(transaction, task))

    def _delivered(self, transaction: Transaction, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.world.say("the marker of %d is durable", transaction.producer_id)
            self._open.pop(transaction.producer_id, None)
        elif not isinstance(error, ApiError):
            assert isinstance(error, Exception)
            self.world.failed_with(error)


class Transactional:
    """The way in which one application commits: in transactions."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._world = client.world
        self._producer = client.world.transactions.producer()

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> bool:
        """Commit in a transaction; return whether it was committed. Otherwise the application has to go back."""
        world, client = self._world, self._client
        while (transaction := world.transactions.begin(self._producer, client.broker)) is None:
            await asyncio.sleep(0.05)
        well = await self._is_taken(offsets)
        if world.is_disturbed and world.chance.random() < ABORTS:
            well = False
        await asyncio.sleep(world.chance.choice((0, 0.01, 0.5)))
        return world.transactions.end(transaction, committed=well) and well

    async def _is_taken(self, offsets: Mapping[TopicPartition, int]) -> bool:
        for _ in range(5):
            codes = await self._sent(offsets)
            if codes <= {ErrorCode.NONE}:
                return True
            if not codes <= RETRIABLE | {ErrorCode.NONE}:
                return False
            await asyncio.sleep(0.2)
        return False

    async def _sent(self, offsets: Mapping[TopicPartition, int]) -> Collection[ErrorCode]:
        client = self._client
        member = client.group_metadata()
        by_topic: dict[str, list[TxnOffsetCommitRequestPartition]] = {}
        for tp, offset in offsets.items():
            part = TxnOffsetCommitRequestPartition(partition_index=tp.partition, committed_offset=offset)
            by_topic.setdefault(tp.topic, []).append(part)
        request = TxnOffsetCommitRequest(
            transactional_id=str(self._producer),
            group_id=client.group,
            producer_id=self._producer,
            producer_epoch=EPOCH,
            generation_id=member.generation_id,
            member_id=member.member_id,
            group_instance_id=member.group_instance_id,
            topics=[TxnOffsetCommitRequestTopic(name=name, partitions=parts) for name, parts in by_topic.items()],
        )
        try:
            reply = await client.send_beside(request)
        except (AnabranchError, OSError):
            return {ErrorCode.COORDINATOR_NOT_AVAILABLE}
        return {ErrorCode.of(part.error_code) for topic in reply.topics for part in topic.partitions}


def coordinators(world: World) -> Any:
    """The transaction coordinators, as the handlers see them."""
    return SimpleNamespace(verify=world.transactions.verify, begun_ms=world.transactions.begun_ms)
