"""HTTP exposition of `Metrics` by prometheus-client: text 0.0.4, 1.0.0 or OpenMetrics, as the request accepts.

Imported with the first request for metrics, in the thread that serves it (40 ms, 8 MB). A request is read and answered
in a thread of its own. Rendering and compressing take 30 ms of the processor, beside a loop that wants it, too: one
thread does that for all, once for those who ask for the same until it begins, and rests as long where several ask at
the same time. Only the values are read on the event loop.

A connection waits for its client until its whole request has been read, and while its answer is sent. Each of the two
has one deadline, and a connection that waits may be closed for a newcomer: a client that sends or reads slowly, or
nothing, keeps no other from the metrics.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer, choose_encoder, gzip_accepted
from prometheus_client.registry import Collector

from anabranch.runtime.metrics import Buckets, Family, Metrics, Sample

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from _typeshed import ReadableBuffer, WriteableBuffer

PATHS = ("/", "/metrics")
REQUESTS_MAX = 16
"""Connections served at a time; one more closes the one that has waited for its client longest, or waits itself."""
REQUEST_SIZE_MAX = 16 * 1024
"""Bytes of a request, of which parsing takes several times as many; the connection of a longer one ends."""
PLACE_S = 1.0
"""How long a connection waits for the place of another."""
GRACE_S = 0.25
"""How long a connection may wait for its client before it is closed for another: its request may just be read."""
LOOK_S = 0.01
"""How long until it looks again whether one waits for its client."""
RESTS_S_MAX = 0.2
"""How long rendering rests at most: a loop that is slow to give its values is busy anyway."""
TIMEOUT_S = 10.0
"""How long a client may take to send its request, and again to read its answer, and the loop to read the values."""


class LoopCollector(Collector):
    """Reads `Metrics` on their event loop, for the thread that renders them."""

    def __init__(self, metrics: Metrics, loop: asyncio.AbstractEventLoop) -> None:
        self._metrics = metrics
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """Yield every metric. TimeoutError, or RuntimeError of a closed loop, where the values cannot be read."""
        reading = self._metrics.families()
        try:
            future = asyncio.run_coroutine_threadsafe(reading, self._loop)
        except RuntimeError:
            reading.close()
            raise
        try:
            families = future.result(TIMEOUT_S)
        finally:
            if self._loop.is_closed():
                reading.close()  # It will never begin.
            else:
                future.cancel()
        yield from map(metric_of, families)


def metric_of(family: Family) -> Metric:
    """Translate one metric into prometheus-client's form."""
    name = family.name
    metric = Metric(name.removesuffix("_total") if family.kind == "counter" else name, family.doc, family.kind)
    if family.kind == "histogram":
        for labels, buckets, total in cast("Iterable[Buckets]", family.samples):
            for bound, count in buckets:
                metric.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
            metric.add_sample(f"{name}_sum", dict(labels), total)
            metric.add_sample(f"{name}_count", dict(labels), buckets[-1][1])
    else:
        for labels, value in cast("Iterable[Sample]", family.samples):
            metric.add_sample(name, dict(labels), value)
    return metric


class _Request(io.RawIOBase):
    """The bytes of a request, REQUEST_SIZE_MAX at most, all of which must have come `timeout_s` from now."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + timeout_s
        self._left = REQUEST_SIZE_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Receive some. OSError; ConnectionAbortedError where it is too long, TimeoutError after the deadline."""
        if not self._left:
            raise ConnectionAbortedError("the request is too long")
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        received = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= received
        return received


