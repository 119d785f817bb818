"""The demo's runs: flights into a topic that is resized 2 → 6 → 3 → 8 while a Spark query reads it.

One broker process and one Spark session serve all runs. A run sends every flight, stretched over `SENDING_S`, resizes
the topic at the shares of `RESIZES`, reads to the end, and compares each aircraft with a plain pass over the file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from anabranch.base.errors import AnabranchError
from anabranch.client.sync import Admin, Producer
from anabranch.demo.flights import Result, start
from anabranch.demo.story import Difference, Events, Followed, Resize

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress

RESIZES = ((0.25, 6), (0.50, 3), (0.75, 8))
"""(share of the flights sent before the resize, partitions)"""
INITIAL_PARTITIONS = 2
TOPICS = {"key": "flights", "none": "flights-unordered"}
"""The topic of each run, by its `ordering`."""
PROGRESS_MAX = 10_000
"""Progress reports that Spark keeps of a query, so that the report has all of them."""
CHUNKS = 80
SENDING_S = 10.0
"""How long the sending of all flights is stretched to, so that resizes and reading fall into it."""
RECORDS_PER_TRIGGER = 25_000
"""Fewer than are sent meanwhile: only a reader that lags can see a record overtake another."""
BROKER_TIMEOUT_S = 30.0
"""How long the broker may take to start, and to stop."""


class Advance(Protocol):
    """Moves a progress display to `done` of its total, with a remark."""

    def __call__(self, done: float, remark: str = "") -> None: ...


Progress = Callable[[str, float | None], AbstractContextManager[Advance]]
"""Opens a progress display with a title and a total, None if unknown."""


@dataclass
class Run:
    """The figures of one run of the query."""

    events: Events
    rows: int = 0
    batches: int = 0
    took_s: float = 0.0
    results: dict[str, Result] = field(default_factory=dict)
    """Results by tail number."""

    @property
    def ordering(self) -> str:
        """`key` or `none`, the source's option."""
        return self.events.ordering

    @property
    def wrong(self) -> int:
        """The number of aircraft whose result differs from the plain pass."""
        return len(self.events.differences)


def run_all(
    address: str,
    home: Path,
    flights: pa.Table,
    expected: Mapping[str, Result],
    orderings: Sequence[str],
    progress: Progress,
) -> list[Run]:
    """Run the query once for each ordering, at the broker at `address` (HOST:PORT), with checkpoints in `home`."""
    runs: list[Run] = []
    with _spark(home, progress) as spark:
        for ordering in orderings:
            run = _run(spark, address, home, flights, ordering, progress)
            run.events.differences = _differences(expected, run.results)
            runs.append(run)
        tailnum = _example(runs, expected)
        for run in runs:
            run.events.followed = _follow(spark, address, TOPICS[run.ordering], tailnum)
    return runs


def _differences(expected: Mapping[str, Result], found: Mapping[str, Result]) -> list[Difference]:
    return [
        Difference(tailnum, expected.get(tailnum), found.get(tailnum))
        for tailnum in sorted(expected.keys() | found.keys())
        if expected.get(tailnum) != found.get(tailnum)
    ]


def _example(runs: Sequence[Run], expected: Mapping[str, Result]) -> str:
    """Choose the aircraft that the report follows: the busiest wrong one, or the busiest of all."""
    wrong = [each.tailnum for run in runs for each in run.events.differences if each.tailnum in expected]
    return max(wrong or expected, key=lambda tailnum: expected[tailnum].legs)


def _follow(spark: SparkSession, address: str, topic: str, tailnum: str) -> Followed:
    """Read where the records of one aircraft are, in the order in which they were sent."""
    from pyspark.sql import functions as F  # noqa: N812

    options = {"kafka.bootstrap.servers": address, "subscribe": topic}
    records = spark.read.format("anabranch").options(**options).load()
    mine = records.where(F.col("key") == F.lit(tailnum.encode())).select("partition", "offset", "sequence")
    return Followed(tailnum, [(row.partition, row.offset) for row in sorted(mine.collect(), key=lambda r: r.sequence)])


def _run(spark: SparkSession, address: str, home: Path, flights: pa.Table, ordering: str, progress: Progress) -> Run:
    topic = TOPICS[ordering]
    events = Events(ordering, time.time())
    run = Run(events)
    plan_log = home / f"plans-{topic}.jsonl"
    began = time.perf_counter()
    with Admin(bootstrap_servers=address) as admin:
        ordered = "true" if ordering == "key" else "false"
        admin.create_topics(topic, partitions=INITIAL_PARTITIONS, configs={"enable.ordered.delivery": ordered})
        options = {
            "kafka.bootstrap.servers": address,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "ordering": ordering,
            "maxOffsetsPerTrigger": str(RECORDS_PER_TRIGGER),
            "planLog": str(plan_log),
        }

        def update(batch_id: int, count: int, changed: dict[str, Result]) -> None:
            run.batches = batch_id + 1
            run.results.update(changed)

        title = "in order of keys" if ordering == "key" else "without order, for contrast"
        with progress(f"sending and reading {title}", flights.num_rows) as advance:
            query = start(spark, options, str(home / f"checkpoint-{topic}"), update)
            try:

                def sent(done: int) -> None:
                    events.sent.append((time.time(), done))
                    advance(done, f"{done:,} sent")

                sender = _Sender(address, topic, flights, sent)
                sender.start()
                for share, count in RESIZES:
                    sender.wait_for(share)
                    events.resizes.append(_resize(admin, topic, count))
                sender.finish()
                run.rows = flights.num_rows
                advance(flights.num_rows, "all sent, reading the rest")
                query.processAllAvailable()
                query.processAllAvailable()
                events.batches = _times_of(query.recentProgress)
                events.plans = plan_log.read_text().splitlines()
            finally:
                query.stop()
    run.took_s = time.perf_counter() - began
    return run


