"""Commits by ranges in transactions at a real broker: they count with the transaction, and wait for gaps below them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.client import OffsetAndMetadata, Producer
from anabranch.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from anabranch.protocol.messages.offset_commit import KeyRangeOffset, OffsetRange
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from tests.end_to_end.test_commits_by_range import END, MIDDLE, RANGES_TOPIC, RangedClient, connected
from tests.support.broker import BrokerProcess
from tests.support.transactions import TransactionalProducer, retried

Connect = Callable[[], RangedClient]
UNSTABLE = ErrorCode.UNSTABLE_OFFSET_COMMIT


@pytest.fixture
def broker(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BrokerProcess]:
    """The parameter, if there is one: whether commits wait for gaps."""
    process = BrokerProcess(
        tmp_path / "data",
        offsets_topic_num_partitions=3,
        transaction_state_log_num_partitions=3,
        **{
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 100,
            "individual.commit.wait.for.gaps": getattr(request, "param", True),
        },
    ).start()
    yield process
    if process.alive:
        process.kill()


class Thread:
    """One processing thread: a connection with a transactional producer of its own."""

    def __init__(self, client: RangedClient, name: str, timeout_ms: int = 60_000) -> None:
        self.client = client
        self.producer = TransactionalProducer(self.client, name, timeout_ms).init()

    def send(
        self,
        *ranges: tuple[int, int],
        shares: tuple[tuple[int, int, int], ...] = (),
        offset: int = -1,
        beside: tuple[TxnOffsetCommitRequestPartition, ...] = (),
    ) -> tuple[int, int]:
        """AddOffsetsToTxn, and send TxnOffsetCommit without waiting for its answer; `beside`: more partitions."""
        producer = self.producer
        who: dict[str, Any] = {"producer_id": producer.producer_id, "producer_epoch": producer.epoch}
        added = AddOffsetsToTxnRequest(transactional_id=producer.name, group_id="g", **who)
        assert retried(lambda: self.client.call(added)).error_code == ErrorCode.NONE
        part = TxnOffsetCommitRequestPartition(
            partition_index=0,
            committed_offset=offset,
            committed_metadata="",
            offset_ranges=[OffsetRange(start=start, end=end) for start, end in ranges],
            key_range_offsets=[KeyRangeOffset(start=start, end=end, offset=at) for start, end, at in shares],
        )
        topics = [TxnOffsetCommitRequestTopic(name="t", partitions=[part, *beside])]
        request = TxnOffsetCommitRequest(transactional_id=producer.name, group_id="g", topics=topics, **who)
        return self.client.send(request, 4)

    def answer(self, sent: tuple[int, int]) -> ErrorCode:
        """Receive the answer to TxnOffsetCommit."""
        return ErrorCode(self.client.receive(sent).topics[0].partitions[0].error_code)


@pytest.fixture
def connect(broker: BrokerProcess) -> Iterator[Connect]:
    """Makes connections that are closed in the end."""
    with contextlib.ExitStack() as made:
        yield lambda: made.enter_context(contextlib.closing(RangedClient(broker.port)))


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stable(client: RangedClient, partition: int) -> tuple[int, int]:
    """OffsetFetch of stable offsets: the offset and the error of a partition."""
    topics = [OffsetFetchRequestTopics(name="t", partition_indexes=[partition])]
    request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="g", topics=topics)], require_stable=True)
    (part,) = client.call(request, 9).groups[0].topics[0].partitions
    return part.committed_offset, part.error_code


def begun(broker: BrokerProcess) -> RangedClient:
    client = connected(broker)
    client.create("t")
    assert client.commit("g", {("t", 0): 40}) == [ErrorCode.NONE]
    return client


def test_the_proposals_two_threads(broker: BrokerProcess, connect: Connect) -> None:
    with begun(broker) as client:
        first, second = Thread(connect(), "a"), Thread(connect(), "b")
        waits = second.send((45, 49))
        assert client.progress() == (40, [], [])
        assert first.answer(first.send((40, 44))) == ErrorCode.NONE
        assert second.answer(waits) == ErrorCode.NONE
        assert client.progress() == (40, [], [])
        assert second.producer.end(commit=True) == ErrorCode.NONE
        assert client.progress() == (40, [(45, 49)], [])
        assert first.producer.end(commit=True) == ErrorCode.NONE
        assert client.progress() == (50, [], [])
    broker.kill()
    broker.start()
    with connected(broker) as client:
        assert client.progress() == (50, [], [])
        third = Thread(connect(), "c")
        waits = third.send((55, 59))
        client.delete("t")
        assert third.answer(waits) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("broker", [False], indirect=True)
def test_without_waiting_members_commit_though_each_holds_what_lies_below_the_others_ranges(
    broker: BrokerProcess, connect: Connect
) -> None:
    """They waited for each other, and one with a marker between its records for itself, until they were fenced."""
    with begun(broker) as client:
        first, second = Thread(connect(), "a"), Thread(connect(), "b")
        assert first.answer(first.send((41, 44), (50, 54))) == ErrorCode.NONE
        assert second.answer(second.send((45, 49), (55, 59))) == ErrorCode.NONE
        assert first.producer.end(commit=True) == ErrorCode.NONE
        assert client.progress() == (40, [(41, 44), (50, 54)], [])
        assert second.producer.end(commit=True) == ErrorCode.NONE
        assert client.progress() == (40, [(41, 59)], [])
        client.commit_ranges((40, 40))
        assert client.progress() == (60, [], [])


def test_an_aborted_one_counts_nothing_and_an_open_one_goes_on_after_a_kill(
    broker: BrokerProcess, connect: Connect
) -> None:
    with begun(broker):
        aborted, going_on = Thread(connect(), "a"), Thread(connect(), "b")
        assert aborted.answer(aborted.send((40, 44), shares=((MIDDLE, END, 99),))) == ErrorCode.NONE
        assert going_on.answer(going_on.send(shares=((0, MIDDLE - 1, 60),))) == ErrorCode.NONE
        assert aborted.producer.end(commit=False) == ErrorCode.NONE
    broker.kill()
    broker.start()
    with connected(broker) as client:
        assert client.progress() == (40, [], [])
        going_on.producer.client = connect()
        assert going_on.producer.end(commit=True) == ErrorCode.NONE
        assert client.progress() == (40, [], [(0, MIDDLE - 1, 60), (MIDDLE, END, 40)])


def test_one_that_waits_is_answered_when_its_transaction_times_out(broker: BrokerProcess, connect: Connect) -> None:
    with begun(broker) as client:
        thread = Thread(connect(), "a", timeout_ms=1_000)
        assert thread.answer(thread.send((45, 49))) == ErrorCode.INVALID_PRODUCER_EPOCH
        assert client.progress() == (40, [], [])


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_is_left_of_a_request_when_its_transaction_is_aborted_counts_nothing(
    broker: BrokerProcess, connect: Connect, *, goes_on: bool
) -> None:
    """It was committed behind the marker: pending for ever, or part of the producer's next transaction."""
    with connected(broker) as client:
        client.create("t", partitions=2)
        assert client.commit("g", {("t", 0): 40, ("t", 1): 50}) == [ErrorCode.NONE] * 2
        thread = Thread(connect(), "a")
        late = TxnOffsetCommitRequestPartition(partition_index=1, committed_offset=90, committed_metadata="")
        waits = thread.send((45, 45), *((47 + 2 * n, 47 + 2 * n) for n in range(300)), beside=(late,))
        until(lambda: client.metadata(RANGES_TOPIC).error_code == ErrorCode.NONE)
        time.sleep(0.3)  # Its first stretch waits for 40 to 44: that it does, nobody can see.
        other = TransactionalProducer(connect(), "a")
        other.producer_id, other.epoch = thread.producer.producer_id, thread.producer.epoch
        assert other.end(commit=False) == ErrorCode.NONE
        if goes_on:
            assert other.commit_offset("g", "t", 0, 41) == ErrorCode.NONE
        answered = [ErrorCode(part.error_code) for part in thread.client.receive(waits).topics[0].partitions]
        assert ErrorCode.NONE not in answered
        if goes_on:
            assert other.end(commit=True) == ErrorCode.NONE
        assert stable(client, 0) == (41 if goes_on else 40, ErrorCode.NONE)
        assert stable(client, 1) == (50, ErrorCode.NONE)


