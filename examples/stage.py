"""What the Spark examples share: a broker, a Spark session, and the picture of the result."""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.client import AnabranchError
from anabranch.client.sync import Admin
from anabranch.demo.session import local_session
from anabranch.spark import register

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pyspark.sql import DataFrame, SparkSession

BLUE, GREEN, RED, GRAY = "#2a6fbb", "#3a9d5d", "#c8503c", "#8a8f98"
START_TIME_LIMIT_S = 120.0


class Stage:
    """A broker of its own and a Spark session, in a directory that is removed at the end."""

    def __init__(self, name: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        settings = {"listeners": self.address, "log.cleaner.backoff.ms": "200", "log.segment.min.bytes": "4096"}
        given = [argument for name, value in settings.items() for argument in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "anabranch.cli", "serve", "--data", str(self.directory / "broker"), *given]
        self._broker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._await_broker()
        self._spark: SparkSession | None = None
        self._name = name

    def _await_broker(self) -> None:
        deadline = time.monotonic() + START_TIME_LIMIT_S
        while True:
            with suppress(AnabranchError, OSError), Admin(self.address) as admin:
                admin.list_topics()
                return
            if self._broker.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the broker did not start")
            time.sleep(0.2)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        if self._spark is not None:
            self._spark.stop()
        self._broker.terminate()
        self._broker.wait(30)
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def spark(self) -> SparkSession:
        """The session, started when it is first used."""
        if self._spark is None:
            self._spark = local_session(self._name)
            register(self._spark)
        return self._spark

    @property
    def options(self) -> dict[str, str]:
        """The options that name the broker."""
        return {"kafka.bootstrap.servers": self.address}

    def stream(self, topics: str, **options: str) -> DataFrame:
        """Return topics, from their beginning, as a stream."""
        reader = self.spark.readStream.format("anabranch").options(**self.options)
        return reader.options(subscribe=topics, startingOffsets="earliest", **options).load()

    def table(self, topics: str) -> DataFrame:
        """Return what topics hold now."""
        return self.spark.read.format("anabranch").options(**self.options, subscribe=topics).load()

    def path(self, name: str) -> str:
        """Return a path in the directory."""
        return str(self.directory / name)


def chart(panels: int, title: str) -> tuple[Figure, Any]:
    """Return a figure with panels side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
    figure, axes = pyplot.subplots(1, panels, figsize=(6.0 * panels, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure, axes


def main(name: str, run: Callable[[Stage, bool, Path], bool], description: str, arguments: Sequence[str]) -> int:
    """Run an example; return 0 if its result is right."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--picture", type=Path, default=Path(f"{name}.png"), help="where the result is drawn")
    parser.add_argument("--quick", action="store_true", help="little data: shows that it runs")
    options = parser.parse_args(arguments)
    with Stage(name) as stage:
        right = run(stage, options.quick, options.picture)
    print(f"The result is {'right' if right else 'WRONG'}; the picture is in {options.picture}")
    return 0 if right else 1
