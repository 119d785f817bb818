"""KafkaJS and @platformatic/kafka, each in a Node.js process."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from tests.conformance.clients import Admin, Client, Fetched, Record, RefusedError, Waiting
from tests.support.javascript import Worker, WorkerError

FETCH_SIZE_MAX = 16 << 20


class JavaScript(Client, Admin):
    """A client behind a worker script."""

    script: str

    def __init__(self, bootstrap: str) -> None:
        self._worker = Worker(self.script, bootstrap)

    def _call(self, call: str, **arguments: object) -> Any:
        try:
            return self._worker.call(call, **arguments)
        except WorkerError as error:
            raise RefusedError(str(error)) from error

    def produce(
        self, topic: str, partition: int, records: Sequence[Record], *, compression: str, idempotent: bool
    ) -> Sequence[int]:
        sent = [
            (_text(r.key), _text(r.value), r.timestamp, [(name, _text(value)) for name, value in r.headers])
            for r in records
        ]
        base = self._call(
            "produce", topic=topic, partition=partition, records=sent, compression=compression, idempotent=idempotent
        )
        return range(base, base + len(records))

    def fetch(
        self, topic: str, ends: Mapping[int, int], *, starts: Mapping[int, int] | None = None
    ) -> dict[int, list[Fetched]]:
        waiting = Waiting(self.name, ends, starts)
        while missing := waiting.missing:
            positions = list(missing.items())
            found = self._call("fetch", topic=topic, positions=positions, maxBytes=FETCH_SIZE_MAX)
            for partition, offset, key, value, timestamp, headers in found:
                pairs = tuple((name, _bytes(data)) for name, data in headers)
                waiting.add(partition, offset, Record(_bytes(key), _bytes(value), timestamp, pairs))
        return waiting.found

    def close(self) -> None:
        self._worker.close()

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        self._call("createTopic", topic=topic, partitions=partitions, configs=dict(configs))

    def delete_topic(self, topic: str) -> None:
        self._call("deleteTopic", topic=topic)

    def topics(self) -> set[str]:
        return set(self._call("topics"))

    def partitions(self, topic: str) -> list[int]:
        return sorted(self._call("partitions", topic=topic))

    def create_partitions(self, topic: str, count: int) -> None:
        self._call("createPartitions", topic=topic, count=count)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        self._call("deleteRecords", topic=topic, partition=partition, offset=before)

    def configs(self, topic: str) -> Mapping[str, str | None]:
        found: Mapping[str, str | None] = self._call("configs", topic=topic)
        return found

    def alter_config(self, topic: str, name: str, value: str) -> None:
        self._call("alterConfig", topic=topic, name=name, value=value)

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        return {partition: (low, high) for partition, low, high in self._call("offsets", topic=topic)}

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        found = self._call("offsetsAt", topic=topic, timestamp=timestamp)
        return next(offset for at, offset in found if at == partition)


class KafkaJs(JavaScript):
    name = "kafkajs"
    sends_null_headers = False
    script = "kafkajs.js"
    can_alter_configs = False  # it knows only AlterConfigs, which replaces all configs and is deprecated


class Platformatic(JavaScript):
    name = "platformatic"
    script = "platformatic.js"
    compressions = ("none", "gzip", "snappy", "lz4")  # its zstd is that of Node.js 22 and newer
    sends_falling_timestamps = False
    reads_framed_snappy = False


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
