"""Applications of our own consumer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from anabranch.client import AnabranchError, RebalanceListener, TopicPartition
from anabranch.client.sync import Admin, Consumer
from anabranch.records.arrow.decode import decode
from anabranch.records.arrow.encode import encode_records
from tests.support.application_worker import POLL_S, Application, At

# Loads the compiled kernels before there is a session that could end meanwhile.
decode(encode_records([(b"key", b"value", 0, [])]))


class OurApplication(Application, RebalanceListener):
    refusals = (AnabranchError,)

    def open(self) -> None:
        plan = self.plan
        classic: dict[str, Any] = {}
        if plan.protocol == "classic":  # a leader without partitions learns of new ones with its metadata only
            classic = {"session_timeout_ms": 10_000, "heartbeat_interval_ms": 200, "metadata_max_age_ms": 500}
        self._admin = Admin(self.address)
        self._consumer = Consumer(
            self.address,
            group_id=plan.group,
            group_protocol=plan.protocol,
            auto_offset_reset=plan.reset,
            enable_auto_commit=plan.commit == "auto",
            auto_commit_interval_ms=300,
            max_poll_interval_ms=plan.poll_interval_ms,
            isolation_level=plan.isolation,
            retry_backoff_ms=20,
            **classic,
        )
        self._consumer.subscribe(plan.topic, listener=self)

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
        self._consumer.commit(dict(offsets))

    def committed(self) -> dict[At, int]:
        found = self._admin.list_group_offsets(self.plan.group)
        return {tuple(tp): each.offset for tp, each in found.items()}

    def close(self) -> None:
        self._consumer.close()
        self._admin.close()
