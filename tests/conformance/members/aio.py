"""Members that are aiokafka's consumers, each with an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import KafkaError

from tests.conformance.members.worker import METADATA_MS, POLL_S, At, Got, Member

ASSIGNORS = {"range": RangePartitionAssignor, "roundrobin": RoundRobinPartitionAssignor}
logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


class LibraryMember(Member, ConsumerRebalanceListener):
    refusals = (KafkaError,)

    def open(self) -> None:
        self._runner = asyncio.Runner()
        self._runner.run(self._open())

    async def _open(self) -> None:
        asked = self.asked
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=asked.address,
            group_id=asked.group,
            group_instance_id=asked.instance,
            auto_offset_reset=asked.reset,
            enable_auto_commit=False,
            partition_assignment_strategy=[ASSIGNORS[asked.assignor or "roundrobin"]],
            session_timeout_ms=asked.session_timeout_ms,
            heartbeat_interval_ms=100,
            fetch_max_wait_ms=100,
            metadata_max_age_ms=METADATA_MS,
        )
        self._consumer.subscribe(topics=list(asked.topics) or (), pattern=asked.pattern, listener=self)
        await self._consumer.start()

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self.owns((each.topic, each.partition) for each in assigned)

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self.revoked((each.topic, each.partition) for each in revoked)

    def poll(self) -> Sequence[Got]:
        found = self._runner.run(self._consumer.getmany(timeout_ms=int(POLL_S * 1_000)))
        return [Got(m.topic, m.partition, m.offset, m.value) for messages in found.values() for m in messages]

    def commit(self, offsets: dict[At, int]) -> Iterable[At]:
        self._runner.run(self._consumer.commit({TopicPartition(*at): offset for at, offset in offsets.items()}))
        return offsets

    def close(self) -> None:
        self._runner.run(self._consumer.stop())
        self._runner.close()
