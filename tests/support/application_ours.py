"""Applications of our own consumer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from anabranch.client import AnabranchError, PartitionKeyRebalanceListener, RebalanceListener, TopicPartition
from anabranch.client.sync import Admin, Consumer, Producer
from anabranch.records.arrow.decode import decode
from anabranch.records.arrow.encode import encode_records
from tests.support.application_worker import POLL_S, Application, At

# Loads the compiled kernels before there is a session that could end meanwhile.
decode(encode_records([(b"key", b"value", 0, [])]))


class Flushing(PartitionKeyRebalanceListener):
    """The listener of an application with state by key: what is flushed is committed."""

    def __init__(self, application: Application) -> None:
        self._application = application

    def on_partition_key_maybe_revoked(self, partitions: Collection[TopicPartition]) -> None:
        self._application.flush(map(tuple, partitions))


class OurApplication(Application, RebalanceListener):
    refusals = (AnabranchError,)

    def open(self) -> None:
        plan = self.plan
        classic: dict[str, Any] = {}
        if plan.protocol == "classic":  # a leader without partitions learns of new ones with its metadata only
            classic = {
                "session_timeout_ms": plan.session_ms,
                "heartbeat_interval_ms": plan.heartbeat_ms,
                "metadata_max_age_ms": 500,
            }
        self._admin = Admin(self.address)
        self._consumer = Consumer(
            self.address,
            group_id=plan.group,
            client_id=self.name,
            group_protocol=plan.protocol,
            auto_offset_reset=plan.reset,
            enable_auto_commit=plan.commit == "auto",
            auto_commit_interval_ms=plan.commit_interval_ms,
            max_poll_interval_ms=plan.poll_interval_ms,
            isolation_level=plan.isolation,
            retry_backoff_ms=20,
            **classic,
        )
        self._producer: Producer | None = None
        if plan.transactional:
            self._producer = Producer(self.address, transactional_id=self.name)
            self._producer.init_transactions()
        self._consumer.subscribe(plan.topic, self, Flushing(self) if plan.flushes else None)

    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> None:
        self.assigned(map(tuple, partitions))

    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        self.revoked(map(tuple, partitions))

    def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> None:
        self.lost(map(tuple, partitions))

    def poll(self) -> list[tuple[At, int, bytes]]:
        records = self._consumer.poll(POLL_S, max_records=self.plan.records_max)
        return [((each.topic, each.partition), each.offset, bytes(each.value or b"")) for each in records]

    def commit(self, offsets: dict[At, int]) -> None:
        if self._producer is None:
            self._consumer.commit(dict(offsets))
            return
        with self._producer.transaction():
            self._producer.send_offsets_to_transaction(dict(offsets), self._consumer.group_metadata())

    def committed(self) -> dict[At, int]:
        found = self._admin.list_group_offsets(self.plan.group)
        return {tuple(tp): each.offset for tp, each in found.items()}

    def close(self) -> None:
        self._consumer.close()
        if self._producer is not None:
            self._producer.close()
        self._admin.close()