class _Answer(io.BufferedIOBase):
    """Sends an answer, whose head finds room in the socket: the deadline of the body is that of the answer."""

    def __init__(self, connection: socket.socket, timeout_s: float, begin: Callable[[], object]) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._begin = begin

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        """Send `data`. OSError; ConnectionAbortedError, which WSGI passes over, after the deadline."""
        self._begin()
        self._connection.settimeout(self._timeout_s)
        try:
            self._connection.sendall(data)  # Its timeout is that of all bytes together.
        except TimeoutError as error:
            raise ConnectionAbortedError("the answer is not read") from error
        return len(memoryview(data))


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S
    server: HttpServer

    def setup(self) -> None:
        """Read and write with deadlines, in place of a timeout of each call."""
        self.connection = self.request
        waits = self.server.waiting
        self.rfile = io.BufferedReader(_Request(self.connection, self.timeout))
        self.wfile = _Answer(self.connection, self.timeout, lambda: waits.setdefault(self.connection, time.monotonic()))

    def parse_request(self) -> bool:
        """Parse the whole request; from now on its connection waits for the metrics."""
        parsed = super().parse_request()
        self.server.waiting.pop(self.connection, None)
        return parsed

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a request is no event of the broker."""


class HttpServer(ThreadingWSGIServer):
    """prometheus-client's HTTP server on a socket that listens already."""

    def __init__(self, listening: socket.socket, metrics: Metrics, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.setup_environ()
        registry = CollectorRegistry(auto_describe=False, support_collectors_without_names=True)
        registry.register(LoopCollector(metrics, loop))
        self._together = Together(_accepting_anything(make_wsgi_app(registry)))
        self.set_app(_only_metrics(self._together))
        self._free = threading.Semaphore(REQUESTS_MAX)
        self.connections: set[socket.socket] = set()
        self.waiting: dict[socket.socket, float] = {}
        """The connections that wait for their clients, the one that has waited longest first, and since when."""
        self._closed = metrics.counter(
            "anabranch_metrics_connections_closed_total", "Connections for metrics closed or refused for want of room."
        )

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a place for a connection; refuse the connection if there is none soon."""
        taken = self._free.acquire(blocking=False) or self._free_a_place()
        if taken:
            self.connections.add(request)
            self.waiting[request] = time.monotonic()
        return taken

    def _free_a_place(self) -> bool:
        """Take the place of the connection that waits for its client longest, or of one that ends; False for none."""
        deadline = time.monotonic() + PLACE_S
        taken = closed = False
        while not taken and time.monotonic() < deadline:
            oldest, since = next(iter(self.waiting.copy().items()), (None, 0.0))
            if oldest is not None and not closed and time.monotonic() - since >= GRACE_S:
                self.waiting.pop(oldest, None)
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # Its thread ends.
                closed = True
            taken = self._free.acquire(timeout=LOOK_S)
        if closed or not taken:
            self._closed.add()
        return taken

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for a connection; its place is free again where there can be none."""
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            self._leave(request)
            raise

    def _leave(self, request: socket.socket) -> None:
        self.connections.discard(request)
        self.waiting.pop(request, None)
        self._free.release()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one request, in a thread of its own."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def server_close(self) -> None:
        """End the thread that renders."""
        super().server_close()
        self._together.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that hung up or sent nothing: its connection is closed."""


Application = Callable[["WSGIEnvironment", "StartResponse"], Iterable[bytes]]
Asked = tuple[object, ...]


class Rendered(NamedTuple):
    """An answer: what an application gives its server."""

    status: str
    headers: list[tuple[str, str]]
    parts: list[bytes]


class Together:
    """An application that renders one answer at a time, each for all who ask for it until it is begun.

    So nobody is given values of before the request, and no number of requests takes more than half of a processor.
    """

    def __init__(self, application: Application) -> None:
        self._application = application
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "render")
        self._lock = threading.Lock()
        self._asked: dict[Asked, concurrent.futures.Future[Rendered]] = {}
        """What was asked for and is not begun."""
        self.waiting = 0
        """Requests that wait for their answers."""
        self._rests_until = 0.0

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request. Whatever the application raises, and RuntimeError when closed."""
        asked = _asked(environ)
        with self._lock:
            self.waiting += 1
        try:
            status, headers, parts = self._asked_for(asked, environ).result()
        finally:
            with self._lock:
                self.waiting -= 1
        start_response(status, headers)
        return parts

    def _asked_for(self, asked: Asked, environ: WSGIEnvironment) -> concurrent.futures.Future[Rendered]:
        with self._lock:
            rendered = self._asked.get(asked)
            if rendered is None:
                rendered = self._asked[asked] = self._thread.submit(self._render, asked, dict(environ))
            return rendered

    def _render(self, asked: Asked, environ: WSGIEnvironment) -> Rendered:
        if self.waiting > 1:
            time.sleep(max(0.0, self._rests_until - time.monotonic()))
        with self._lock:
            del self._asked[asked]
        began = time.monotonic()
        heads: list[tuple[str, list[tuple[str, str]]]] = []

        def begin(status: str, headers: list[tuple[str, str]], _: Any = None) -> Callable[[bytes], object]:
            heads.append((status, headers))
            return sent.append

        sent: list[bytes] = []
        sent.extend(self._application(environ, begin))
        ended = time.monotonic()
        self._rests_until = ended + min(ended - began, RESTS_S_MAX)
        return Rendered(*heads[-1], sent)

    def close(self) -> None:
        """Render nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _asked(environ: WSGIEnvironment) -> Asked:
    """What tells one answer from another: the names asked for, the form, and whether it is compressed."""
    accepted = environ.get("HTTP_ACCEPT", "")
    try:
        _, form = choose_encoder(accepted)
    except (TypeError, ValueError):
        form = ""
    names = frozenset(parse_qs(environ.get("QUERY_STRING", "")).get("name[]", ()))
    return environ.get("REQUEST_METHOD"), names, form, gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", ""))


def _only_metrics(application: Application) -> Application:
    """Answer 404 elsewhere, and 503 where the loop does not give the values."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in PATHS:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        try:
            return application(environ, start_response)
        except (TimeoutError, concurrent.futures.CancelledError, RuntimeError):
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the broker is too busy, or stopping\n"]

    return answer


def _accepting_anything(application: Application) -> Application:
    """Pass over what a client says that it accepts, where that cannot be understood."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return application(environ, start_response)
        except (TypeError, ValueError):
            return application({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)

    return answer
