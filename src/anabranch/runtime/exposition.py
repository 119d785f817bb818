"""HTTP exposition of `Metrics` by prometheus-client: text 0.0.4, 1.0.0 or OpenMetrics, as the request accepts.

Imported with the first request for metrics, in the thread that serves it (40 ms, 8 MB). A request is read, rendered and
compressed in a thread of its own; only the values are read on the event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from anabranch.runtime.metrics import Buckets, Family, Metrics, Sample

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

PATHS = ("/", "/metrics")
REQUESTS_MAX = 16
"""Connections served at a time; one more closes the oldest connection that has sent no request yet."""
CLOSING_S = 1.0
"""How long a connection waits for the place of a closed one."""
TIMEOUT_S = 10.0
"""How long a client may take to send its request, and the loop to read the values."""


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


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def parse_request(self) -> bool:
        """Parse the request; from now on its connection is not idle."""
        cast(HttpServer, self.server).idle.pop(self.connection, None)
        return super().parse_request()

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
        registry = CollectorRegistry(auto_describe=False)
        registry.register(LoopCollector(metrics, loop))
        self.set_app(_only_metrics(make_wsgi_app(registry)))
        self._free = threading.Semaphore(REQUESTS_MAX)
        self.idle: dict[socket.socket, None] = {}
        """The connections without a request, oldest first."""

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a place for a connection; refuse the connection if all places are taken by requests."""
        taken = self._free.acquire(blocking=False)
        if not taken and (oldest := next(iter(self.idle.copy()), None)) is not None:
            self.idle.pop(oldest, None)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # Its thread ends.
            taken = self._free.acquire(timeout=CLOSING_S)
        if taken:
            self.idle[request] = None
        return taken

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one request, in a thread of its own."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.idle.pop(request, None)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that hung up or sent nothing: its connection is closed."""


Application = Callable[["WSGIEnvironment", "StartResponse"], Iterable[bytes]]


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
