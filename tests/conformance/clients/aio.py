"""aiokafka, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, for_code

from tests.conformance.clients import Admin, Client, Fetched, Record, RefusedError, Waiting

TIMEOUT_S = 30
Answer = TypeVar("Answer")


class Aiokafka(Client, Admin):
    name = "aiokafka"
    frames_snappy = True
    can_alter_configs = False  # it knows only AlterConfigs, which replaces all configs and is deprecated

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aiokafka", daemon=True)
        self._thread.start()
        self._consumer, self._admin = self._run(self._open())

    async def _open(self) -> tuple[Any, Any]:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap, enable_auto_commit=False, auto_offset_reset="none", fetch_max_wait_ms=100
        )
        admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
        await consumer.start()
        await admin.start()
        return consumer, admin

    def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * TIMEOUT_S)
        except KafkaError as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error

    def produce(
        self, topic: str, partition: int, records: Sequence[Record], *, compression: str, idempotent: bool
    ) -> Sequence[int]:
        async def work() -> list[int]:
            async with AIOKafkaProducer(
                bootstrap_servers=self._bootstrap,
                compression_type=None if compression == "none" else compression,
                enable_idempotence=idempotent,
                acks="all",
                linger_ms=5,
                max_request_size=16 << 20,
                max_batch_size=16 << 10,
            ) as producer:
                sent = [
                    await producer.send(
                        topic,
                        record.value,
                        record.key,
                        partition,
                        record.timestamp,
                        list(record.headers),
                    )
                    for record in records
                ]
                return [(await each).offset for each in sent]

        return self._run(work())

    def fetch(
        self, topic: str, ends: Mapping[int, int], *, starts: Mapping[int, int] | None = None
    ) -> dict[int, list[Fetched]]:
        waiting = Waiting(self.name, ends, starts)

        async def work() -> None:
            self._consumer.assign([TopicPartition(topic, partition) for partition in ends])
            for partition, at in waiting.next.items():
                self._consumer.seek(TopicPartition(topic, partition), at)
            while waiting.missing:
                for at, messages in (await self._consumer.getmany(timeout_ms=200)).items():
                    for message in messages:
                        record = Record(message.key, message.value, message.timestamp, tuple(message.headers))
                        waiting.add(at.partition, message.offset, record)
            self._consumer.unsubscribe()

        self._run(work())
        return waiting.found

    def close(self) -> None:
        async def work() -> None:
            await self._consumer.stop()
            await self._admin.close()

        self._run(work())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        asked = NewTopic(topic, partitions, 1, topic_configs=dict(configs))
        answer = self._run(self._admin.create_topics([asked]))
        _check(*answer.topic_errors[0][1:])

    def delete_topic(self, topic: str) -> None:
        answer = self._run(self._admin.delete_topics([topic]))
        _check(answer.topic_error_codes[0][1])

    def topics(self) -> set[str]:
        return set(self._run(self._admin.list_topics()))

    def partitions(self, topic: str) -> list[int]:
        (found,) = self._run(self._admin.describe_topics([topic]))
        return sorted(partition["partition"] for partition in found["partitions"])

    def create_partitions(self, topic: str, count: int) -> None:
        answer = self._run(self._admin.create_partitions({topic: NewPartitions(count)}))
        _check(*answer.topic_errors[0][1:])

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        self._run(self._admin.delete_records({TopicPartition(topic, partition): RecordsToDelete(before)}))

    def configs(self, topic: str) -> Mapping[str, str | None]:
        (answer,) = self._run(self._admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)]))
        (resource,) = answer.resources
        _check(resource[0], resource[1])
        return {entry[0]: entry[1] for entry in resource[4]}

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        async def work() -> dict[int, tuple[int, int]]:
            at = [TopicPartition(topic, partition) for partition in await self._indices(topic)]
            lows, highs = await self._consumer.beginning_offsets(at), await self._consumer.end_offsets(at)
            return {each.partition: (lows[each], highs[each]) for each in at}

        return self._run(work())

    async def _indices(self, topic: str) -> list[int]:
        (found,) = await self._admin.describe_topics([topic])
        return [partition["partition"] for partition in found["partitions"]]

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        at = TopicPartition(topic, partition)
        found = self._run(self._consumer.offsets_for_times({at: timestamp}))
        return int(found[at].offset)


def _check(code: int, message: str | None = None) -> None:
    if code:
        raise RefusedError(f"{for_code(code).__name__}: {message}")
