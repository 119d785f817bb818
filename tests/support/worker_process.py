"""A process that hosts applications or members: commands in, events out, as lines of JSON; signals to all it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tests.support.broker import ROOT


class WorkerProcess:
    """One process; a thread reads what it says."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
                "PYTHONWARNINGS": "ignore",
                **(environment or {}),
            },
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(json.JSONDecodeError):  # A kill cuts lines off.
                self.said(json.loads(line))

    def said(self, event: dict[str, Any]) -> None:
        """Take an event, in the reader's thread."""
        raise NotImplementedError

    def say(self, command: Mapping[str, object]) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> int:
        """Send a signal to it and all it runs; return when, by the monotonic clock in ns."""
        os.killpg(self._process.pid, number)
        return time.monotonic_ns()

    def wait(self, timeout_s: float) -> None:
        """Wait for its end. A process that does not end shows what its threads do; TimeoutExpired."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(1)
            raise

    def kill(self) -> int:
        """End it and all it runs without a word; return when, by the monotonic clock in ns."""
        at = self.signal(signal.SIGKILL) if self.alive else time.monotonic_ns()
        self._process.wait()
        self._reader.join(5)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # What was not read is lost with the process.
                    stream.close()
        return at
