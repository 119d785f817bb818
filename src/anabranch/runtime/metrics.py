"""Numbers about a broker, kept in process and told in the Prometheus text format.

Counters and histograms are plain attributes that hot paths add to; whatever can be asked for when somebody looks is a
gauge, a function called at that time. Names follow Kafka's MBeans, lower case and with Prometheus' units and suffixes.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

Labels = Mapping[str, str]
Sample = tuple[Labels, float]

LATENCY_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
HTTP_REQUEST_SIZE_MAX = 8192
HTTP_TIMEOUT_S = 10.0


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1) -> None:
        """Add `amount`, which is not negative."""
        self.value += amount


class Histogram:
    """How often a value fell below each bound."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self._counts)

    def lines(self, name: str, labels: Labels) -> Iterator[str]:
        """The cumulative buckets, the sum and the count."""
        seen = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            seen += count
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f"{name}_bucket{_braces({**labels, 'le': le})} {seen}"
        yield f"{name}_sum{_braces(labels)} {self.total:.9g}"
        yield f"{name}_count{_braces(labels)} {seen}"


class Metrics:
    """The registry of one broker."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[tuple[tuple[str, str], ...], Counter]] = {}
        self._histograms: dict[str, dict[tuple[tuple[str, str], ...], Histogram]] = {}
        self._gauges: dict[str, Callable[[], Iterable[Sample]]] = {}
        self._help: dict[str, str] = {}

    def counter(self, name: str, doc: str, **labels: str) -> Counter:
        """The counter of that name and those labels, made on first use. `name` ends in `_total`."""
        self._help[name] = doc
        return self._counters.setdefault(name, {}).setdefault(tuple(labels.items()), Counter())

    def histogram(self, name: str, doc: str, **labels: str) -> Histogram:
        """The histogram of that name and those labels, made on first use. `name` ends in its unit."""
        self._help[name] = doc
        return self._histograms.setdefault(name, {}).setdefault(tuple(labels.items()), Histogram())

    def gauge(self, name: str, doc: str, read: Callable[[], float]) -> None:
        """Ask `read` whenever somebody looks."""
        self.gauges(name, doc, lambda: [({}, read())])

    def gauges(self, name: str, doc: str, read: Callable[[], Iterable[Sample]]) -> None:
        """Ask `read` for labelled samples whenever somebody looks."""
        self._help[name] = doc
        self._gauges[name] = read

    def forget(self, **labels: str) -> None:
        """Drop the counters and histograms that carry all of `labels`: those of a deleted topic."""
        gone = set(labels.items())
        for counters in self._counters.values():
            for key in [key for key in counters if gone <= set(key)]:
                del counters[key]
        for histograms in self._histograms.values():
            for key in [key for key in histograms if gone <= set(key)]:
                del histograms[key]

    def text(self) -> str:
        """Everything, in the Prometheus text format."""
        lines: list[str] = []
        for name, counters in self._counters.items():
            lines += self._title(name, "counter")
            lines += [f"{name}{_braces(dict(key))} {counter.value:.15g}" for key, counter in counters.items()]
        for name, histograms in self._histograms.items():
            lines += self._title(name, "histogram")
            for key, histogram in histograms.items():
                lines += histogram.lines(name, dict(key))
        for name, read in self._gauges.items():
            lines += self._title(name, "gauge")
            lines += [f"{name}{_braces(labels)} {value:.15g}" for labels, value in read()]
        return "\n".join(lines) + "\n"

    def _title(self, name: str, kind: str) -> list[str]:
        return [f"# HELP {name} {self._help[name]}", f"# TYPE {name} {kind}"]


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class MetricsServer:
    """Answers `GET /metrics`, and nothing else, over HTTP/1.1; one answer per connection."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. OSError where the address cannot be had."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=HTTP_REQUEST_SIZE_MAX)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            async with asyncio.timeout(HTTP_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                method, path = (*head.split(b"\r\n", 1)[0].split(b" "), b"", b"")[:2]
                if method not in (b"GET", b"HEAD"):
                    status, body = "405 Method Not Allowed", ""
                elif path.split(b"?", 1)[0] not in (b"/metrics", b"/"):
                    status, body = "404 Not Found", "metrics are at /metrics\n"
                else:
                    status, body = "200 OK", self._metrics.text()
                content = body.encode()
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                    f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode()
                )
                if method != b"HEAD":
                    writer.write(content)
                await writer.drain()
        writer.close()
