"""kcat, the command line of librdkafka: from the PATH, else from the distribution's package, unpacked beside us."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conformance.clients import Client, Fetched, Record, RefusedError, Waiting

TOOLS = Path(__file__).resolve().parents[3] / ".tools" / "kcat"
PACKAGES = ("kcat", "librdkafka1", "libyajl2", "libavro23", "libserdes1", "libjansson4", "libsnappy1v5", "liblz4-1")


def install() -> tuple[str, dict[str, str]]:
    """Find kcat, or unpack it without touching the system; answer the command and its environment."""
    found = shutil.which("kcat") or shutil.which("kafkacat")
    if found:
        return found, dict(os.environ)
    binary = TOOLS / "usr" / "bin" / "kcat"
    if not binary.exists():
        TOOLS.mkdir(parents=True, exist_ok=True)
        assert shutil.which("apt-get"), "The tests need kcat: install it and put it on the PATH."
        for package in PACKAGES:
            done = subprocess.run(["apt-get", "download", package], cwd=TOOLS, capture_output=True, check=False)
            if done.returncode and package == "kcat":
                subprocess.run(["apt-get", "update"], capture_output=True, check=False)
                subprocess.run(["apt-get", "download", package], cwd=TOOLS, capture_output=True, check=False)
        for archive in TOOLS.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(archive), str(TOOLS)], capture_output=True, check=True)
        assert binary.exists(), "The tests need kcat, and the package could not be fetched: install it."
    libraries = [str(path.parent) for path in TOOLS.rglob("*.so*")]
    return str(binary), {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(dict.fromkeys(libraries))}


class Kcat(Client):
    """kcat -P and -C. It sends a record's value from a file, and reads as JSON."""

    name = "kcat"
    chooses_timestamps = False
    sends_empty_bytes = False
    sends_null_headers = False
    receives_null_headers = False

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._command, self._environment = install()

    def _run(self, *words: str, stdin: bytes = b"") -> bytes:
        command = [self._command, "-b", self._bootstrap, "-m", "30", *words]
        done = subprocess.run(command, input=stdin, capture_output=True, env=self._environment, timeout=60, check=False)
        if done.returncode:
            raise RefusedError(done.stderr.decode("utf-8", "replace"))
        return done.stdout

    def produce(
        self, topic: str, partition: int, records: Sequence[Record], *, compression: str, idempotent: bool
    ) -> Sequence[int]:
        words = ["-P", "-t", topic, "-p", str(partition), "-z", compression, "-X", f"enable.idempotence={idempotent}"]
        words += ["-Z", "-K", "\x01", "-D", "\x02", "-X", "acks=all"]
        with tempfile.NamedTemporaryFile() as file:
            pairs = ((record.key or b"") + b"\x01" + (record.value or b"") for record in records)
            file.write(b"\x02".join(pairs))
            file.flush()
            self._run(*words, "-l", file.name)
        return []

    def fetch(
        self, topic: str, ends: Mapping[int, int], *, starts: Mapping[int, int] | None = None
    ) -> dict[int, list[Fetched]]:
        waiting = Waiting(self.name, ends, starts)
        for partition, start in waiting.next.items():
            if start < ends[partition]:
                words = ["-C", "-q", "-t", topic, "-p", str(partition), "-o", str(start), "-e", "-J", "-Z"]
                for line in self._run(*words, "-c", str(ends[partition] - start)).splitlines():
                    row = json.loads(line)
                    names, values = row.get("headers", [])[::2], row.get("headers", [])[1::2]
                    headers = tuple((name, (value or "").encode()) for name, value in zip(names, values, strict=True))
                    record = Record(_bytes(row["key"]), _bytes(row["payload"]), row["ts"], headers)
                    waiting.add(row["partition"], row["offset"], record)
        assert not waiting.missing, f"kcat ended before {waiting.missing}"
        return waiting.found

    def close(self) -> None:
        pass


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
