"""The batcher's driver on false transports and virtual time: lost connections, late responses, closing, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client.producer.delivery import DeliveryError, TableDelivery
from anabranch.client.producer.driver import SendingDriver
from anabranch.client.producer.intake import Intake
from anabranch.client.producer.outcome import News, RecordOutcome
from anabranch.client.producer.records import Options
from anabranch.client.producer.rows import NOT_CHOSEN, ColumnNames, RecordMetadata
from anabranch.client.settings import ProducerSettings
from anabranch.machines.placement import place
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataResponse, MetadataResponseTopic
from anabranch.protocol.messages.produce import (
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from anabranch.records.batch import headers
from anabranch.records.hashing import murmur2
from tests.simulation.virtual_time import VirtualClock, run, running_loop
from tests.support.scripted_broker import HANG_UP, SILENT, Late, ScriptedBroker

REQUEST_TIMEOUT_MS = 1_000


class Log:
    """Appends every batch it has not seen, and returns its offset."""

    def __init__(self) -> None:
        self.offsets: dict[tuple[int, int], int] = {}
        """The base offset of each batch, by partition and sequence."""
        self.ends: dict[int, int] = {}
        self.refusal = ErrorCode.NONE

    def __call__(self, request: ProduceRequest) -> ProduceResponse:
        return ProduceResponse(
            responses=[
                TopicProduceResponse(
                    name=topic.name,
                    topic_id=topic.topic_id,
                    partition_responses=[self._append(part.index, part.records) for part in topic.partition_data],
                )
                for topic in request.topic_data
            ]
        )

    def _append(self, number: int, data: Any) -> PartitionProduceResponse:
        if self.refusal:
            return PartitionProduceResponse(index=number, error_code=self.refusal, base_offset=-1)
        ((_, header),) = headers(bytes(data))
        key = number, header.base_sequence
        if key not in self.offsets:
            end = self.ends.get(number, 0)
            self.offsets[key], self.ends[number] = end, end + header.record_count
        return PartitionProduceResponse(index=number, base_offset=self.offsets[key])


class World:
    """A driver, its broker, and the broker's log."""

    def __init__(self, **settings: Any) -> None:
        chosen: dict[str, Any] = {
            "request_timeout_ms": REQUEST_TIMEOUT_MS,
            "delivery_timeout_ms": 10_000,
            "retry_backoff_ms": 100,
            **settings,
        }
        self.settings = ProducerSettings(**chosen)
        self.broker = ScriptedBroker({"t": 2})
        self.log = Log()
        self.broker.on(ProduceRequest, self.log)
        self.cluster = self.broker.cluster(request_timeout_ms=REQUEST_TIMEOUT_MS)
        self.driver = SendingDriver(self.settings, self.cluster, None, VirtualClock(running_loop()))

    def send(
        self, value: bytes = b"v", *, key: bytes = b"k", partition: int | None = 0
    ) -> asyncio.Future[RecordMetadata]:
        promise: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        chosen = NOT_CHOSEN if partition is None else partition
        self.driver.append(("t", key, value, 1, (), chosen, promise))
        return promise

    async def batch_of(self, value: bytes = b"v", partition: int = 0) -> asyncio.Future[RecordMetadata]:
        """Send a record, and have its batch ready before the next record."""
        promise = self.send(value, partition=partition)
        self.driver.batcher.flush()
        self.driver.schedule()
        await asyncio.sleep(0.02)
        return promise

    async def end(self) -> None:
        await self.driver.close()
        await self.cluster.close()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, "a closed driver leaves no task behind"


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> float:
    """Run a story; return how long it took, in virtual seconds."""

    async def timed() -> float:
        await story()
        return running_loop().time()

    return run(timed(), 1)


def test_records_get_their_offsets_and_a_flush_waits_for_them() -> None:
    async def story() -> None:
        world = World()
        promises = [world.send(partition=number % 2) for number in range(6)]
        flushed = world.driver.open.begin_flush(running_loop())
        world.driver.schedule()
        assert [(await promise).offset for promise in promises] == [0, 0, 1, 1, 2, 2]
        await flushed
        assert world.driver.open.count == 0
        world.driver.open.raise_failures()
        await world.end()

    play(story)


def test_a_request_whose_connection_ends_is_sent_again_with_its_sequence() -> None:
    async def story() -> None:
        world = World()
        world.broker.script(ProduceRequest, lambda request: (world.log(request), HANG_UP)[1], HANG_UP, world.log)
        promise = world.send()
        assert (await promise).offset == 0
        sent = [asked for asked in world.broker.asked if isinstance(asked.request, ProduceRequest)]
        assert len(sent) == 3 and len({asked.link for asked in sent}) == 3, "each on a connection of its own"
        assert world.log.ends == {0: 1}, "one record, though it was appended before the first hang-up"
        await world.end()

    play(story)


