"""Produce: what is refused before anything is looked up, and when the response is sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import INTERNAL_TOPICS, NO_TOPIC_ID, TopicPartition
from anabranch.protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from anabranch.records.batch import TRANSACTIONAL
from anabranch.records.compression import Compression
from anabranch.server.context import Apart, BrokerContext, CloseConnectionError, Large, RequestContext
from anabranch.server.handlers import produce
from anabranch.server.handlers.produce import AT_A_TIME, handle_produce
from anabranch.server.partitions.checks import LOOP_US, PLAIN_RECORD_US, BatchChecks
from tests.support.batches import make_batch, make_keyed_batch, make_sound_batch
from tests.support.replicas import NOW_MS, TOPIC, TOPIC_ID, LocalReplicas

OK = ErrorCode.NONE
CALL = RequestContext("User:ANONYMOUS", None, "test:1", 1, 12)


QUICK_RECORDS_MAX = int(LOOP_US / PLAIN_RECORD_US)
"""Records that the loop can wait for without machine code."""


class Broker:
    """The parts of a broker that Produce uses."""

    def __init__(self, path: Path) -> None:
        self.local = LocalReplicas(path, durability="fsync")
        self.local.resize(1)
        self.removed: set[tuple[str, int]] = set()
        self.names = {TOPIC_ID: TOPIC}
        self.deleting: set[str] = set()
        self.verdict = ErrorCode.NONE
        self.verified: list[tuple[str, TopicPartition, int, int]] = []
        parts = SimpleNamespace(
            replicas=self.local.replicas,
            checks=BatchChecks(),
            clock=self.local.clock,
            view=SimpleNamespace(
                has_removed=lambda topic, number: (topic, number) in self.removed,
                name_of=self.names.get,
                topic=lambda name: None if name in self.deleting else name,
            ),
            transactions=SimpleNamespace(verify=self._verify),
            producer_ids=SimpleNamespace(given_below=1_000),
        )
        self.context = cast(BrokerContext, parts)

    def _verify(self, name: str, partition: TopicPartition, producer_id: int, producer_epoch: int) -> ErrorCode:
        self.verified.append((name, partition, producer_id, producer_epoch))
        return self.verdict

    def send(
        self,
        records: bytes | bytearray | None,
        number: int = 0,
        *,
        topic: str = TOPIC,
        acks: int = -1,
        transaction: str | None = None,
        topic_id: UUID = NO_TOPIC_ID,
        version: int = 12,
    ) -> PartitionProduceResponse | None:
        """The answer for the one partition of the request; None where there is no response."""

        async def call() -> ProduceResponse | None:
            data = PartitionProduceData(index=number, records=None if records is None else memoryview(records))
            topics = [TopicProduceData(name=topic, topic_id=topic_id, partition_data=[data])]
            request = ProduceRequest(transactional_id=transaction, acks=acks, timeout_ms=1, topic_data=topics)
            found: Any = handle_produce(self.context, request, CALL._replace(api_version=version))
            self.apart = isinstance(found, Apart)
            if isinstance(found, Apart):
                found = await found.handle(request)
            self.waited = isinstance(found, Awaitable)
            response = await found if isinstance(found, Awaitable) else found
            assert response is None or response.responses[0].topic_id == topic_id
            return cast("ProduceResponse | None", response)

        response = self.local.runner.run(call())
        return None if response is None else response.responses[0].partition_responses[0]

    def error(self, records: bytes | bytearray | None, number: int = 0, **options: Any) -> ErrorCode:
        answer = self.send(records, number, **options)
        assert answer is not None
        return ErrorCode(answer.error_code)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path)
    yield made
    made.local.close()


def batch(sequence: int = -1, *, transactional: bool = False) -> bytearray:
    identity = {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence} if sequence >= 0 else {}
    return make_sound_batch(timestamp=NOW_MS, attributes=TRANSACTIONAL if transactional else 0, **identity)


def test_what_cannot_be_appended_is_refused(broker: Broker) -> None:
    assert broker.error(batch(), topic=next(iter(INTERNAL_TOPICS))) is ErrorCode.INVALID_TOPIC_EXCEPTION
    assert broker.error(batch(), 5) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert broker.error(None) is ErrorCode.INVALID_RECORD
    assert broker.error(b"") is ErrorCode.INVALID_RECORD
    assert broker.error(batch(), acks=2) is ErrorCode.INVALID_REQUIRED_ACKS
    broker.local[0].take_offline("damaged")
    assert broker.error(batch()) is ErrorCode.KAFKA_STORAGE_ERROR
    assert not broker.waited


def test_a_topic_is_given_by_its_id_from_version_13_on(broker: Broker) -> None:
    by_id: dict[str, Any] = {"topic": "", "topic_id": TOPIC_ID, "version": 13}
    other: dict[str, Any] = {**by_id, "topic_id": UUID(int=99)}
    assert broker.error(batch(), **by_id) is OK
    assert broker.error(batch(), 5, **by_id) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert broker.error(batch(), **other) is ErrorCode.UNKNOWN_TOPIC_ID
    assert broker.error(batch(), **(by_id | {"topic_id": NO_TOPIC_ID})) is ErrorCode.UNKNOWN_TOPIC_ID
    broker.names[UUID(int=99)] = TOPIC
    assert broker.error(batch(), **other) is ErrorCode.UNKNOWN_TOPIC_ID, "the leader's own id counts"
    broker.deleting.add(TOPIC)
    assert broker.error(batch(), **by_id) is ErrorCode.UNKNOWN_TOPIC_ID
    assert broker.local[0].log.end == 1


def test_a_removed_partition_is_addressed_where_the_cluster_knows_of_it(broker: Broker) -> None:
    broker.local.resize(2)
    broker.local.resize(1)
    broker.local.remove(1)
    assert broker.error(batch(), 1) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    broker.removed.add((TOPIC, 1))
    answer = broker.send(batch(), 1)
    assert answer is not None
    assert (answer.error_code, answer.base_offset, answer.log_start_offset) == (OK, 0, -1)
    assert broker.local[0].log.flushed == 1, "its survivor's log is synced"


@pytest.mark.parametrize("acks", [-1, 1])
def test_the_response_waits_for_the_sync(broker: Broker, acks: int) -> None:
    assert broker.error(batch(0), acks=acks) is OK
    assert broker.waited
    assert broker.local[0].log.flushed == 1
    assert broker.error(batch(0), acks=acks) is OK
    assert not broker.waited, "a repetition of what is synced"


def compact(broker: Broker) -> None:
    broker.local.configs["cleanup.policy"] = "compact,delete"
    broker.local.apply_settings()


@pytest.mark.parametrize(
    ("codec", "many"), [(Compression.NONE, False), (Compression.NONE, True), (Compression.LZ4, False)]
)
def test_a_compacted_topic_takes_no_batch_with_a_record_without_a_key(
    broker: Broker, codec: Compression, many: bool
) -> None:
    rows: list[tuple[bytes | None, bytes | None]] = [(b"k", b"v"), (None, b"v"), (b"l", None), (None, b"w")]
    rows += [(b"k", b"v")] * (QUICK_RECORDS_MAX if many else 0)
    keyless = make_keyed_batch(rows, timestamp=NOW_MS, compression=codec)
    assert broker.error(keyless) is OK
    compact(broker)
    end = broker.local[0].log.end
    answer = broker.send(keyless)
    assert answer is not None
    assert broker.apart is many
    assert answer.error_code == ErrorCode.INVALID_RECORD
    assert [error.batch_index for error in answer.record_errors] == [1, 3]
    assert all(error.batch_index_error_message == "The record has no key." for error in answer.record_errors)
    assert answer.error_message is not None
    assert "takes no record without a key; 2 of this batch have none" in answer.error_message
    assert broker.local[0].log.end == end
    keyed = make_keyed_batch([row for row in rows if row[0] is not None], timestamp=NOW_MS, compression=codec)
    assert broker.error(keyed + keyless) is ErrorCode.INVALID_RECORD
    assert broker.local[0].log.end == end, "nothing of the request's other batch is appended either"
    assert broker.error(keyed) is OK


def test_records_for_a_compacted_topic_that_is_given_by_its_id_are_looked_into_apart(broker: Broker) -> None:
    compact(broker)
    rows: list[tuple[bytes | None, bytes | None]] = [(b"k", b"v")] * (QUICK_RECORDS_MAX + 1)
    keyed = make_keyed_batch(rows, timestamp=NOW_MS, compression=Compression.NONE)
    assert broker.error(keyed, topic="", topic_id=TOPIC_ID, version=13) is OK
    assert broker.apart
    assert broker.error(keyed, topic="", topic_id=UUID(int=9), version=13) is ErrorCode.UNKNOWN_TOPIC_ID
    assert not broker.apart


def test_no_topic_takes_records_that_cannot_be_read(broker: Broker) -> None:
    answer = broker.send(make_batch(timestamp=NOW_MS))
    assert answer is not None
    assert answer.error_code == ErrorCode.INVALID_RECORD
    assert "cannot be read" in (answer.error_message or "")


def test_the_response_waits_for_the_last_of_several_batches_too(broker: Broker) -> None:
    assert broker.error(batch(0)) is OK
    assert broker.error(batch(0) + batch(1)) is OK
    assert broker.waited
    assert broker.local[0].log.flushed == 2


def test_a_sync_that_fails_is_an_error(broker: Broker) -> None:
    broker.local.disk.broken = True
    answer = broker.send(batch(0))
    assert answer is not None
    assert (answer.error_code, answer.base_offset) == (ErrorCode.KAFKA_STORAGE_ERROR, -1)
    assert answer.error_message == "The disk refuses: Input/output error."


def test_without_acks_there_is_no_response_and_an_error_ends_the_connection(broker: Broker) -> None:
    assert broker.send(batch(), acks=0) is None
    assert broker.local[0].log.end == 1
    with pytest.raises(CloseConnectionError):
        broker.send(batch(), 5, acks=0)


def test_the_coordinator_is_asked_under_the_requests_name(broker: Broker) -> None:
    assert broker.error(batch(0, transactional=True)) is ErrorCode.INVALID_TXN_STATE
    assert broker.verified == []
    assert broker.error(batch(0, transactional=True), transaction="x") is OK
    assert broker.verified == [("x", broker.local.name(0), 7, 0)]


@pytest.mark.parametrize(
    ("verdict", "version", "error"),
    [
        (ErrorCode.INVALID_TXN_STATE, 10, ErrorCode.INVALID_TXN_STATE),
        (ErrorCode.INVALID_TXN_STATE, 11, ErrorCode.TRANSACTION_ABORTABLE),
        (ErrorCode.PRODUCER_FENCED, 12, ErrorCode.INVALID_PRODUCER_EPOCH),
        (ErrorCode.CONCURRENT_TRANSACTIONS, 12, ErrorCode.NOT_ENOUGH_REPLICAS),
        (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, 12, ErrorCode.NOT_ENOUGH_REPLICAS),
        (ErrorCode.COORDINATOR_NOT_AVAILABLE, 12, ErrorCode.NOT_ENOUGH_REPLICAS),
        (ErrorCode.NOT_COORDINATOR, 12, ErrorCode.NOT_ENOUGH_REPLICAS),
    ],
)
def test_the_coordinators_refusal_is_worded_for_producers(
    broker: Broker, verdict: ErrorCode, version: int, error: ErrorCode
) -> None:
    broker.verdict = verdict
    assert broker.error(batch(0, transactional=True), transaction="x", version=version) is error


def test_a_client_that_hangs_up_while_its_response_waits_leaves_no_error_behind(broker: Broker) -> None:
    async def hang_up() -> None:
        data = PartitionProduceData(index=0, records=memoryview(batch()))
        request = ProduceRequest(
            acks=-1, timeout_ms=1, topic_data=[TopicProduceData(name=TOPIC, partition_data=[data])]
        )
        found: Any = handle_produce(broker.context, request, CALL)
        waiting = asyncio.ensure_future(found)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await broker.local.replicas.commit(broker.local[0])

    broker.local.runner.run(hang_up())
    assert broker.local[0].log.flushed == 1


def test_a_partition_that_comes_while_others_records_are_checked_is_given_its_own(broker: Broker) -> None:
    records = memoryview(make_keyed_batch([(b"k", b"v")] * (QUICK_RECORDS_MAX + 1), timestamp=NOW_MS))
    data = [PartitionProduceData(index=number, records=records) for number in range(2)]
    topics = [TopicProduceData(name=TOPIC, topic_id=NO_TOPIC_ID, partition_data=data)]
    request = ProduceRequest(transactional_id=None, acks=-1, timeout_ms=1, topic_data=topics)
    goes_on = threading.Event()
    broker.context.checks._thread.submit(goes_on.wait, 20)

    async def begin() -> asyncio.Task[Any]:
        apart = handle_produce(broker.context, request, CALL)
        assert isinstance(apart, Apart)
        task = asyncio.ensure_future(apart.handle(request))
        await asyncio.sleep(0)
        return task

    async def end(task: asyncio.Task[Any]) -> ProduceResponse:
        answer = await task
        answer = await answer if isinstance(answer, Awaitable) else answer
        return cast(ProduceResponse, answer.make() if isinstance(answer, Large) else answer)

    handled = broker.local.runner.run(begin())
    broker.local.resize(2)
    goes_on.set()
    (topic,) = broker.local.runner.run(end(handled)).responses
    assert [each.error_code for each in topic.partition_responses] == [OK, OK]
    assert [broker.local[number].log.end for number in range(2)] == [QUICK_RECORDS_MAX + 1] * 2


def test_a_request_that_opens_many_files_or_has_many_batches_or_bytes_is_handled_in_steps(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = AT_A_TIME + 1
    broker.local.resize(count)

    def is_apart(numbers: range, batches: int = 1) -> bool:
        async def call() -> bool:
            records = [memoryview(bytearray(bytes(batch()) * batches)) for _ in numbers]
            data = [PartitionProduceData(index=at, records=some) for at, some in zip(numbers, records, strict=True)]
            topics = [TopicProduceData(name=TOPIC, partition_data=data)]
            request = ProduceRequest(acks=1, timeout_ms=1, topic_data=topics)
            found: Any = handle_produce(broker.context, request, CALL)
            apart = isinstance(found, Apart)
            if isinstance(found, Apart):
                found = await found.handle(request)
            found = await found if isinstance(found, Awaitable) else found
            response = found.make() if isinstance(found, Large) else found
            assert not any(it.error_code for it in response.responses[0].partition_responses)
            return apart

        return broker.local.runner.run(call())

    everyone = range(count)
    assert is_apart(everyone), "all files are made"
    assert not is_apart(everyone)
    broker.local.clock.ms += broker.local[0].settings.log.segment_ms
    assert is_apart(everyone), "each begins a segment"
    assert not is_apart(everyone)
    monkeypatch.setattr(produce, "BATCHES_AT_ONCE", 4)
    assert not is_apart(range(2), 2)
    ends = [broker.local[number].log.end for number in range(2)]
    assert is_apart(range(2), 3)
    assert [broker.local[number].log.end - end for number, end in enumerate(ends)] == [3, 3]
    monkeypatch.setattr(produce, "BYTES_AT_ONCE", 3 * len(batch()))
    assert not is_apart(range(3))
    assert is_apart(range(4))
    broker.local.resize(2 * count)
    broker.local.resize(count)
    assert is_apart(range(count, 2 * count)), "others are appended to, of which nothing is known"
