"""One client's connection: frames in, requests handled, answers out in the order of the requests.

The rule: a connection with malformed requests is closed, with one WARNING that names the peer and the reason; other
connections are not affected. While too many requests wait for their response, or the peer does not read its responses,
no request is begun (`admission.may_begin`), so that a connection holds a bounded amount of memory. The response of a
request that has begun is awaited even if its connection closes: its handler receives the cancellation.

A peer may hang up while its connection is not read. Then requests that only read are dropped, those in progress and
those behind them; what else has arrived is handled as if the peer were there (`runtime.net.hang_ups`).

A request of many elements is decoded in a thread, and a large answer is encoded in one. A connection begins no further
request before the one that was decoded apart is answered. The code for the first request of a kind is made in a thread,
too, before the request is handled as any other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from time import perf_counter
from traceback import clear_frames
from typing import Any

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.codec import TooManyElementsError
from anabranch.protocol.frames import (
    NotPreparedError,
    RequestHeader,
    UnsupportedVersionError,
    decode_request,
    decode_request_into,
    encode_response,
    prepare_request,
    request_key,
)
from anabranch.protocol.registry import API
from anabranch.runtime.events import EventLogger
from anabranch.runtime.freeing import free_one_by_one
from anabranch.runtime.loop_steps import timed
from anabranch.runtime.net.channel import FrameChannel, Part, memory_size
from anabranch.runtime.net.transport import Transport
from anabranch.runtime.thread_work import to_the_end
from anabranch.server.context import (
    ANONYMOUS,
    Apart,
    CloseConnectionError,
    Large,
    RequestContext,
    keep_message,
)
from anabranch.server.handlers import READS
from anabranch.server.handlers.api_versions import supported
from anabranch.server.handlers.refused import REFUSED, reason_of, refusal_of
from anabranch.server.network.admission import Activity, Verdict, may_begin
from anabranch.server.network.gathering import gathered
from anabranch.server.network.service import ApiMetrics, Service

events = EventLogger("listener")
NO_API, PRODUCE, API_VERSIONS = -1, 0, 18
LARGE_REQUEST_SIZE = 32 * 1024
"""Bytes of a request from which on it is decoded in a thread: 1,000 partitions of a fetch, which take 2 ms."""
LOOP_ELEMENTS_MAX = 1_000
"""Elements of a request above which it is decoded in a thread, too: of Produce, whose size says little."""
DECODED_FACTOR = 32
"""What a decoded request takes at most, in its bytes: 29 were measured of names of topics."""
WAITING = frozenset((11, 14, 28))
"""Requests that may wait for members or commits: JoinGroup, SyncGroup, TxnOffsetCommit. They take no part of the memory
for decoded requests, since others that they wait for might wait for them. A fetch and a ConsumerGroupPosition give
their part back before they wait. One in the line of a coordinator waits for none that is not decoded."""
GATHERED = READS - {1, 3, 10}
"""Requests whose answers may be long and have their turns; a fetch has memory of its own, and Metadata and
FindCoordinator may wait for what they make: their long answers are made in the threads alone."""
LONG_READS = READS - {1}
"""Requests whose handlers may hold much when their client hangs up; a fetch frees what it holds itself."""
GATHERED_FACTOR = 16
"""What an answer takes at most before it is encoded, in its bytes: 7 were measured of sizes of logs."""


_DROPPED: Sequence[Part] = []
"""In place of the answer to a read whose peer has hung up."""


class _Place:
    """The place of one request's answer in the order of answers."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: Sequence[Part] | None = None
        """The encoded response; None until complete."""


