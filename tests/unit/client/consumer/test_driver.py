"""The fetcher's driver on false transports and virtual time: lost connections, late responses, closing, errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client.consumer.driver import FetchingDriver
from anabranch.client.settings import ConsumerSettings
from anabranch.machines.clients.fetching import Deliverable
from anabranch.protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse, PartitionData
from anabranch.protocol.messages.list_offsets import (
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from anabranch.protocol.messages.metadata import MetadataRequest
from tests.simulation.virtual_time import VirtualClock, run, running_loop
from tests.support.scripted_broker import DELAY_S, HANG_UP, SILENT, Late, ScriptedBroker, topic_id
from tests.support.wire import batch

MAX_WAIT_MS = 500
REQUEST_TIMEOUT_MS = 1_000


def records(first: int, count: int) -> bytes:
    """A batch without a leader epoch, as brokers send that know none."""
    made = batch([b"%d" % offset for offset in range(first, first + count)])
    made[:8] = first.to_bytes(8, "big")
    return bytes(made)


class Logs:
    """A topic of one partition; a fetch at its end waits for the longest time."""

    def __init__(self, end: int) -> None:
        self.end = end

    def offsets(self, request: ListOffsetsRequest) -> ListOffsetsResponse:
        return ListOffsetsResponse(
            topics=[
                ListOffsetsTopicResponse(
                    name=topic.name,
                    partitions=[
                        ListOffsetsPartitionResponse(
                            partition_index=part.partition_index, offset=0 if part.timestamp == -2 else self.end
                        )
                        for part in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    def fetch(self, request: FetchRequest) -> Any:
        wanted = [(topic, part) for topic in request.topics for part in topic.partitions]
        found = [(topic, part) for topic, part in wanted if part.fetch_offset < self.end]
        response = FetchResponse(
            responses=[
                FetchableTopicResponse(
                    topic_id=topic.topic_id,
                    partitions=[
                        PartitionData(
                            partition_index=part.partition,
                            high_watermark=self.end,
                            last_stable_offset=self.end,
                            log_start_offset=0,
                            records=records(part.fetch_offset, self.end - part.fetch_offset),
                        )
                    ],
                )
                for topic, part in found
            ]
        )
        return response if found else Late(MAX_WAIT_MS / 1000, response)


class World:
    """A driver, its broker, and the broker's log."""

    def __init__(self, end: int = 3, **settings: Any) -> None:
        chosen: dict[str, Any] = {
            "request_timeout_ms": REQUEST_TIMEOUT_MS,
            "fetch_max_wait_ms": MAX_WAIT_MS,
            "auto_offset_reset": "earliest",
            **settings,
        }
        self.broker = ScriptedBroker({"t": 1})
        self.logs = Logs(end)
        self.broker.on(ListOffsetsRequest, self.logs.offsets)
        self.broker.on(FetchRequest, self.logs.fetch)
        self.cluster = self.broker.cluster(request_timeout_ms=REQUEST_TIMEOUT_MS)
        self.driver = FetchingDriver(ConsumerSettings(**chosen), self.cluster, VirtualClock(running_loop()))
        self.driver.fetcher.assign([], ["t"])

    async def poll(self, timeout_s: float | None = None) -> list[tuple[int, int]]:
        """Take everything that is deliverable; the offset range of each part."""
        parts: list[Deliverable] = await self.driver.gather(timeout_s)
        found = [(part.start, part.end) for part in parts]
        assert self.driver.fetcher.all_handed_out(parts)
        self.driver.pump()
        return found

    def fetched_from(self) -> list[int]:
        """The offset of every partition in every fetch request."""
        requests = self.broker.requests(FetchRequest)
        return [part.fetch_offset for request in requests for topic in request.topics for part in topic.partitions]

    async def end(self) -> None:
        await self.driver.close()
        await self.cluster.close()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, "a closed driver leaves no task behind"


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(story(), 1)


def test_records_come_in_order_and_new_ones_as_soon_as_they_are_there() -> None:
    async def story() -> None:
        world = World()
        assert await world.poll() == [(0, 3)]
        assert await world.poll(0.1) == []
        world.logs.end = 5
        assert await world.poll() == [(3, 5)]
        assert {asked.request.topics[0].topic_id for asked in world.broker.asked if _fetches(asked.request)} == {
            topic_id("t")
        }
        await world.end()

    play(story)


def _fetches(request: Any) -> bool:
    return isinstance(request, FetchRequest) and bool(request.topics)


def test_a_poll_without_records_ends_at_its_timeout() -> None:
    async def story() -> None:
        world = World(end=0)
        began = running_loop().time()
        assert await world.poll(2.5) == []
        assert running_loop().time() - began == pytest.approx(2.5)
        assert await world.poll(0) == []
        assert running_loop().time() - began == pytest.approx(2.5)
        await world.end()

    play(story)


