"""Counters in memory, prometheus-client's text of them, and the HTTP server beside the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from anabranch.runtime import exposition
from anabranch.runtime.exposition import LoopCollector, Together
from anabranch.runtime.metrics import (
    SAMPLES_PER_STEP,
    Buckets,
    Counter,
    Family,
    LabelItems,
    Looked,
    Metrics,
    MetricsServer,
    Sample,
)

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

T = TypeVar("T")


def some_metrics() -> Metrics:
    metrics = Metrics()
    metrics.counter("bytes_in_total", "Bytes.", topic='odd "\\\n').add(3)
    metrics.counter("bytes_in_total", "Bytes.", topic="t", partition="0").add(0.5)
    times = metrics.histogram("time_seconds", "Time.", request="Fetch")
    for value in (0.0001, 0.003, 99.0):
        times.observe(value)
    metrics.gauge("topics", "Topics.", lambda: 2)
    metrics.gauges("sizes", "Sizes.", lambda: [({"state": "live"}, 1.0), ({"state": "gone"}, float("inf"))])
    return metrics


async def text(metrics: Metrics) -> str:
    collector = LoopCollector(metrics, asyncio.get_running_loop())
    return (await asyncio.to_thread(generate_latest, collector)).decode()


def test_the_text_names_every_metric_with_its_labels_and_values() -> None:
    lines = asyncio.run(text(some_metrics())).splitlines()
    assert lines[:4] == [
        "# HELP bytes_in_total Bytes.",
        "# TYPE bytes_in_total counter",
        'bytes_in_total{topic="odd \\"\\\\\\n"} 3.0',
        'bytes_in_total{partition="0",topic="t"} 0.5',
    ]
    assert lines[4:7] == [
        "# HELP time_seconds Time.",
        "# TYPE time_seconds histogram",
        'time_seconds_bucket{le="0.0001",request="Fetch"} 1.0',
    ]
    assert lines[22:26] == [
        'time_seconds_bucket{le="30",request="Fetch"} 2.0',
        'time_seconds_bucket{le="+Inf",request="Fetch"} 3.0',
        'time_seconds_sum{request="Fetch"} 99.0031',
        'time_seconds_count{request="Fetch"} 3.0',
    ]
    assert lines[26:] == [
        "# HELP topics Topics.",
        "# TYPE topics gauge",
        "topics 2.0",
        "# HELP sizes Sizes.",
        "# TYPE sizes gauge",
        'sizes{state="live"} 1.0',
        'sizes{state="gone"} +Inf',
    ]


def test_the_text_is_read_back_as_it_was() -> None:
    families = text_string_to_metric_families(asyncio.run(text(some_metrics())))
    samples = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert samples["bytes_in_total", 'odd "\\\n'] == 3
    assert samples["time_seconds_count", "Fetch"] == 3
    assert samples["sizes", "gone"] == float("inf")


def test_what_is_forgotten_is_not_exposed() -> None:
    metrics = some_metrics()
    metrics.forget(topic="t")
    exposed = asyncio.run(text(metrics))
    assert 'topic="t"' not in exposed
    assert 'topic="odd' in exposed


def test_a_metric_that_cannot_be_read_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """A defect of one gauge had every scrape answered with status 500."""
    metrics = Metrics()
    metrics.gauge("broken", "A defect.", lambda: 1 / 0)
    metrics.gauge("sound", "Sound.", lambda: 7.0)
    exposed = asyncio.run(text(metrics))
    assert "sound 7.0" in exposed
    assert "broken" not in exposed
    assert "metric not read" in caplog.text


def serving(metrics: Metrics, use: Callable[[int], T]) -> T:
    """Serve metrics, and use the port in another thread."""

    async def run() -> T:
        server = MetricsServer(metrics)
        await server.start("127.0.0.1", 0)
        try:
            return await asyncio.to_thread(use, server.port)
        finally:
            await server.stop()

    return asyncio.run(run())


ANSWER_SIZE_MIN = 1 << 20


def connect(port: int) -> socket.socket:
    """Connect with small segments and a small buffer: the other side's system buffers little for such a peer."""
    client = socket.socket()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.settimeout(10)
    client.connect(("127.0.0.1", port))
    return client


def more_than_a_socket_takes() -> Metrics:
    metrics = Metrics()
    metrics.gauges("large", "Large.", lambda: [({"label": "x" * ANSWER_SIZE_MIN}, 1.0)])
    return metrics