class Connection:
    """One client's connection."""

    def __init__(
        self,
        service: Service,
        transport: Transport,
        peer: str,
        number: int,
        on_closed: Callable[[Connection], None],
    ) -> None:
        """`number` is larger than that of every earlier connection; `on_closed` is called once."""
        self.peer = peer
        self.number = number
        self._service = service
        self._broker = service.broker
        self._loop = service.loop
        self._forget = on_closed
        self._places: deque[_Place] = deque()
        self._tasks: dict[asyncio.Task[None], int] = {}
        """The tasks of requests in progress, and the API of each."""
        self._fd = transport.fd
        self._full = False
        self._held = 0
        """Bytes of memory that answers hold, as last noted."""
        self._held_since = 0.0
        self._apart = False
        """Whether a request is handled apart from the loop, so that no further one may begin."""
        self._call: RequestContext | None = None
        """The context of the last request: most have the same."""
        self._hung_up = False
        self._dropped = False
        """Whether the turn of a dropped answer has come: a later one would be taken for it, and is not sent."""
        self.channel = FrameChannel(
            service.loop,
            transport,
            self,
            pool=service.pool,
            landing=service.landing,
            frame_size_max=service.frame_size_max,
        )

    @property
    def busy(self) -> bool:
        """Whether a request waits for its answer, or an answer to be sent."""
        return self._apart or bool(self._places) or self.channel.unsent > 0

    @property
    def activity(self) -> Activity:
        """The activity of the connection, for admission."""
        channel = self.channel
        held_since = channel.held_since if channel.holds_memory else None
        self._note_answers()
        return Activity(channel.progress_at, held_since, channel.unsent, self.busy, self._held, self._held_since)

    # -- requests ----------------------------------------------------------------------------------------------------

    def on_frame(self, frame: memoryview) -> None:
        """Decode one request and handle it up to its first await."""
        began = perf_counter()
        if len(frame) >= LARGE_REQUEST_SIZE and request_key(frame) != PRODUCE:  # Of a produce most are records.
            self._take_apart(frame, began)
            return
        try:
            header, request = decode_request(frame, LOOP_ELEMENTS_MAX, prepare_now=False)
        except TooManyElementsError:
            self._take_apart(frame, began)
            return
        except NotPreparedError:
            self._prepare(frame)
            return
        except Exception as error:
            self._not_decoded(error)
            return
        self._handle(header, request, frame, began)

    def _not_decoded(self, error: Exception) -> None:
        if isinstance(error, UnsupportedVersionError) and error.header.api_key == API_VERSIONS:
            answer = supported(ErrorCode.UNSUPPORTED_VERSION)
            self._send(encode_response(answer, API_VERSIONS, 0, error.header.correlation_id))
        elif isinstance(error, DecodeError):
            self.violate(str(error))
        else:  # ours: this connection ends, the others go on
            if (fields := self._said()) is not None:
                events.error("request not decoded", exception=error, **fields)
            self.channel.close()

    def _prepare(self, frame: memoryview) -> None:
        """Handle the first request of its kind once the code that it takes is made; no further one begins meanwhile."""
        if self._drops(request_key(frame)):
            return
        buffer, kept = self.channel.keep_frame(frame)
        self._apart = True

        async def prepare() -> None:
            try:
                await to_the_end(self._service.codec, _make_ready, self._service, kept)
            except asyncio.CancelledError:
                self._service.pool.give(buffer)
                self._send(_DROPPED)
                raise
            except Exception as error:
                self._service.pool.give(buffer)
                self._not_decoded(error)
                return
            finally:
                self._apart = False
                self._go_on()
            try:
                self.channel.hand_over(buffer, kept)  # It may be one that is decoded, or handled, apart.
            except Exception as error:
                self._not_decoded(error)

        self._begin("first request", prepare(), NO_API)  # A hang-up does not cancel it.
        self._hold_back()

    def _take_apart(self, frame: memoryview, began: float) -> None:
        """Decode a request in a thread, from a buffer of its own; the connection begins no further one meanwhile."""
        key = request_key(frame)
        if self._drops(key):
            return
        buffer, kept = self.channel.keep_frame(frame)
        self._apart = True
        decoded = self._service.decoded
        size = 0 if key in WAITING else DECODED_FACTOR * len(kept)
        room: asyncio.Future[None] = self._loop.create_future()
        requests: list[Any] = []
        freed = False

        async def decode() -> None:
            try:
                await room
                header = await to_the_end(self._service.codec, _decode_ready, self._service, requests, kept)
                before = self._tasks.copy()
                self._handle(header, requests[0], kept, began, release)
                begun = self._tasks.keys() - before.keys()
                del before  # This task is among them: what it is cancelled with holds this frame, and is held by it.
                await asyncio.gather(*begun, return_exceptions=True)
            except asyncio.CancelledError:
                self._send(_DROPPED)
                raise
            except Exception as error:
                self._not_decoded(error)
            finally:
                self._apart = False
                self._go_on()
                free(partial(free_one_by_one, requests), 0 if room.cancelled() else size)

        def release() -> None:
            free(partial(_empty, requests), size)

        def free(clear: Callable[[], None], held: int) -> None:
            nonlocal freed
            if not freed:
                freed = True
                # So many objects take long to be freed, too. Views of the buffer are among them.
                cleared = self._loop.run_in_executor(None, clear)
                cleared.add_done_callback(timed(self._loop, "large request", lambda _: give_back(held)))

        def give_back(held: int) -> None:
            self._service.pool.give(buffer)
            decoded.give(held)

        def begin() -> None:
            if room.cancelled():
                decoded.give(size)
            else:
                room.set_result(None)

        self._begin("large request", decode(), key)
        self._hold_back()
        decoded.take(size, begin)

    def _begin(self, work: str, coroutine: Coroutine[Any, Any, None], api_key: int) -> None:
        task = self._loop.create_task(self._service.steps.named(work, coroutine))
        self._tasks[task] = api_key
        task.add_done_callback(self._tasks.pop)

    def _handle(
        self,
        header: RequestHeader,
        request: Any,
        frame: memoryview,
        began: float,
        release: Callable[[], None] = keep_message,
    ) -> None:
        api_key, api_version, correlation_id, client_id = header
        if self._hung_up and self._drops(api_key):
            return
        service = self._service
        endpoint = service.endpoints.get(api_key)
        if endpoint is None:
            self._refuse(header, request)
            return
        metrics = service.api_metrics.get(api_key) or service.metrics_of(api_key)
        metrics.requests.value += 1
        service.steps.work = metrics.name
        call = self._call
        if call is None or call.api_version != api_version or call.client_id != client_id:
            call = self._call = RequestContext(ANONYMOUS, client_id, self.peer, self.number, api_version)
        if release is not keep_message:
            call = call._replace(release=release)
        try:
            is_plain = endpoint.parts is None and not endpoint.limits
            answer = (endpoint.handler if is_plain else endpoint.handle)(self._broker, request, call)
            if isinstance(answer, Apart):
                apart = _whole(answer, request) if self._apart else self._handle_apart(answer, request, frame)
                self._await(apart, header, metrics, began)
                return
            if isinstance(answer, Large):
                self._await(_ready(answer), header, metrics, began)
                return
            if hasattr(answer, "__await__"):
                self._await(answer, header, metrics, began)
                return
            if answer is None:
                return
            self._send(encode_response(answer, api_key, api_version, correlation_id))
        except CloseConnectionError as error:
            events.debug("connection closed", peer=self.peer, reason=error)
            self.channel.close()
            return
        except Exception as error:  # ours: this connection ends, the others go on
            self._fail(header, error)
            return
        metrics.time.observe(perf_counter() - began)

    def _refuse(self, header: RequestHeader, request: Any) -> None:
        """Answer a request of an API without an endpoint in its own form, where it has such an answer."""
        api_key, api_version, correlation_id, _ = header
        if api_key not in REFUSED:
            self.violate(f"API key {api_key} is not served")
            return
        if (fields := self._said()) is not None:
            events.warning("request refused", reason=reason_of(api_key, API[api_key].name), **fields)
        self._send(encode_response(refusal_of(request), api_key, api_version, correlation_id))

    def _await(self, answer: Awaitable[Any], header: RequestHeader, metrics: ApiMetrics, began: float) -> None:
        place = _Place()
        self._places.append(place)
        self._begin(metrics.name, self._finish(answer, place, header, metrics, began), header.api_key)
        self._hold_back()

    def _handle_apart(self, answer: Apart, request: Any, frame: memoryview) -> Awaitable[Any]:
        """Handle a request in a buffer of its own; the connection begins no further one meanwhile."""
        buffer, kept = self.channel.keep_frame(frame)
        given: list[Any] = [buffer, request if kept.obj is frame.obj else decode_request(kept)[1]]
        del buffer, kept
        self._apart = True

        async def handle() -> Any:
            try:
                found = await answer.handle(given.pop())
            finally:
                self._service.pool.give(given[0])  # Which unmaps it while nobody else holds it, nor the request.
                given.clear()
                self._apart = False
                self._go_on()
            return await found if hasattr(found, "__await__") else found

        return handle()

    async def _finish(
        self, answer: Awaitable[Any], place: _Place, header: RequestHeader, metrics: ApiMetrics, began: float
    ) -> None:
        held: list[int] = []
        if header.api_key in GATHERED:
            answer = gathered(answer, partial(self._have_room, header.api_key, held))
        try:
            message = await answer
            if isinstance(message, Large):
                large = [message]
                del message
                place.parts = await self._loop.run_in_executor(self._service.codec, _encode, large, header)
            elif message is not None:
                place.parts = encode_response(message, header.api_key, header.api_version, header.correlation_id)
            else:
                place.parts = ()
        except asyncio.CancelledError as error:
            if header.api_key in LONG_READS:
                # The frames of its handler, which the error holds, hold what was found: that takes long to be freed.
                self._loop.run_in_executor(None, clear_frames, error.__traceback__)
            if self._hung_up:
                place.parts = _DROPPED
                self._flush()
            else:
                self.channel.close()  # Later answers would wait for this one, which will not come.
            raise
        except CloseConnectionError as error:
            events.debug("connection closed", peer=self.peer, reason=error)
            self.channel.close()
            return
        except Exception as error:  # ours: this connection ends, the others go on
            self._fail(header, error)
            return
        finally:
            for size in held:
                if place.parts:
                    self._service.gathered.learn(header.api_key, GATHERED_FACTOR * memory_size(place.parts))
                    self._flush()  # From now on it counts as an unread one.
                self._service.gathered.give(size)
        self._flush()
        metrics.time.observe(perf_counter() - began)

    async def _have_room(self, api_key: int, held: list[int]) -> None:
        """Wait for the turn of a long answer, and add the bytes that it counts to `held`."""
        gathered, room = self._service.gathered, self._loop.create_future()

        def begin(size: int) -> None:
            if room.cancelled():
                gathered.give(size)
            else:
                room.set_result(size)

        gathered.take(self.number, api_key, begin)
        try:
            held.append(await room)
        except asyncio.CancelledError:
            if not room.cancelled():  # Its turn came when it was cancelled.
                gathered.give(room.result())
            raise

    # -- answers -----------------------------------------------------------------------------------------------------

    def _send(self, parts: Sequence[Part]) -> None:
        if self._places:
            place = _Place()
            place.parts = parts
            self._places.append(place)
        else:
            self._write(parts)
            if not self.channel.writing:  # Sent, or sent with others soon: nothing is held.
                if self._apart:
                    self._hold_back()
                return
        self._note_answers()
        self._hold_back()

    def _note_answers(self) -> None:
        """Note the memory that answers hold; close the connection that holds most if that is too much by far."""
        held = self.channel.unsent_memory
        if self._places:
            held += sum(memory_size(place.parts) for place in self._places if place.parts)
        if held == self._held:
            return
        if not self._held:
            self._held_since = self._loop.time()
        self._held = held
        answers = self._service.answers
        answers.note(self, held)
        while isinstance(other := answers.surplus, Connection):
            other.violate(Verdict.UNREAD.value)
            answers.note(other, 0)  # Whatever it held: or this would go on for ever.

    def _flush(self) -> None:
        places = self._places
        while places and (parts := places[0].parts) is not None:
            places.popleft()
            self._write(parts)
        if places or self.channel.unsent or self._held:
            self._note_answers()
        self._go_on()

    def _write(self, parts: Sequence[Part]) -> None:
        self._dropped = self._dropped or parts is _DROPPED
        if not self._dropped:
            self.channel.write(parts)

    @property
    def _may_begin(self) -> bool:
        return not self._apart and may_begin(len(self._places), self.channel.unsent)

    def _hold_back(self) -> None:
        if not self._full and not self._may_begin:
            self._full = True
            self.channel.pause()
            if not READS.isdisjoint(self._tasks.values()):
                self._service.hang_ups.watch(self._fd, self._on_hung_up)

    def _go_on(self) -> None:
        if self._full and self._may_begin:
            self._full = False
            if not self._service.closing:
                self.channel.resume()
        elif not self._full and self.channel.unsent:
            self._hold_back()

    def on_drained(self) -> None:
        """The peer has read its answers: go on with its requests."""
        self._note_answers()
        self._go_on()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _on_hung_up(self) -> None:
        """The peer has ended its stream, of which some may be left: drop the reads in progress."""
        self._hung_up = True
        reads = [task for task, api_key in self._tasks.items() if api_key in READS]
        self._loop.call_soon(_cancel, reads)  # One loop turn later, as when the channel is closed.

    def _drops(self, api_key: int) -> bool:
        """Whether a request is dropped, because it only reads, and its peer has hung up."""
        if not self._hung_up or api_key not in READS:
            return False
        self._send(_DROPPED)
        return True

    def violate(self, reason: str) -> None:
        """Close a connection with a protocol violation by the peer."""
        if not self.channel.closed:
            self._warn(reason)
            self.channel.close()

    def _said(self) -> dict[str, object] | None:
        """The peer, and how many lines were left out, for a line of the log; None where it is left out, too."""
        suppressed = self._service.said.admit(self._loop.time())
        if suppressed is None:
            return None
        return {"peer": self.peer, "suppressed": suppressed} if suppressed else {"peer": self.peer}

    def _warn(self, reason: object) -> None:
        if (fields := self._said()) is not None:
            events.warning("connection closed", reason=reason, **fields)

    def _fail(self, header: RequestHeader, error: Exception) -> None:
        if not self.channel.closed:
            if (fields := self._said()) is not None:
                events.error("request failed", exception=error, api=API[header.api_key].name, **fields)
            self.channel.close()

    def on_closed(self, error: Exception | None) -> None:
        """The channel is closed: cancel the requests in progress."""
        if isinstance(error, OSError):
            events.debug("connection lost", peer=self.peer, reason=error)
        elif error is not None:
            self._warn(error)
        self._service.hang_ups.forget(self._fd)
        self._places.clear()
        self._held = 0
        self._service.answers.note(self, 0)
        if self._tasks:
            # One loop turn later, because a task that has not begun would drop its handler's coroutine unawaited.
            self._loop.call_soon(_cancel, tuple(self._tasks))
        self._forget(self)


