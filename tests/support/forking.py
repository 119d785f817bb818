"""Brokers that begin with their modules imported: forked from a process that has imported them.

Imports take three quarters of what the start of a broker costs the processor, and the tests start a thousand. A broker
begun like this is a process like any other: its memory, descriptors, threads and signals are its own, it runs the entry
point of `anabranch`, and it dies and ends by itself. The rule: the server has one thread and imports, nothing more, so
what is forked is what a new interpreter would have come to. Tests of the command itself start it as users do.

`start` asks the server of this process, which it begins if need be, and which ends with it.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = ("anabranch.cli.entry", "anabranch.cli.broker", "anabranch.server.broker")
_MESSAGE_MAX = 1 << 17
_DESCRIPTORS = 2
"""Those sent with a request: standard error, and where the exit code is to be written."""
_asking = threading.Lock()


class Forked:
    """A process of `anabranch serve`, with the methods of `subprocess.Popen` that a test of a broker needs."""

    def __init__(self, pid: int, stderr: TextIO, ended: TextIO) -> None:
        self.pid = pid
        self.stderr: TextIO | None = stderr
        self.returncode: int | None = None
        self._ended = ended
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code, negative for a signal. TimeoutExpired."""
        with self._waiting:
            if self.returncode is None:
                if not select.select([self._ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("anabranch serve", timeout or 0)
                self.returncode = int(self._ended.read())
                self._ended.close()
            return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def start(arguments: Sequence[str], descriptors_max: int | None = None) -> Forked:
    """Start `anabranch` with arguments; its standard error can be read, its standard output is dropped."""
    said, said_in = os.pipe()
    ended, ended_in = os.pipe()
    request = {"arguments": list(arguments), "environment": dict(os.environ), "descriptors_max": descriptors_max}
    with _asking:
        _, server = _server(os.getpid())
        socket.send_fds(server, [json.dumps(request).encode()], [said_in, ended_in])
        pid = int(server.recv(_MESSAGE_MAX))
    os.close(said_in)
    os.close(ended_in)
    return Forked(pid, os.fdopen(said), os.fdopen(ended))


@functools.cache
def _server(client: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Begin the server of a process, which ends when that closes what it is asked by."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(its.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # An interrupt from the terminal is for the tests, which then end their brokers.
        )
    return server, ours


# -- the server ------------------------------------------------------------------------------------------------------


def _forked(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request; returns its request in each, and None in the server when its client is gone."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, _MESSAGE_MAX)
            _tell_ends(running)
        if requests.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_MAX, _DESCRIPTORS)
        if not message:
            return None
        said, ended = descriptors
        if pid := os.fork():
            os.close(said)
            running[pid] = ended
            requests.send(str(pid).encode())
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for held in (woken, wake, ended, *running.values()):
            os.close(held)
        requests.close()
        os.dup2(said, sys.stderr.fileno())
        os.close(said)
        request: dict[str, Any] = json.loads(message)
        return request


def _tell_ends(running: dict[int, int]) -> None:
    """Write the exit codes of those that have ended."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended = running.pop(found[0])
            os.write(ended, str(os.waitstatus_to_exitcode(found[1])).encode())
            os.close(ended)


def _begin(request: dict[str, Any]) -> None:
    """Be what was asked for."""
    os.environ.clear()
    os.environ.update(request["environment"])
    if (limit := request["descriptors_max"]) is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    sys.argv[:] = ["anabranch", *request["arguments"]]
    importlib.import_module("anabranch.cli.entry").main()


def _serve(descriptor: int) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as requests:
        request = _forked(requests)
    if request is not None:
        gc.unfreeze()
        _begin(request)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
