"""Members that are our own consumers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from anabranch.client import AnabranchError, RebalanceListener, SubscriptionPattern, TopicPartition
from anabranch.client.sync import Consumer
from anabranch.records.arrow.decode import decode
from anabranch.records.arrow.encode import encode_records
from tests.conformance.members.worker import METADATA_MS, POLL_S, At, Got, Member

# Loads the compiled kernels before there is a session that could end meanwhile.
decode(encode_records([(b"key", b"value", 0, [])]))


class LibraryMember(Member, RebalanceListener):
    refusals = (AnabranchError,)

    def open(self) -> None:
        asked = self.asked
        settings = {}
        if asked.protocol == "classic":
            settings = {"session_timeout_ms": asked.session_timeout_ms, "heartbeat_interval_ms": 100}
            settings["partition_assignment_strategy"] = asked.assignor
        elif asked.assignor:
            settings["group_remote_assignor"] = asked.assignor
        self._consumer = Consumer(
            asked.address,
            group_id=asked.group,
            group_protocol=asked.protocol,
            group_instance_id=asked.instance,
            auto_offset_reset=asked.reset,
            enable_auto_commit=False,
            metadata_max_age_ms=METADATA_MS,
            retry_backoff_ms=20,
            fetch_max_wait_ms=100,
            **settings,
        )
        topics = SubscriptionPattern(asked.pattern) if asked.pattern else list(asked.topics)
        self._consumer.subscribe(topics, listener=self)

    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> None:
        self.assigned(map(tuple, partitions))

    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        self.revoked(map(tuple, partitions))

    def poll(self) -> Sequence[Got]:
        return [Got(r.topic, r.partition, r.offset, bytes(r.value or b"")) for r in self._consumer.poll(POLL_S)]

    def commit(self, offsets: dict[At, int]) -> Iterable[At]:
        self._consumer.commit(dict(offsets))
        return offsets

    def close(self) -> None:
        self._consumer.close()
