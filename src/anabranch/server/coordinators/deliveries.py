"""Deliveries of markers: a transaction that is decided is delivered until every partition has its marker.

A nonexistent partition (its topic was deleted, or it was retired, emptied and removed) needs none, and a partition
with a later producer epoch has no open transaction of this one. After any other failure, and after any exception, the
marker is sent again, at growing intervals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.server.cluster.peers import MarkerPeers
from anabranch.server.cluster.view import ClusterView

if TYPE_CHECKING:
    from anabranch.machines.transactions.coordinator import WriteMarkers

events = EventLogger("transactions")
Result = TypeVar("Result")
MANY = 1_000
"""Partitions of a transaction from which on a thread sorts them."""
RETRY_S = 0.02
RETRY_MAX_S = 2.0
WARNING_INTERVAL_S = 30.0
FENCED = frozenset({ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.TRANSACTION_COORDINATOR_FENCED})


class Deliveries:
    """The decided transactions with markers still to be written."""

    def __init__(self, peers: MarkerPeers, view: ClusterView) -> None:
        self._peers = peers
        self._view = view
        self._tasks: dict[WriteMarkers, asyncio.Task[None]] = {}
        self._warnings = EventLimit(WARNING_INTERVAL_S)

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, decided: WriteMarkers, coordinator_epoch: int, on_delivered: Callable[[], None]) -> None:
        """Deliver in the background, unless that is being done; `on_delivered` is called when all markers are durable.

        `coordinator_epoch` is the leader epoch of the coordinator's partition: later ones fence earlier ones.
        """
        if decided not in self._tasks:
            delivery = self._deliver(decided, coordinator_epoch, on_delivered)
            task = asyncio.get_running_loop().create_task(delivery, name="write markers")
            self._tasks[decided] = task
            task.add_done_callback(lambda done: self._end(decided, done))

    def cancel(self) -> None:
        """Stop delivering: the coordinator asks again after the next start."""
        for task in self._tasks.values():
            task.cancel()

    def _end(self, decided: WriteMarkers, done: asyncio.Task[None]) -> None:
        del self._tasks[decided]
        if not done.cancelled() and (error := done.exception()) is not None:
            events.error("markers not written", transactional_id=decided.transactional_id, exception=error)

    async def _deliver(self, decided: WriteMarkers, coordinator_epoch: int, on_delivered: Callable[[], None]) -> None:
        left: Collection[TopicPartition] = decided.partitions
        delay_s = RETRY_S
        while True:
            reason: Exception | None = None
            try:
                request = await _beside(left, _request, decided, left, coordinator_epoch)
                response = await self._peers.write_markers(request)
            except Exception as error:  # Ours or the disk's: the transaction stays open until its markers are written.
                reason = error
            else:
                left = await _beside(left, self._undelivered, decided, left, response)
            if not left:
                break
            self._warn(decided, left, reason)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_MAX_S)
        on_delivered()

    def _warn(self, decided: WriteMarkers, left: Collection[TopicPartition], reason: Exception | None) -> None:
        suppressed = self._warnings.admit(asyncio.get_running_loop().time())
        if suppressed is None:
            return
        fields = {
            "transactional_id": decided.transactional_id,
            "partitions": ",".join(map(str, sorted(left))),
            "suppressed": suppressed,
        }
        if reason is None:
            events.warning("markers not written yet", **fields)
        else:
            events.error("markers not written yet", exception=reason, **fields)

    def _undelivered(
        self, decided: WriteMarkers, asked: Collection[TopicPartition], response: WriteTxnMarkersResponse
    ) -> Collection[TopicPartition]:
        """Return the partitions without a marker that need one, those without a result included."""
        delivered = {
            TopicPartition(topic.name, result.partition_index)
            for marker in response.markers
            for topic in marker.topics
            for result in topic.partitions
            if self._is_delivered(decided, topic.name, result.partition_index, ErrorCode.of(result.error_code))
        }
        return [partition for partition in asked if partition not in delivered]

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


async def _beside(left: Collection[TopicPartition], work: Callable[..., Result], *given: Any) -> Result:
    """Do some work about partitions; in a thread where there are many."""
    if len(left) < MANY:
        return work(*given)
    return await asyncio.get_running_loop().run_in_executor(None, partial(work, *given))


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
