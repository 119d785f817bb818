"""Markers: the end of a transaction, written into the logs of the partitions that it holds (WriteTxnMarkers).

The rules are in `machines.partition.markers`. A marker is durable before the response, unless its topic leaves
durability to the operating system. In a partition of `__consumer_offsets` the group coordinator writes the marker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.partition.markers import MarkerVerdict, aliases, decide_marker
from anabranch.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from anabranch.records.batch import end_transaction_marker, parse_header
from anabranch.runtime.clock import Clock
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.turns import Pace
from anabranch.server.coordinators.shard_set import ShardSet
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas

events = EventLogger("markers")
WARNING_INTERVAL_S = 10.0

AT_A_TIME = 100
"""Partitions to which markers are appended in a turn of the loop, of all requests."""


class Markers:
    """The `MarkerPeers` of a cluster of one process; in a group partition the coordinator writes the marker."""

    def __init__(self, replicas: Replicas, clock: Clock, groups: ShardSet[Any, Any]) -> None:
        self._replicas = replicas
        self._clock = clock
        self._groups = groups
        self._pace = Pace(AT_A_TIME)
        self._by_clients = EventLimit(WARNING_INTERVAL_S)

    def note_client(self, peer: str, count: int) -> None:
        """Log that a client writes markers, which ends transactions of others."""
        suppressed = self._by_clients.admit(self._clock.monotonic_ms() / 1000)
        if suppressed is not None:
            events.warning("markers written for a client", peer=peer, markers=count, suppressed=suppressed)

    async def write_markers(
        self, request: WriteTxnMarkersRequest, *, by_client: bool = False
    ) -> WriteTxnMarkersResponse:
        """Write every marker into each of its partitions; they are durable when this is answered without an error.

        `by_client`: they are not the coordinator's, and end open transactions only.
        """
        return WriteTxnMarkersResponse(
            markers=[await self._write(marker, by_client=by_client) for marker in request.markers]
        )

    async def _write(self, marker: WritableTxnMarker, *, by_client: bool) -> WritableTxnMarkerResult:
        named = [(topic.name, number) for topic in marker.topics for number in topic.partition_indexes]
        # All are appended before the first is waited for: their logs are synced side by side.
        ends: deque[asyncio.Future[list[ErrorCode]]] = deque()
        for at in range(0, len(named), AT_A_TIME):
            some = named[at : at + AT_A_TIME]
            await self._pace.take(len(some))
            ends.append(asyncio.gather(*(self._end(marker, *each, by_client=by_client) for each in some)))
        topics: dict[str, list[WritableTxnMarkerPartitionResult]] = {}
        names = iter(named)
        while ends:  # What is awaited has no name here: cancelled, it holds this frame, which would hold it.
            for error, (topic, number) in zip(await ends.popleft(), names, strict=False):
                result = WritableTxnMarkerPartitionResult(partition_index=number, error_code=error)
                topics.setdefault(topic, []).append(result)
            await asyncio.sleep(0)
        return WritableTxnMarkerResult(
            producer_id=marker.producer_id,
            topics=[WritableTxnMarkerTopicResult(name=name, partitions=results) for name, results in topics.items()],
        )

    async def _end(self, marker: WritableTxnMarker, topic: str, number: int, *, by_client: bool) -> ErrorCode:
        partition = self._replicas.get(topic, number)
        # Aliases first: when the partition is gone, they may be there still.
        for other, alias in self._aliases(marker, topic, number):
            error = await self._append(other, marker, alias, by_client=by_client)
            if error is not ErrorCode.NONE:
                return error
        if partition is None:
            return self._replicas.missing(topic, number)
        if topic == self._groups.topic:
            return await self._end_in_group(partition, marker, by_client=by_client)
        return await self._append(partition, marker, marker.producer_id, by_client=by_client)

    async def _end_in_group(self, partition: Partition, marker: WritableTxnMarker, *, by_client: bool) -> ErrorCode:
        """Have the coordinator of groups write the marker, and decide the offsets that the transaction holds."""
        verdict = _verdict(partition, marker, marker.producer_id, by_client=by_client)
        if verdict.error is not ErrorCode.NONE or (by_client and not verdict.append):
            return verdict.error
        # Also if the producer is unknown here: its offsets may wait in the coordinator's line.
        try:
            await self._groups.shard(partition.name.partition).end_transaction(
                marker.producer_id,
                marker.producer_epoch,
                committed=marker.transaction_result,
                coordinator_epoch=marker.coordinator_epoch,
            )
        except ApiError as failure:
            return failure.code
        return ErrorCode.NONE

    def _aliases(self, marker: WritableTxnMarker, topic: str, number: int) -> list[tuple[Partition, int]]:
        """Where the producer's batches for the partition were redirected to, and are in an open transaction."""
        role = self._replicas.role_in(topic)
        if role is None:
            return []
        initial = role.initial_partition_count
        return aliases(marker.producer_id, number, initial, self._replicas.ancestors_of(topic, number, initial))

    async def _append(
        self, partition: Partition, marker: WritableTxnMarker, producer_id: int, *, by_client: bool
    ) -> ErrorCode:
        error = partition.unavailable() or _verdict(partition, marker, producer_id, by_client=by_client).error
        if error is not ErrorCode.NONE:
            return error
        now_ms = self._replicas.time.now_ms()
        log, emptied = partition.log, False
        try:
            log.resume(now_ms)
            verdict = _verdict(partition, marker, producer_id, by_client=by_client)
            if verdict.nothing_written:
                return ErrorCode.NONE
            if verdict.append:  # Anew: to resume the log may have cut it.
                emptied = partition.retiring and log.log_start == log.end
                batch = end_transaction_marker(
                    producer_id,
                    marker.producer_epoch,
                    commit=marker.transaction_result,
                    coordinator_epoch=marker.coordinator_epoch,
                    timestamp_ms=self._clock.now_ms(),
                )
                partition.append(batch, parse_header(batch), now_ms)
            if log.high_watermark < log.end or log.flush_due:
                durable = self._replicas.commit(partition)
                if partition.settings.fsync:
                    await asyncio.shield(durable)
            if emptied:
                # Everything before the marker was deleted, and so it may go too: the partition can be removed.
                # Its files are left to the upkeep of logs: the places of all deliveries would wait for that.
                deleted = log.delete_before(log.high_watermark)
                if deleted is not None:
                    await deleted
                partition.deleted()
        except OSError as failure:
            partition.storage_failed(failure)
            return ErrorCode.KAFKA_STORAGE_ERROR
        return ErrorCode.NONE


def _verdict(partition: Partition, marker: WritableTxnMarker, producer_id: int, *, by_client: bool) -> MarkerVerdict:
    return decide_marker(
        partition.table,
        retiring=partition.retiring,
        producer_id=producer_id,
        producer_epoch=marker.producer_epoch,
        coordinator_epoch=marker.coordinator_epoch,
        by_client=by_client,
    )