def test_a_lost_batch_is_asked_for_in_its_partition_before_the_new_layout_counts() -> None:
    async def story() -> None:
        world = World()
        world.broker.topics["t"], world.broker.initial["t"] = 1, 1
        key = next(b"%d" % number for number in range(99) if place(murmur2(b"%d" % number), 1, 2) == 1)

        def append_and_hang_up(request: ProduceRequest) -> Any:
            world.log(request)
            world.broker.topics["t"] = 2
            return HANG_UP

        world.broker.script(ProduceRequest, append_and_hang_up, world.log)
        promise = world.send(key=key, partition=None)
        assert (await promise)[1:3] == (0, 0)
        later = world.send(key=key, partition=None)
        assert (await later)[1:3] == (1, 0)
        assert world.log.ends == {0: 1, 1: 1}
        await world.end()

    play(story)


def test_a_response_that_comes_too_late_is_dropped_with_its_connection() -> None:
    async def story() -> None:
        world = World()
        wrong = ProduceResponse(
            responses=[
                TopicProduceResponse(name="t", partition_responses=[PartitionProduceResponse(index=0, base_offset=99)])
            ]
        )
        world.broker.script(ProduceRequest, Late(REQUEST_TIMEOUT_MS / 1000 + 0.5, wrong), world.log)
        promise = world.send()
        assert (await promise).offset == 0
        first, second = world.broker.times(ProduceRequest)
        assert second - first >= REQUEST_TIMEOUT_MS / 1000
        await asyncio.sleep(5)
        assert promise.result().offset == 0 and world.driver.open.count == 0
        await world.end()

    play(story)


def test_requests_keep_their_order_while_the_connection_is_made() -> None:
    async def story() -> None:
        world = World()
        await (await world.batch_of())  # The kernels are loaded, metadata and producer id known.
        for link in world.broker.links:
            link.end()
        world.broker.reachable = False
        promises = [await world.batch_of(b"%d" % number) for number in range(4)]
        world.broker.reachable = True
        assert [(await promise).offset for promise in promises] == [1, 2, 3, 4]
        await world.end()

    play(story)


def test_an_unreachable_broker_fails_records_at_their_deadline_and_not_before() -> None:
    async def story() -> None:
        world = World(delivery_timeout_ms=5_000)
        world.broker.reachable = False
        promise = world.send()
        began = running_loop().time()
        with pytest.raises(ApiError, match="t"):
            await promise
        assert 4.9 <= running_loop().time() - began <= 6.5
        with pytest.raises(DeliveryError, match="1 record was not delivered"):
            world.driver.open.raise_failures()
        world.driver.open.raise_failures()
        await world.end()

    play(story)


def test_a_broker_that_never_answers_fails_records_at_their_deadline() -> None:
    async def story() -> None:
        world = World(delivery_timeout_ms=5_000)
        world.broker.script(ProduceRequest, SILENT)
        promise = world.send()
        with pytest.raises(ApiError):
            await promise
        assert running_loop().time() < 12
        assert len(world.broker.requests(ProduceRequest)) >= 4, "tried again until then"
        await world.end()

    play(story)


@pytest.mark.parametrize("moment", ["metadata", "connecting", "answer", "backoff"])
def test_close_ends_every_wait(moment: str) -> None:
    async def story() -> None:
        world = World()
        if moment == "metadata":
            world.broker.script(MetadataRequest, SILENT)
        elif moment == "connecting":
            world.broker.reachable = False
        elif moment == "answer":
            world.broker.script(ProduceRequest, SILENT)
        else:
            world.log.refusal = ErrorCode.NOT_LEADER_OR_FOLLOWER
        promise = world.send()
        await asyncio.sleep(0.3)
        began = running_loop().time()
        await world.end()
        assert running_loop().time() - began < 0.1
        asked = len(world.broker.asked)
        await asyncio.sleep(30)
        assert len(world.broker.asked) == asked, "a closed driver sends nothing"
        assert isinstance(promise.exception(), ApiError), "the record was not sent, as far as known"

    play(story)


def test_close_ends_the_wait_for_room() -> None:
    async def story() -> None:
        world = World(buffer_memory=100)
        world.broker.script(MetadataRequest, SILENT)
        promise = world.send(bytes(200))

        def check() -> None:
            raise ApiError(ErrorCode.INVALID_REQUEST, "closed")

        waiting = asyncio.create_task(world.driver.wait_for_room(check))
        await asyncio.sleep(0.1)
        await world.driver.close()
        with pytest.raises(ApiError):
            await waiting
        assert promise.done()
        await world.end()

    play(story)


