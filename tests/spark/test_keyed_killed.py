"""A query with state by key whose driver and workers are killed while its topic is resized: as a plain pass, once.

What it wrote is read as an application reads it. Each row says how many values its key has had, and a digest of them in
their order: so every row shows whether all values before it were taken once and in order, and the last one of each key
that nothing is missing.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.client.sync import Admin, Consumer, Producer
from tests.spark.keyed_driver import Digest
from tests.support.broker import ROOT, running
from tests.support.thorough import THOROUGH

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
KEYS = 40
COUNTS = (4, 2, 7, 3, 5, 2)
RESIZED_S, ROUNDS = 3, 3
LONG = pytest.mark.skipif(not THOROUGH, reason="drivers are killed: make conformance; test_keyed.py has a short form")
TIME_LIMIT_S = 240.0


class Load:
    """Numbered records of `KEYS` keys, and a resize every few seconds, until it is stopped."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._send, self._resize)]
        self.sent = self.resizes = 0
        self.failed: list[BaseException] = []
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        assert not self.failed, self.failed

    def _send(self) -> None:
        try:
            with Producer(self._address) as producer:
                while not self._ends.wait(0.2):
                    numbers = range(self.sent, self.sent + 100)
                    keys = pa.array([f"key-{number % KEYS}" for number in numbers])
                    values = pa.array([str(number) for number in numbers])
                    producer.send_arrow("in", pa.table({"key": keys, "value": values}))
                    producer.flush()
                    self.sent += 100
        except BaseException as error:
            self.failed.append(error)

    def _resize(self) -> None:
        try:
            with Admin(self._address) as admin:
                for count in itertools.cycle(COUNTS):
                    if self._ends.wait(RESIZED_S):
                        return
                    admin.resize("in", count)
                    self.resizes += 1
        except BaseException as error:
            self.failed.append(error)


class Query:
    """The query's process, its JVM and its Python workers, started as often as they are killed."""

    def __init__(self, address: str, directory: Path, store: str) -> None:
        self.checkpoint = directory / "checkpoint"
        self._command = [sys.executable, "-m", "tests.spark.keyed_driver", address, str(self.checkpoint), store]
        self._log = directory / "driver.log"
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=ROOT
            )

    def noted(self, what: str) -> int:
        """The newest micro-batch that was planned (`offsets`), or ended (`commits`); -1 without one."""
        return max((int(file.name) for file in (self.checkpoint / what).glob("[0-9]*")), default=-1)

    def until(self, holds: object, what: str) -> None:
        deadline = time.monotonic() + TIME_LIMIT_S
        while not holds():  # type: ignore[operator]
            assert self.process.poll() is None, self._log.read_text()[-3_000:]
            assert time.monotonic() < deadline, f"{what}: {self._log.read_text()[-3_000:]}"
            time.sleep(0.005)

    def until_ended(self, batch: int) -> None:
        self.until(lambda: self.noted("commits") >= batch, f"micro-batch {batch} does not end")

    def kill_within_a_batch(self) -> None:
        """Kill all of it after a micro-batch was planned, before it has ended."""
        self.until(lambda: self.noted("offsets") > self.noted("commits") >= 0, "no micro-batch runs")
        time.sleep(random.uniform(0, 0.3))
        is_within = self.noted("offsets") > self.noted("commits")
        for process in self._processes():
            os.kill(process, signal.SIGKILL)
        self.process.wait()
        self.killed_within += is_within and self.noted("offsets") > self.noted("commits")

    killed_within = 0

    def kill_a_worker(self) -> None:
        """Have the next task that has taken a key's rows kill its Python worker."""
        kill = Path(f"{self.checkpoint}.kill")
        kill.touch()
        self.until(lambda: not kill.exists(), "no worker kills itself")

    def finish(self) -> None:
        Path(f"{self.checkpoint}.end").touch()
        assert self.process.wait(TIME_LIMIT_S) == 0, self._log.read_text()[-3_000:]

    def _processes(self) -> Iterator[int]:
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                session = int((directory / "stat").read_text().rpartition(")")[2].split()[3])
            except OSError:
                continue
            if session == self.process.pid:
                yield int(directory.name)


@contextmanager
def started(address: str, directory: Path, store: str) -> Iterator[Query]:
    query = Query(address, directory, store)
    try:
        yield query
    finally:
        for process in query._processes():
            os.kill(process, signal.SIGKILL)


def plain_pass(count: int) -> dict[str, list[Digest]]:
    """By key, the digests after each of its values."""
    found: dict[str, list[Digest]] = {f"key-{key}": [Digest(0, 0)] for key in range(KEYS)}
    for number in range(count):
        digests = found[f"key-{number % KEYS}"]
        digests.append(digests[-1].with_value(number))
    return found


def written(address: str) -> dict[str, list[Digest]]:
    """What a `read_committed` consumer is handed of the query's rows, by key."""
    found: dict[str, list[Digest]] = {}
    with Consumer(address, auto_offset_reset="earliest", isolation_level="read_committed") as consumer:
        consumer.assign("out")
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 1:
            for record in consumer.poll(timeout_s=0.2):
                assert record.key is not None and record.value is not None
                count, digest = map(int, record.value.split())
                found.setdefault(record.key.decode(), []).append(Digest(count, digest))
                quiet_since = time.monotonic()
    return found


@LONG
@pytest.mark.parametrize("store", ["HDFSBackedStateStoreProvider", "RocksDBStateStoreProvider"])
def test_a_keyed_query_whose_driver_and_workers_are_killed_is_as_a_plain_pass(tmp_path: Path, store: str) -> None:
    with running(tmp_path / "broker") as broker:
        with Admin(broker.address) as admin:
            admin.create_topics("in", partitions=2)
            admin.create_topics("out", partitions=2)
        load = Load(broker.address)
        try:
            with started(broker.address, tmp_path, store) as query:
                for _ in range(ROUNDS):
                    query.until_ended(query.noted("commits") + 1)
                    query.kill_a_worker()
                    query.until_ended(query.noted("commits") + 1)
                    query.kill_within_a_batch()
                    query.start()
                query.until_ended(query.noted("commits") + 1)
                load.stop()
                query.finish()
                assert query.killed_within >= ROUNDS // 2, "no kill came within a micro-batch"
        finally:
            load.stop()
        expected = plain_pass(load.sent)
        found = written(broker.address)
        for key, digests in found.items():
            counts = [digest.count for digest in digests]
            assert counts == sorted(set(counts)), f"{key}: a row comes twice, or out of order: {counts}"
            assert all(digest == expected[key][digest.count] for digest in digests), f"{key}: {digests}"
        assert {key: digests[-1] for key, digests in found.items()} == {
            key: digests[-1] for key, digests in expected.items()
        }
        assert load.resizes >= 3
        with Admin(broker.address) as admin:
            read = {number for number, span in admin.topic_offsets("in").items() if span.end}
        assert max(read) >= 2, "no record went to a partition that was added"