def get(port: int, path: str = "/metrics", **headers: str) -> tuple[str, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_a_request_gets_the_format_that_it_accepts() -> None:
    def use(port: int) -> None:
        kind, body = get(port)
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        assert b"topics 2.0\n" in body
        assert get(port, "/")[1] == body
        kind, other = get(port, Accept="application/openmetrics-text;version=1.0.0")
        assert kind.startswith("application/openmetrics-text")
        assert other.endswith(b"# EOF\n")
        assert gzip.decompress(get(port, **{"Accept-Encoding": "gzip"})[1]) == body

    serving(some_metrics(), use)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/elsewhere", 404), ("POST", "/metrics", 405)])
def test_nothing_else_is_served(method: str, path: str, status: int) -> None:
    def use(port: int) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        with refused.value:
            assert refused.value.status == status

    serving(some_metrics(), use)


HELD = {
    "nothing": b"",
    "half a line": b"GET /metrics HT",
    "a line": b"GET /metrics HTTP/1.1\r\n",
    "half a head": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n",
    "a request whose answer is not read": b"GET /metrics HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("sent", HELD.values(), ids=HELD)
def test_connections_that_wait_for_their_clients_keep_no_scrape_waiting(
    sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = more_than_a_socket_takes()
    closed = metrics.counter("anabranch_metrics_connections_closed_total", "Closed.")

    def use(port: int) -> None:
        held = [connect(port) for _ in range(exposition.REQUESTS_MAX)]
        for connection in held:
            connection.sendall(sent)
        if sent.endswith(b"\r\n\r\n"):
            for connection in held:
                assert connection.recv(1), "it is answered"
        assert b"\nanabranch_metrics_connections 16.0\n" in get(port)[1]
        began = time.monotonic()
        for _ in range(3):
            assert get(port)[1]
        assert time.monotonic() - began < exposition._Handler.timeout / 2
        for connection in held:
            connection.close()

    serving(metrics, use)
    assert closed.value >= 1
    assert capfd.readouterr().err == ""


def test_what_a_client_accepts_and_cannot_be_understood_is_passed_over(capfd: pytest.CaptureFixture[str]) -> None:
    def use(port: int) -> None:
        for version in ("abc", "1.x", "1;2"):
            assert b"topics 2.0\n" in get(port, Accept=f"application/openmetrics-text; version={version}")[1]

    serving(some_metrics(), use)
    assert capfd.readouterr().err == ""


def test_a_request_that_is_too_long_ends_there(capfd: pytest.CaptureFixture[str]) -> None:
    """98 headers of 64 KiB from 16 clients took half a gigabyte."""
    line = b"X: " + b"y" * 4_000 + b"\r\n"

    def use(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.settimeout(10)
            answer = b""
            with contextlib.suppress(ConnectionError):
                client.sendall(b"GET /metrics HTTP/1.0\r\n" + 90 * line + b"\r\n")
                while part := client.recv(1 << 16):
                    answer += part
            assert b"topics" not in answer
        assert get(port)[1]

    serving(some_metrics(), use)
    assert capfd.readouterr().err == ""


def test_a_place_without_a_thread_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if "process_request_thread" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    def use(port: int) -> None:
        with monkeypatch.context() as without:
            without.setattr(threading.Thread, "start", refused)
            for _ in range(exposition.REQUESTS_MAX + 1):
                with socket.create_connection(("127.0.0.1", port)) as client:
                    client.settimeout(10)
                    with contextlib.suppress(ConnectionError):
                        assert client.recv(1) == b""
        assert b"anabranch_metrics_connections 1.0" in get(port)[1]

    serving(some_metrics(), use)


def test_the_server_waits_for_requests_without_looking_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a socket that does not block it came back at once: after its first request it took a whole processor."""
    looked = 0
    wait = exposition.HttpServer.handle_request

    def count(server: exposition.HttpServer) -> None:
        nonlocal looked
        looked += 1
        wait(server)

    monkeypatch.setattr(exposition.HttpServer, "handle_request", count)

    def scrape(port: int) -> int:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).close()
        time.sleep(0.3)
        return looked

    assert serving(Metrics(), scrape) <= 2


@pytest.mark.parametrize("line", [b"", b"X: y\r\n"], ids=["nothing more", "a line from time to time"])
def test_a_request_has_one_deadline(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    monkeypatch.setattr(exposition._Handler, "timeout", 0.5)

    def use(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.settimeout(0.1)
            began = time.monotonic()
            slow.sendall(b"GET /metrics HTTP/1.1\r\n")
            while True:
                assert time.monotonic() - began < 5
                try:
                    slow.sendall(line)
                    assert slow.recv(1) == b""
                    break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            assert time.monotonic() - began > 0.4

    serving(some_metrics(), use)


def test_an_answer_has_a_deadline_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exposition._Handler, "timeout", 0.5)

    def use(port: int) -> None:
        with connect(port) as reader:
            reader.sendall(b"GET /metrics HTTP/1.0\r\n")
            time.sleep(0.4)
            reader.sendall(b"\r\n")
            size = 0
            while part := reader.recv(1 << 16):
                if not size:
                    time.sleep(0.2)  # More than the request has left.
                size += len(part)
            assert size > ANSWER_SIZE_MIN, "all of it was sent"
        with connect(port) as other:
            other.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            time.sleep(1.5)
            with contextlib.suppress(ConnectionError):
                size = 0
                while part := other.recv(1 << 16):
                    size += len(part)
            assert size < ANSWER_SIZE_MIN, "a part of it was not read in time"

    serving(more_than_a_socket_takes(), use)
    assert capfd.readouterr().err == ""


def test_a_connection_is_refused_while_every_place_serves_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "REQUESTS_MAX", 1)
    monkeypatch.setattr(exposition, "PLACE_S", 0.01)
    metrics = Metrics()
    second: list[bytes] = []

    def use(port: int) -> None:
        def ask_again() -> float:
            with socket.create_connection(("127.0.0.1", port)) as other:
                other.settimeout(10)
                second.append(other.recv(1))
            return 0.0

        metrics.gauge("nested", "Connects while it is read.", ask_again)
        assert b"nested 0.0" in get(port)[1]

    serving(metrics, use)
    assert second == [b""]


def test_one_answer_is_rendered_at_a_time_for_all_who_ask_the_same_before_it_begins() -> None:
    rendered: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        rendered.append(environ["QUERY_STRING"])
        begun.set()
        assert may_end.wait(10)
        start_response("200 OK", [])
        return [b"%d" % len(rendered)]

    def ask(query: str, other: int = 0) -> list[bytes]:
        asked = {"QUERY_STRING": f"name[]={query}&other={other}"}  # What else the address says tells no answer apart.
        return [*together(asked, lambda *given: print)]

    with closing(Together(application)) as together, ThreadPoolExecutor(10) as clients:
        first = clients.submit(ask, "a")
        assert begun.wait(10)
        later = [clients.submit(ask, query, number) for number, query in enumerate("aaaabbbbb")]
        while together.waiting < 10:
            time.sleep(0.01)
        may_end.set()
        assert first.result() == [b"1"], "nobody is given values of before the request"
        assert sorted(each.result()[0] for each in later) in ([b"2"] * 4 + [b"3"] * 5, [b"2"] * 5 + [b"3"] * 4)
    assert sorted(query[:8] for query in rendered) == ["name[]=a", "name[]=a", "name[]=b"]


def test_the_loop_goes_on_between_any_two_metrics() -> None:
    metrics = Metrics()
    reads: list[int] = []
    steps = 0
    for number in range(20):
        metrics.gauge(f"gauge_{number}", "A gauge.", lambda: reads.append(steps) or 0.0)  # type: ignore[func-returns-value]

    async def run() -> None:
        nonlocal steps
        reading = asyncio.create_task(metrics.families())
        while not reading.done():
            steps += 1
            await asyncio.sleep(0)

    asyncio.run(run())
    assert len(set(reads)) == 20


@pytest.mark.parametrize("kind", ["counter", "histogram"])
def test_the_loop_goes_on_within_a_metric_of_many_samples(kind: str) -> None:
    metrics = Metrics()
    count = 5 * SAMPLES_PER_STEP + 1
    for number in range(count):
        getattr(metrics, kind)("many", "Many.", partition=str(number))
    steps = 0

    async def run() -> list[Family]:
        nonlocal steps
        reading = asyncio.create_task(metrics.families())
        while not reading.done():
            steps += 1
            if steps == 3:
                metrics.forget(partition="7")
                getattr(metrics, kind)("many", "Many.", partition="new")
            await asyncio.sleep(0)
        return reading.result()

    (family,) = asyncio.run(run())
    assert steps >= 6
    assert len(family.samples) == count, "samples that come and go meanwhile change nothing"


def test_the_loop_goes_on_within_a_gauge_whose_samples_are_an_iterator() -> None:
    metrics = Metrics()
    count, read = 5 * SAMPLES_PER_STEP + 1, 0
    at_once: list[int] = []

    def samples() -> Iterator[Sample]:
        nonlocal read
        for number in range(count):
            read += 1
            yield {"partition": str(number)}, float(number)

    async def run() -> list[Family]:
        metrics.gauges("many", "Many.", samples)
        reading = asyncio.create_task(metrics.families())
        while not reading.done():
            before = read
            await asyncio.sleep(0)
            at_once.append(read - before)
        return reading.result()

    (family,) = asyncio.run(run())
    assert [value for _, value in family.samples] == [*map(float, range(count))]  # type: ignore[misc]
    assert max(at_once) <= SAMPLES_PER_STEP


def test_values_are_read_in_the_thread_of_the_loop() -> None:
    metrics = Metrics()
    threads: list[int] = []
    metrics.gauge("thread", "A thread.", lambda: threads.append(threading.get_ident()) or 0.0)  # type: ignore[func-returns-value]
    serving(metrics, get)
    assert threads == [threading.get_ident()]


def test_a_loop_that_gives_no_values_is_answered_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "TIMEOUT_S", 0.05)
    metrics = Metrics()
    metrics.gauge("slow", "Blocks the loop.", lambda: time.sleep(0.5) or 0.0)  # type: ignore[func-returns-value]

    def use(port: int) -> None:
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(port)
        with refused.value:
            assert refused.value.status == 503

    serving(metrics, use)


def test_a_loop_that_is_closed_before_it_reads_the_values_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exposition, "TIMEOUT_S", 0.1)
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *_: loop.close())  # What it was given, it does not do.
    with pytest.raises(TimeoutError):
        list(LoopCollector(Metrics(), loop).collect())
    gc.collect()
    assert not caplog.records


def test_a_taken_port_is_an_oserror_and_nothing_is_left_open() -> None:
    async def run() -> None:
        first, second = MetricsServer(Metrics()), MetricsServer(Metrics())
        await first.start("127.0.0.1", 0)
        with pytest.raises(OSError):
            await second.start("127.0.0.1", first.port)
        await first.stop()
        await second.start("localhost", first.port)
        await second.stop()

    asyncio.run(run())


def test_prometheus_client_is_imported_with_the_first_request() -> None:
    script = """
import asyncio, sys, urllib.request
from anabranch.runtime.metrics import Metrics, MetricsServer

async def run():
    server = MetricsServer(Metrics())
    await server.start("127.0.0.1", 0)
    print("prometheus_client" in sys.modules)
    await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{server.port}/metrics")
    print("prometheus_client" in sys.modules)
    await server.stop()

asyncio.run(run())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.stderr) == (["False", "True"], "")


def test_the_loop_goes_on_within_metrics_of_things_of_which_few_have_a_sample() -> None:
    """Of 100,000 partitions without records each metric took 40 ms in one step."""
    metrics = Metrics()
    count, read = 5 * SAMPLES_PER_STEP, 0
    at_once: list[int] = []

    def looked() -> Iterator[int]:
        nonlocal read
        for _ in range(count):
            read += 1
            yield 1

    def samples() -> Iterator[Sample | Looked]:
        yield from looked()
        yield {"partition": "last"}, 1.0

    async def run() -> list[Family]:
        nonlocal read
        metrics.gauges("few", "Few.", samples)
        metrics.total("sum", "Sum.", looked)
        reading = asyncio.create_task(metrics.families())
        while not reading.done():
            before = read
            await asyncio.sleep(0)
            at_once.append(read - before)
        return reading.result()

    few, total = asyncio.run(run())
    assert [*few.samples] == [({"partition": "last"}, 1.0)] and [*total.samples] == [({}, float(count))]
    assert 0 < max(at_once) <= SAMPLES_PER_STEP


def test_a_metric_that_is_dropped_while_its_name_is_read_is_left_out() -> None:
    metrics = Metrics()
    for number in range(SAMPLES_PER_STEP + 2):
        metrics.counter("c_total", "A counter.", topic=f"t{number}").add(number)

    async def read() -> Sequence[Sample] | Sequence[Buckets]:
        reading = asyncio.ensure_future(metrics.families())
        await asyncio.sleep(0)
        metrics.forget(topic=f"t{SAMPLES_PER_STEP}")
        (family,) = await reading
        return family.samples

    values = [value for _, value in asyncio.run(read())]
    assert values == [*range(SAMPLES_PER_STEP), SAMPLES_PER_STEP + 1]


def test_forgetting_a_topic_looks_at_its_own_metrics_alone() -> None:
    """Each deleted topic looked at the counters of all others."""

    class Unread(dict[LabelItems, Counter]):
        def __iter__(self) -> Iterator[LabelItems]:
            raise AssertionError("all counters are read")

    metrics = Metrics()
    metrics._counters["bytes_total"] = Unread()
    for number in range(3):
        metrics.counter("bytes_total", "Bytes.", topic=f"t{number}", partition="0").add()
    metrics.forget(topic="t1", partition="1")
    metrics.forget(topic="unknown")
    assert len(metrics._counters["bytes_total"]) == 3
    metrics.forget(topic="t1", partition="0")
    assert len(metrics._counters["bytes_total"]) == 2
    assert set(metrics._labelled) == {("topic", "t0"), ("topic", "t2"), ("partition", "0")}
    assert metrics.counter("bytes_total", "Bytes.", topic="t1", partition="0").value == 0
