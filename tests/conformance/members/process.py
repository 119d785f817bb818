"""Worker processes of members, as seen by who starts them: commands out, events in, signals to all that they run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.support.broker import ROOT
from tests.support.javascript import SOURCE, install

TIMEOUT_S = 60.0
SCRIPTS = {"kafkajs": "kafkajs_members.js", "platformatic": "platformatic_members.js"}
happened = threading.Condition()
"""Notified whenever any member says anything."""


def until(holds: Callable[[], Any], what: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until members have said what makes it true."""
    with happened:
        assert happened.wait_for(holds, timeout_s), f"waited in vain: {what()}"


class Worker:
    """A process that hosts members of one library."""

    def __init__(self, library: str, address: str) -> None:
        self.library = library
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._ready = False
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"}
        if library in SCRIPTS:
            command = ["node", str(SOURCE / SCRIPTS[library]), address]
            environment |= {"NODE_PATH": str(install()), "NODE_NO_WARNINGS": "1"}
        else:
            command = [sys.executable, "-m", "tests.conformance.members.worker", library, address]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            with happened:
                if event["event"] == "ready":
                    self._ready = True
                elif (handle := self._handlers.get(event["member"])) is not None:
                    handle(event)
                happened.notify_all()

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def tell(self, **command: object) -> None:
        """Give it a command."""
        until(lambda: self._ready, lambda: f"the worker of {self.library} is not ready")
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def listen(self, member: str, handle: Callable[[dict[str, Any]], None]) -> None:
        """Let a member's events be handled."""
        self._handlers[member] = handle

    def pause(self) -> int:
        """Stop it and all it runs, where they stand; return when."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        return time.monotonic_ns()

    def go_on(self) -> None:
        """Let it go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> int:
        """End it and all it runs without a word; return when."""
        if self.running:
            os.killpg(self._process.pid, signal.SIGKILL)
        at = time.monotonic_ns()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        return at


class Workers:
    """The workers of a test session: a few for each library, made when they are first needed, and again if killed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._made: dict[tuple[str, int], Worker] = {}

    def get(self, library: str, number: int) -> Worker:
        """Return a worker of the library; equal numbers are one process."""
        worker = self._made.get((library, number))
        if worker is None or not worker.running:
            worker = self._made[library, number] = Worker(library, self.address)
        return worker

    def close(self) -> None:
        """End all."""
        for worker in self._made.values():
            worker.kill()
