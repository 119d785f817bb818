"""A server as a process of its own: started, watched until it serves, measured, stopped.

What is measured is the whole process tree: CPU seconds in user and system mode, of children that have ended too, and
resident memory. A server serves when it answers ApiVersions and its Metadata names a broker.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.peers.artifacts import TOOLS

HOST = "127.0.0.1"
_CPUCLOCK_SCHED = 2
"""In the id of a process's clock, what it counts (clock_getcpuclockid)."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.005
API_VERSIONS = 18
METADATA = 3


class ServerError(RuntimeError):
    """A server ended, or did not serve in time; the message carries the tail of its log."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process tree has used so far."""

    cpu_s: float
    resident_bytes: int


class ServerProcess(ABC):
    """A server process with a directory of its own; use it as a context manager, or call `start` and `stop`."""

    def __init__(
        self,
        name: str,
        *,
        port: int | None = None,
        directory: Path | None = None,
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 20.0,
    ) -> None:
        self.name = name
        self.port = free_port() if port is None else port
        self.start_timeout_s = start_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self.started_in_s = 0.0
        self._keep = directory is not None
        if directory is None:
            runs = TOOLS / "run"
            runs.mkdir(parents=True, exist_ok=True)
            directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=runs))
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return the command that starts the server."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Return what is run, as a reader of results would name it."""

    def environment(self) -> Mapping[str, str]:
        """Return what the server's environment has beyond this process's."""
        return {}

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def log_path(self) -> Path:
        return self.directory / "server.log"

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the process and return when it serves; `started_in_s` tells how long that took."""
        assert not self.running, f"{self.name} runs already"
        self.directory.mkdir(parents=True, exist_ok=True)
        command, environment = self.command(), {**os.environ, **self.environment()}
        with self.log_path.open("ab") as log:
            began = time.monotonic()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        while not serves(self.port):
            if self._process.poll() is not None:
                raise ServerError(f"{self.name} ended with {self._process.returncode} at its start:\n{self.log_tail()}")
            if time.monotonic() - began > self.start_timeout_s:
                self.kill()
                raise ServerError(f"{self.name} did not serve within {self.start_timeout_s} s:\n{self.log_tail()}")
            time.sleep(POLL_S)
        self.started_in_s = time.monotonic() - began
        return self

    def stop(self) -> int | None:
        """Ask the process to end and wait for it; a process that does not is killed. Return its exit code."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(self.stop_timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
                raise ServerError(
                    f"{self.name} did not end within {self.stop_timeout_s} s:\n{self.log_tail()}"
                ) from None
        return self._process.returncode

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> Self:
        """Start again on the same port and directory."""
        self.stop()
        return self.start()

    def usage(self) -> Usage:
        """Measure the process tree; its live children are counted with it."""
        pids = process_tree(self.pid)
        return Usage(sum(map(cpu_s, pids)), sum(map(resident_bytes, pids)))

    def log_tail(self, lines: int = 30) -> str:
        """Return the last lines of what the process printed."""
        if not self.log_path.exists():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def remove(self) -> None:
        """Remove the directory, unless the caller gave it."""
        if not self._keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.kill()
            self.remove()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self.remove()


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def serves(port: int) -> bool:
    """Tell whether a broker answers ApiVersions and Metadata on the port, and Metadata names at least one broker."""
    try:
        with socket.create_connection((HOST, port), timeout=5.0) as connection:
            _ask(connection, API_VERSIONS, 0, b"")
            answer = _ask(connection, METADATA, 4, struct.pack(">ib", 0, 0))
    except (OSError, EOFError):
        return False
    (brokers,) = struct.unpack_from(">i", answer, 8)
    return bool(brokers > 0)


def _ask(connection: socket.socket, api_key: int, version: int, body: bytes) -> bytes:
    payload = struct.pack(">hhih", api_key, version, 1, -1) + body
    connection.sendall(struct.pack(">i", len(payload)) + payload)
    (size,) = struct.unpack(">i", _receive(connection, 4))
    return _receive(connection, size)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError("the server closed the connection")
        data += piece
    return data


def process_tree(pid: int) -> list[int]:
    """Return the process and its live descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [pid]
    for parent in tree:
        tree.extend(children.get(parent, []))
    return tree


def cpu_s(pid: int) -> float:
    """Return the user and system CPU seconds of a process with all its threads and the children it has waited for.

    Its own are those of its clock, in nanoseconds; those of its children are counted in ticks of 10 ms.
    """
    fields = _stat(pid)
    if not fields:
        return 0.0
    try:
        own = time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:  # It has just ended.
        return 0.0
    return own + sum(int(ticks) for ticks in fields[13:15]) / TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:")), 0)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, the state first; nothing when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
