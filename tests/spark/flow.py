"""Numbered records of some keys, what must come out, and readers that are driven as Spark drives them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.datasource import Filter

from anabranch.client.sync import Admin, Producer
from anabranch.spark.options import for_batch, for_stream, parse
from anabranch.spark.source import FilteringBatchReader, StreamReader, TaskPartition, full_schema

KEYS = 40


class Flow:
    """Sends numbered records of `KEYS` keys to a topic, and remembers what must come out."""

    def __init__(self, address: str, topic: str, partitions: int = 2, configs: Mapping[str, str] | None = None) -> None:
        self.topic = topic
        self.address = address
        self.admin = Admin(bootstrap_servers=address)
        self.admin.create_topics(topic, partitions=partitions, configs=configs or {})
        self.producer = Producer(bootstrap_servers=address)
        self.sent = 0

    def send(self, count: int, producer: Producer | None = None) -> None:
        """Send the next `count` records; by a producer of one's own, such as one in a transaction, if one is given."""
        producer = producer or self.producer
        numbers = range(self.sent, self.sent + count)
        keys = pa.array([f"key-{n % KEYS}" for n in numbers])
        producer.send_arrow(self.topic, pa.table({"key": keys, "value": pa.array([str(n) for n in numbers])}))
        producer.flush()
        self.sent += count

    def resize(self, count: int) -> None:
        self.admin.resize(self.topic, count)

    def expected(self) -> dict[str, list[int]]:
        return {f"key-{k}": list(range(k, self.sent, KEYS)) for k in range(KEYS)}

    def close(self) -> None:
        self.producer.close()
        self.admin.close()


class MicroBatches:
    """A streaming reader as Spark's driver and executors call it, one micro-batch after the other, without Spark."""

    def __init__(self, address: str, topic: str, offset: Any = None, **options: str | None) -> None:
        self.reader = StreamReader(for_stream(parse(_given(address, topic, options))), full_schema(headers=False))
        try:
            self.offset = self.reader.initialOffset() if offset is None else offset
        except BaseException:
            self.reader.stop()
            raise
        self.keys: dict[str, list[int]] = defaultdict(list)
        self.batches = 0

    def step(self) -> bool:
        """Read the next micro-batch; False if there is none."""
        end = self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())
        end = json.loads(json.dumps(end))
        if end == self.offset:
            return False
        self.run(end)
        return True

    def run(self, end: Any) -> None:
        """Run the micro-batch that ends there."""
        for task in self.reader.partitions(self.offset, end):
            _take(self.reader, task, self.keys)
        self.reader.commit(end)
        self.offset = end
        self.batches += 1

    def all_available(self) -> dict[str, list[int]]:
        """Read as long as there is something; return what all micro-batches have yielded, in order."""
        while self.step():
            pass
        return dict(self.keys)

    def close(self) -> None:
        self.reader.stop()


def batch_read(
    address: str, topic: str, filters: Sequence[Filter] = (), *, left: Sequence[Filter] = (), **options: str | None
) -> dict[str, list[int]]:
    """What the tasks of a batch query yield, one task after the other; `left` of the filters are Spark's."""
    given = _given(address, topic, options)
    reader = FilteringBatchReader(for_batch(parse(given)), full_schema(headers=False))
    assert list(reader.pushFilters(list(filters))) == list(left)
    reader = cloudpickle.loads(cloudpickle.dumps(reader))
    keys: dict[str, list[int]] = defaultdict(list)
    for task in reader.partitions():
        _take(reader, task, keys)
    return dict(keys)


def _given(address: str, topic: str, options: Mapping[str, str | None]) -> dict[str, str]:
    """The options of a query that begins at the earliest offsets, unless they say otherwise; None leaves one out."""
    starts = {} if any(name.startswith("starting") for name in options) else {"startingOffsets": "earliest"}
    given = {"kafka.bootstrap.servers": address, "subscribe": topic, **starts, **options}
    return {name: value for name, value in given.items() if value is not None}


def _take(reader: StreamReader | FilteringBatchReader, task: TaskPartition, keys: dict[str, list[int]]) -> None:
    for batch in reader.read(task):
        for key, value in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True):
            keys["" if key is None else key.decode()].append(int(value))
