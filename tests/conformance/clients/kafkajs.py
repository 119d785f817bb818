"""KafkaJS, in a Node process that is told what to do line by line (javascript/kafkajs.js)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.clients import Admin, Client, Fetched, Record, RefusedError, Waiting

HERE = Path(__file__).resolve().parents[1] / "javascript"
TOOLS = Path(__file__).resolve().parents[3] / ".tools" / "javascript"
FETCH_SIZE_MAX = 8 << 20


def install() -> Path:
    """Install the packages of the lock file once; answer the folder that has them."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    lock = (HERE / "package-lock.json").read_bytes()
    stamp = TOOLS / "installed.lock"
    for script in (*HERE.glob("*.js"), HERE / "package.json", HERE / "package-lock.json"):
        shutil.copy(script, TOOLS / script.name)
    if not stamp.exists() or stamp.read_bytes() != lock:
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
        done = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"npm ci failed; Node 20 and npm are needed:\n{done.stdout}{done.stderr}"
        stamp.write_bytes(lock)
    return TOOLS


class KafkaJs(Client, Admin):
    name = "KafkaJS"
    can_alter_configs = False
    can_delete_records = False
    sends_null_headers = False

    def __init__(self, bootstrap: str) -> None:
        folder = install()
        self._process = subprocess.Popen(
            ["node", str(folder / "kafkajs.js"), bootstrap],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "KAFKAJS_NO_PARTITIONER_WARNING": "1"},
        )
        self._calls = 0

    def _call(self, call: str, **given: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._calls += 1
        self._process.stdin.write(json.dumps({"id": self._calls, "call": call, **given}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer["id"] == self._calls
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer["result"]

    def produce(
        self, topic: str, partition: int, records: Sequence[Record], *, compression: str, idempotent: bool
    ) -> Sequence[int]:
        given = [
            [_text(it.key), _text(it.value), it.timestamp, [[name, _text(value)] for name, value in it.headers]]
            for it in records
        ]
        base = self._call(
            "produce", topic=topic, partition=partition, records=given, compression=compression, idempotent=idempotent
        )
        return [base + index for index in range(len(records))]

    def fetch(
        self, topic: str, ends: Mapping[int, int], *, starts: Mapping[int, int] | None = None
    ) -> dict[int, list[Fetched]]:
        waiting = Waiting(self.name, ends, starts)
        while missing := waiting.missing:
            found = self._call("fetch", topic=topic, positions=list(missing.items()), maxBytes=FETCH_SIZE_MAX)
            for partition, offset, key, value, timestamp, headers in found:
                pairs = tuple((name, _bytes(data)) for name, data in headers)
                waiting.add(partition, offset, Record(_bytes(key), _bytes(value), timestamp, pairs))
        return waiting.found

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        self._call("createTopic", topic=topic, partitions=partitions, configs=dict(configs))

    def delete_topic(self, topic: str) -> None:
        self._call("deleteTopic", topic=topic)

    def topics(self) -> set[str]:
        return set(self._call("topics"))

    def partitions(self, topic: str) -> list[int]:
        return sorted(self._call("partitions", topic=topic))

    def configs(self, topic: str) -> Mapping[str, str | None]:
        configs: Mapping[str, str | None] = self._call("configs", topic=topic)
        return configs

    def create_partitions(self, topic: str, count: int) -> None:
        self._call("createPartitions", topic=topic, count=count)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        self._call("deleteRecords", topic=topic, partition=partition, offset=before)

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        return {partition: (low, high) for partition, low, high in self._call("offsets", topic=topic)}

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        return dict(self._call("offsetsAt", topic=topic, timestamp=timestamp))[partition]


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
