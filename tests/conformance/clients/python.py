"""kafka-python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, OffsetSpec, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, NewPartitions, NewTopic
from kafka.errors import KafkaError

from tests.conformance.clients import Admin, Client, Fetched, Record, RefusedError, Waiting

TIMEOUT_S = 30
Answer = TypeVar("Answer")


class KafkaPython(Client, Admin):
    name = "kafka-python"
    frames_snappy = True
    sends_null_headers = False

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._consumer = KafkaConsumer(
            bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="none", fetch_max_wait_ms=100
        )
        self._admin = KafkaAdminClient(bootstrap_servers=bootstrap)

    def produce(
        self, topic: str, partition: int, records: Sequence[Record], *, compression: str, idempotent: bool
    ) -> Sequence[int]:
        producer = KafkaProducer(
            bootstrap_servers=self._bootstrap,
            compression_type=None if compression == "none" else compression,
            enable_idempotence=idempotent,
            acks="all",
            linger_ms=5,
            max_request_size=16 << 20,
        )

        def work() -> list[int]:
            sent = [
                producer.send(
                    topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                    partition=partition,
                    timestamp_ms=record.timestamp,
                )
                for record in records
            ]
            producer.flush(TIMEOUT_S)
            return [each.get(TIMEOUT_S).offset for each in sent]

        try:
            return _refusals(work)
        finally:
            producer.close(TIMEOUT_S)

    def fetch(
        self, topic: str, ends: Mapping[int, int], *, starts: Mapping[int, int] | None = None
    ) -> dict[int, list[Fetched]]:
        waiting = Waiting(self.name, ends, starts)
        self._consumer.assign([TopicPartition(topic, partition) for partition in ends])
        for partition, at in waiting.next.items():
            self._consumer.seek(TopicPartition(topic, partition), at)
        while waiting.missing:
            for at, messages in self._consumer.poll(200).items():
                for message in messages:
                    record = Record(message.key, message.value, message.timestamp, tuple(message.headers))
                    waiting.add(at.partition, message.offset, record)
        self._consumer.unsubscribe()
        return waiting.found

    def close(self) -> None:
        self._consumer.close(autocommit=False)
        self._admin.close()

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        asked = NewTopic(topic, partitions, 1, topic_configs=dict(configs))
        _refusals(lambda: self._admin.create_topics([asked]))

    def delete_topic(self, topic: str) -> None:
        _refusals(lambda: self._admin.delete_topics([topic]))

    def topics(self) -> set[str]:
        return set(_refusals(self._admin.list_topics))

    def partitions(self, topic: str) -> list[int]:
        (found,) = _refusals(lambda: self._admin.describe_topics([topic]))
        return sorted(partition["partition_index"] for partition in found["partitions"])

    def create_partitions(self, topic: str, count: int) -> None:
        _refusals(lambda: self._admin.create_partitions({topic: NewPartitions(count)}))

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        _refusals(lambda: self._admin.delete_records({TopicPartition(topic, partition): before}))

    def configs(self, topic: str) -> Mapping[str, str | None]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        found = _refusals(lambda: self._admin.describe_configs([resource], config_filter="all"))
        return {name: entry["value"] for name, entry in found["topic"][topic].items()}

    def alter_config(self, topic: str, name: str, value: str) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, configs={name: value})
        answer = _refusals(lambda: self._admin.alter_configs([resource]))["topic"][topic]
        if answer != "OK":
            raise RefusedError(str(answer))

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        at = [TopicPartition(topic, partition) for partition in self.partitions(topic)]
        lows = _refusals(lambda: self._admin.list_partition_offsets(dict.fromkeys(at, OffsetSpec.EARLIEST)))
        highs = _refusals(lambda: self._admin.list_partition_offsets(dict.fromkeys(at, OffsetSpec.LATEST)))
        return {each.partition: (lows[each].offset, highs[each].offset) for each in at}

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        at = TopicPartition(topic, partition)
        return int(_refusals(lambda: self._consumer.offsets_for_times({at: timestamp}))[at].offset)


def _refusals(work: Callable[[], Answer]) -> Answer:
    try:
        return work()
    except KafkaError as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error