def test_what_a_transaction_has_committed_outlives_that_the_topic_of_ranges_is_deleted(
    broker: BrokerProcess, connect: Connect
) -> None:
    """The topic is made again: what was committed was neither folded nor given up, in no time."""
    with begun(broker) as client:
        below, above = Thread(connect(), "a"), Thread(connect(), "b")
        assert below.answer(below.send((40, 44))) == ErrorCode.NONE
        assert above.answer(above.send((45, 49))) == ErrorCode.NONE
        client.delete(RANGES_TOPIC)
        assert above.producer.end(commit=True) == ErrorCode.NONE
        until(lambda: client.progress() == (40, [(45, 49)], []) and stable(client, 0)[1] == UNSTABLE)
        assert below.producer.end(commit=True) == ErrorCode.NONE
        until(lambda: stable(client, 0) == (50, ErrorCode.NONE))


def test_producers_of_ours_commit_ranges_and_wait_for_gaps(broker: BrokerProcess) -> None:
    asyncio.run(_ours(broker))


async def _ours(broker: BrokerProcess) -> None:
    with begun(broker) as client:
        address, tp = f"127.0.0.1:{broker.port}", ("t", 0)
        async with (
            Producer(address, transactional_id="first") as first,
            Producer(address, transactional_id="second") as second,
        ):
            for producer in (first, second):
                await producer.init_transactions()
                await producer.begin_transaction()
            above = {tp: OffsetAndMetadata(40, ranges=[(45, 47), (49, 49)])}
            waits = asyncio.create_task(second.send_offsets_to_transaction(above, "g"))
            done, _ = await asyncio.wait([waits], timeout=1.0)
            assert not done, "what lies below is not done"
            await first.send_offsets_to_transaction({tp: OffsetAndMetadata(40, ranges=[(40, 44)])}, "g")
            await first.commit_transaction()
            await _until(lambda: client.progress() == (45, [], []))
            done, _ = await asyncio.wait([waits], timeout=1.0)
            assert not done, "48 is not done"
            client.commit_ranges((48, 48))
            await asyncio.wait_for(waits, 20.0)
            await second.commit_transaction()
            await _until(lambda: client.progress() == (50, [], []))


