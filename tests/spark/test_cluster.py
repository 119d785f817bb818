"""The pipeline on a Spark standalone cluster: master and two workers from the PySpark package, with nothing of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from anabranch.client.sync import Admin, Producer
from tests.support.broker import ROOT
from tests.support.thorough import THOROUGH

KEYS, RECORDS = 12, 600
TIME_LIMIT_S = 120.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


class SparkProcess:
    """A process of Spark's own, with what it logs."""

    def __init__(self, name: str, directory: Path, *arguments: str) -> None:
        import pyspark

        self.home = Path(pyspark.__file__).parent
        self.log = directory / f"{name}.log"
        environment = {**ENVIRONMENT, "SPARK_HOME": str(self.home), "SPARK_LOCAL_IP": "127.0.0.1"}
        command = [str(self.home / "bin" / "spark-class"), *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=directory, stdout=log, stderr=log)

    def await_text(self, text: str) -> str:
        """Wait for a line with some text, and return it."""
        deadline = time.monotonic() + TIME_LIMIT_S
        while True:
            found = [line for line in self.log.read_text().splitlines() if text in line]
            if found:
                return found[0]
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(30)


@contextmanager
def cluster(directory: Path) -> Iterator[str]:
    """Run a master and two workers of one core each; the master's address."""
    deploy = "org.apache.spark.deploy"
    ports = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with ExitStack() as stack:
        master = SparkProcess("master", directory, f"{deploy}.master.Master", *ports)
        stack.callback(master.stop)
        address = master.await_text("Starting Spark master at ").rpartition(" ")[2]
        for name in ("worker-1", "worker-2"):
            size = ["--cores", "1", "--memory", "600m", "--work-dir", str(directory / name)]
            worker = SparkProcess(name, directory, f"{deploy}.worker.Worker", *ports, *size, address)
            stack.callback(worker.stop)
            worker.await_text("Successfully registered with master")
        yield address


@pytest.mark.skipif(not THOROUGH, reason="six processes of Java: make conformance")
@pytest.mark.timeout(600)
def test_the_pipeline_runs_on_all_workers_of_a_cluster_with_every_key_in_order(
    address: str, checkpoint: str, tmp_path: Path
) -> None:
    with Admin(address) as admin, Producer(address) as producer:
        for topic in ("cluster-numbers", "cluster-sums"):
            admin.create_topics(topic, partitions=2)
        for number in range(RECORDS):
            if number == RECORDS // 2:
                producer.flush()
                admin.resize("cluster-numbers", 4)
            producer.send("cluster-numbers", str(number), key=f"key-{number % KEYS}")
        producer.flush()
    with cluster(tmp_path) as master:
        command = [sys.executable, "-m", "tests.spark.cluster_driver", master, address, checkpoint]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=400, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["batches"] >= 4
    for key in range(KEYS):
        mine = list(range(key, RECORDS, KEYS))
        steps = [total for total, _ in said["sums"][f"key-{key}"]]
        in_order = {sum(mine[:count]) for count in range(1, len(mine) + 1)}
        assert set(steps) <= in_order and steps == sorted(set(steps)), "a micro-batch had records out of turn"
        assert steps[-1] == sum(mine)
    ran = {executor for sums in said["sums"].values() for _, executors in sums for executor in executors}
    assert {Path(executor).relative_to(tmp_path).parts[0] for executor in ran} == {"worker-1", "worker-2"}