def test_a_refused_batch_fails_its_records_and_spares_the_others() -> None:
    async def story() -> None:
        world = World()
        world.log.refusal = ErrorCode.MESSAGE_TOO_LARGE
        refused = await world.batch_of(b"large")
        with pytest.raises(ApiError) as failure:
            await refused
        assert failure.value.code is ErrorCode.MESSAGE_TOO_LARGE
        world.log.refusal = ErrorCode.NONE
        assert (await (await world.batch_of(b"small", partition=1))).offset == 0
        await world.end()

    play(story)


def test_rows_of_a_table_share_one_outcome() -> None:
    async def story() -> None:
        import pyarrow as pa

        from anabranch.client.producer.columns import columns_of

        world = World()
        promise: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        delivery = TableDelivery("t", promise, 0)
        table = pa.table({"value": [b"a", b"b", b"c"]})
        slices = list(columns_of(table, ColumnNames(), partition=1, delivery=delivery, now_ms=1, size_max=1 << 20))
        for rows, size in slices:
            delivery.open_count += rows.record_count
            world.driver.open.counts[0] += rows.record_count
            world.driver.append_rows("t", rows, size)
        metadata = await promise
        assert (metadata.record_count, metadata.offsets) == (3, {1: (0, 2)})
        await world.end()

    play(story)


def test_records_that_cannot_get_a_producer_id_fail_with_the_reason() -> None:
    async def story() -> None:
        world = World()
        refused = InitProducerIdResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
        world.broker.script(InitProducerIdRequest, HANG_UP, refused)
        promise = world.send()
        with pytest.raises(ApiError) as failure:
            await promise
        assert failure.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        assert not world.broker.requests(ProduceRequest)
        await world.end()

    play(story)


def test_a_sender_waits_for_room_and_learns_why_it_need_not_wait_longer() -> None:
    async def story() -> None:
        world = World(buffer_memory=4_000)
        await (await world.batch_of())
        world.broker.script(ProduceRequest, lambda request: Late(0.5, world.log(request)))
        promises = [await world.batch_of(bytes(1_500)) for _ in range(3)]
        checks: list[float] = []
        await world.driver.wait_for_room(lambda: checks.append(running_loop().time()))
        assert checks and promises[0].done() and not promises[-1].done()

        def refuse() -> None:
            raise ApiError(ErrorCode.INVALID_TXN_STATE, "closed")

        world.send(bytes(4_000))
        with pytest.raises(ApiError, match="closed"):
            await world.driver.wait_for_room(refuse)
        await world.end()

    play(story)


def test_metadata_in_use_is_refreshed_at_its_age() -> None:
    async def story() -> None:
        world = World(metadata_max_age_ms=60_000)
        await (await world.batch_of())
        before = len(world.broker.requests(MetadataRequest))
        await asyncio.sleep(61)
        await (await world.batch_of())
        await asyncio.sleep(0.1)
        assert len(world.broker.requests(MetadataRequest)) == before + 1
        await world.end()

    play(story)


def test_metadata_of_a_topic_that_was_created_while_old_metadata_came_is_refreshed_at_its_age() -> None:
    async def story() -> None:
        world = World(metadata_max_age_ms=60_000)
        await (await world.batch_of())
        await asyncio.sleep(61)
        usual = world.broker._metadata
        gone = MetadataResponse(
            brokers=usual(MetadataRequest()).brokers,
            topics=[MetadataResponseTopic(name="t", error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)],
        )
        world.broker.script(MetadataRequest, Late(0.5, gone), usual)
        world.log.refusal = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        promise = await world.batch_of()
        world.log.refusal = ErrorCode.NONE
        await promise
        await asyncio.sleep(1)
        before = len(world.broker.requests(MetadataRequest))
        await asyncio.sleep(61)
        await (await world.batch_of())
        await asyncio.sleep(0.1)
        assert len(world.broker.requests(MetadataRequest)) == before + 1
        await world.end()

    play(story)


def test_a_record_without_a_response_counts_as_delivered_when_sent() -> None:
    async def story() -> None:
        world = World(acks=0)
        world.broker.script(ProduceRequest, SILENT)
        assert (await world.send()).offset == -1
        await world.end()

    play(story)


class Handed:
    """Records that another thread would send."""

    def __init__(self, world: World) -> None:
        self.driver = world.driver
        self.intake = Intake(lambda: None, News())

    def send(self, value: Any, *, topic: Any = "t", key: bytes = b"k", when: float | Options = 0.007) -> RecordOutcome:
        when = when if isinstance(when, Options) else float(str(when))  # An object of its own.
        row = topic, key, value, when
        self.intake.tray.rows += row
        tray, end = self.intake.place(self.intake.tray, row)
        outcome = RecordOutcome()
        outcome.receipt, outcome.place = tray.receipt, end // 4 - 1
        return outcome

    def take(self) -> int:
        tray = self.intake.take()
        assert tray is not None
        return self.driver.append_tray(tray)


