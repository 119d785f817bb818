"""The listener: accepts connections, bounds their number and memory, closes those that are idle or stalled."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

from anabranch.machines.held_memory import DecodedMemory, GatheredMemory
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.loop_steps import LoopSteps
from anabranch.runtime.net.acceptor import Acceptor, ConnectionNumbers
from anabranch.runtime.net.pool import BufferPool
from anabranch.runtime.net.transport import PlainTransport
from anabranch.server.context import BrokerContext
from anabranch.server.handlers import ENDPOINTS
from anabranch.server.network.admission import Admission, AnswerMemory, Verdict
from anabranch.server.network.connection import Connection
from anabranch.server.network.service import Service

events = EventLogger("listener")
SWEEP_INTERVAL_S = 1.0
SWEPT_AT_A_TIME = 500
"""Connections that are judged before other work has its turn: 1 ms."""
WARNING_INTERVAL_S = 10.0


class Listener:
    """The connections of one listening socket. `listen`, then `accept`, then `close`."""

    def __init__(
        self,
        broker: BrokerContext,
        loop: asyncio.AbstractEventLoop,
        numbers: ConnectionNumbers,
        steps: LoopSteps,
        *,
        connections_max: int,
    ) -> None:
        """`connections_max`: `max.connections`, or what the system's limit of descriptors allows."""
        settings = broker.settings
        pool = BufferPool(settings.queued_max_request_bytes)
        self._settings = settings
        self._loop = loop
        self._service = Service(
            broker,
            loop,
            ENDPOINTS,
            broker.metrics,
            pool,
            frame_size_max=settings.socket_request_max_bytes,
            answers=AnswerMemory(settings.queued_max_response_bytes),
            decoded=DecodedMemory(settings.queued_max_decoded_bytes),
            gathered=GatheredMemory(settings.queued_max_response_bytes),
            steps=steps,
        )
        self._admission = Admission(
            connections_max=connections_max,
            per_address_max=settings.max_connections_per_ip,
            idle_max_ms=settings.connections_max_idle_ms,
            stalled_max_ms=settings.stalled_request_timeout_ms,
        )
        self._connections: dict[int, Connection] = {}
        self._of_address: Counter[str] = Counter()
        self._acceptor: Acceptor | None = None
        self._numbers = numbers
        self._sweeping: asyncio.Task[None] | None = None
        self._refused = EventLimit(WARNING_INTERVAL_S)
        self._accept_failed = EventLimit(WARNING_INTERVAL_S)
        metrics = broker.metrics
        name = "kafka_server_socketservermetrics_"
        metrics.gauge(f"{name}connections", "Connections that are open.", lambda: len(self._connections))
        metrics.gauge(f"{name}memorypoolused_bytes", "Memory for requests being received.", lambda: pool.in_use)
        metrics.gauge(f"{name}memorypoolwaiting", "Connections waiting for request memory.", lambda: pool.waiting)
        answers = self._service.answers
        metrics.gauge(f"{name}unsent_bytes", "Memory for answers that clients have not read.", lambda: answers.held)
        decoded = self._service.decoded
        metrics.gauge(f"{name}decoded_bytes", "Memory for large requests that are handled.", lambda: decoded.held)
        metrics.gauge(f"{name}decoded_waiting", "Large requests that wait for it.", lambda: decoded.waiting)
        gathered = self._service.gathered
        metrics.gauge(f"{name}gathered_bytes", "Memory for long answers that are being made.", lambda: gathered.held)
        metrics.gauge(f"{name}gathered_waiting", "Long answers that wait for it.", lambda: gathered.waiting)
        self._accepted = metrics.counter(f"{name}connectioncreation_total", "Connections accepted.")
        self._too_many = metrics.counter(
            f"{name}connectionrefused_total", "Connections refused: too many, in all or of an address."
        )
        self._idle_closed = metrics.counter(f"{name}expiredconnectionskilled_total", "Idle connections closed.")

    def listen(self) -> int:
        """Take the address, without accepting yet; answers the port. OSError where it cannot be had."""
        address = self._settings.listeners
        self._acceptor = Acceptor(self._loop, address.host, address.port, self._on_connected, self._on_accept_error)
        return self._acceptor.port

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    def accept(self) -> None:
        """Take the connections that arrived since `listen`, and those to come."""
        assert self._acceptor is not None
        self._acceptor.start()
        self._sweeping = self._loop.create_task(self._sweep())

    def _on_connected(self, sock: socket.socket, address: tuple[str, int]) -> None:
        peer = f"{address[0]}:{address[1]}"
        settings = self._settings
        refusal = self._admission.refusal(len(self._connections), self._of_address[address[0]])
        if refusal is not None:
            sock.close()
            self._too_many.add()
            suppressed = self._refused.admit(self._loop.time())
            if suppressed is not None:
                events.warning(
                    "connection refused",
                    reason=refusal.value,
                    peer=peer,
                    max_connections=self._admission.connections_max,
                    suppressed=suppressed,
                )
            return
        if settings.socket_send_buffer_bytes > 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.socket_send_buffer_bytes)
        if settings.socket_receive_buffer_bytes > 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, settings.socket_receive_buffer_bytes)
        self._accepted.add()
        connection = Connection(self._service, PlainTransport(sock), peer, self._numbers.take(), self._forget)
        self._connections[connection.number] = connection
        self._of_address[address[0]] += 1
        connection.channel.start()

    def _on_accept_error(self, error: OSError) -> None:
        suppressed = self._accept_failed.admit(self._loop.time())
        if suppressed is not None:
            events.error("connections cannot be accepted", reason=error, suppressed=suppressed)

    def _forget(self, connection: Connection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        address = connection.peer.rpartition(":")[0]
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            for place, connection in enumerate(list(self._connections.values()), 1):
                try:
                    self._judge(connection)
                except Exception as error:  # ours: the others are judged, and this one again
                    events.error("connection not judged", exception=error, peer=connection.peer)
                if place % SWEPT_AT_A_TIME == 0:
                    await asyncio.sleep(0)

    def _judge(self, connection: Connection) -> None:
        service = self._service
        verdict = self._admission.judge(
            connection.activity,
            self._loop.time(),
            contended=service.pool.waiting > 0,
            answers_max=service.answers.share,
        )
        if verdict in (Verdict.IDLE, Verdict.SILENT):
            self._idle_closed.add()
        if verdict is Verdict.IDLE:
            events.debug("idle connection closed", peer=connection.peer)
            connection.channel.close()
        elif verdict is not Verdict.KEEP:
            connection.violate(verdict.value)

    async def close(self, timeout_s: float) -> None:
        """Accept nothing more, let the requests in progress be answered, then close every connection."""
        self._service.closing = True
        if self._acceptor is not None:
            self._acceptor.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in self._connections.values():
            connection.channel.pause()
        deadline = self._loop.time() + timeout_s
        while any(connection.busy for connection in self._connections.values()) and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._connections.values()):
            connection.channel.close()
        self._service.hang_ups.close()
