"""Metrics of one process: counters, histograms and gauges in memory, served over HTTP in the Prometheus formats.

Counters and histograms are plain attributes that hot paths add to; a gauge is a function called at every scrape. Names
follow Kafka's MBeans, lower case and with Prometheus' units and suffixes. Exposition is prometheus-client's work
(`exposition`), in threads of its own and imported with the first request: a broker that nobody scrapes neither loads
nor starts any of it. Values are read on the event loop in small steps, so that a scrape never holds the loop up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from anabranch.runtime.events import EventLogger

if TYPE_CHECKING:
    from anabranch.runtime.exposition import HttpServer

events = EventLogger("metrics")
SAMPLES_PER_STEP = 200
"""Counters, histograms or samples of a gauge read in one step of the event loop, and things without one."""

Key = TypeVar("Key")
T = TypeVar("T")
Labels = Mapping[str, str]
LabelItems = tuple[tuple[str, str], ...]
Sample = tuple[Labels, float]
Looked = int
"""So many things were looked at for a metric, and none of them has a sample."""
Buckets = tuple[Labels, list[tuple[str, int]], float]
"""Labels, cumulative counts by upper bound (`le`), and the sum of the values."""

LATENCY_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1) -> None:
        """Add `amount`, which is not negative."""
        self.value += amount


class Histogram:
    """Counts of values by upper bound."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, int]]:
        """The cumulative counts by upper bound, as text; the last bound is +Inf."""
        return list(zip(_names(self._bounds), accumulate(self._counts), strict=True))