@pytest.mark.parametrize("loss", ["hang up", "silence", "refused connection"])
def test_a_lost_fetch_is_asked_again_from_the_same_offset(loss: str) -> None:
    async def story() -> None:
        world = World()
        assert await world.poll() == [(0, 3)]
        if loss == "refused connection":
            world.broker.reachable = False
            world.broker.hang_up()
        else:
            world.broker.script(FetchRequest, SILENT if loss == "silence" else HANG_UP, world.logs.fetch)
            world.broker.hang_up()
        assert await world.poll(0.3) == []
        world.logs.end = 4
        world.broker.reachable = True
        assert await world.poll() == [(3, 4)]
        assert set(world.fetched_from()) <= {0, 3}
        await world.end()

    play(story)


def test_a_response_that_comes_too_late_is_dropped_with_its_connection() -> None:
    async def story() -> None:
        world = World()
        late_s = (REQUEST_TIMEOUT_MS + MAX_WAIT_MS) / 1000 + 0.5
        world.broker.script(FetchRequest, lambda request: Late(late_s, world.logs.fetch(request)), world.logs.fetch)
        began = running_loop().time()
        assert await world.poll() == [(0, 3)]
        assert running_loop().time() - began >= (REQUEST_TIMEOUT_MS + MAX_WAIT_MS) / 1000
        assert await world.poll(3) == [], "the late response brings nothing twice"
        await world.end()

    play(story)


def test_a_lookup_of_an_offset_is_tried_again_until_it_is_answered() -> None:
    async def story() -> None:
        world = World()
        world.broker.script(ListOffsetsRequest, HANG_UP, HANG_UP, HANG_UP, SILENT, world.logs.offsets)
        assert await world.poll() == [(0, 3)]
        assert len(world.broker.requests(ListOffsetsRequest)) == 5
        await world.end()

    play(story)


def test_a_topic_that_does_not_exist_is_the_error_of_the_poll_and_found_when_it_is_made() -> None:
    async def story() -> None:
        world = World()
        world.broker.topics.clear()
        with pytest.raises(ApiError, match="t") as failure:
            await world.poll(60)
        assert failure.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        world.broker.topics["t"] = 1
        found: list[tuple[int, int]] = []
        while not found:
            with contextlib.suppress(ApiError):
                found = await world.poll(1)
        assert found == [(0, 3)]
        await world.end()

    play(story)


@pytest.mark.parametrize("waiting_for", ["metadata", "lookup", "fetch", "connection"])
def test_close_ends_a_poll_whatever_it_waits_for(waiting_for: str) -> None:
    async def story() -> None:
        world = World(end=0)
        if waiting_for == "metadata":
            world.broker.script(MetadataRequest, SILENT)
        elif waiting_for == "lookup":
            world.broker.script(ListOffsetsRequest, SILENT)
        elif waiting_for == "fetch":
            world.broker.script(FetchRequest, SILENT)
        else:
            world.broker.reachable = False
        polling = asyncio.create_task(world.poll(None))
        await asyncio.sleep(0.5)
        assert not polling.done()
        began = running_loop().time()
        await world.driver.close()
        with pytest.raises(ApiError, match="closed"):
            await polling
        assert running_loop().time() - began < 0.1
        await world.end()
        asked = len(world.broker.asked)
        await asyncio.sleep(400)
        assert len(world.broker.asked) == asked, "a closed driver sends nothing"
        with pytest.raises(ApiError, match="closed"):
            await world.poll(0)

    play(story)


def test_know_waits_for_the_metadata_of_what_is_assigned_and_raises_what_hinders_it() -> None:
    async def story() -> None:
        world = World()
        metadata = world.broker._metadata
        world.broker.script(MetadataRequest, SILENT, metadata)
        await world.driver.know([])
        assert [tuple(tp) for tp in world.driver.fetcher.assignment] == [("t", 0)]
        await world.end()
        missing = World()
        missing.broker.topics.clear()
        with pytest.raises(ApiError):
            await missing.driver.know([])
        await missing.end()

    play(story)


def test_metadata_is_refreshed_at_its_age_while_nobody_polls() -> None:
    async def story() -> None:
        world = World(metadata_max_age_ms=60_000)
        await world.poll()
        before = len(world.broker.requests(MetadataRequest))
        await asyncio.sleep(60 + DELAY_S * 10)
        once = len(world.broker.requests(MetadataRequest))
        assert once > before
        await asyncio.sleep(60)
        assert len(world.broker.requests(MetadataRequest)) - once == once - before
        await world.end()

    play(story)


def test_a_poll_without_an_assignment_says_what_to_do() -> None:
    async def story() -> None:
        world = World()
        world.driver.fetcher.assign([], [])
        with pytest.raises(ApiError, match="assign a topic first"):
            await world.poll(1)
        await world.end()

    play(story)
