"""A streaming query from one topic to another, as a process that stops for good at a chosen step of its sink.

    python -m tests.spark.sink_driver ADDRESS CHECKPOINT STEP TARGET [MASTER]

At STEP it makes the file CHECKPOINT.STEP and waits to be killed; without one (`none`) it writes all there is, and ends.
At a step of a task the first attempt of each micro-batch's first task kills its own Python worker, and notes that in
the file. At a step of two attempts, with `spark.speculation` on a cluster at MASTER, that attempt notes itself in the
file and stays behind until a second one runs beside it, which notes itself too. The topic is written at TARGET.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from anabranch.client import PreparedTransaction
from anabranch.client.sync import Admin
from anabranch.demo.session import local_session
from anabranch.spark import register
from anabranch.spark.sink.decision import Decision, Names
from anabranch.spark.sink.options import parse
from anabranch.spark.sink.writer import BATCH_ID, StreamWriter, TaskWritten
from anabranch.spark.source import AnabranchDataSource

FORMAT = "anabranch-stopping"
STEPS = ("writing", "prepared", "decided", "committed-one", "committed-all")
TASK_STEPS = ("task-begun", "task-writing", "task-prepared")
TWICE_STEPS = ("second-ends-first", "first-goes-on")
"""The first attempt has sent its rows when the second begins. It never goes on; or it does, while the second sends."""


class StoppingWriter(StreamWriter):
    """The writer, which stops at a step."""

    def __init__(self, given: dict[str, str], schema: StructType) -> None:
        self.step, self.checkpoint = given.pop("step"), given.pop("stops")
        super().__init__(parse(given), schema)

    def _reaches(self, step: str) -> None:
        if step == self.step:
            Path(f"{self.checkpoint}.{step}").touch()
            time.sleep(600)

    def _task_reaches(self, step: str) -> None:
        task = TaskContext.get()
        if step == self.step and task is not None and (task.partitionId(), task.attemptNumber()) == (0, 0):
            with Path(f"{self.checkpoint}.{step}").open("a") as file:
                file.write(f"{task.getLocalProperty(BATCH_ID)}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def _runs_twice(self) -> None:
        """Let two attempts of a task have their transactions open at the same time."""
        task = TaskContext.get()
        if self.step not in TWICE_STEPS or task is None or task.partitionId():
            return
        attempts, attempt = Path(f"{self.checkpoint}.{self.step}"), task.attemptNumber()
        mine = f"{task.getLocalProperty(BATCH_ID)} {attempt}"
        with attempts.open("a") as file:
            file.write(f"{mine}\n")
        if attempt == 0:
            second = f"{mine[:-1]}1"
            while self.step == "second-ends-first" or second not in attempts.read_text().splitlines():
                time.sleep(0.1)
        elif self.step == "first-goes-on":
            time.sleep(3)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskWritten:
        """Write, and stop with the rows sent and the transaction open, or begun, or prepared."""

        def rows() -> Iterator[pa.RecordBatch]:
            self._task_reaches("task-begun")
            yield from iterator
            time.sleep(0.3 if self.step in ("writing", "task-writing") else 0)
            self._runs_twice()
            self._reaches("writing")
            self._task_reaches("task-writing")

        written = super().write(rows())
        self._task_reaches("task-prepared")
        return written

    def decide(self, admin: Admin, query: Names, topic: str, made: Decision) -> None:
        """Stop before, or after."""
        self._reaches("prepared")
        super().decide(admin, query, topic, made)
        self._reaches("decided")

    def _end_all(
        self, admin: Admin, prepared: Sequence[PreparedTransaction], *, commit: bool
    ) -> list[PreparedTransaction]:
        """Stop after the first, or the last."""
        late = []
        for each in prepared:
            late += [] if self.end(admin, each, commit=commit) else [each]
            self._reaches("committed-one")
        if prepared:
            self._reaches("committed-all")
        return late


class StoppingSource(AnabranchDataSource):
    """The data source with that writer."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        """Return the writer."""
        del overwrite
        return StoppingWriter({name: self.options[name] for name in self.options}, schema)


def speculating_session(master: str) -> SparkSession:
    """Start Spark on a cluster of two hosts, where a task is run twice when it has taken half a second."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "ERROR",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.minTaskRuntime": "500ms",
    }
    spark: SparkSession = SparkSession.builder.master(master).appName("sink").config(map=settings).getOrCreate()
    return spark


def main(address: str, checkpoint: str, step: str, target: str, master: str = "") -> None:
    """Run the query from topic `in` to topic `out`."""
    attempts = 4 if step in TASK_STEPS else 1
    spark = speculating_session(master) if master else local_session("sink", attempts=attempts)
    register(spark)
    spark.dataSource.register(StoppingSource)
    source = spark.readStream.format("anabranch").option("kafka.bootstrap.servers", address)
    rows = source.options(subscribe="in", startingOffsets="earliest", maxOffsetsPerTrigger="300").load()
    query = (
        rows.select("key", "value")
        .writeStream.format(FORMAT)
        .option("kafka.bootstrap.servers", target)
        .options(topic="out", step=step, stops=checkpoint, checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
