"""One connection over a real socket pair: answers in the order of requests, and what becomes of them when it closes."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.base.errors import DecodeError
from anabranch.base.limits import IN_FLIGHT_PER_CONNECTION_MAX, STRING_SIZE_MAX
from anabranch.codec import compile, prepare
from anabranch.protocol import frames
from anabranch.protocol.frames import decode_request, decode_request_into, encode_request
from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from anabranch.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from anabranch.protocol.messages.list_groups import ListGroupsRequest
from anabranch.runtime.clock import Clock
from anabranch.runtime.metrics import Metrics
from anabranch.runtime.net.pool import BufferPool
from anabranch.runtime.net.transport import PlainTransport
from anabranch.server import handlers
from anabranch.server.context import ANONYMOUS, Apart, BrokerContext, CloseConnectionError, Large, RequestContext
from anabranch.server.coordinators.turns import Turns
from anabranch.server.handlers import Endpoint, Handler, Operation
from anabranch.server.network.connection import LARGE_REQUEST_SIZE, Connection
from anabranch.server.network.service import Service

HEARTBEAT, LIST_GROUPS, CONSUMER_GROUP_HEARTBEAT = 12, 16, 68
VERSION = 4
NONSENSE = struct.pack(">i", 8) + b"\x7f\xff\x00\x00\x00\x00\x00\x00"


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are read at once, though some are the first of their kind in this process."""
    monkeypatch.setattr(
        "anabranch.server.network.connection.decode_request", lambda frame, *most, **_: decode_request(frame, *most)
    )


def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next request be the first of its kind."""
    monkeypatch.undo()
    for known in (frames._served, compile._readers, compile._writers):
        for kind in (HEARTBEAT, HeartbeatRequest, HeartbeatResponse):
            monkeypatch.delitem(cast("dict[Any, Any]", known), (kind, VERSION), raising=False)


def heartbeat(number: int, client_id: str | None = "a client", version: int = VERSION) -> bytes:
    """A request of which the generation and the correlation id are `number`."""
    request = HeartbeatRequest(group_id="g", generation_id=number, member_id="m")
    return b"".join(bytes(part) for part in encode_request(request, version, number, client_id))


class Client:
    """The other end of a connection whose only API is served by `handler`."""

    def __init__(self, handler: Handler, limits: Mapping[str, int] | None = None) -> None:
        self.sock, ours = socket.socketpair()
        self.sock.setblocking(False)
        self.closed: list[Connection] = []
        service = Service(
            broker=cast(BrokerContext, None),
            loop=asyncio.get_running_loop(),
            endpoints={HEARTBEAT: Endpoint(handler, Operation.READ, limits=limits or {})},
            metrics=Metrics(),
            pool=BufferPool(1 << 24),
            frame_size_max=1 << 20,
        )
        self.connection = Connection(service, PlainTransport(ours), "peer:1", 7, self.closed.append)
        self.connection.channel.start()

    async def send(self, *frames: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, b"".join(frames))

    async def answers(self, count: int) -> list[int]:
        """The correlation ids of the next answers."""
        loop, found = asyncio.get_running_loop(), []
        for _ in range(count):
            (size,) = struct.unpack(">i", await loop.sock_recv(self.sock, 4))
            found.append(struct.unpack(">i", (await loop.sock_recv(self.sock, size))[:4])[0])
        return found


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a story; a coroutine that was never awaited fails it."""

    async def limited() -> None:
        async with asyncio.timeout(10):
            await story()

    asyncio.run(limited())
    gc.collect()


async def until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.001)


def test_a_handler_is_told_who_asks() -> None:
    seen: list[RequestContext] = []

    def handle(broker: BrokerContext, request: HeartbeatRequest, call: RequestContext) -> HeartbeatResponse:
        seen.append(call)
        return HeartbeatResponse()

    async def story() -> None:
        client = Client(handle)
        await client.send(heartbeat(1))
        assert await client.answers(1) == [1]
        said = [("a client", VERSION), ("a client", 3), ("another", 3), (None, 3), ("a client", VERSION)]
        assert seen == [RequestContext(ANONYMOUS, "a client", "peer:1", 7, VERSION)]
        for number, (client_id, version) in enumerate(said):
            await client.send(heartbeat(number, client_id, version))
        assert await client.answers(len(said)) == list(range(len(said)))
        assert [(call.client_id, call.api_version) for call in seen[1:]] == said
        client.sock.close()
        await until(lambda: client.closed)

    run(story)


