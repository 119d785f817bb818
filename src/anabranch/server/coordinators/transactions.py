"""The transaction coordinators of this broker: shards over `__transaction_state`, and the delivery of their markers.

A transaction that is decided is delivered until every partition has its marker, however often that is tried; then its
shard is told. A partition that is no more (its topic was deleted, or it was retired, emptied and removed) has nothing
left to be decided. When a shard dies meanwhile, it asks for the delivery again once it is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from anabranch.runtime.clock import Clock
from anabranch.runtime.events import EventLogger, Seldom
from anabranch.server.cluster.commands import Commands
from anabranch.server.cluster.peers import MarkerPeers
from anabranch.server.cluster.view import ClusterView
from anabranch.server.coordinators.shard import RecordCodec
from anabranch.server.coordinators.shard_set import ShardSet
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.settings import Settings

if TYPE_CHECKING:  # Imported when the first log is read, so that a broker without transactions starts without them.
    from anabranch.machines.transactions.coordinator import Coordinator, WriteMarkers
    from anabranch.machines.transactions.records import Record
    from anabranch.machines.transactions.states import State
    from anabranch.machines.transactions.transaction import Transaction

events = EventLogger("transactions")
TOPIC = "__transaction_state"
RETRY_S = 0.02
RETRY_MAX_S = 2.0
WARNING_INTERVAL_S = 30.0
FENCED = frozenset({ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.TRANSACTION_COORDINATOR_FENCED})


class TransactionFilter(NamedTuple):
    """What ListTransactions passes; a transaction must satisfy all of it."""

    states: Collection[State] | None
    """None passes every state."""
    producer_ids: Collection[int]
    """Empty passes every producer."""
    open_for_ms: int
    """The least time that it has been open; below 0 passes those that are not open, too."""
    matches: Callable[[str], bool]
    """Tells whether a transactional id passes."""


class Transactions(ShardSet["Coordinator", "Record"]):
    """All shards that coordinate transactions."""

    def __init__(
        self,
        settings: Settings,
        *,
        commands: Commands,
        view: ClusterView,
        replicas: Replicas,
        clock: Clock,
        new_id: Callable[[], UUID],
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
            commands=commands,
            view=view,
            replicas=replicas,
            clock=clock,
            new_id=new_id,
        )
        self._peers = peers
        self._broker_settings = settings
        self._deliveries: dict[WriteMarkers, asyncio.Task[None]] = {}
        self._warnings = Seldom(WARNING_INTERVAL_S)

    @property
    def deliveries(self) -> int:
        """How many transactions wait for markers to be written."""
        return len(self._deliveries)

    def unload(self) -> None:
        """Decide nothing more; markers that are not written yet are written after the next start."""
        super().unload()
        for task in self._deliveries.values():
            task.cancel()

    def verify(
        self, transactional_id: str, partition: TopicPartition, producer_id: int, producer_epoch: int
    ) -> ErrorCode:
        """Why a producer may not write into a partition as part of its transaction; NONE if it may."""
        try:
            machine = self.shard_of(transactional_id).machine
        except ApiError as error:
            return error.code
        return machine.verify(transactional_id, producer_id, producer_epoch, partition)

    def listed(self, wanted: TransactionFilter) -> Iterator[tuple[str, Transaction]]:
        """Every transactional id that passes the filter, with its state. ApiError if a shard is not active."""
        for shard in self:
            latest_ms = shard.now_ms() - wanted.open_for_ms
            for name, known in shard.machine:
                if (
                    (wanted.states is None or known.state in wanted.states)
                    and (not wanted.producer_ids or known.producer_id in wanted.producer_ids)
                    and (wanted.open_for_ms < 0 or 0 <= known.started_ms <= latest_ms)
                    and wanted.matches(name)
                ):
                    yield name, known

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
            )
        )

    # -- markers -----------------------------------------------------------------------------------------------------

    def _perform(self, effect: WriteMarkers) -> None:
        decided = effect
        if decided not in self._deliveries:
            task = asyncio.get_running_loop().create_task(self._deliver(decided), name="write markers")
            self._deliveries[decided] = task
            task.add_done_callback(lambda done: self._end_delivery(decided, done))

    def _end_delivery(self, decided: WriteMarkers, done: asyncio.Task[None]) -> None:
        del self._deliveries[decided]
        if not done.cancelled() and (error := done.exception()) is not None:
            events.error("markers not written", transactional_id=decided.transactional_id, exception=error)

    async def _deliver(self, decided: WriteMarkers) -> None:
        shard = self.shard_of(decided.transactional_id)
        left: Collection[TopicPartition] = decided.partitions
        delay_s = RETRY_S
        while True:
            request = _request(decided, left, shard.partition.leader_epoch)
            response = await self._peers.write_markers(request)
            left = [
                TopicPartition(topic.name, result.partition_index)
                for marker in response.markers
                for topic in marker.topics
                for result in topic.partitions
                if not self._is_delivered(decided, topic.name, result.partition_index, ErrorCode.of(result.error_code))
            ]
            if not left:
                break
            suppressed = self._warnings.turn(asyncio.get_running_loop().time())
            if suppressed is not None:
                events.warning(
                    "markers not written yet",
                    transactional_id=decided.transactional_id,
                    partitions=",".join(map(str, left)),
                    suppressed=suppressed,
                )
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_MAX_S)
        shard.tell(lambda machine, now_ms: machine.markers_written(decided, now_ms))

    def _is_delivered(self, decided: WriteMarkers, topic: str, number: int, error: ErrorCode) -> bool:
        if error in FENCED:
            events.error(
                "marker refused: its partition knows of a later one",
                transactional_id=decided.transactional_id,
                partition=f"{topic}-{number}",
                reason=error.name,
            )
        if error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            known = self._view.topic(topic)
            return known is None or not known.exists(number)
        return error is ErrorCode.NONE or error in FENCED


def _request(
    decided: WriteMarkers, partitions: Collection[TopicPartition], coordinator_epoch: int
) -> WriteTxnMarkersRequest:
    topics: dict[str, list[int]] = {}
    for topic, number in sorted(partitions):
        topics.setdefault(topic, []).append(number)
    marker = WritableTxnMarker(
        producer_id=decided.producer_id,
        producer_epoch=decided.producer_epoch,
        transaction_result=decided.commit,
        topics=[WritableTxnMarkerTopic(name=name, partition_indexes=numbers) for name, numbers in topics.items()],
        coordinator_epoch=coordinator_epoch,
    )
    return WriteTxnMarkersRequest(markers=[marker])


def _codec() -> RecordCodec[Record]:
    from anabranch.machines.transactions.records import decode_record, encode_record

    return RecordCodec(encode_record, decode_record)
