"""Members that are kafka-python's consumers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kafka import ConsumerRebalanceListener, KafkaConsumer, OffsetAndMetadata, TopicPartition
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from kafka.errors import KafkaError

from tests.conformance.members.worker import METADATA_MS, At, Got, Member

POLL_MS = 1_000
"""Where a poll is over between the answer of SyncGroup and what follows from it, kafka-python 3.0 forgets the
assignment: it takes itself for joined, sends no heartbeats, and turns. At 100 ms that was every other run."""
ASSIGNORS = {
    "range": RangePartitionAssignor,
    "roundrobin": RoundRobinPartitionAssignor,
    "cooperative-sticky": CooperativeStickyAssignor,
}


class LibraryMember(Member, ConsumerRebalanceListener):
    refusals = (KafkaError,)

    def open(self) -> None:
        asked = self.asked
        self._consumer = KafkaConsumer(
            bootstrap_servers=asked.address,
            group_id=asked.group,
            group_instance_id=asked.instance,
            auto_offset_reset=asked.reset,
            enable_auto_commit=False,
            partition_assignment_strategy=[ASSIGNORS[asked.assignor or "range"]],
            session_timeout_ms=asked.session_timeout_ms,
            heartbeat_interval_ms=100,
            fetch_max_wait_ms=100,
            retry_backoff_ms=50,
            metadata_max_age_ms=METADATA_MS,
        )
        self._consumer.subscribe(topics=list(asked.topics) or (), pattern=asked.pattern, listener=self)

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self.assigned((each.topic, each.partition) for each in assigned)

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self.revoked((each.topic, each.partition) for each in revoked)

    def poll(self) -> Sequence[Got]:
        try:
            found = self._consumer.poll(POLL_MS)
        except KafkaError as error:
            # While the broker is away it may be here that one hears of it; whoever uses the library polls again.
            if not error.retriable:
                raise
            return ()
        return [Got(m.topic, m.partition, m.offset, m.value) for messages in found.values() for m in messages]

    def commit(self, offsets: dict[At, int]) -> Iterable[At]:
        self._consumer.commit({TopicPartition(*at): OffsetAndMetadata(o, "", -1) for at, o in offsets.items()})
        return offsets

    def close(self) -> None:
        self._consumer.close(autocommit=False)