def test_a_handler_never_sees_a_field_above_the_limit_of_its_endpoint() -> None:
    seen: list[int] = []

    def handle(broker: BrokerContext, request: HeartbeatRequest, call: RequestContext) -> HeartbeatResponse:
        seen.append(request.generation_id)
        return HeartbeatResponse()

    async def story() -> None:
        client = Client(handle, {"generation_id": 7})
        await client.send(*map(heartbeat, (6, 7, 8)))
        assert await client.answers(3) == [6, 7, 8]
        assert seen == [6, 7, 7]
        client.sock.close()
        await until(lambda: client.closed)

    run(story)


def test_answers_keep_the_order_of_requests_whenever_they_are_ready() -> None:
    async def story() -> None:
        waiting: dict[int, asyncio.Future[HeartbeatResponse]] = {}

        def handle(
            broker: BrokerContext, request: HeartbeatRequest, call: RequestContext
        ) -> HeartbeatResponse | Awaitable[HeartbeatResponse]:
            if request.generation_id % 2:
                return HeartbeatResponse()
            waiting[request.generation_id] = asyncio.get_running_loop().create_future()
            return waiting[request.generation_id]

        client = Client(handle)
        await client.send(*(heartbeat(number) for number in range(1, 6)))
        await until(lambda: len(waiting) == 2)
        waiting[4].set_result(HeartbeatResponse())
        assert await client.answers(1) == [1]
        waiting[2].set_result(HeartbeatResponse())
        assert await client.answers(4) == [2, 3, 4, 5]
        client.sock.close()
        await until(lambda: client.closed)

    run(story)


def test_no_more_requests_begin_than_may_wait() -> None:
    async def story() -> None:
        begun: list[asyncio.Future[HeartbeatResponse]] = []

        def handle(
            broker: BrokerContext, request: HeartbeatRequest, call: RequestContext
        ) -> Awaitable[HeartbeatResponse]:
            begun.append(asyncio.get_running_loop().create_future())
            return begun[-1]

        client = Client(handle)
        most = IN_FLIGHT_PER_CONNECTION_MAX
        await client.send(*(heartbeat(number) for number in range(most + 2)))
        await until(lambda: len(begun) == most)
        await asyncio.sleep(0.01)
        assert len(begun) == most
        begun[0].set_result(HeartbeatResponse())
        await until(lambda: len(begun) == most + 1)
        client.sock.close()
        for answer in begun:  # While as many wait as may, the connection is not read, and its end not seen.
            if not answer.done():
                answer.set_result(HeartbeatResponse())
        await until(lambda: client.closed)

    run(story)


@pytest.mark.parametrize("hang_up", ["nonsense in the same packet", "hanging up"])
def test_an_answer_that_is_being_made_when_the_connection_closes_is_awaited_and_cancelled(hang_up: str) -> None:
    async def story() -> None:
        parked: list[asyncio.Future[None]] = []
        ended: list[str] = []

        async def answer() -> HeartbeatResponse:
            parked.append(asyncio.get_running_loop().create_future())
            try:
                await parked[-1]
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            return HeartbeatResponse()

        def handle(
            broker: BrokerContext, request: HeartbeatRequest, call: RequestContext
        ) -> Awaitable[HeartbeatResponse]:
            return answer()

        client = Client(handle)
        if hang_up == "hanging up":
            await client.send(heartbeat(1))
            await until(lambda: parked)
            client.sock.close()
        else:
            await client.send(heartbeat(1), NONSENSE)
        await until(lambda: client.closed)
        await until(lambda: ended)
        assert ended == ["cancelled"]
        assert parked[0].cancelled()
        assert not client.connection.busy
        client.sock.close()

    run(story)


