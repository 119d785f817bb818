"""confluent-kafka, which is librdkafka."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from tests.conformance.clients import Admin, Client, Fetched, Record, RefusedError, Waiting

TIMEOUT_S = 30


class ConfluentKafka(Client, Admin):
    name = "confluent-kafka"

    def __init__(self, bootstrap: str) -> None:
        self._common = {"bootstrap.servers": bootstrap, "log_level": 0}
        self._admin = AdminClient(self._common)
        self._consumer = Consumer(
            {
                **self._common,
                "group.id": "unused",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 100,
            }
        )

    def produce(
        self, topic: str, partition: int, records: Sequence[Record], *, compression: str, idempotent: bool
    ) -> Sequence[int]:
        offsets: dict[int, int] = {}
        errors: list[str] = []

        def delivered(index: int) -> Callable[[KafkaError | None, Message], None]:
            def take(error: KafkaError | None, message: Message) -> None:
                if error is not None:
                    errors.append(error.str())
                else:
                    offsets[index] = message.offset()

            return take

        settings = {"compression.type": compression, "enable.idempotence": idempotent, "acks": "all", "linger.ms": 5}
        limits = {"message.max.bytes": 16 << 20, "message.timeout.ms": TIMEOUT_S * 1000}
        producer = Producer({**self._common, **settings, **limits})
        for index, record in enumerate(records):
            producer.produce(
                topic,
                value=record.value,
                key=record.key,
                partition=partition,
                on_delivery=delivered(index),
                timestamp=0 if record.timestamp is None else record.timestamp,
                headers=list(record.headers),
            )
        assert producer.flush(TIMEOUT_S) == 0, "confluent-kafka did not deliver all records"
        if errors:
            raise RefusedError(errors[0])
        return [offsets[index] for index in range(len(records))]

    def fetch(
        self, topic: str, ends: Mapping[int, int], *, starts: Mapping[int, int] | None = None
    ) -> dict[int, list[Fetched]]:
        waiting = Waiting(self.name, ends, starts)
        self._consumer.assign([TopicPartition(topic, partition, at) for partition, at in waiting.next.items()])
        while waiting.missing:
            for message in self._consumer.consume(1000, 0.2):
                if message.error() is not None:
                    raise RefusedError(message.error().str())
                _, timestamp = message.timestamp()
                record = Record(message.key(), message.value(), timestamp, tuple(message.headers() or ()))
                waiting.add(message.partition(), message.offset(), record)
        self._consumer.unassign()
        return waiting.found

    def close(self) -> None:
        self._consumer.close()

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        _result(self._admin.create_topics([NewTopic(topic, partitions, 1, config=dict(configs))]))

    def delete_topic(self, topic: str) -> None:
        _result(self._admin.delete_topics([topic]))

    def topics(self) -> set[str]:
        return set(self._admin.list_topics(timeout=TIMEOUT_S).topics)

    def partitions(self, topic: str) -> list[int]:
        return sorted(self._admin.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions)

    def create_partitions(self, topic: str, count: int) -> None:
        _result(self._admin.create_partitions([NewPartitions(topic, count)]))

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        _result(self._admin.delete_records([TopicPartition(topic, partition, before)]))

    def configs(self, topic: str) -> Mapping[str, str | None]:
        entries = _result(self._admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]))
        return {name: entry.value for name, entry in entries.items()}

    def alter_config(self, topic: str, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        _result(
            self._admin.incremental_alter_configs(
                [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])]
            )
        )

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        found = {}
        for partition in self.partitions(topic):
            at = TopicPartition(topic, partition)
            low = _result(self._admin.list_offsets({at: OffsetSpec.earliest()}))
            high = _result(self._admin.list_offsets({at: OffsetSpec.latest()}))
            found[partition] = (low.offset, high.offset)
        return found

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        at = TopicPartition(topic, partition, timestamp)
        return int(self._consumer.offsets_for_times([at], timeout=TIMEOUT_S)[0].offset)


def _result(futures: Mapping[Any, Future[Any]]) -> Any:
    (future,) = futures.values()
    try:
        return future.result(TIMEOUT_S)
    except KafkaException as error:
        raise RefusedError(error.args[0].str()) from error
