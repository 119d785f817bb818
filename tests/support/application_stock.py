"""Applications of confluent-kafka, which is librdkafka: a client that knows nothing of resizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.support.application_worker import PARTITIONS_MAX, POLL_S, Application, At


class StockApplication(Application):
    """What it is given is told at the end of the poll in which it is given it, before any record of that.

    Where the application was late, librdkafka calls back for each generation that has passed meanwhile, in one poll,
    and what the earlier ones had assigned is others' by then; no record of it is handed out.
    """

    refusals = (KafkaException,)
    _given: frozenset[At] | None = None
    """What this poll has assigned so far, perhaps nothing; None where it has not."""

    def open(self) -> None:
        plan = self.plan
        settings: dict[str, Any] = {
            "bootstrap.servers": self.address,
            # By default it waits up to 10 s before it tries a broker again that was away: as long as a session lasts.
            "reconnect.backoff.max.ms": 500,
            "group.id": plan.group,
            "client.id": self.name,
            "group.protocol": plan.protocol,
            "auto.offset.reset": plan.reset,
            "enable.auto.commit": plan.commit == "auto",
            "auto.commit.interval.ms": plan.commit_interval_ms,
            "max.poll.interval.ms": plan.poll_interval_ms,
            "isolation.level": plan.isolation,
            "fetch.wait.max.ms": 100,
            "log_level": 0,
        }
        if plan.protocol == "classic":
            # A leader learns of new partitions with its metadata only.
            settings |= {
                "session.timeout.ms": 6_000,
                "heartbeat.interval.ms": 300,
                "topic.metadata.refresh.interval.ms": 500,
            }
        self._consumer = Consumer(settings)
        self._consumer.subscribe(
            [plan.topic],
            on_assign=lambda _, partitions: self.assigned(map(_at, partitions)),
            on_revoke=lambda _, partitions: self.revoked(map(_at, partitions)),
            on_lost=lambda _, partitions: self.lost(map(_at, partitions)),
        )

    def assigned(self, partitions: Iterable[At]) -> None:
        """Note what is given: by the classic protocol all that there is from now on, by the other one what is added."""
        earlier = None if self.plan.protocol == "classic" else self._given
        self._given = (earlier or frozenset()) | frozenset(partitions)

    def revoked(self, partitions: Iterable[At]) -> None:
        gone = frozenset(partitions)
        self._given = None if self._given is None else self._given - gone
        super().revoked(gone)

    def lost(self, partitions: Iterable[At]) -> None:
        gone = frozenset(partitions)
        self._given = None if self._given is None else self._given - gone
        super().lost(gone)

    def poll(self) -> list[tuple[At, int, bytes]]:
        found = self._consumer.consume(self.plan.records_max, POLL_S)
        if self._given is not None:
            super().assigned(self._given)
            self._given = None
        return [((m.topic(), m.partition()), m.offset(), m.value()) for m in found if m.error() is None]

    def commit(self, offsets: dict[At, int]) -> None:
        asked = [TopicPartition(*at, offset) for at, offset in offsets.items()]
        for each in self._consumer.commit(offsets=asked, asynchronous=False):
            if each.error is not None:
                raise KafkaException(each.error)

    def committed(self) -> dict[At, int]:
        asked = [TopicPartition(self.plan.topic, number) for number in range(PARTITIONS_MAX)]
        return {_at(each): each.offset for each in self._consumer.committed(asked, 10) if each.offset >= 0}

    def close(self) -> None:
        self._consumer.close()


def _at(each: TopicPartition) -> At:
    return each.topic, each.partition
