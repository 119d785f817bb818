"""Connections of clients: frames in, requests handled, answers out in the order of the requests.

The rules: a peer that sends what is no request is closed, with one WARNING that names it and the reason; nobody else
notices. At most `IN_FLIGHT_PER_CONNECTION_MAX` requests of a connection wait for their answer, and none is begun while
an answer is still waiting to be read by the peer, so that a connection holds a bounded amount of memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Sequence
from time import perf_counter
from typing import Any

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.base.limits import IN_FLIGHT_PER_CONNECTION_MAX
from anabranch.protocol.frames import RequestHeader, UnsupportedVersionError, decode_request, encode_response
from anabranch.protocol.registry import API
from anabranch.runtime.events import EventLogger, Seldom
from anabranch.runtime.metrics import Counter, Histogram
from anabranch.runtime.net.acceptor import Acceptor, ConnectionNumbers
from anabranch.runtime.net.channel import FrameChannel, Part
from anabranch.runtime.net.pool import BufferPool, Landing
from anabranch.server.context import ANONYMOUS, BrokerContext, CloseConnectionError, RequestContext
from anabranch.server.handlers import ENDPOINTS
from anabranch.server.handlers.api_versions import supported

events = EventLogger("listener")
API_VERSIONS = 18
BROKERS_ONLY = frozenset({4, 5, 6})
"""LeaderAndIsr, StopReplica, UpdateMetadata: spoken between controller and brokers, which are one process here."""
SWEEP_INTERVAL_S = 1.0
WARNING_INTERVAL_S = 10.0


class _Answer:
    """The place of one request's answer in the order of answers."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: Sequence[Part] | None = None


class _ApiMetrics:
    """What is counted for each API."""

    def __init__(self, broker: BrokerContext, name: str) -> None:
        self.requests: Counter = broker.metrics.counter(
            "kafka_network_requestmetrics_requests_total", "Requests received.", request=name
        )
        self.time: Histogram = broker.metrics.histogram(
            "kafka_network_requestmetrics_totaltime_seconds", "From a request's last byte to its answer.", request=name
        )


