"""Carries out the decisions about produced batches: looks up partitions, calls `decide_append`, appends, answers.

Batches are checked before (`machines.partition.checking`). That may take too long for the event loop: the caller has it
done elsewhere (`server.partitions.checks`), and hands over the outcome.

Nothing here awaits, so that no resize comes between a decision and its append. Before a decision every log involved is
resumed if a sync of it has failed: records that this cuts are removed from the producer table, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_PRODUCER_ID, NO_TOPIC_ID, TopicPartition
from anabranch.base.limits import PRODUCER_ID_BITS
from anabranch.machines.partition.appending import APPEND, VERIFY, Duplicate, Newcomers, Redirect, Refuse, decide_append
from anabranch.machines.partition.checking import BatchLimits, CheckedBatch, check_batches
from anabranch.machines.partition.producers import Remembered
from anabranch.records.batch import BatchHeader, parse_header, stamp_log_append_time, with_producer
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.removed import RemovedPartition
from anabranch.server.partitions.replicas import Replicas


class Produced(NamedTuple):
    """The answer for one partition."""

    error: ErrorCode
    base_offset: int = -1
    log_append_time_ms: int = -1
    message: str | None = None
    unsynced: tuple[Partition, ...] = ()
    """The partitions whose logs hold the records and have not synced them yet."""
    refused_records: tuple[tuple[int, str], ...] = ()
    """The records at fault, by their place in the batch, and why, where the error is theirs."""


class ProducedBatch(NamedTuple):
    """A produced batch on its way to a log."""

    partition: Partition | RemovedPartition
    """The one that its producer addressed."""
    header: BatchHeader
    data: memoryview
    count_said: int
    """The partition count that its producer placed it by; COUNT_NOT_SAID for stock producers."""
    topic_id_said: UUID
    """The id of the topic in the request; NO_TOPIC_ID where the request names the topic."""


TransactionCheck = Callable[[TopicPartition, int, int], ErrorCode]
"""Asks the coordinator whether the transaction of a producer (id, epoch) holds a partition: NONE, or why not."""


BatchCheck = Callable[[memoryview, BatchLimits, int], list[CheckedBatch] | Refuse]
"""Checks produced batches by the limits of their topic, now (in ms)."""


def no_transaction(partition: TopicPartition, producer_id: int, producer_epoch: int) -> ErrorCode:
    """The `TransactionCheck` of a request that names no transactional id."""
    return ErrorCode.INVALID_TXN_STATE


class Appender:
    """Appends the batches of one produce request."""

    __slots__ = ("_check", "_check_transaction", "_newcomers", "_now_ms", "_replicas", "_steady_ms")

    def __init__(
        self,
        replicas: Replicas,
        now_ms: int,
        check_transaction: TransactionCheck = no_transaction,
        check: BatchCheck = check_batches,
        producer_ids_below: int = 1 << PRODUCER_ID_BITS,
    ) -> None:
        """`producer_ids_below`: those that may have been handed out."""
        self._replicas = replicas
        self._now_ms = now_ms
        self._steady_ms = replicas.time.now_ms()
        """The time of producers, which is that of appends: neither jumps when the clock is set."""
        self._newcomers = Newcomers(producer_ids_below, self._steady_ms, replicas.producers.has_room)
        self._check_transaction = check_transaction
        self._check = check

    def produce(
        self,
        partition: Partition | RemovedPartition,
        data: memoryview,
        count_said: int,
        checked: list[CheckedBatch] | Refuse | None = None,
        topic_id_said: UUID = NO_TOPIC_ID,
    ) -> Produced:
        """Append the batches in `data` to `partition`, or to the one that holds its keys now; in order, all or a part.

        The answer is that of the first batch, or of the one that ends the work with an error. `checked`: the outcome of
        the check, if the caller has it already.
        """
        batches = (
            self._check(data, partition.settings, max(self._now_ms, self._steady_ms)) if checked is None else checked
        )
        if isinstance(batches, Refuse):
            return Produced(batches.code, message=batches.message, refused_records=batches.records)
        first: Produced | None = None
        unsynced: tuple[Partition, ...] = ()
        for header, wire in batches:
            batch = ProducedBatch(partition, header, wire, count_said, topic_id_said)
            produced = self._produce_one(batch)
            if produced.error is not ErrorCode.NONE or len(batches) == 1:
                return produced
            first = first or produced
            unsynced += produced.unsynced
        assert first is not None
        return first._replace(unsynced=tuple(dict.fromkeys(unsynced)))

    def _produce_one(self, batch: ProducedBatch) -> Produced:
        partition, header, _, count_said, topic_id_said = batch
        role = partition.leadership
        ancestors: Sequence[Partition] = ()
        if count_said == COUNT_NOT_SAID and role is not None and role.layout:
            ancestors = self._replicas.ancestors_of(*partition.name, role.initial_partition_count)
        refused = self._resume_logs(partition, ancestors if header.producer_id != NO_PRODUCER_ID else ())
        if refused is not None:
            return refused
        table = partition.table
        newcomers = self._newcomers
        decision = decide_append(role, table, ancestors, header, count_said, None, topic_id_said, newcomers)
        if decision is VERIFY:
            held = self._check_transaction(partition.name, header.producer_id, header.producer_epoch)
            decision = decide_append(role, table, ancestors, header, count_said, held, topic_id_said, newcomers)
        if decision is APPEND:
            assert isinstance(partition, Partition)
            produced = self._append(batch, partition)
        elif isinstance(decision, Redirect):
            produced = self._append(_redirected(batch, decision.producer_id), decision.to)
            if produced.error is ErrorCode.NONE:
                partition.table.forget_refusal(header.producer_id)
        elif isinstance(decision, Duplicate):
            return _again(decision.of, decision.ancestor or partition)
        else:
            assert isinstance(decision, Refuse)
            if decision.remember:
                table.refused(header)
            if decision.code is ErrorCode.INVALID_PARTITION_METADATA:
                self._replicas.count_stale_batch(partition.name.topic)
            return Produced(decision.code, message=decision.message)
        if produced.error is not ErrorCode.NONE and produced.error.retriable:
            partition.table.refused(header)
        return produced

    def _resume_logs(self, partition: Partition | RemovedPartition, ancestors: Sequence[Partition]) -> Produced | None:
        """Have the logs that a decision reads take appends again after a failed sync; the answer if one cannot."""
        each = partition
        try:
            if isinstance(partition, Partition):
                partition.log.resume(self._steady_ms)
            for each in ancestors:
                each.log.resume(self._steady_ms)
        except OSError as failure:
            assert isinstance(each, Partition)
            return _storage_failed(each, failure)
        return None

    def _append(self, batch: ProducedBatch, target: Partition) -> Produced:
        """Append a batch to `target`, with the time of its append if the topic wants that."""
        settings, header, wire = target.settings, batch.header, batch.data
        append_time = -1
        if settings.log_append_time:
            append_time = self._now_ms
            stamp_log_append_time(wire, 0, append_time)
            header = parse_header(wire)
        unavailable = target.unavailable()
        if unavailable is not ErrorCode.NONE:
            return Produced(unavailable)
        full = self._replicas.space.refusal(header.size)
        if full is not None:
            return Produced(ErrorCode.KAFKA_STORAGE_ERROR, message=full)
        producers = len(target.table)
        try:
            appended = target.append(wire, header, self._steady_ms)
        except OSError as failure:
            return _storage_failed(target, failure)
        if len(target.table) != producers:
            self._replicas.producers.took(1)
        return Produced(ErrorCode.NONE, appended.base_offset, append_time, unsynced=(target,) if settings.fsync else ())


def _redirected(batch: ProducedBatch, producer_id: int) -> ProducedBatch:
    """The batch under the producer id that keeps its sequences apart from those of its survivor's producers."""
    if producer_id == NO_PRODUCER_ID:
        return batch
    sent = batch.header
    wire = with_producer(
        batch.data, producer_id, sent.producer_epoch, sent.base_sequence, transactional=sent.is_transactional
    )
    return batch._replace(header=parse_header(wire), data=memoryview(wire))


def _again(of: Remembered, holder: Partition | RemovedPartition) -> Produced:
    """The answer that the batch was given when it was appended; it must be as durable as that promised."""
    append_time = of.timestamp if holder.settings.log_append_time else -1
    unsynced: tuple[Partition, ...] = ()
    if isinstance(holder, Partition) and holder.settings.fsync and of.last_offset >= holder.log.flushed:
        unsynced = (holder,)
    return Produced(ErrorCode.NONE, of.base_offset, append_time, unsynced=unsynced)


def _storage_failed(partition: Partition, failure: OSError) -> Produced:
    partition.storage_failed(failure)
    return Produced(ErrorCode.KAFKA_STORAGE_ERROR, message=f"The disk refuses: {failure.strerror}.")
