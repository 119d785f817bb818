"""Worker processes of members, as seen by who starts them: commands out, events in, signals to all that they run."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from tests.support.heartbeat_tap import HeartbeatTap
from tests.support.javascript import SOURCE, install
from tests.support.worker_process import WorkerProcess

TIMEOUT_S = 60.0
TAPPED = "java"
"""The library whose members' heartbeats are noted: they say to their users that they own what they disown there."""
SCRIPTS = {"kafkajs": "kafkajs_members.js", "platformatic": "platformatic_members.js"}
happened = threading.Condition()
"""Notified whenever any member says anything."""


def until(holds: Callable[[], Any], what: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until members have said what makes it true."""
    with happened:
        assert happened.wait_for(holds, timeout_s), f"waited in vain: {what()}"


class Worker(WorkerProcess):
    """A process that hosts members of one library."""

    def __init__(self, library: str, address: str) -> None:
        self.library = library
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._ready = False
        if library in SCRIPTS:
            environment = {"NODE_PATH": str(install()), "NODE_NO_WARNINGS": "1"}
            super().__init__(["node", str(SOURCE / SCRIPTS[library]), address], environment)
        else:
            super().__init__([sys.executable, "-m", "tests.conformance.members.worker", library, address])

    def said(self, event: dict[str, Any]) -> None:
        with happened:
            if event["event"] == "ready":
                self._ready = True
            elif (handle := self._handlers.get(event["member"])) is not None:
                handle(event)
            happened.notify_all()

    def tell(self, **command: object) -> None:
        """Give it a command."""
        until(lambda: self._ready, lambda: f"the worker of {self.library} is not ready")
        self.say(command)

    def listen(self, member: str, handle: Callable[[dict[str, Any]], None]) -> None:
        """Let a member's events be handled."""
        self._handlers[member] = handle

    def pause(self) -> int:
        """Stop it and all it runs, where they stand; return when."""
        return self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)


class Workers:
    """The workers of a test session: a few for each library, made when they are first needed, and again if killed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.tap: HeartbeatTap | None = None
        self._made: dict[tuple[str, int], Worker] = {}

    def get(self, library: str, number: int) -> Worker:
        """Return a worker of the library; equal numbers are one process."""
        worker = self._made.get((library, number))
        if worker is None or not worker.alive:
            worker = self._made[library, number] = Worker(library, self._address_for(library))
        return worker

    def _address_for(self, library: str) -> str:
        if library != TAPPED:
            return self.address
        if self.tap is None:
            host, _, port = self.address.rpartition(":")
            self.tap = HeartbeatTap(host, int(port))
        return self.tap.address

    def close(self) -> None:
        """End all."""
        for worker in self._made.values():
            worker.kill()
        if self.tap is not None:
            self.tap.close()
