"""Members that are confluent-kafka's consumers, which are librdkafka's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.conformance.members.worker import METADATA_MS, POLL_S, At, Got, Member


class LibraryMember(Member):
    refusals = (KafkaException,)

    def open(self) -> None:
        asked = self.asked
        settings = {
            "bootstrap.servers": asked.address,
            "group.id": asked.group,
            "group.protocol": asked.protocol,
            "auto.offset.reset": asked.reset,
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            "topic.metadata.refresh.interval.ms": METADATA_MS,
            "log_level": 0,
        }
        if asked.protocol == "classic":
            settings["partition.assignment.strategy"] = asked.assignor
            settings["session.timeout.ms"] = asked.session_timeout_ms
            settings["heartbeat.interval.ms"] = 100
        elif asked.assignor:
            settings["group.remote.assignor"] = asked.assignor
        if asked.instance:
            settings["group.instance.id"] = asked.instance
        self._consumer = Consumer(settings)
        topics = ["^" + asked.pattern] if asked.pattern else list(asked.topics)
        gone = lambda _, partitions: self.revoked(map(_at, partitions))  # noqa: E731
        self._consumer.subscribe(
            topics,
            on_assign=lambda _, partitions: self.assigned(map(_at, partitions)),
            on_revoke=gone,
            on_lost=gone,
        )

    def poll(self) -> Sequence[Got]:
        messages = self._consumer.consume(500, POLL_S)
        return [Got(m.topic(), m.partition(), m.offset(), m.value()) for m in messages if m.error() is None]

    def commit(self, offsets: dict[At, int]) -> Iterable[At]:
        asked = [TopicPartition(*at, offset) for at, offset in offsets.items()]
        return [_at(each) for each in self._consumer.commit(offsets=asked, asynchronous=False) if each.error is None]

    def close(self) -> None:
        self._consumer.close()


def _at(each: TopicPartition) -> At:
    return each.topic, each.partition