def test_a_future_that_a_handler_gave_is_cancelled_when_the_connection_closes() -> None:
    async def story() -> None:
        given: list[asyncio.Future[HeartbeatResponse]] = []

        def handle(
            broker: BrokerContext, request: HeartbeatRequest, call: RequestContext
        ) -> Awaitable[HeartbeatResponse]:
            given.append(asyncio.get_running_loop().create_future())
            return given[-1]

        client = Client(handle)
        await client.send(heartbeat(1), NONSENSE)
        await until(lambda: client.closed and given[0].cancelled())
        client.sock.close()

    run(story)


def test_a_connection_is_closed_when_one_of_its_answers_will_not_come() -> None:
    async def story() -> None:
        given: list[asyncio.Future[HeartbeatResponse]] = []

        def handle(
            broker: BrokerContext, request: HeartbeatRequest, call: RequestContext
        ) -> Awaitable[HeartbeatResponse]:
            given.append(asyncio.get_running_loop().create_future())
            return given[-1]

        client = Client(handle)
        await client.send(heartbeat(1), heartbeat(2))
        await until(lambda: len(given) == 2)
        given[0].cancel()
        await until(lambda: client.closed)
        assert not client.connection.busy
        await until(given[1].cancelled)
        client.sock.close()

    run(story)