class Connection:
    """One client's connection."""

    def __init__(self, listener: Listener, sock: socket.socket, peer: str, number: int) -> None:
        self.peer = peer
        self.number = number
        self._listener = listener
        self._broker = listener.broker
        self._loop = listener.loop
        self._answers: deque[_Answer] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._full = False
        self.channel = FrameChannel(
            listener.loop,
            sock,
            self,
            pool=listener.pool,
            landing=listener.landing,
            frame_size_max=listener.broker.settings.socket_request_max_bytes,
        )

    @property
    def busy(self) -> bool:
        """Whether a request waits for its answer, or an answer to be sent."""
        return bool(self._answers) or self.channel.unsent > 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def on_frame(self, frame: memoryview) -> None:
        """Decode one request and handle it up to its first await."""
        began = perf_counter()
        try:
            header, request = decode_request(frame)
        except UnsupportedVersionError as error:
            self._refuse(error)
            return
        except DecodeError as error:
            self.violate(str(error))
            return
        except Exception as error:  # ours: this connection ends, the others go on
            events.error("request not decoded", exception=error, peer=self.peer)
            self.channel.close()
            return
        endpoint = ENDPOINTS.get(header.api_key)
        if endpoint is None:
            self.violate(f"API key {header.api_key} is not served")
            return
        metrics = self._listener.metrics_of(header.api_key)
        metrics.requests.value += 1
        call = RequestContext(ANONYMOUS, header.client_id, self.peer, self.number, header.api_version)
        try:
            answer = endpoint.handler(self._broker, request, call)
            if hasattr(answer, "__await__"):
                self._await(answer, header, metrics, began)
                return
            if answer is None:
                return
            self._send(encode_response(answer, header.api_key, header.api_version, header.correlation_id))
        except CloseConnectionError as error:
            events.debug("connection closed", peer=self.peer, reason=error)
            self.channel.close()
            return
        except Exception as error:  # ours: this connection ends, the others go on
            self._fail(header, error)
            return
        metrics.time.observe(perf_counter() - began)

    def _refuse(self, error: UnsupportedVersionError) -> None:
        key, version, correlation_id, _ = error.header
        if key == API_VERSIONS:
            answer = supported(ErrorCode.UNSUPPORTED_VERSION)
            self._send(encode_response(answer, API_VERSIONS, 0, correlation_id))
        elif key in BROKERS_ONLY and version in API[key].versions:
            events.warning("request refused", peer=self.peer, reason=f"{API[key].name} is for brokers among themselves")
            answer = API[key].response(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
            self._send(encode_response(answer, key, version, correlation_id))
        else:
            self.violate(str(error))

    def _await(self, answer: Awaitable[Any], header: RequestHeader, metrics: _ApiMetrics, began: float) -> None:
        place = _Answer()
        self._answers.append(place)
        self._hold_back()
        task = self._loop.create_task(self._finish(answer, place, header, metrics, began))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(
        self, answer: Awaitable[Any], place: _Answer, header: RequestHeader, metrics: _ApiMetrics, began: float
    ) -> None:
        try:
            message = await answer
            place.parts = encode_response(message, header.api_key, header.api_version, header.correlation_id)
        except Exception as error:  # ours: this connection ends, the others go on
            self._fail(header, error)
            return
        self._flush()
        metrics.time.observe(perf_counter() - began)

    # -- answers -----------------------------------------------------------------------------------------------------

    def _send(self, parts: Sequence[Part]) -> None:
        if self._answers:
            place = _Answer()
            place.parts = parts
            self._answers.append(place)
        else:
            self.channel.write(parts)
        self._hold_back()

    def _flush(self) -> None:
        answers = self._answers
        while answers and (parts := answers[0].parts) is not None:
            answers.popleft()
            self.channel.write(parts)
        self._go_on()

    def _hold_back(self) -> None:
        if not self._full and (len(self._answers) >= IN_FLIGHT_PER_CONNECTION_MAX or self.channel.unsent):
            self._full = True
            self.channel.pause()

    def _go_on(self) -> None:
        if self._full and len(self._answers) < IN_FLIGHT_PER_CONNECTION_MAX and not self.channel.unsent:
            self._full = False
            if not self._listener.closing:
                self.channel.resume()
        elif not self._full and self.channel.unsent:
            self._hold_back()

    def on_drained(self) -> None:
        """The peer has read its answers: go on with its requests."""
        self._go_on()

    # -- the end -----------------------------------------------------------------------------------------------------

    def violate(self, reason: str) -> None:
        """Close a connection whose peer does not speak the protocol."""
        if not self.channel.closed:
            events.warning("connection closed", peer=self.peer, reason=reason)
            self.channel.close()

    def _fail(self, header: RequestHeader, error: Exception) -> None:
        if not self.channel.closed:
            events.error("request failed", exception=error, peer=self.peer, api=API[header.api_key].name)
            self.channel.close()

    def on_closed(self, error: Exception | None) -> None:
        """The channel is closed: forget the requests in progress."""
        if isinstance(error, OSError):
            events.debug("connection lost", peer=self.peer, reason=error)
        elif error is not None:
            events.warning("connection closed", peer=self.peer, reason=error)
        for task in self._tasks:
            task.cancel()
        self._answers.clear()
        self._listener.forget(self)


class Listener:
    """Accepts connections, bounds their number and memory, closes those that are idle or stalled."""

    def __init__(self, broker: BrokerContext, loop: asyncio.AbstractEventLoop, numbers: ConnectionNumbers) -> None:
        settings = broker.settings
        self.broker = broker
        self.loop = loop
        self.pool = BufferPool(settings.queued_max_request_bytes)
        self.landing = Landing()
        self.closing = False
        self._connections: dict[int, Connection] = {}
        self._metrics: dict[int, _ApiMetrics] = {}
        self._acceptor: Acceptor | None = None
        self._numbers = numbers
        self._sweep: asyncio.TimerHandle | None = None
        self._refused = Seldom(WARNING_INTERVAL_S)
        self._accept_failed = Seldom(WARNING_INTERVAL_S)
        metrics = broker.metrics
        name = "kafka_server_socketservermetrics_"
        metrics.gauge(f"{name}connections", "Connections that are open.", lambda: len(self._connections))
        metrics.gauge(f"{name}memorypoolused_bytes", "Memory for requests being received.", lambda: self.pool.in_use)
        metrics.gauge(f"{name}memorypoolwaiting", "Connections waiting for request memory.", lambda: self.pool.waiting)
        self._accepted = metrics.counter(f"{name}connectioncreation_total", "Connections accepted.")
        self._too_many = metrics.counter(f"{name}connectionrefused_total", "Connections above max.connections.")
        self._idle_closed = metrics.counter(f"{name}expiredconnectionskilled_total", "Idle connections closed.")

    def listen(self) -> int:
        """Take the address, without accepting yet; answers the port. OSError where it cannot be had."""
        address = self.broker.settings.listeners
        self._acceptor = Acceptor(self.loop, address.host, address.port, self._on_connected, self._on_accept_error)
        return self._acceptor.port

    def accept(self) -> None:
        """Take the connections that arrived since `listen`, and those to come."""
        assert self._acceptor is not None
        self._acceptor.start()
        self._sweep = self.loop.call_later(SWEEP_INTERVAL_S, self._on_sweep)

    def metrics_of(self, api_key: int) -> _ApiMetrics:
        """The metrics of one API."""
        found = self._metrics.get(api_key)
        if found is None:
            found = self._metrics[api_key] = _ApiMetrics(self.broker, API[api_key].name)
        return found

    def _on_connected(self, sock: socket.socket, address: tuple[str, int]) -> None:
        peer = f"{address[0]}:{address[1]}"
        settings = self.broker.settings
        if len(self._connections) >= settings.max_connections:
            sock.close()
            self._too_many.add()
            suppressed = self._refused.turn(self.loop.time())
            if suppressed is not None:
                events.warning(
                    "connection refused: max.connections are open",
                    peer=peer,
                    max_connections=settings.max_connections,
                    suppressed=suppressed,
                )
            return
        if settings.socket_send_buffer_bytes > 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.socket_send_buffer_bytes)
        if settings.socket_receive_buffer_bytes > 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, settings.socket_receive_buffer_bytes)
        self._accepted.add()
        connection = Connection(self, sock, peer, self._numbers.take())
        self._connections[connection.number] = connection
        connection.channel.start()

    def _on_accept_error(self, error: OSError) -> None:
        suppressed = self._accept_failed.turn(self.loop.time())
        if suppressed is not None:
            events.error("connections cannot be accepted", reason=error, suppressed=suppressed)

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""
        self._connections.pop(connection.number, None)

    def _on_sweep(self) -> None:
        self._sweep = self.loop.call_later(SWEEP_INTERVAL_S, self._on_sweep)
        now = self.loop.time()
        settings = self.broker.settings
        idle_since = now - settings.connections_max_idle_ms / 1000
        stalled_since = now - settings.stalled_request_timeout_ms / 1000
        contended = self.pool.waiting > 0
        for connection in list(self._connections.values()):
            channel = connection.channel
            if contended and channel.holds_memory and channel.held_since < stalled_since:
                connection.violate("others wait for the request memory that it holds without making progress")
            elif channel.progress_at < idle_since and (not connection.busy or channel.unsent):
                self._idle_closed.add()
                if channel.holds_memory or channel.unsent:
                    connection.violate("silent in the middle of a request or an answer for connections.max.idle.ms")
                else:
                    events.debug("idle connection closed", peer=connection.peer)
                    channel.close()

    async def close(self, timeout_s: float) -> None:
        """Accept nothing more, let the requests in progress be answered, then close every connection."""
        self.closing = True
        if self._acceptor is not None:
            self._acceptor.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in self._connections.values():
            connection.channel.pause()
        deadline = self.loop.time() + timeout_s
        while any(connection.busy for connection in self._connections.values()) and self.loop.time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._connections.values()):
            connection.channel.close()
