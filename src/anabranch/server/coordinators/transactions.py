"""The transaction coordinators of this broker: shards over `__transaction_state`, and the delivery of their markers.

When the markers of a decided transaction are durable, its shard records that. If the shard fails meanwhile, its machine
begins the delivery again once it is loaded.

A marker that comes late ends the next transaction of its producer half way. So markers are delivered only while their
transaction waits for them: a delivery begins only if it does at that moment, whatever it did when the effect was
decided, and it ends in the same step in which the shard records it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.server.cluster.peers import MarkerPeers
from anabranch.server.coordinators.deliveries import Deliveries
from anabranch.server.coordinators.groups import TOPIC as GROUPS_TOPIC
from anabranch.server.coordinators.record_codec import RecordCodec
from anabranch.server.coordinators.shard import Shard
from anabranch.server.coordinators.shard_set import ShardServices, ShardSet
from anabranch.server.settings import Settings

if TYPE_CHECKING:  # Imported when the first log is read, so that a broker without transactions starts without them.
    from anabranch.machines.transactions.coordinator import Coordinator, WriteMarkers
    from anabranch.machines.transactions.records import TransactionRecord
    from anabranch.machines.transactions.states import TransactionState
    from anabranch.machines.transactions.transaction import Transaction

events = EventLogger("transactions")
TOPIC = "__transaction_state"
WARNING_INTERVAL_S = 10.0


class TransactionFilter(NamedTuple):
    """The filters of ListTransactions; a transaction must satisfy all of them."""

    states: Collection[TransactionState] | None
    """None passes every state."""
    producer_ids: Collection[int]
    """Empty passes every producer."""
    open_for_ms: int
    """The least time that it has been open; below 0 passes those that are not open, too."""
    matches: Callable[[str], bool]
    """Whether a transactional id passes."""

    def passes(self, transactional_id: str, known: Transaction, now_ms: int) -> bool:
        """Whether a transaction satisfies the filter."""
        return (
            (self.states is None or known.state in self.states)
            and (not self.producer_ids or known.producer_id in self.producer_ids)
            and (self.open_for_ms < 0 or 0 <= known.started_ms <= now_ms - self.open_for_ms)
            and self.matches(transactional_id)
        )


class Transactions(ShardSet["Coordinator", "TransactionRecord"]):
    """All shards that coordinate transactions."""

    def __init__(
        self,
        settings: Settings,
        services: ShardServices,
        *,
        peers: MarkerPeers,
    ) -> None:
        super().__init__(
            TOPIC,
            partition_count=settings.transaction_state_log_num_partitions,
            configs={
                "cleanup.policy": "compact",
                "compression.type": "uncompressed",
                "segment.bytes": str(settings.transaction_state_log_segment_bytes),
            },
            make=self._make_coordinator,
            codec=_codec,
            modules=("anabranch.machines.transactions.coordinator",),
            services=services,
        )
        self._deliveries = Deliveries(peers, services.view, GROUPS_TOPIC)
        self._broker_settings = settings
        self._warnings = EventLimit(WARNING_INTERVAL_S)

    def size(self) -> int:
        """Bytes of memory that transactional ids take, and what their transactions hold."""
        return sum(shard.machine.size for shard in self if shard.active)

    @property
    def deliveries(self) -> int:
        """How many transactions wait for markers to be written."""
        return len(self._deliveries)

    def unload(self) -> None:
        """Decide nothing more; markers that are not written yet are written after the next start."""
        super().unload()
        self._deliveries.cancel()

    def verify(
        self, transactional_id: str, partition: TopicPartition, producer_id: int, producer_epoch: int
    ) -> ErrorCode:
        """Why a producer may not write into a partition as part of its transaction; NONE if it may."""
        try:
            machine = self.shard_of(transactional_id).machine
        except ApiError as error:
            return error.code
        return machine.verify(transactional_id, producer_id, producer_epoch, partition)

    def begun_ms(self, transactional_id: str) -> int:
        """When the present transaction of a producer began, in ms: it tells it from others; -1 if unknown."""
        try:
            known = self.shard_of(transactional_id).machine.transaction(transactional_id)
        except ApiError:
            return -1
        return -1 if known is None else known.started_ms

    def listed(self, wanted: TransactionFilter) -> Iterator[tuple[str, Transaction | None]]:
        """Every transactional id that passes the filter, with its state; None for each that does not.

        ApiError if a shard is not active. A caller may let other work go on in between.
        """
        for shard in list(self):
            now_ms = shard.now_ms()
            for name, known in list(shard.machine):
                yield name, known if wanted.passes(name, known, now_ms) else None

    def _make_coordinator(self, partition: int) -> Coordinator:
        from anabranch.machines.transactions.coordinator import Coordinator
        from anabranch.machines.transactions.settings import TransactionSettings

        settings = self._broker_settings
        return Coordinator(
            TransactionSettings(
                timeout_max_ms=settings.transaction_max_timeout_ms,
                id_expiration_ms=settings.transactional_id_expiration_ms,
                timed_out_interval_ms=settings.transaction_timed_out_interval_ms,
                expired_interval_ms=settings.transaction_expired_interval_ms,
            ),
            self._has_room,
        )

    def _has_room(self, size: int) -> bool:
        """Whether transactions may take so many bytes of memory more."""
        held, held_max = self.size(), self._broker_settings.transaction_metadata_max_bytes
        if held + size <= held_max:
            return True
        suppressed = self._warnings.admit(monotonic())
        if suppressed is not None:
            reason = f"They take {held} bytes of memory; transaction.metadata.max.bytes is {held_max}."
            events.warning("transaction refused", reason=reason, suppressed=suppressed)
        return False

    def _perform(self, effect: WriteMarkers) -> None:
        shard = self.shard_of(effect.transactional_id)
        if shard.active and shard.machine.awaits(effect):
            self._deliveries.begin(effect, shard.partition.leader_epoch, partial(_record, shard, effect))


def _record(shard: Shard[Coordinator, TransactionRecord], written: WriteMarkers) -> bool:
    """Have a shard record that all markers are written; False while that would wait in its line.

    A shard that is not active does not: it will have the markers delivered again when it is loaded.
    """
    if shard.is_deciding:
        return False
    shard.tell(lambda machine, now_ms: machine.markers_written(written, now_ms))
    return True


def _codec() -> RecordCodec[TransactionRecord]:
    from anabranch.machines.transactions.coordinator import Coordinator
    from anabranch.machines.transactions.records import decode_record, encode_record

    return RecordCodec(encode_record, decode_record, loaded_weight=Coordinator.weight_of_loading)