def test_a_handler_may_have_the_connection_closed() -> None:
    async def story() -> None:
        def handle(broker: BrokerContext, request: HeartbeatRequest, call: RequestContext) -> HeartbeatResponse:
            raise CloseConnectionError("as asked")

        client = Client(handle)
        await client.send(heartbeat(1))
        await until(lambda: client.closed)
        assert await asyncio.get_running_loop().sock_recv(client.sock, 1) == b""
        client.sock.close()

    run(story)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_request_handled_apart_holds_the_next_ones_back_but_not_while_its_answer_waits(
    monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    if is_first:
        unprepared(monkeypatch)
    begun: list[int] = []
    looking, looked, synced = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def sync() -> HeartbeatResponse:
        await synced.wait()
        return HeartbeatResponse()

    def handle(broker: BrokerContext, request: HeartbeatRequest, call: RequestContext) -> Any:
        if request.generation_id != 1:
            begun.append(request.generation_id)
            return HeartbeatResponse()

        async def look(copy: HeartbeatRequest) -> Awaitable[HeartbeatResponse]:
            looking.set()
            await looked.wait()
            begun.append(copy.generation_id)
            return sync()

        return Apart(look)

    async def story() -> None:
        client = Client(handle)
        pool = client.connection._service.pool
        await client.send(*map(heartbeat, (1, 2, 3)))
        await until(lambda: looking.is_set())
        await asyncio.sleep(0.02)
        assert begun == [] and pool.in_use
        looked.set()
        await until(lambda: len(begun) == 3)
        assert begun == [1, 2, 3]
        assert pool.in_use == 0
        synced.set()
        assert await client.answers(3) == [1, 2, 3]
        client.sock.close()
        await until(lambda: client.closed)

    run(story)


def test_a_request_handled_apart_may_want_no_answer_or_the_connection_closed() -> None:
    def handle(broker: BrokerContext, request: HeartbeatRequest, call: RequestContext) -> Any:
        async def look(copy: HeartbeatRequest) -> HeartbeatResponse | None:
            if copy.generation_id == 3:
                raise CloseConnectionError("as it went wrong")
            return None if copy.generation_id == 1 else HeartbeatResponse()

        return Apart(look)

    async def story() -> None:
        client = Client(handle)
        await client.send(*map(heartbeat, (1, 2, 3)))
        assert await client.answers(1) == [2]
        await until(lambda: client.closed)
        assert client.connection._service.pool.in_use == 0
        client.sock.close()

    run(story)


# -- a peer that hangs up while its connection is not read ---------------------------------------------------------


class Served:
    """Two APIs whose answers wait: heartbeats, which change something, and group listings, which do not."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.given: dict[int, asyncio.Future[Any]] = {}
        self.client = Client(self._beat)
        endpoints = cast(dict[int, Endpoint], self.client.connection._service.endpoints)
        endpoints[LIST_GROUPS] = Endpoint(self._list, Operation.DESCRIBE)

    def _wait(self, number: int) -> Awaitable[Any]:
        self.begun.append(number)
        self.given[number] = asyncio.get_running_loop().create_future()
        return self.given[number]

    def _beat(self, broker: BrokerContext, request: HeartbeatRequest, call: RequestContext) -> Awaitable[Any]:
        return self._wait(request.generation_id)

    def _list(self, broker: BrokerContext, request: ListGroupsRequest, call: RequestContext) -> Awaitable[Any]:
        return self._wait(int(request.states_filter[0]))


def listing(number: int, size: int = 0) -> bytes:
    """A request that only reads, and is decoded in a thread where it has `size`."""
    request = ListGroupsRequest(states_filter=[str(number), *["x" * min(size, 30_000)] * 2])
    return b"".join(bytes(part) for part in encode_request(request, 4, number, "a client"))


FULL = range(IN_FLIGHT_PER_CONNECTION_MAX)
BEHIND = IN_FLIGHT_PER_CONNECTION_MAX


def test_reads_are_dropped_when_the_peer_has_hung_up_and_what_came_behind_them_is_done() -> None:
    async def story() -> None:
        served = Served()
        client = served.client
        await client.send(*map(listing, FULL), listing(BEHIND), heartbeat(BEHIND + 1))
        await until(lambda: len(served.begun) == len(FULL))
        client.sock.close()
        await until(lambda: all(each.cancelled() for each in served.given.values()))
        await until(lambda: client.closed)
        assert served.begun == [*FULL, BEHIND + 1], "the read behind is not begun, the other request is"

    run(story)


def test_a_peer_that_ends_its_side_alone_is_sent_the_answers_before_the_first_that_was_dropped() -> None:
    async def story() -> None:
        served = Served()
        client = served.client
        await client.send(heartbeat(0), *map(listing, FULL[1:]), heartbeat(BEHIND))
        await until(lambda: len(served.begun) == len(FULL))
        client.sock.shutdown(socket.SHUT_WR)
        await until(lambda: all(served.given[number].cancelled() for number in FULL[1:]))
        assert served.begun == [*FULL] and not client.closed
        served.given[0].set_result(HeartbeatResponse())
        assert await client.answers(1) == [0]
        await until(lambda: client.closed)
        assert served.begun == [*FULL, BEHIND]
        assert await asyncio.get_running_loop().sock_recv(client.sock, 1) == b""
        client.sock.close()

    run(story)


def test_a_large_read_that_waits_for_memory_is_dropped_when_the_peer_has_hung_up() -> None:
    async def story() -> None:
        served = Served()
        client, decoded = served.client, served.client.connection._service.decoded
        decoded.take(decoded.size_max, lambda: None)
        await client.send(listing(1, LARGE_REQUEST_SIZE), heartbeat(2), listing(3, LARGE_REQUEST_SIZE))
        await until(lambda: decoded.waiting)
        client.sock.close()
        await until(lambda: client.closed)
        await until(lambda: not client.connection._service.pool.in_use)
        decoded.give(decoded.size_max)
        assert served.begun == [2] and not decoded.held and not decoded.waiting

    run(story)


def test_no_write_is_dropped_when_the_peer_has_hung_up_however_large() -> None:
    async def story() -> None:
        served = Served()
        client = served.client
        await client.send(large(1), listing(2, LARGE_REQUEST_SIZE), large(3), heartbeat(4))
        client.sock.shutdown(socket.SHUT_WR)
        for number in (1, 3):
            await until(lambda number=number: number in served.given)  # type: ignore[misc]
            assert served.begun[-1] == number
            served.given[number].set_result(HeartbeatResponse())
        await until(lambda: client.closed)
        assert served.begun in ([1, 3, 4], [1, 2, 3, 4]), "the read may have begun before the hang-up was known"
        client.sock.close()

    run(story)


# -- large requests and answers --------------------------------------------------------------------------------------


def large(number: int) -> bytes:
    """A request that is decoded in a thread."""
    request = HeartbeatRequest(group_id="g" * STRING_SIZE_MAX, generation_id=number, member_id="m")
    return b"".join(bytes(part) for part in encode_request(request, VERSION, number, "a client"))


def test_a_large_request_is_decoded_in_a_thread_and_the_next_one_begins_when_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    threads: list[int] = []
    answered = asyncio.Event()

    def decode(frame: memoryview, *most: int, **_: bool) -> Any:
        threads.append(threading.get_ident())
        return decode_request(frame, *most)

    for module in ("anabranch.protocol.frames", "anabranch.server.network.connection"):
        monkeypatch.setattr(f"{module}.decode_request", decode)

    async def wait(number: int) -> HeartbeatResponse:
        await answered.wait()
        return HeartbeatResponse()

    def handle(broker: BrokerContext, request: HeartbeatRequest, call: RequestContext) -> Any:
        begun.append(request.generation_id)
        return wait(request.generation_id) if request.generation_id == 2 else HeartbeatResponse()

    async def story() -> None:
        client = Client(handle)
        here = threading.get_ident()
        await client.send(heartbeat(1), large(2), heartbeat(3), large(4), heartbeat(5))
        await until(lambda: len(begun) == 2)
        assert await client.answers(1) == [1]
        assert begun == [1, 2] and client.connection.busy
        answered.set()
        assert await client.answers(4) == [2, 3, 4, 5]
        assert begun == [1, 2, 3, 4, 5]
        assert [thread == here for thread in threads] == [True, False, True, False, True]
        await until(lambda: not client.connection._service.pool.in_use)
        client.sock.close()
        await until(lambda: client.closed)

    run(story)


def test_the_first_request_of_its_kind_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that reads it, and writes its answer, is made there: up to 10 ms."""
    unprepared(monkeypatch)
    threads: list[int] = []

    def note(*declared: type, version: int) -> None:
        threads.append(threading.get_ident())
        prepare(*declared, version=version)

    monkeypatch.setattr(frames, "prepare", note)

    async def story() -> None:
        client = Client(lambda broker, request, call: HeartbeatResponse())
        await client.send(*map(heartbeat, range(1, 4)))
        assert await client.answers(3) == [1, 2, 3]
        (thread,) = threads
        assert thread != threading.get_ident()
        assert (HeartbeatResponse, VERSION) in compile._writers
        await until(lambda: not client.connection._service.pool.in_use)
        client.sock.close()
        await until(lambda: client.closed)

    run(story)


@pytest.mark.parametrize("is_large", [False, True])
def test_the_handler_that_few_ask_for_is_imported_in_a_thread(monkeypatch: pytest.MonkeyPatch, is_large: bool) -> None:
    unprepared(monkeypatch)
    threads: list[int] = []

    def imported(name: str) -> SimpleNamespace:
        threads.append(threading.get_ident())
        assert name == "anabranch.server.handlers.rare"
        return SimpleNamespace(handle=lambda broker, request, call: HeartbeatResponse())

    monkeypatch.setattr(handlers, "import_module", imported)

    async def story() -> None:
        client = Client(handlers._Rare("rare", "handle"))
        await client.send(large(1) if is_large else heartbeat(1))
        assert await client.answers(1) == [1]
        assert threads[0] != threading.get_ident() == threads[1], "then it is only looked up"
        client.sock.close()
        await until(lambda: client.closed)

    run(story)


def test_a_large_request_that_is_malformed_closes_its_connection() -> None:
    async def story() -> None:
        client = Client(lambda broker, request, call: HeartbeatResponse())
        frame = bytearray(large(1))
        frame[4 + 8 + 2 + len("a client")] = 0x7F  # The length of the group id.
        await client.send(bytes(frame[:-3]) + b"\xff" * 3)
        await until(lambda: client.closed)
        await until(lambda: not client.connection._service.pool.in_use)
        client.sock.close()

    run(story)


def test_a_connection_may_close_while_its_request_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, decoded = threading.Event(), threading.Event()

    def decode(frame: memoryview, *most: int, **_: bool) -> Any:
        decoding.set()
        assert decoded.wait(10)
        return decode_request(frame, *most)

    monkeypatch.setattr("anabranch.protocol.frames.decode_request", decode)

    async def story() -> None:
        client = Client(lambda broker, request, call: HeartbeatResponse())
        await client.send(large(1))
        await until(decoding.is_set)
        client.connection.channel.close()
        await asyncio.sleep(0)
        decoded.set()
        await until(lambda: not client.connection._apart and not client.connection._service.pool.in_use)
        assert not client.connection._tasks
        client.sock.close()

    run(story)


@pytest.mark.parametrize("hangs_up", [False, True])
@pytest.mark.parametrize("api_key", [HEARTBEAT, CONSUMER_GROUP_HEARTBEAT])
def test_a_large_request_in_a_coordinator_s_line_counts_until_its_turn_is_over(api_key: int, hangs_up: bool) -> None:
    may_end, handled = asyncio.Event(), []

    async def story() -> None:
        turns = Turns("a shard", Clock())

        async def decided() -> Any:
            await may_end.wait()
            handled.append(api_key)
            return HeartbeatResponse() if api_key == HEARTBEAT else ConsumerGroupHeartbeatResponse(assignment=None)

        client = Client(lambda broker, request, call: turns.take(decided))
        service = client.connection._service
        cast(dict[int, Endpoint], service.endpoints)[api_key] = service.endpoints[HEARTBEAT]
        beat = ConsumerGroupHeartbeatRequest(group_id="g" * STRING_SIZE_MAX, member_id="m", member_epoch=1)
        parts = encode_request(beat, 1, 1, "a client")
        await client.send(large(1) if api_key == HEARTBEAT else b"".join(map(bytes, parts)))
        await until(lambda: turns.busy)
        if hangs_up:
            client.connection.channel.close()
            await asyncio.sleep(0.05)
        assert service.decoded.held > LARGE_REQUEST_SIZE and not handled
        may_end.set()
        await until(lambda: not service.decoded.held and not service.pool.in_use)
        assert handled == [api_key]
        client.sock.close()

    run(story)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_large_answer_is_made_in_a_thread(awaited: bool) -> None:
    made: list[int] = []

    def make() -> HeartbeatResponse:
        made.append(threading.get_ident())
        return HeartbeatResponse()

    async def later() -> Large:
        return Large(make)

    def handle(broker: BrokerContext, request: HeartbeatRequest, call: RequestContext) -> Any:
        if request.generation_id == 2:
            return HeartbeatResponse()
        return later() if awaited else Large(make)

    async def story() -> None:
        client = Client(handle)
        await client.send(heartbeat(1), heartbeat(2))
        assert await client.answers(2) == [1, 2]
        assert made and made[0] != threading.get_ident()
        client.sock.close()
        await until(lambda: client.closed)

    run(story)


def test_large_answers_keep_no_other_work_from_its_thread() -> None:
    many = IN_FLIGHT_PER_CONNECTION_MAX
    going_on = threading.Event()

    def make() -> HeartbeatResponse:
        assert going_on.wait(20)
        return HeartbeatResponse()

    async def story() -> None:
        client = Client(lambda broker, request, call: Large(make))
        await client.send(*(heartbeat(number) for number in range(many)))
        await until(lambda: len(client.connection._tasks) == many)
        async with asyncio.timeout(10):
            await asyncio.get_running_loop().run_in_executor(None, going_on.set)
        assert await client.answers(many) == [*range(many)]
        client.sock.close()
        await until(lambda: client.closed)

    run(story)


@pytest.mark.parametrize("cut", [0, 3], ids=["too many topics", "cut off"])
def test_the_error_of_a_large_request_holds_nothing_of_what_was_read(cut: int) -> None:
    topics = [CreatableTopic(name=f"n{number}", num_partitions=1, replication_factor=1) for number in range(20_001)]
    frame = b"".join(bytes(part) for part in encode_request(CreateTopicsRequest(topics=topics), 7, 1, None))[4:]
    del topics
    requests: list[Any] = []
    with pytest.raises(DecodeError) as found:
        decode_request_into(requests, memoryview(frame[: len(frame) - cut]))
    left = sum(type(each) is CreatableTopic for each in gc.get_objects())
    assert (requests, left) == ([], 0), found
