"""Apache Kafka's own Java client, in a Java virtual machine that Python drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError

from benchmarks.peers.java import JavaMachine
from tests.conformance.clients import Admin, Client, Fetched, Record, RefusedError, Waiting

Answer = TypeVar("Answer")


class JavaClient(Client, Admin):
    name = "java"
    frames_snappy = True

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._java = JavaMachine("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
        self._consumer = self._java.consumer(
            bootstrap, {"auto.offset.reset": "none", "fetch.max.wait.ms": "100", "max.poll.records": "1000"}
        )
        self._admin = self._java.admin(bootstrap)
        self._api = self._java.jvm.org.apache.kafka.clients.admin

    def produce(
        self, topic: str, partition: int, records: Sequence[Record], *, compression: str, idempotent: bool
    ) -> Sequence[int]:
        settings = {"compression.type": compression, "enable.idempotence": str(idempotent).lower(), "acks": "all"}
        limits = {"max.request.size": str(16 << 20), "delivery.timeout.ms": "30000", "request.timeout.ms": "20000"}
        producer = self._java.producer(self._bootstrap, {**settings, **limits, "linger.ms": "5"})

        def work() -> list[int]:
            sent = [
                producer.send(self._java.record(topic, partition, r.timestamp, r.key, r.value, r.headers))
                for r in records
            ]
            producer.flush()
            return [each.get().offset() for each in sent]

        try:
            return _refusals(work)
        finally:
            producer.close()

    def fetch(
        self, topic: str, ends: Mapping[int, int], *, starts: Mapping[int, int] | None = None
    ) -> dict[int, list[Fetched]]:
        waiting = Waiting(self.name, ends, starts)
        self._consumer.assign(self._java.list(self._java.partition(topic, partition) for partition in ends))
        for partition, at in waiting.next.items():
            self._consumer.seek(self._java.partition(topic, partition), at)
        while waiting.missing:
            found = self._consumer.poll(self._java.jvm.java.time.Duration.ofMillis(200)).iterator()
            while found.hasNext():
                each = found.next()
                headers = tuple((header.key(), header.value()) for header in each.headers().toArray())
                record = Record(each.key(), each.value(), each.timestamp(), headers)
                waiting.add(each.partition(), each.offset(), record)
        self._consumer.unsubscribe()
        return waiting.found

    def close(self) -> None:
        self._consumer.close()
        self._admin.close()
        self._java.close()

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        short = self._java.jvm.java.lang.Short.parseShort("1")
        asked = self._api.NewTopic(topic, partitions, short).configs(self._java.map(configs))
        _refusals(lambda: self._admin.createTopics(self._java.list([asked])).all().get())

    def delete_topic(self, topic: str) -> None:
        _refusals(lambda: self._admin.deleteTopics(self._java.list([topic])).all().get())

    def topics(self) -> set[str]:
        return set(self._admin.listTopics().names().get())

    def partitions(self, topic: str) -> list[int]:
        described = _refusals(lambda: self._admin.describeTopics(self._java.list([topic])).allTopicNames().get())
        return sorted(partition.partition() for partition in described[topic].partitions())

    def create_partitions(self, topic: str, count: int) -> None:
        asked = self._java.map({topic: self._api.NewPartitions.increaseTo(count)})
        _refusals(lambda: self._admin.createPartitions(asked).all().get())

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        at, records = self._java.partition(topic, partition), self._java.records_before(before)
        _refusals(lambda: self._admin.deleteRecords(self._java.map({at: records})).all().get())

    def _topic_resource(self, topic: str) -> Any:
        resource = self._java.jvm.org.apache.kafka.common.config.ConfigResource
        return resource(resource.Type.TOPIC, topic)

    def configs(self, topic: str) -> Mapping[str, str | None]:
        resource = self._topic_resource(topic)
        described = _refusals(lambda: self._admin.describeConfigs(self._java.list([resource])).all().get())
        return {entry.name(): entry.value() for entry in described[resource].entries().toArray()}

    def alter_config(self, topic: str, name: str, value: str) -> None:
        operation = self._api.AlterConfigOp(self._api.ConfigEntry(name, value), self._api.AlterConfigOp.OpType.SET)
        asked = self._java.map({self._topic_resource(topic): self._java.list([operation])})
        _refusals(lambda: self._admin.incrementalAlterConfigs(asked).all().get())

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        earliest, latest = self._api.OffsetSpec.earliest(), self._api.OffsetSpec.latest()
        return {
            partition: (self._offset(topic, partition, earliest), self._offset(topic, partition, latest))
            for partition in self.partitions(topic)
        }

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        return self._offset(topic, partition, self._api.OffsetSpec.forTimestamp(timestamp))

    def _offset(self, topic: str, partition: int, spec: Any) -> int:
        at = self._java.partition(topic, partition)
        return int(_refusals(lambda: self._admin.listOffsets(self._java.map({at: spec})).all().get())[at].offset())


def _refusals(work: Callable[[], Answer]) -> Answer:
    try:
        return work()
    except Py4JJavaError as error:
        cause = error.java_exception.getCause() or error.java_exception
        raise RefusedError(str(cause.toString())) from error
