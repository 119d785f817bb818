"""Deliveries of markers: a transaction that is decided is delivered until every partition has its marker.

A nonexistent partition (its topic was deleted, or it was retired, emptied and removed) needs none, and a partition
with a later producer epoch has no open transaction of this one. After any other failure, and after any exception, the
marker is sent again, at growing intervals.

Deliveries have their turns: each sends markers to some of its partitions, and then the next one does. The markers that
are on their way are bounded over all deliveries, so that none waits for all partitions of a large one, and all of them
together take no more than a share of the loop and of memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.loop_steps import timed
from anabranch.server.cluster.peers import MarkerPeers
from anabranch.server.cluster.view import ClusterView

if TYPE_CHECKING:
    from anabranch.machines.transactions.coordinator import WriteMarkers

events = EventLogger("transactions")
SENT_AT_A_TIME = 100
"""Markers that a delivery sends before the next one has its turn."""
ON_THEIR_WAY_MAX = 1_000
"""Markers, of all deliveries, that are sent and not answered yet, from which on no further ones are sent."""
RETRY_S = 0.02
RETRY_MAX_S = 2.0
WARNING_INTERVAL_S = 30.0
NAMED_MAX = 5
"""Partitions that a line of the log names, and refusals that have a line of their own in an interval."""
FENCED = frozenset({ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.TRANSACTION_COORDINATOR_FENCED})


class _Delivery:
    """One decided transaction; in each attempt all partitions are asked that have no marker yet."""

    __slots__ = (
        "_left",
        "coordinator_epoch",
        "decided",
        "delay_s",
        "on_delivered",
        "on_their_way",
        "reason",
        "undelivered",
        "unsent",
    )

    def __init__(self, decided: WriteMarkers, coordinator_epoch: int, on_delivered: Callable[[], None]) -> None:
        self.decided = decided
        self.coordinator_epoch = coordinator_epoch
        self.on_delivered = on_delivered
        self.delay_s = RETRY_S
        self.begin(decided.partitions)

    def begin(self, partitions: Collection[TopicPartition]) -> None:
        """Begin an attempt."""
        self._left: Iterator[TopicPartition] = iter(partitions)
        self.unsent = len(partitions)
        self.on_their_way = 0
        self.undelivered: list[TopicPartition] = []
        self.reason: Exception | None = None

    def take(self) -> list[TopicPartition]:
        """The partitions that have their turn."""
        some = list(islice(self._left, SENT_AT_A_TIME))
        self.unsent -= len(some)
        self.on_their_way += len(some)
        return some

    @property
    def is_answered(self) -> bool:
        """Whether the attempt is over."""
        return not self.unsent and not self.on_their_way


class Deliveries:
    """The decided transactions with markers still to be written."""

    def __init__(self, peers: MarkerPeers, view: ClusterView) -> None:
        self._peers = peers
        self._view = view
        self._deliveries: dict[WriteMarkers, _Delivery] = {}
        self._line: deque[_Delivery] = deque()
        """Those with markers to be sent, in the order of their turns."""
        self._on_their_way = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._pauses: dict[_Delivery, asyncio.TimerHandle] = {}
        """The ends of the pauses before the next attempts."""
        self._warnings = EventLimit(WARNING_INTERVAL_S)
        self._refusals = EventLimit(WARNING_INTERVAL_S, NAMED_MAX)

    def __len__(self) -> int:
        return len(self._deliveries)

    def begin(self, decided: WriteMarkers, coordinator_epoch: int, on_delivered: Callable[[], None]) -> None:
        """Deliver in the background, unless that is being done; `on_delivered` is called when all markers are durable.

        `coordinator_epoch` is the leader epoch of the coordinator's partition: later ones fence earlier ones.
        """
        if decided not in self._deliveries:
            delivery = self._deliveries[decided] = _Delivery(decided, coordinator_epoch, on_delivered)
            self._line.append(delivery)
            self._send()

    def cancel(self) -> None:
        """Stop delivering: the coordinator asks again after the next start."""
        self._deliveries.clear()
        self._line.clear()
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()
        for task in self._tasks:
            task.cancel()

    def _send(self) -> None:
        """Send markers, as many as may be on their way."""
        while self._line and self._on_their_way < ON_THEIR_WAY_MAX:
            delivery = self._line.popleft()
            some = delivery.take()
            if delivery.unsent:
                self._line.append(delivery)
            self._on_their_way += len(some)
            task = asyncio.get_running_loop().create_task(self._deliver(delivery, some), name="write markers")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _deliver(self, delivery: _Delivery, some: Sequence[TopicPartition]) -> None:
        """Send the markers for some partitions."""
        undelivered = some
        try:
            response = await self._peers.write_markers(_request(delivery.decided, some, delivery.coordinator_epoch))
            undelivered = self._undelivered(delivery.decided, some, response)
        except Exception as error:  # Ours or the disk's: the transaction stays open until its markers are written.
            delivery.reason = error
        self._on_their_way -= len(some)
        delivery.on_their_way -= len(some)
        delivery.undelivered += undelivered
        if delivery.is_answered and delivery.decided in self._deliveries:
            self._attempted(delivery)
        self._send()

    def _attempted(self, delivery: _Delivery) -> None:
        """All partitions have answered: end, or begin again after a pause."""
        if delivery.undelivered:
            self._warn(delivery.decided, delivery.undelivered, delivery.reason)
            delivery.begin(delivery.undelivered)
            loop = asyncio.get_running_loop()
            self._pauses[delivery] = loop.call_later(
                delivery.delay_s, timed(loop, "coordinator", self._resume), delivery
            )
            delivery.delay_s = min(delivery.delay_s * 2, RETRY_MAX_S)
            return
        del self._deliveries[delivery.decided]
        try:
            delivery.on_delivered()
        except Exception as error:  # Ours. The others are delivered all the same.
            events.error("markers not written", transactional_id=delivery.decided.transactional_id, exception=error)

    def _resume(self, delivery: _Delivery) -> None:
        del self._pauses[delivery]
        self._line.append(delivery)
        self._send()

    def _warn(self, decided: WriteMarkers, left: Collection[TopicPartition], reason: Exception | None) -> None:
        suppressed = self._warnings.admit(asyncio.get_running_loop().time())
        if suppressed is None:
            return
        fields = {
            "transactional_id": decided.transactional_id,
            "partitions": _in_short(left),
            "suppressed": suppressed,
        }
        if reason is None:
            events.warning("markers not written yet", **fields)
        else:
            events.error("markers not written yet", exception=reason, **fields)

    def _undelivered(
        self, decided: WriteMarkers, asked: Collection[TopicPartition], response: WriteTxnMarkersResponse
    ) -> Sequence[TopicPartition]:
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
        if error in FENCED and (suppressed := self._refusals.admit(monotonic())) is not None:
            events.error(
                "marker refused: its partition knows of a later one",
                transactional_id=decided.transactional_id,
                partition=f"{topic}-{number}",
                reason=error.name,
                suppressed=suppressed,
            )
        if error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            known = self._view.topic(topic)
            return known is None or not known.exists(number)
        return error is ErrorCode.NONE or error in FENCED


def _in_short(partitions: Collection[TopicPartition]) -> str:
    """Name the first of some partitions, and say how many others there are."""
    named, more = ",".join(map(str, nsmallest(NAMED_MAX, partitions))), len(partitions) - NAMED_MAX
    return f"{named} and {more} more" if more > 0 else named


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