def _times_of(reports: Sequence[StreamingQueryProgress]) -> list[tuple[float, float]]:
    """Return when each micro-batch began and how long it took; reports of triggers without one are left out."""
    return [
        (datetime.fromisoformat(report.timestamp).timestamp(), report.durationMs["triggerExecution"] / 1000)
        for report in reports
        if "addBatch" in report.durationMs
    ]


def _resize(admin: Admin, topic: str, count: int) -> Resize:
    before = admin.topics([topic])[topic].partition_count
    at, began = time.time(), time.perf_counter()
    admin.resize(topic, count)
    return Resize(at, (time.perf_counter() - began) * 1000, before, count)


class _Sender(threading.Thread):
    """Sends the flights in order, in chunks, stretched over `SENDING_S`."""

    def __init__(self, address: str, topic: str, flights: pa.Table, on_sent: Callable[[int], None]) -> None:
        super().__init__(name="sender", daemon=True)
        self._address = address
        self._topic = topic
        self._flights = flights
        self._on_sent = on_sent
        self._share = 0.0
        self._moved = threading.Condition()
        self._error: BaseException | None = None

    def run(self) -> None:
        rows = self._flights.num_rows
        size = -(-rows // CHUNKS)
        try:
            with Producer(bootstrap_servers=self._address) as producer:
                began = time.perf_counter()
                for at in range(0, rows, size):
                    producer.send_arrow(self._topic, self._flights.slice(at, size))
                    if (
                        at == 0
                    ):  # On a busy machine all of a layout's records could still wait for the first connection.
                        producer.flush()
                        began = time.perf_counter()
                    done = min(rows, at + size)
                    self._on_sent(done)
                    self._move(done / rows * 0.999)
                    time.sleep(max(0.0, began + SENDING_S * done / rows - time.perf_counter()))
        except BaseException as error:
            self._error = error
        self._move(1.0)

    def _move(self, share: float) -> None:
        with self._moved:
            self._share = share
            self._moved.notify_all()

    def wait_for(self, share: float) -> None:
        """Wait until that share of the flights was handed to the producer."""
        with self._moved:
            self._moved.wait_for(lambda: self._share >= share)
        self._check()

    def finish(self) -> None:
        """Wait until all are acknowledged."""
        self.join()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


@contextmanager
def own_broker(home: Path, *, keep: bool) -> Iterator[str]:
    """Run a broker as a process on a free port, with its data in `home`; its address (HOST:PORT).

    With `keep` it goes on after a block that ends without an exception.
    """
    if home.exists() and any(home.iterdir()) and keep:
        raise AnabranchError(f"{home} is not empty: a demo was kept there. Stop its broker and remove it first.")
    home.mkdir(parents=True, exist_ok=True)
    log_path = home / "broker.log"
    settings = {"listeners": "127.0.0.1:0", "metrics.listener": "", "log.format": "json"}
    given = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "anabranch.cli", "serve", "--data", str(home / "data"), *given]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log, start_new_session=keep, env=_environment())
    (home / "pid").write_text(f"{process.pid}\n")
    kept = False
    try:
        yield _address_of(process, log_path)
        kept = keep
    finally:
        if not kept:
            process.send_signal(signal.SIGTERM)
            process.wait(BROKER_TIMEOUT_S)


def _environment() -> dict[str, str]:
    source = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))}


def _address_of(process: subprocess.Popen[bytes], log_path: Path) -> str:
    deadline = time.monotonic() + BROKER_TIMEOUT_S
    while time.monotonic() < deadline:
        for line in log_path.read_text().splitlines():
            event: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "ready":
                return str(event["listener"])
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise AnabranchError(f"The demo's broker did not start:\n{log_path.read_text()[-2000:]}")


@contextmanager
def _spark(home: Path, progress: Progress) -> Iterator[SparkSession]:
    from anabranch.demo.session import local_session

    log_path = home / "spark.log"
    with progress("starting Spark", None):
        try:
            with _standard_error_to(log_path):
                spark = local_session("anabranch demo")
        except Exception as error:
            raise AnabranchError(f"Spark did not start: {error}\n{log_path.read_text()[-2000:]}") from error
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", str(PROGRESS_MAX))
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _standard_error_to(path: Path) -> Iterator[None]:
    """Give the processes that are started in the block a file as standard error, for as long as they live.

    What the JVM warns of at its start (incubator modules, native libraries) matters to nobody; what fails, PySpark
    raises here.
    """
    sys.stderr.flush()
    screen = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(screen, 2)
        os.close(screen)
