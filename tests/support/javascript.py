"""JavaScript clients: installed from the lock of tests/conformance/javascript into `.tools/`, run as a worker process.

A worker reads a request a line and answers a line (lines.js), so that one process serves a whole test session.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.artifacts import TOOLS

SOURCE = Path(__file__).resolve().parents[1] / "conformance" / "javascript"
NODE_MIN = 20
INSTALL_TIMEOUT_S = 600


class WorkerError(Exception):
    """A call in the worker threw; the message is the worker's."""


def install() -> Path:
    """Install the packages of the lock file, once for each lock, and return the directory of the modules."""
    for command in ("node", "npm"):
        if shutil.which(command) is None:
            raise RuntimeError(
                f"The JavaScript clients need Node.js {NODE_MIN} or newer with npm; {command} is missing."
            )
    lock = SOURCE / "package-lock.json"
    version = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    home = TOOLS / f"javascript-{version}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not (home / ".installed").exists():
            for name in ("package.json", "package-lock.json"):
                shutil.copy(SOURCE / name, home)
            command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
            done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
            if done.returncode:
                raise RuntimeError(f"The JavaScript clients could not be installed: {done.stderr.strip()}")
            (home / ".installed").touch()
    return home / "node_modules"


class Worker:
    """A script of tests/conformance/javascript as a process that answers calls."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._script = script
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(
            ["node", str(SOURCE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "NODE_PATH": str(install()), "NODE_NO_WARNINGS": "1"},
        )
        self._calls = 0

    def call(self, call: str, **arguments: object) -> Any:
        """Make one call and return its result; WorkerError when it threw."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._calls += 1
        request = {"id": self._calls, "call": call, **arguments}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self._script} ended: {self._errors.read().decode(errors='replace')}")
        answer = json.loads(line)
        assert answer["id"] == self._calls
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