def _make_ready(service: Service, frame: memoryview) -> None:
    """Import the handler of a request, and make the code for it, which others take for a sign of both. Blocks."""
    _load_handler(service, frame)
    prepare_request(frame)


def _load_handler(service: Service, frame: memoryview) -> None:
    endpoint = service.endpoints.get(request_key(frame))
    if endpoint is not None:
        endpoint.load()


def _decode_ready(service: Service, requests: list[Any], frame: memoryview) -> RequestHeader:
    """Import the handler of a large request, and read it into a list. Blocks."""
    _load_handler(service, frame)
    return decode_request_into(requests, frame)


async def _whole(answer: Apart, request: Any) -> Any:
    found = await answer.handle(request)
    return await found if hasattr(found, "__await__") else found


async def _ready(answer: Large) -> Large:
    return answer


def _encode(answers: list[Large], header: RequestHeader) -> Sequence[Part]:
    """Encode an answer and free it: both take long where it is large."""
    return encode_response(answers.pop().make(), header.api_key, header.api_version, header.correlation_id)


def _empty(requests: list[Any]) -> None:
    """Free what a request holds, whoever holds the request."""
    request = requests.pop()
    for name in type(request).__slots__:
        requests.append(getattr(request, name))
        delattr(request, name)
    free_one_by_one(requests)


def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
