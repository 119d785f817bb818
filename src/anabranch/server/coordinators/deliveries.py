"""Deliveries of markers: a transaction that is decided is delivered until every partition has its marker.

A nonexistent partition (its topic was deleted, or it was retired, emptied and removed) needs none, and a partition
with a later producer epoch has no open transaction of this one. After any other failure, and after any exception, the
marker is sent again, at growing intervals.

Deliveries have their turns: each sends markers to some of its partitions, and then the next one does. The markers that
are on their way are bounded over all deliveries, so that none waits for all partitions of a large one, and all of them
together take no more than a share of the loop and of memory.

A partition answers when its log is synced, and the logs are synced side by side. One of the group coordinators' topic
may take seconds: its shard decides other things first. So each of these has places of its own, and what waits for them
are those transactions alone that have offsets there.

A delivery ends when the coordinator has recorded that the markers are written, and not before: until then the decision
may be asked for again, as the coordinator still waits for them, and a second delivery would be late for the first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
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
ON_THEIR_WAY_TO_SHARD_MAX = 100
"""As `ON_THEIR_WAY_MAX`, for the markers that go to one shard of the group coordinators."""
RETRY_S = 0.02
RETRY_MAX_S = 2.0
WARNING_INTERVAL_S = 30.0
NAMED_MAX = 5
"""Partitions that a line of the log names, and refusals that have a line of their own in an interval."""
FENCED = frozenset({ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.TRANSACTION_COORDINATOR_FENCED})


class _Delivery:
    """One decided transaction; in each attempt all partitions are asked that have no marker yet."""

    __slots__ = ("coordinator_epoch", "decided", "delay_s", "reason", "report", "unanswered", "undelivered")

    def __init__(self, decided: WriteMarkers, coordinator_epoch: int, report: Callable[[], bool]) -> None:
        self.decided = decided
        self.coordinator_epoch = coordinator_epoch
        self.report = report
        self.delay_s = RETRY_S
        self.unanswered = 0
        """Partitions of the attempt that have not answered."""
        self.undelivered: list[TopicPartition] = []
        """Partitions that have answered, and have no marker."""
        self.reason: Exception | None = None


class _Part:
    """The partitions of an attempt that are sent in one lane."""

    __slots__ = ("_left", "delivery", "unsent")

    def __init__(self, delivery: _Delivery, partitions: Collection[TopicPartition]) -> None:
        self.delivery = delivery
        self.unsent = len(partitions)
        self._left = iter(partitions)

    def take(self) -> list[TopicPartition]:
        """The partitions that have their turn."""
        some = list(islice(self._left, SENT_AT_A_TIME))
        self.unsent -= len(some)
        return some


class _Lane:
    """Markers that have their places together, with the parts to be sent in the order of their turns."""

    __slots__ = ("line", "on_their_way", "places")

    def __init__(self, places: int) -> None:
        self.places = places
        self.on_their_way = 0
        self.line: deque[_Part] = deque()


class Deliveries:
    """The decided transactions with markers still to be written."""

    def __init__(self, peers: MarkerPeers, view: ClusterView, groups_topic: str) -> None:
        """`groups_topic`: that of the group coordinators."""
        self._peers = peers
        self._view = view
        self._groups_topic = groups_topic
        self._deliveries: dict[WriteMarkers, _Delivery] = {}
        self._lane = _Lane(ON_THEIR_WAY_MAX)
        self._shard_lanes: dict[TopicPartition, _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pauses: dict[_Delivery, asyncio.TimerHandle] = {}
        """The ends of the pauses before the next attempts, and the next reports."""
        self._warnings = EventLimit(WARNING_INTERVAL_S)
        self._refusals = EventLimit(WARNING_INTERVAL_S, NAMED_MAX)

    def __len__(self) -> int:
        return len(self._deliveries)

    def begin(self, decided: WriteMarkers, coordinator_epoch: int, report: Callable[[], bool]) -> None:
        """Deliver in the background, unless that is being done; `report` is called when all markers are durable.

        It returns whether the coordinator has recorded that; otherwise it is called again later. `coordinator_epoch` is
        the leader epoch of the coordinator's partition: later ones fence earlier ones.
        """
        if decided not in self._deliveries:
            delivery = self._deliveries[decided] = _Delivery(decided, coordinator_epoch, report)
            self._attempt(delivery, decided.partitions)

    def cancel(self) -> None:
        """Stop delivering: the coordinator asks again after the next start."""
        self._deliveries.clear()
        self._lane = _Lane(ON_THEIR_WAY_MAX)
        self._shard_lanes.clear()
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()
        for task in self._tasks:
            task.cancel()

    def _attempt(self, delivery: _Delivery, asked: Collection[TopicPartition]) -> None:
        """Begin an attempt."""
        delivery.unanswered, delivery.undelivered, delivery.reason = len(asked), [], None
        for_shards = [partition for partition in asked if partition.topic == self._groups_topic]
        others = asked if not for_shards else [it for it in asked if it.topic != self._groups_topic]
        for partition in for_shards:
            lane = self._shard_lanes.setdefault(partition, _Lane(ON_THEIR_WAY_TO_SHARD_MAX))
            lane.line.append(_Part(delivery, [partition]))
            self._send(lane)
        if others or not for_shards:  # A log of another broker may have a decided transaction without partitions.
            self._lane.line.append(_Part(delivery, others))
            self._send(self._lane)

    def _send(self, lane: _Lane) -> None:
        """Send markers, as many as may be on their way."""
        while lane.line and lane.on_their_way < lane.places:
            part = lane.line.popleft()
            some = part.take()
            if part.unsent:
                lane.line.append(part)
            lane.on_their_way += len(some)
            work = self._deliver(lane, part.delivery, some)
            task = asyncio.get_running_loop().create_task(work, name="write markers")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _deliver(self, lane: _Lane, delivery: _Delivery, some: Sequence[TopicPartition]) -> None:
        """Send the markers for some partitions."""
        undelivered = some
        try:
            response = await self._peers.write_markers(_request(delivery.decided, some, delivery.coordinator_epoch))
            undelivered = self._undelivered(delivery.decided, some, response)
        except Exception as error:  # Ours or the disk's: the transaction stays open until its markers are written.
            delivery.reason = error
        lane.on_their_way -= len(some)
        delivery.unanswered -= len(some)
        delivery.undelivered += undelivered
        if not delivery.unanswered and delivery.decided in self._deliveries:
            self._attempted(delivery)
        self._send(lane)

    def _attempted(self, delivery: _Delivery) -> None:
        """All partitions have answered: end, or go on after a pause."""
        if not delivery.undelivered and self._is_recorded(delivery):
            del self._deliveries[delivery.decided]
            return
        if delivery.undelivered or delivery.reason is not None:
            self._warn(delivery.decided, delivery.undelivered, delivery.reason)
        loop = asyncio.get_running_loop()
        self._pauses[delivery] = loop.call_later(delivery.delay_s, timed(loop, "coordinator", self._resume), delivery)
        delivery.delay_s = min(delivery.delay_s * 2, RETRY_MAX_S)

    def _is_recorded(self, delivery: _Delivery) -> bool:
        try:
            return delivery.report()
        except Exception as error:  # Ours. The others are delivered all the same.
            delivery.reason = error
            return False

    def _resume(self, delivery: _Delivery) -> None:
        del self._pauses[delivery]
        if delivery.undelivered:
            self._attempt(delivery, delivery.undelivered)
        else:
            self._attempted(delivery)

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
