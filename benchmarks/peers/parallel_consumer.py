"""Confluent Parallel Consumer as a peer, in key mode: the library that Kafka's Java users take for this.

Its jars are locked in `parallel_consumer.lock`. The program that runs it is one source file: `java` of a JDK runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from benchmarks.peers.artifacts import ArtifactError, fetch, java, read_lock

LOCK = Path(__file__).with_name("parallel_consumer.lock")
SOURCE = Path(__file__).with_name("ParallelConsumerRun.java")
TIMEOUT_S = 400


def parallel_consumer_version() -> str:
    """Return the version that the lock pins."""
    return next(artifact.version for artifact in read_lock(LOCK) if artifact.name == "parallel-consumer-core")


def run(address: str, group: str, topic: str, records: int, *, concurrency: int, sleep_ms: int) -> tuple[float, float]:
    """Process so many records of a topic; return the seconds, and CPU seconds, from the first call to the last."""
    class_path = os.pathsep.join(map(str, fetch(LOCK)))
    command = [java(), "-Xmx1G", "-cp", class_path, str(SOURCE)]
    arguments = [address, group, topic, str(records), str(concurrency), str(sleep_ms)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        text = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
        raise ArtifactError(f"Confluent Parallel Consumer did not run; a JDK (17 or newer) is needed:\n{text}")
    told = json.loads(lines[0])
    assert told["records"] >= records and told["disordered"] == 0, told
    return float(told["seconds"]), float(told["cpu_seconds"])
