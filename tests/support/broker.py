"""A real broker process for tests: started, killed, stopped, and its log read."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGQUIT, SIGTERM, Signals
from typing import Any

from tests.support.forking import ROOT, Forked, start

START_TIMEOUT_S = 30.0

SLOW_STEP = "slow step on the event loop"


class BrokerProcess:
    """`anabranch serve` on a free port, with its data in `data`."""

    def __init__(self, data: Path, *, durability: str = "os", **settings: object) -> None:
        self.data = data
        self.settings = {
            "listeners": "127.0.0.1:0",
            "metrics.listener": "127.0.0.1:0",
            "log.format": "json",
            "log.segment.min.bytes": 14,
            "durability": durability,
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        self.descriptors_max: int | None = None
        """The limit of descriptors of the process; None to leave it as it is."""
        self.import_paths: list[Path] = []
        """Directories with further distributions, as of plug-ins."""
        self.port = 0
        self.metrics_port = 0
        self.lines: list[dict[str, Any]] = []
        self.start_seconds = 0.0
        self._process: subprocess.Popen[str] | Forked | None = None
        self._reader: threading.Thread | None = None
        self._ready = threading.Event()

    def start(self, *, expect_ready: bool = True, timeout_s: float = START_TIMEOUT_S) -> BrokerProcess:
        """Start it, and wait until it serves."""
        given = [argument for name, value in self.settings.items() for argument in ("--set", f"{name}={value}")]
        self._ready.clear()
        self.lines = []
        began = time.monotonic()
        arguments = ["serve", "--data", str(self.data), *given]
        self._process = self._alone(arguments) if self.import_paths else start(arguments, self.descriptors_max)
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        if expect_ready:
            if not self._ready.wait(timeout_s) or self._process.poll() is not None:
                self.kill()
                raise AssertionError(f"the broker did not start: {self.lines}")
            self.start_seconds = time.monotonic() - began
        return self

    def _alone(self, arguments: list[str]) -> subprocess.Popen[str]:
        """Start it as users do, for what it imports at its start."""
        return subprocess.Popen(
            [sys.executable, "-m", "anabranch.cli", *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", *self.import_paths)))},
        )

    def _read(self, process: subprocess.Popen[str] | Forked) -> None:
        assert process.stderr is not None
        for raw in process.stderr:
            try:
                line = json.loads(raw)
            except ValueError:
                line = {"level": "raw", "event": raw.rstrip()}
            self.lines.append(line)
            if line["event"] == "ready":
                self.port = int(line["listener"].rpartition(":")[2])
                self.metrics_port = int(line.get("metrics_port") or 0)
                self._ready.set()
        self._ready.set()

    @property
    def address(self) -> str:
        """Its host and port."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """kill -9."""
        self._end(SIGKILL)

    def stop(self) -> int:
        """Stop cleanly; the exit code."""
        return self._end(SIGTERM)

    def wait(self, timeout_s: float = 120.0) -> int:
        """Wait until it ends by itself; the exit code."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        assert self._reader is not None
        self._reader.join(5)
        if self._process.stderr is not None:
            self._process.stderr.close()
        return code

    def signal(self, number: Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def _end(self, number: Signals) -> int:
        assert self._process is not None
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
        return self.wait()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def said(self, level: str, event: str | None = None) -> list[dict[str, Any]]:
        """Lines of its log; without an event all but those that a busy machine makes it say, of slow steps."""
        lines = [it for it in list(self.lines) if it["level"] == level]
        return [it for it in lines if (it["event"] != SLOW_STEP if event is None else it["event"] == event)]

    def until_said(self, level: str, event: str, count: int = 1, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """Wait for lines of its log."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.said(level, event)) < count:
            assert time.monotonic() < deadline, f"{count} times {event!r} expected, {self._state()}"
            time.sleep(0.01)
        return found

    def _state(self) -> str:
        """What it does, in place of what a test waits for: where it has ended, how; its stacks, if not; its log."""
        assert self._process is not None
        if (code := self._process.poll()) is None:
            self.signal(SIGQUIT)
            time.sleep(0.5)
        return f"exit code {code}, got {self.lines}"

    def resident_bytes(self) -> int:
        """Its resident memory."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    def forget_peak(self) -> None:
        """Begin anew to note the largest resident size."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The largest resident size since `forget_peak`."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def metrics(self, timeout_s: float = 10.0) -> dict[str, float]:
        """Its metrics, labels as part of the name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=timeout_s) as answer:
            text = answer.read().decode()
        samples = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, _, value in samples}


@contextlib.contextmanager
def running(data: Path, *, durability: str = "os", **settings: object) -> Iterator[BrokerProcess]:
    """A broker for the time of a `with`; stopped cleanly, which must succeed."""
    broker = BrokerProcess(data, durability=durability, **settings)
    try:
        broker.start()
        yield broker
        if broker.alive:
            assert broker.stop() == 0, broker.lines
    finally:
        if broker.alive:
            broker.kill()


def log_size(log: Path) -> int:
    """The bytes of the segments of a log, which retention or the cleaner may remove while they are looked at."""
    size = 0
    for segment in log.glob("*.log"):
        with contextlib.suppress(FileNotFoundError):
            size += segment.stat().st_size
    return size
