"""A Spark standalone cluster of processes from the PySpark package."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.broker import ROOT

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
    """Run a master and two workers of one core each, on hosts of their own by their addresses; the master's address."""
    deploy = "org.apache.spark.deploy"
    ports = ["--port", "0", "--webui-port", "0"]
    with ExitStack() as stack:
        master = SparkProcess("master", directory, f"{deploy}.master.Master", "--host", "127.0.0.1", *ports)
        stack.callback(master.stop)
        address = master.await_text("Starting Spark master at ").rpartition(" ")[2]
        for name, host in (("worker-1", "127.0.0.1"), ("worker-2", "127.0.0.2")):
            size = ["--cores", "1", "--memory", "600m", "--work-dir", str(directory / name)]
            worker = SparkProcess(name, directory, f"{deploy}.worker.Worker", "--host", host, *ports, *size, address)
            stack.callback(worker.stop)
            worker.await_text("Successfully registered with master")
        yield address
