"""The parallel handler on false transports and virtual time: order, bounds, failures, draining, the end of a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from anabranch.base.errors import ApiError
from anabranch.base.ids import TopicPartition
from anabranch.client import Consumer, RejectError, Retry
from anabranch.client.consumer.driver import FetchingDriver
from anabranch.client.consumer.record import Record
from anabranch.client.settings import ConsumerSettings
from anabranch.protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse, PartitionData
from anabranch.protocol.messages.list_offsets import (
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from tests.simulation.virtual_time import VirtualClock, run, running_loop
from tests.support.scripted_broker import Late, ScriptedBroker
from tests.support.wire import batch

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
Keys = Sequence[bytes | None]


def log_of(keys: Keys, first: int) -> bytes:
    """A batch for each record: its key, and its offset as value."""
    made = bytearray()
    for offset in range(first, len(keys)):
        one = batch([b"%d" % offset], key=keys[offset])
        one[:8] = offset.to_bytes(8, "big")
        made += one
    return bytes(made)


class World:
    """A consumer of topic `t`, whose partitions have records of these keys."""

    def __init__(self, *logs: Keys, **settings: Any) -> None:
        self.logs = [list(keys) for keys in logs]
        self.broker = ScriptedBroker({"t": len(logs)})
        self.broker.on(ListOffsetsRequest, self._offsets)
        self.broker.on(FetchRequest, self._fetch)
        chosen: dict[str, Any] = {"auto_offset_reset": "earliest", "fetch_max_wait_ms": 500, **settings}
        self.consumer = Consumer(**chosen)
        cluster = self.broker.cluster()
        self.driver = FetchingDriver(ConsumerSettings(**chosen), cluster, VirtualClock(running_loop()))
        consumer: Any = self.consumer
        consumer._cluster, consumer._driver = cluster, self.driver
        consumer._fetcher, consumer._handout = self.driver.fetcher, self.driver.handout
        self.consumer.assign("t")
        self.began: list[tuple[int, int]] = []
        self.ended: list[tuple[int, int]] = []
        self.running = 0
        self.most = 0

    def _offsets(self, request: ListOffsetsRequest) -> ListOffsetsResponse:
        return ListOffsetsResponse(
            topics=[
                ListOffsetsTopicResponse(
                    name=topic.name,
                    partitions=[
                        ListOffsetsPartitionResponse(partition_index=part.partition_index, offset=0)
                        for part in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    def _fetch(self, request: FetchRequest) -> Any:
        found = [
            FetchableTopicResponse(
                topic_id=topic.topic_id,
                partitions=[
                    PartitionData(
                        partition_index=part.partition,
                        high_watermark=len(self.logs[part.partition]),
                        last_stable_offset=len(self.logs[part.partition]),
                        log_start_offset=0,
                        records=log_of(self.logs[part.partition], part.fetch_offset),
                    )
                ],
            )
            for topic in request.topics
            for part in topic.partitions
            if part.fetch_offset < len(self.logs[part.partition])
        ]
        response = FetchResponse(responses=found)
        return response if found else Late(0.5, response)

    @contextlib.asynccontextmanager
    async def working(self, record: Record, seconds: float) -> Any:
        """Note the beginning and the end of the work on a record, which takes some time."""
        self.began.append((record.partition, record.offset))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(seconds)
            yield
            self.ended.append((record.partition, record.offset))
        finally:
            self.running -= 1

    def handler(self, seconds: Callable[[Record], float] = lambda _: 0.01, stop_after: int | None = None) -> Any:
        """A handler that takes some time for a record, and stops the run when so many have ended."""

        async def handle(record: Record) -> None:
            async with self.working(record, seconds(record)):
                pass
            if len(self.ended) == stop_after:
                self.consumer.stop()

        return handle

    def of_key(self, done: list[tuple[int, int]], key: bytes) -> list[tuple[int, int]]:
        return [(partition, offset) for partition, offset in done if self.logs[partition][offset] == key]

    async def end(self) -> None:
        await self.consumer.close()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, "a closed consumer leaves no task behind"


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(story(), 1)


def now() -> float:
    return running_loop().time()


def test_keys_go_on_side_by_side_and_each_in_order() -> None:
    async def story() -> None:
        world = World([b"a", b"b", b"a", b"c", b"b", b"a"] * 20, [b"a", b"d"] * 10)
        times = {b"a": 0.5, b"b": 0.1, b"c": 0.01, b"d": 0.02}
        await world.consumer.run(world.handler(lambda record: times[record.key or b""], 140), parallel=4)
        assert len(world.ended) == len(set(world.ended)) == 140
        for key in times:
            for partition in (0, 1):
                mine = [each for each in world.of_key(world.ended, key) if each[0] == partition]
                assert mine == sorted(mine)
        assert world.most == 4
        assert world.driver.consumed() == {T0: 120, T1: 20}
        await world.end()

    play(story)


def test_a_slow_key_holds_up_its_own_records_only() -> None:
    async def story() -> None:
        world = World([b"slow", b"slow", *[b"%d" % number for number in range(50)]])
        await world.consumer.run(world.handler(lambda record: 100.0 if record.key == b"slow" else 0.01, 52))
        assert world.ended[-2:] == [(0, 0), (0, 1)]
        assert now() == pytest.approx(200, abs=2)
        await world.end()

    play(story)


def test_records_without_a_key_have_no_order() -> None:
    async def story() -> None:
        world = World([None] * 64)
        await world.consumer.run(world.handler(lambda record: 10.0 - record.offset / 10, 64), parallel=64)
        assert world.most == 64
        assert world.ended == [(0, offset) for offset in reversed(range(64))]
        await world.end()

    play(story)


def test_only_the_work_in_front_of_the_first_unfinished_record_counts() -> None:
    async def story() -> None:
        world = World([b"%d" % number for number in range(30)])
        run_ = asyncio.create_task(
            world.consumer.run(world.handler(lambda record: 100.0 if record.offset == 7 else 0.01))
        )
        await asyncio.sleep(10)
        assert len(world.ended) == 29
        assert world.driver.consumed() == {T0: 7}
        assert world.driver.take_fresh([T0]) == {T0: [(8, 29)]}
        run_.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run_
        again = await world.consumer.poll(5)
        assert [record.offset for record in again] == [7], "what is done is not handed out again"
        await world.end()

    play(story)


def test_a_failed_record_stops_the_run_and_is_not_done() -> None:
    async def story() -> None:
        world = World([b"%d" % number for number in range(100)])
        handle = world.handler()

        async def fail(record: Record) -> None:
            await handle(record)
            if record.offset == 5:
                raise KeyError("five")

        with pytest.raises(KeyError, match="five"):
            await world.consumer.run(fail, parallel=8)
        assert world.running == 0 and len(world.began) == len(world.ended) < 100
        assert world.driver.consumed() == {T0: 5}
        left = [record.offset for record in await world.consumer.poll(5, 200)]
        assert left == [5, *range(len(world.began), 100)]
        await world.end()

    play(story)


def test_a_failed_record_comes_again_after_a_growing_delay_and_its_key_waits() -> None:
    async def story() -> None:
        world = World([b"a", b"a", b"b", b"b"])
        tried: list[tuple[float, int, int]] = []

        async def handle(record: Record) -> None:
            tried.append((round(now(), 1), record.offset, record.delivery_count))
            if record.offset == 0 and record.delivery_count < 4:
                raise ValueError(record)
            if record.offset == 1:
                world.consumer.stop()

        began = now()
        await world.consumer.run(handle, on_error=Retry(backoff_ms=1_000, backoff_max_ms=2_500))
        assert [(offset, count) for _, offset, count in tried] == [
            (0, 1),
            (2, 1),
            (3, 1),
            (0, 2),
            (0, 3),
            (0, 4),
            (1, 1),
        ]
        assert [at - began for at, offset, _ in tried if offset == 0] == pytest.approx([0, 1, 3, 5.5], abs=0.3)
        assert world.driver.consumed() == {T0: 4}
        await world.end()

    play(story)


def test_after_its_attempts_a_record_goes_to_the_dead_letters_and_counts_as_done() -> None:
    async def story() -> None:
        world = World([b"a", b"a", b"b"])
        left_out: list[tuple[int, int, str]] = []
        handled: list[int] = []

        async def handle(record: Record) -> None:
            handled.append(record.offset)
            if record.offset == 0:
                raise ValueError("poison")
            if len(handled) == 5:
                world.consumer.stop()

        async def dead_letter(record: Record, error: Exception) -> None:
            await asyncio.sleep(1)
            left_out.append((record.offset, record.delivery_count, str(error)))

        policy = Retry(backoff_ms=10, attempts=3, then="skip")
        await world.consumer.run(handle, on_error=policy, dead_letter=dead_letter)
        assert left_out == [(0, 3, "poison")]
        assert handled == [0, 2, 0, 0, 1]
        assert world.driver.consumed() == {T0: 3}
        await world.end()

    play(story)


def test_what_cannot_be_left_out_stops_the_run() -> None:
    async def story() -> None:
        world = World([b"a"])

        async def handle(record: Record) -> None:
            raise ValueError("poison")

        def dead_letter(record: Record, error: Exception) -> None:
            raise OSError("no room for dead letters")

        with pytest.raises(OSError, match="no room") as failed:
            await world.consumer.run(handle, on_error="skip", dead_letter=dead_letter)
        assert isinstance(failed.value.__context__, ValueError)
        assert world.driver.consumed() == {T0: 0}
        await world.end()

    play(story)


def test_a_handler_may_ask_for_its_record_again_and_the_application_decides_about_errors() -> None:
    async def story() -> None:
        world = World([b"a", b"b"])
        seen: list[tuple[int, int]] = []

        async def handle(record: Record) -> None:
            seen.append((record.offset, record.delivery_count))
            if record.offset == 0 and record.delivery_count == 1:
                raise RejectError(retry_after=3)
            if record.offset == 1:
                raise LookupError
            world.consumer.stop()

        await world.consumer.run(handle, on_error=lambda record, error: "skip" if record.offset == 1 else "stop")
        assert seen == [(0, 1), (1, 1), (0, 2)] and now() >= 3
        assert world.driver.consumed() == {T0: 2}
        await world.end()

    play(story)


def test_a_partition_runs_ahead_of_its_first_unfinished_record_by_a_bounded_distance() -> None:
    async def story() -> None:
        world = World([b"%d" % number for number in range(400)], max_offsets_ahead=100)
        handle = world.handler(lambda record: 50.0 if record.offset == 3 else 0.001, 400)
        run_ = asyncio.create_task(world.consumer.run(handle))
        await asyncio.sleep(20)
        assert max(world.ended) == (0, 102), "100 offsets from the first that is not done"
        await run_
        assert len(world.ended) == 400
        await world.end()

    play(story)


@pytest.mark.parametrize("bound", [{"max_unfinished_records": 16}, {"max_unfinished_bytes": 48}])
def test_records_are_taken_up_to_the_bounds(bound: dict[str, int]) -> None:
    async def story() -> None:
        world = World([b"%02d" % (number % 50) for number in range(10, 99)], **bound)
        most = 0

        async def handle(record: Record) -> None:
            nonlocal most
            unfinished = world.driver.unfinished
            assert unfinished is not None
            most = max(most, unfinished.tracker.unfinished)
            await world.handler(stop_after=89)(record)

        await world.consumer.run(handle)
        assert 10 <= most <= 17
        assert len(world.ended) == 89
        await world.end()

    play(story)


def test_before_a_partition_goes_its_running_records_end_and_no_others_begin() -> None:
    async def story() -> None:
        world = World([b"%d" % number for number in range(500)], [b"%d" % number for number in range(500)])
        run_ = asyncio.create_task(world.consumer.run(world.handler(lambda _: 1.0), parallel=8))
        await asyncio.sleep(5.5)
        began = len(world.began)
        await world.driver.settle([T0])
        mine = [offset for partition, offset in world.began if partition == 0]
        assert sorted(mine) == sorted(offset for partition, offset in world.ended if partition == 0)
        await asyncio.sleep(5)
        assert [offset for partition, offset in world.began if partition == 0] == mine
        assert len(world.began) > began + 20, "the other partition goes on"
        world.consumer.stop()
        await run_
        await world.end()

    play(story)


def test_handlers_that_do_not_end_in_time_are_cancelled_and_their_records_are_not_done() -> None:
    async def story() -> None:
        world = World([b"a", b"b"])
        handle = world.handler(lambda record: 1000.0 if record.offset == 0 else 0.01)
        run_ = asyncio.create_task(world.consumer.run(handle, drain_timeout_s=20))
        await asyncio.sleep(5)
        began = now()
        await world.driver.settle([T0])
        assert now() - began == pytest.approx(20, abs=1)
        assert world.running == 0 and world.driver.consumed() == {T0: 0}
        world.consumer.stop()
        await run_
        await world.end()

    play(story)


def test_lost_partitions_end_their_handlers_at_once_and_count_for_nothing() -> None:
    async def story() -> None:
        world = World([b"%d" % number for number in range(20)], [b"%d" % number for number in range(20)])
        run_ = asyncio.create_task(world.consumer.run(world.handler(lambda _: 50.0), parallel=40))
        await asyncio.sleep(5)
        assert world.running == 40
        world.driver.fetcher.withdraw([T0])
        world.driver.dropped([T0])
        await asyncio.sleep(1)
        assert world.running == 20
        await asyncio.sleep(60)
        assert sorted(world.ended) == [(1, offset) for offset in range(20)]
        world.consumer.stop()
        await run_
        await world.end()

    play(story)


def test_a_position_that_is_set_meanwhile_holds_and_records_that_run_keep_their_keys() -> None:
    async def story() -> None:
        world = World([b"a", b"b", b"a"])
        seen: list[tuple[int, float]] = []

        async def handle(record: Record) -> None:
            seen.append((record.offset, now()))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(10 if len(seen) < 3 else 0.01)
            if len(seen) == 5:
                world.consumer.stop()

        run_ = asyncio.create_task(world.consumer.run(handle, drain_timeout_s=5))
        await asyncio.sleep(4)
        assert [offset for offset, _ in seen] == [0, 1]
        await world.consumer.seek("t", 0, 0)
        await run_
        assert [offset for offset, _ in seen] == [0, 1, 0, 1, 2]
        assert world.driver.consumed() == {T0: 3}
        await world.end()

    play(story)


def test_stop_lets_running_handlers_end_and_begins_no_others() -> None:
    async def story() -> None:
        world = World([b"%d" % number for number in range(500)])
        run_ = asyncio.create_task(world.consumer.run(world.handler(lambda _: 10.0), parallel=8))
        await asyncio.sleep(5)
        with pytest.raises(ApiError, match="runs a handler"):
            await world.consumer.poll(0)
        world.consumer.stop()
        await run_
        assert len(world.began) == len(world.ended) == 8
        await world.end()

    play(story)


def test_a_consumer_that_is_closed_ends_its_run() -> None:
    async def story() -> None:
        world = World([b"%d" % number for number in range(500)])
        run_ = asyncio.create_task(world.consumer.run(world.handler(lambda _: 10.0), parallel=8))
        await asyncio.sleep(5)
        await world.consumer.close()
        await run_
        assert len(world.ended) == 8
        await world.end()

    play(story)


def test_a_cancelled_run_cancels_its_handlers() -> None:
    async def story() -> None:
        world = World([b"%d" % number for number in range(500)])
        run_ = asyncio.create_task(world.consumer.run(world.handler(lambda _: 10.0), parallel=8))
        await asyncio.sleep(5)
        run_.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run_
        assert world.running == 0 and world.ended == [] and now() < 7
        await world.end()

    play(story)


def test_a_plain_function_runs_in_threads() -> None:
    async def story() -> None:
        world = World([b"%d" % (number % 3) for number in range(60)])
        done: dict[bytes | None, list[int]] = {}

        def handle(record: Record) -> None:
            done.setdefault(record.key, []).append(record.offset)
            if sum(map(len, done.values())) == 60:
                running_loop().call_soon(world.consumer.stop)

        await world.consumer.run(handle, parallel=4)
        assert done == {b"%d" % key: list(range(key, 60, 3)) for key in range(3)}
        await world.end()

    play(story)


# -- acknowledgements by hand ---------------------------------------------------------------------------------------


def explicit(*logs: Keys, **settings: Any) -> World:
    return World(*logs, acknowledgement_mode="explicit", **settings)


async def polled(world: World, seconds: float = 0.0) -> dict[int, Record]:
    return {record.offset: record for record in await world.consumer.poll(seconds)}


def test_a_poll_returns_what_may_be_worked_on_at_the_same_time() -> None:
    async def story() -> None:
        world = explicit([b"a", b"b", b"a", None, b"b", None])
        records = await polled(world, 5)
        assert list(records) == [0, 1, 3, 5]
        assert await polled(world) == {}
        assert world.consumer.done(records[1]) and not world.consumer.done(records[1])
        assert list(await polled(world)) == [4]
        assert world.driver.consumed() == {T0: 0}
        assert world.consumer.done(records[0])
        assert world.driver.consumed() == {T0: 2}
        await world.end()

    play(story)


def test_a_rejected_record_comes_again_its_key_waits_and_other_keys_go_on() -> None:
    async def story() -> None:
        world = explicit([b"a", b"b", b"a", b"b"])
        records = await polled(world, 5)
        began = now()
        assert world.consumer.reject(records[0], retry_after=5)
        assert not world.consumer.done(records[0]), "it is not the application's any more"
        assert world.consumer.done(records[1])
        assert list(await polled(world, 1)) == [3]
        again = await polled(world, 60)
        assert list(again) == [0] and again[0].delivery_count == 2
        assert now() - began == pytest.approx(5, abs=0.2)
        assert not world.consumer.done(records[0]) and world.consumer.done(again[0])
        assert list(await polled(world)) == [2]
        await world.end()

    play(story)


def test_records_of_before_a_seek_count_for_nothing() -> None:
    async def story() -> None:
        world = explicit([b"a", b"b"])
        records = await polled(world, 5)
        await world.consumer.seek("t", 0, 0)
        assert not world.consumer.done(records[0]) and not world.consumer.reject(records[1])
        assert list(await polled(world, 5)) == [0, 1]
        assert world.driver.consumed() == {T0: 0}
        await world.end()

    play(story)


def test_paused_partitions_hand_out_nothing_that_was_taken_before_either() -> None:
    async def story() -> None:
        world = explicit([b"a", b"a"], [b"b", b"b"])
        first = {record.partition: record for record in await world.consumer.poll(5)}
        while len(first) < 2:
            first.update({record.partition: record for record in await world.consumer.poll(5)})
        await world.consumer.pause(("t", 0))
        for record in first.values():
            world.consumer.done(record)
        assert [record.partition for record in await world.consumer.poll(1)] == [1]
        await world.consumer.resume(("t", 0))
        assert [record.partition for record in await world.consumer.poll(1)] == [0]
        await world.end()

    play(story)


def test_acknowledgements_need_their_mode_and_exclude_tables() -> None:
    async def story() -> None:
        world = World([b"a"])
        (record,) = await world.consumer.poll(5)
        with pytest.raises(ApiError, match="explicit"):
            world.consumer.done(record)
        await world.end()
        world = explicit([b"a"])
        with pytest.raises(ApiError, match="tables"):
            await world.consumer.poll_arrow(1)
        await world.end()

    play(story)


def test_a_loop_that_stops_leaves_the_records_that_it_did_not_reach() -> None:
    async def story() -> None:
        world = explicit([b"a", b"b", b"c"])
        async for record in world.consumer:
            world.consumer.done(record)
            if record.offset == 1:
                break
        assert list(await polled(world)) == [2]
        await world.end()

    play(story)
