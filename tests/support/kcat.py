"""The `kcat` command: the one on PATH, or Debian's package unpacked into `.tools/` without root.

Unpacking changes nothing on the system: package lists and archives are kept under `.tools/` too, and only packages
that the system lacks are fetched, kcat and the libraries it needs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.artifacts import TOOLS

TIMEOUT_S = 300
NEEDED = "kcat is not on PATH and could not be fetched as a Debian package; install it (apt-get install kcat)"


@dataclass(frozen=True, slots=True)
class Kcat:
    """The path of kcat, and the environment for it."""

    path: str
    environment: dict[str, str] = field(default_factory=dict)


def kcat() -> Kcat:
    """Return kcat, fetching it first where it is missing."""
    installed = shutil.which("kcat")
    if installed:
        return Kcat(installed)
    home = TOOLS / "kcat"
    home.mkdir(parents=True, exist_ok=True)
    root = home / "root"
    with (home / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not (root / "usr/bin/kcat").exists():
            _unpack(home, root)
    libraries = sorted({str(path.parent) for path in root.glob("usr/lib/**/*.so*")})
    return Kcat(str(root / "usr/bin/kcat"), {"LD_LIBRARY_PATH": os.pathsep.join(libraries)})


def _unpack(home: Path, root: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise RuntimeError(f"{NEEDED}; this machine has no apt-get.")
    state, cache = home / "state", home / "cache"
    for directory in (state / "lists/partial", cache / "archives/partial"):
        directory.mkdir(parents=True, exist_ok=True)
    apt = ["apt-get", "-qq", "-o", f"Dir::State={state}", "-o", "Dir::State::status=/var/lib/dpkg/status"]
    apt += ["-o", f"Dir::Cache={cache}", "-o", "APT::Sandbox::User=", "-o", "Debug::NoLocking=1"]
    _run([*apt, "update"], home)
    plan = _run([*apt, "--simulate", "--no-install-recommends", "install", "kcat"], home)
    packages = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    _run([*apt, "download", *packages], cache)
    unpacked = home / "unpacking"
    shutil.rmtree(unpacked, ignore_errors=True)
    for package in cache.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(unpacked)], home)
    unpacked.rename(root)
    shutil.rmtree(state)


def _run(command: list[str], directory: Path) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{NEEDED}. {' '.join(command[:1] + command[-2:])} said: {done.stderr.strip()}")
    return done.stdout