@cache
def _names(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return upper bounds as text."""
    return *(f"{bound:g}" for bound in bounds), "+Inf"


class Family(NamedTuple):
    """All samples of one metric at a time."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    doc: str
    samples: Sequence[Sample] | Sequence[Buckets]
    """`Buckets` of a histogram, else `Sample`."""


class Metrics:
    """The registry of one broker."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[LabelItems, Counter]] = {}
        self._histograms: dict[str, dict[LabelItems, Histogram]] = {}
        self._gauges: dict[str, Callable[[], Iterable[Sample | Looked]]] = {}
        self._labelled: dict[tuple[str, str], set[tuple[str, LabelItems]]] = {}
        """The names and labels of counters and histograms, by each of their labels."""
        self._help: dict[str, str] = {}

    def counter(self, name: str, doc: str, **labels: str) -> Counter:
        """Return the counter of that name and those labels, made on first use. `name` ends in `_total`."""
        self._help[name] = doc
        return self._made(self._counters.setdefault(name, {}), name, tuple(labels.items()), Counter)

    def histogram(self, name: str, doc: str, **labels: str) -> Histogram:
        """Return the histogram of that name and those labels, made on first use. `name` ends in its unit."""
        self._help[name] = doc
        return self._made(self._histograms.setdefault(name, {}), name, tuple(labels.items()), Histogram)

    def _made(self, known: dict[LabelItems, T], name: str, labels: LabelItems, make: Callable[[], T]) -> T:
        found = known.get(labels)
        if found is None:
            found = known[labels] = make()
            for label in labels:
                self._labelled.setdefault(label, set()).add((name, labels))
        return found

    def gauge(self, name: str, doc: str, read: Callable[[], float]) -> None:
        """Call `read` at every scrape."""
        self.gauges(name, doc, lambda: [({}, read())])

    def gauges(self, name: str, doc: str, read: Callable[[], Iterable[Sample | Looked]]) -> None:
        """Call `read` for labelled samples at every scrape; an iterator is read in steps, and must bear changes.

        What it looks at without a sample it tells by numbers (`Looked`): they are part of its steps.
        """
        self._help[name] = doc
        self._gauges[name] = read

    def total(self, name: str, doc: str, read: Callable[[], Iterable[float]]) -> None:
        """Sum what `read` gives at every scrape, in steps."""

        def summed() -> Iterator[Sample | Looked]:
            total = 0.0
            for each in read():
                total += each
                yield 1
            yield {}, total

        self.gauges(name, doc, summed)

    def forget(self, **labels: str) -> None:
        """Drop the counters and histograms that carry all of `labels`: those of a deleted topic."""
        carry = [self._labelled.get(label, set()) for label in labels.items()]
        for name, gone in set.intersection(*carry):
            for known in (self._counters, self._histograms):
                known.get(name, {}).pop(gone, None)
            for label in gone:
                alike = self._labelled[label]
                alike.discard((name, gone))
                if not alike:
                    del self._labelled[label]

    async def families(self) -> list[Family]:
        """Read every metric, on the loop; other work of the loop runs after every `SAMPLES_PER_STEP` counters."""
        found: list[Family] = []
        for name, counters in list(self._counters.items()):
            values: list[Sample] = []
            for some in _steps(counters):
                values += [(dict(key), counter.value) for key, counter in some]
                await asyncio.sleep(0)
            found.append(Family("counter", name, self._help[name], values))
        for name, histograms in list(self._histograms.items()):
            buckets: list[Buckets] = []
            for some_of in _steps(histograms):
                buckets += [(dict(key), histogram.buckets(), histogram.total) for key, histogram in some_of]
                await asyncio.sleep(0)
            found.append(Family("histogram", name, self._help[name], buckets))
        for name, read in list(self._gauges.items()):
            read_so_far: list[Sample] = []
            try:
                looked = 0
                for sample in read():
                    if isinstance(sample, int):
                        looked += sample
                    else:
                        read_so_far.append(sample)
                        looked += 1
                    if looked >= SAMPLES_PER_STEP:
                        looked = 0
                        await asyncio.sleep(0)
                await asyncio.sleep(0)
            except Exception as error:  # ours: the other metrics are served
                events.error("metric not read", exception=error, metric=name)
                continue
            found.append(Family("gauge", name, self._help[name], read_so_far))
        return found


def _steps(metrics: Mapping[Key, T]) -> Iterator[list[tuple[Key, T]]]:
    """Cut the metrics of one name, as they are now, into steps, without those that are dropped meanwhile."""
    keys = list(metrics)  # Pairs would be so many objects more.
    for begin in range(0, len(keys), SAMPLES_PER_STEP):
        yield [(key, metrics[key]) for key in keys[begin : begin + SAMPLES_PER_STEP] if key in metrics]


class MetricsServer:
    """Serves `GET /metrics`: listens on the loop, and starts an HTTP server in a thread with the first connection."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._servers: list[HttpServer] = []
        self._stopped = False
        self.port = 0
        metrics.gauge("anabranch_metrics_connections", "Connections for metrics.", self._connections)

    async def start(self, host: str, port: int) -> None:
        """Listen on every address of `host`; port 0 takes a free one. OSError where one cannot be had."""
        loop = asyncio.get_running_loop()
        self.port = port
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, address in dict.fromkeys((family, str(address[0])) for family, *_, address in found):
                listening = socket.create_server((address, self.port), family=family)
                self._sockets.append(listening)
                listening.setblocking(False)
                self.port = int(listening.getsockname()[1])
        except OSError:
            await self.stop()
            raise
        for listening in self._sockets:
            loop.add_reader(listening.fileno(), self._start_http, loop, listening)

    def _start_http(self, loop: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
        loop.remove_reader(listening.fileno())
        listening.setblocking(True)  # Its thread waits in it.
        thread = threading.Thread(target=self._serve, args=(loop, listening), name="metrics", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, loop: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
        from anabranch.runtime.exposition import HttpServer

        server = HttpServer(listening, self._metrics, loop)
        self._servers.append(server)
        while not self._stopped:
            server.handle_request()
        server.server_close()

    def _connections(self) -> int:
        return sum(len(server.connections) for server in self._servers)

    async def stop(self) -> None:
        """Stop listening."""
        self._stopped = True
        for listening in self._sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for connections
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        for listening in self._sockets:
            listening.close()