async def _until(holds: Callable[[], bool]) -> None:
    """A commit is decided when it returns; the group's coordinator hears of it right after."""
    async with asyncio.timeout(20.0):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("plain_comes_first", [True, False])
def test_an_offset_and_ranges_of_keys_of_two_transactions_do_not_overtake_one_another(
    broker: BrokerProcess, plain_comes_first: bool
) -> None:
    """The one that came second waits: what is committed last would take the place of the other."""
    asyncio.run(_beside(broker, plain_comes_first=plain_comes_first))


async def _beside(broker: BrokerProcess, *, plain_comes_first: bool) -> None:
    with begun(broker) as client:
        client.commit_ranges((45, 45))
        address, tp = f"127.0.0.1:{broker.port}", ("t", 0)
        plain, by_key = OffsetAndMetadata(60), OffsetAndMetadata(40, shares=[(0, MIDDLE - 1, 80)])
        said = (plain, by_key) if plain_comes_first else (by_key, plain)
        async with (
            Producer(address, transactional_id="first") as first,
            Producer(address, transactional_id="second") as second,
        ):
            for producer in (first, second):
                await producer.init_transactions()
                await producer.begin_transaction()
            await first.send_offsets_to_transaction({tp: said[0]}, "g")
            waits = asyncio.create_task(second.send_offsets_to_transaction({tp: said[1]}, "g"))
            done, _ = await asyncio.wait([waits], timeout=0.5)
            assert not done, "the other transaction is open"
            await first.commit_transaction()
            await asyncio.wait_for(waits, 20.0)
            await second.commit_transaction()
            ahead = [(0, MIDDLE - 1, 80), (MIDDLE, END, 60)] if plain_comes_first else []
            await _until(lambda: client.progress() == (60, [], ahead))


def test_an_offset_that_comes_beside_ranges_of_another_transaction_is_to_be_sent_again(
    broker: BrokerProcess, connect: Connect
) -> None:
    with begun(broker) as client:
        by_key, plain = Thread(connect(), "a"), Thread(connect(), "b")
        assert by_key.answer(by_key.send(shares=((0, MIDDLE - 1, 60),))) == ErrorCode.NONE
        assert plain.answer(plain.send(offset=100)) == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        assert by_key.producer.end(commit=True) == ErrorCode.NONE
        assert plain.producer.commit_offset("g", "t", 0, 100) == ErrorCode.NONE
        assert plain.producer.end(commit=True) == ErrorCode.NONE
        assert client.progress() == (100, [], [])


def test_offsets_of_a_producers_next_transaction_are_not_lost_in_any_partition(broker: BrokerProcess) -> None:
    """The ranges of its first transaction become part of the positions one after the other."""
    asyncio.run(_one_after_the_other(broker, [("t", partition) for partition in range(100)]))


async def _one_after_the_other(broker: BrokerProcess, partitions: list[tuple[str, int]]) -> None:
    with connected(broker) as client:
        client.create("t", partitions=len(partitions))
        async with Producer(f"127.0.0.1:{broker.port}", transactional_id="one") as producer:
            await producer.init_transactions()
            for said in (OffsetAndMetadata(0, shares=[(0, MIDDLE - 1, 5), (MIDDLE, END, 3)]), OffsetAndMetadata(10)):
                await producer.begin_transaction()
                await producer.send_offsets_to_transaction(dict.fromkeys(partitions, said), "g")
                await producer.commit_transaction()

        def committed() -> list[int]:
            (topic,) = client.fetched("g", {"t": list(range(len(partitions)))}).topics
            return [part.committed_offset for part in topic.partitions]

        await _until(lambda: committed() == [10] * len(partitions))