async def until_done(outcomes: list[RecordOutcome]) -> None:
    while not all(outcome.done() for outcome in outcomes):
        await asyncio.sleep(0.01)


def test_records_handed_over_together_are_cut_by_batch_size_and_complete_in_order() -> None:
    async def story() -> None:
        world = World(batch_size=1_000, linger_ms=5)
        handed = Handed(world)
        generation = world.driver.open.generation
        outcomes = [handed.send(bytes(100), when=Options(number, (), 0)) for number in range(60)]
        assert handed.take() == 60 * (1 + 100 + 36)
        assert world.driver.open.counts == {generation: 60}
        world.driver.batcher.flush()
        world.driver.schedule()
        await until_done(outcomes)
        found = [each.result() for each in outcomes]
        assert [each.offset for each in found] == list(range(60)) and [each.timestamp for each in found] == [*range(60)]
        assert set(world.driver.open.counts.values()) == {0}
        assert 60 * 137 // 2_000 <= len(world.log.offsets) <= 60 * 137 // 1_000
        await world.end()

    play(story)


def test_records_of_several_senders_and_topics_share_a_chunk_and_find_their_own_offsets() -> None:
    async def story() -> None:
        world = World(linger_ms=50)
        world.broker.topics["u"] = world.broker.initial["u"] = 1
        handed = Handed(world)
        first = handed.send(b"1", when=Options(5, (), 0))
        handed.take()
        alone = world.send(b"2")
        many = [handed.send(b"%d" % number, topic="tu"[number % 2], when=Options(9, (), 0)) for number in range(8)]
        handed.take()
        await until_done([first, *many])
        assert (first.result(), await alone) == (("t", 0, 0, 5), ("t", 0, 1, 1))
        assert [each.result() for each in many] == [
            ("tu"[number % 2], 0, number // 2 + 2 * (number % 2 == 0), 9) for number in range(8)
        ]
        assert {key[0] for key in world.log.offsets} == {0}
        await world.end()

    play(story)


def test_a_record_that_no_column_can_hold_fails_alone() -> None:
    async def story() -> None:
        world = World()
        handed = Handed(world)
        outcomes = [handed.send(b"1"), handed.send(3), handed.send(b"2"), handed.send(b"3", topic=["t"])]
        outcomes.append(handed.send(b"4", when=Options(1, [("\ud800", b"")], None)))
        handed.take()
        await until_done(outcomes)
        assert [outcome.exception() is None for outcome in outcomes] == [True, False, True, False, False]
        assert "cannot be encoded" in str(outcomes[1].exception()) and "a topic is a str" in str(
            outcomes[3].exception()
        )
        with pytest.raises(DeliveryError, match="3 records were not delivered"):
            world.driver.open.raise_failures()
        assert world.driver.open.count == 0
        await world.end()

    play(story)


@pytest.mark.parametrize("ended", ["fenced", "closed"])
def test_records_handed_over_too_late_fail(ended: str) -> None:
    async def story() -> None:
        world = World()
        handed = Handed(world)
        outcome = handed.send(b"1")
        if ended == "fenced":
            world.driver.batcher.stop(ApiError(ErrorCode.PRODUCER_FENCED, "another one"))
        else:
            await world.driver.close()
        handed.take()
        assert isinstance(outcome.exception(0), ApiError) and world.driver.open.count == 0
        with pytest.raises(DeliveryError):
            world.driver.open.raise_failures()
        await world.end()

    play(story)


def test_records_handed_over_are_placed_anew_where_the_topic_grows() -> None:
    async def story() -> None:
        world = World()
        world.broker.initial["t"] = 2
        await (await world.batch_of())
        handed = Handed(world)

        def answer(request: ProduceRequest) -> ProduceResponse:
            (topic,) = request.topic_data
            stale = topic.undeleted_partition_count != 3
            world.broker.topics["t"] = 3
            world.log.refusal = ErrorCode.INVALID_PARTITION_METADATA if stale else ErrorCode.NONE
            refusals.append(stale)
            return world.log(request)

        refusals: list[bool] = []
        world.broker.on(ProduceRequest, answer)
        keys = [b"%d" % number for number in range(90)]
        outcomes: list[RecordOutcome] = []
        for number, key in enumerate(keys):
            if number % 30 == 0:
                world.send(key=b"alone", partition=None)
            outcomes.append(handed.send(b"v", key=key, when=number))
            if number % 30 == 29:
                handed.take()
        await until_done(outcomes)
        assert True in refusals
        found = [outcome.result() for outcome in outcomes]
        assert [each.partition for each in found] == [place(murmur2(key), 2, 3) for key in keys]
        assert [each.timestamp for each in found] == [1000 * number for number in range(90)]
        for partition in range(3):
            offsets = [each.offset for each in found if each.partition == partition]
            assert len(offsets) > 10 and offsets == sorted(set(offsets))
        await world.end()

    play(story)
