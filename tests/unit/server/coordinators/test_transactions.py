"""Which transactions ListTransactions passes; and markers that are sent only while their transaction waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.outcome import Outcome
from anabranch.machines.transactions import coordinator
from anabranch.machines.transactions.coordinator import Coordinator
from anabranch.machines.transactions.records import TransactionRecord
from anabranch.machines.transactions.states import TransactionState
from anabranch.machines.transactions.transaction import NOT_STARTED, Transaction
from anabranch.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest
from anabranch.protocol.messages.end_txn import EndTxnRequest
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest
from anabranch.protocol.messages.write_txn_markers import (
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from anabranch.runtime.clock import Clock
from anabranch.runtime.disk import Disk
from anabranch.runtime.metrics import Counter
from anabranch.server.cluster.view import ClusterView
from anabranch.server.coordinators import shard
from anabranch.server.coordinators.shard import ON_LOOP_MAX, Shard
from anabranch.server.coordinators.shard_set import ShardServices
from anabranch.server.coordinators.transactions import TOPIC, TransactionFilter, Transactions
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.topic_settings import topic_settings
from anabranch.server.settings import Settings
from anabranch.storage.log.group_commit import GroupCommit
from anabranch.storage.log.log import LocalLog

NOW_MS = 10_000


def known(
    state: TransactionState = TransactionState.ONGOING, producer_id: int = 7, started_ms: int = 4_000
) -> Transaction:
    return Transaction(producer_id, 0, -1, 60_000, state, frozenset(), 0, started_ms)


EVERYTHING = TransactionFilter(None, frozenset(), -1, lambda name: True)


@pytest.mark.parametrize(
    ("wanted", "transaction", "passes"),
    [
        (EVERYTHING, known(), True),
        (EVERYTHING, known(TransactionState.EMPTY, started_ms=NOT_STARTED), True),
        (EVERYTHING._replace(states={TransactionState.ONGOING}), known(), True),
        (EVERYTHING._replace(states={TransactionState.EMPTY}), known(), False),
        (EVERYTHING._replace(states=frozenset()), known(), False),  # only states that no transaction has were named
        (EVERYTHING._replace(producer_ids={7, 8}), known(), True),
        (EVERYTHING._replace(producer_ids={8}), known(), False),
        (EVERYTHING._replace(open_for_ms=6_000), known(), True),
        (EVERYTHING._replace(open_for_ms=6_001), known(), False),
        (EVERYTHING._replace(open_for_ms=0), known(started_ms=NOT_STARTED), False),
        (EVERYTHING._replace(matches=lambda name: name == "tx"), known(), True),
        (EVERYTHING._replace(matches=lambda name: name == "other"), known(), False),
        (EVERYTHING._replace(states={TransactionState.ONGOING}, producer_ids={8}), known(), False),
    ],
)
def test_a_transaction_passes_if_it_satisfies_every_filter(
    wanted: TransactionFilter, transaction: Transaction, passes: bool
) -> None:
    assert wanted.passes("tx", transaction, NOW_MS) is passes


class World:
    """The transactions of one shard, whose syncs, and whose leaders of partitions, wait for the test."""

    def __init__(self, path: Path) -> None:
        topic = topic_settings({"cleanup.policy": "compact"}, NOT_SET, "fsync")
        log, count = LocalLog.open(path / f"{TOPIC}-0", topic.log, disk=Disk()), Counter()
        self.partition = Partition(
            TopicPartition(TOPIC, 0), NO_TOPIC_ID, log, topic, bytes_in=count, bytes_out=count, messages_in=count
        )
        self.partition.leadership = Leadership(NO_TOPIC_ID, 0, 0, 0, 1, 1, retiring=False)
        self.partition.rebuild_table(0)
        self.commits = GroupCommit()
        self.syncs, self.answers = asyncio.Event(), asyncio.Event()
        self.syncs.set()
        self.sent: list[int] = []
        """The producers of the markers that were sent."""
        replicas: Any = SimpleNamespace(get=lambda *_: self.partition, commit=self.commit)
        services = ShardServices(Any, ClusterView(), replicas, Clock(), Any)  # type: ignore[arg-type]
        self.transactions = Transactions(Settings(), services, peers=self)
        self.shard: Shard[Coordinator, TransactionRecord] = self.transactions._made(0)
        self.transactions._shards, self.transactions._count = {0: self.shard}, 1
        self.ids: dict[str, int] = {}

    def commit(self, partition: Partition) -> asyncio.Future[None]:
        async def synced() -> None:
            await self.syncs.wait()
            await self.commits.commit(partition.log, partition.high_watermark_moved)

        return asyncio.ensure_future(synced())

    async def write_markers(self, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
        (marker,) = request.markers
        self.sent.append(marker.producer_id)
        await self.answers.wait()
        results = [
            WritableTxnMarkerTopicResult(
                name=topic.name,
                partitions=[
                    WritableTxnMarkerPartitionResult(partition_index=number, error_code=0)
                    for number in topic.partition_indexes
                ],
            )
            for topic in marker.topics
        ]
        return WriteTxnMarkersResponse(
            markers=[WritableTxnMarkerResult(producer_id=marker.producer_id, topics=results)]
        )

    async def init(self, name: str) -> None:
        request = InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000)
        producer_id = self.ids.setdefault(name, len(self.ids))
        await self.shard.submit(
            lambda machine, now_ms: machine.init_producer_id(request, 4, now_ms, lambda: producer_id)
        )

    async def add(self, name: str) -> None:
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=self.ids[name],
            v3_and_below_producer_epoch=0,
        )
        held = [TopicPartition("t", 0)]
        assert not await self.shard.submit(lambda machine, now_ms: machine.add_partitions(request, held, 3, now_ms))

    async def end(self, name: str) -> None:
        request = EndTxnRequest(transactional_id=name, producer_id=self.ids[name], producer_epoch=0, committed=True)
        reply = await self.shard.submit(lambda machine, now_ms: machine.end(request, 3, now_ms))
        assert not reply.error_code

    def state(self, name: str) -> TransactionState:
        found = self.shard.machine.transaction(name)
        assert found is not None
        return found.state


def play(path: Path, story: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World(path)
        await world.shard.load()
        await story(world)
        world.transactions.unload()
        await world.commits.drain()
        world.commits.close()

    asyncio.run(run())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


def test_markers_that_are_due_when_their_transaction_has_ended_do_not_end_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "SWEPT_MAX", 1)
    monkeypatch.setattr(shard, "RELOAD_DELAY_MS", 60_000)  # It is loaded by hand.

    async def story(world: World) -> None:
        for name in ("first", "last"):
            await world.init(name)
            await world.add(name)
            await world.end(name)
        await until(lambda: world.sent == [0, 1])
        world.shard._fail("append refused", OSError(28, "No space left on device"))
        world.syncs.clear()
        await world.shard.load()
        other = asyncio.ensure_future(world.init("other"))
        await until(lambda: not world.shard.machine._undelivered)
        world.answers.set()
        await until(lambda: world.state("last") is TransactionState.COMPLETE_COMMIT)
        world.answers.clear()
        next_one = asyncio.ensure_future(world.add("last"))
        await until(lambda: world.state("last") is TransactionState.ONGOING)
        world.syncs.set()
        await asyncio.gather(other, next_one)
        await asyncio.sleep(0.02)
        assert world.sent == [0, 1], "the second look at what is prepared was too late"
        await world.end("last")
        await until(lambda: len(world.sent) == 3)
        assert world.state("last") is TransactionState.PREPARE_COMMIT, "no other delivery completes it"
        world.answers.set()
        await until(lambda: world.state("last") is TransactionState.COMPLETE_COMMIT)
        assert world.sent == [0, 1, 1]

    play(tmp_path, story)


def test_a_delivery_goes_on_while_its_end_cannot_be_recorded_at_once(tmp_path: Path) -> None:
    done = threading.Event()

    def large(machine: Coordinator, now_ms: int) -> Outcome[None, TransactionRecord]:
        assert done.wait(10)
        return Outcome(None)

    async def story(world: World) -> None:
        await world.init("t")
        await world.add("t")
        await world.end("t")
        await until(lambda: world.sent == [0])
        apart = world.shard.ask(large, lambda machine: ON_LOOP_MAX + 1)
        world.answers.set()
        await asyncio.sleep(0.05)
        (again,) = world.shard.machine.loaded(0).effects
        world.transactions._perform(again)
        await asyncio.sleep(0.05)
        assert world.sent == [0], "a second delivery would be late: the first one is told of before"
        assert world.transactions.deliveries == 1
        done.set()
        await apart
        await until(lambda: world.state("t") is TransactionState.COMPLETE_COMMIT)
        assert world.transactions.deliveries == 0

    play(tmp_path, story)
