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
from anabranch.machines.partition.checking import (
    TIMELY_SIZE_MAX,
    BatchLimits,
    CheckedBatch,
    TooLongError,
    check_batches,
)
from anabranch.machines.partition.producers import Remembered
from anabranch.records.batch import BatchHeader, parse_header, stamp_log_append_time, stamp_producer
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


class UnstagedError(TooLongError):
    """A batch is too large to be written in the loop, and is not staged for the partition. Nothing has changed."""

    def __init__(self, partition: Partition, batch: memoryview) -> None:
        super().__init__(f"a batch of {len(batch)} bytes for {partition.name}")
        self.partition = partition
        self.batch = batch


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
        # As `Newcomers(...)`, at half the cost; every request has some.
        newcomers = (producer_ids_below, self._steady_ms, replicas.producers.has_room)
        self._newcomers = tuple.__new__(Newcomers, newcomers)
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

        A single batch may raise UnstagedError: then it is appended again while it is staged.
        The answer is that of the first batch, or of the one that ends the work with an error. `checked`: the outcome of
        the check, if the caller has it already. `count_said`: the partition count that the producer placed the batches
        by, COUNT_NOT_SAID for stock producers; `topic_id_said`: NO_TOPIC_ID where the request names the topic.
        """
        batches = (
            self._check(data, partition.settings, max(self._now_ms, self._steady_ms)) if checked is None else checked
        )
        if isinstance(batches, Refuse):
            return Produced(batches.code, message=batches.message, refused_records=batches.records)
        first: Produced | None = None
        unsynced: tuple[Partition, ...] = ()
        for header, wire in batches:
            produced = self._produce_one(partition, header, wire, count_said, topic_id_said)
            if produced.error is not ErrorCode.NONE or len(batches) == 1:
                return produced
            first = first or produced
            unsynced += produced.unsynced
        assert first is not None
        return first._replace(unsynced=tuple(dict.fromkeys(unsynced)))

    def _produce_one(
        self,
        partition: Partition | RemovedPartition,
        header: BatchHeader,
        wire: memoryview,
        count_said: int,
        topic_id_said: UUID,
    ) -> Produced:
        role = partition.leadership
        ancestors: Sequence[Partition] = ()
        if count_said == COUNT_NOT_SAID and role is not None and role.layout:
            ancestors = self._replicas.ancestors_of(*partition.name, role.initial_partition_count)
        if isinstance(partition, Partition):
            try:
                partition.log.resume(self._steady_ms)
            except OSError as failure:
                return _storage_failed(partition, failure)
            if partition.offline_reason is not None:  # Its producers could not be folded again.
                return Produced(ErrorCode.KAFKA_STORAGE_ERROR)
        if ancestors and header.producer_id != NO_PRODUCER_ID:
            refused = self._resume_logs(ancestors)
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
            produced = self._append(header, wire, partition)
        elif isinstance(decision, Redirect):
            produced = self._append(header, wire, decision.to, decision.producer_id)
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

    def _resume_logs(self, ancestors: Sequence[Partition]) -> Produced | None:
        """Have the logs that a decision reads take appends again after a failed sync; the answer if one cannot.

        Of a partition that is offline nobody knows what it was sent: a repetition would be taken for a new batch.
        """
        for each in ancestors:
            if each.offline_reason is not None:
                return Produced(ErrorCode.KAFKA_STORAGE_ERROR)
            try:
                each.log.resume(self._steady_ms)
            except OSError as failure:
                return _storage_failed(each, failure)
        return None

    def _append(
        self, header: BatchHeader, wire: memoryview, target: Partition, producer_id: int = NO_PRODUCER_ID
    ) -> Produced:
        """Append a batch to `target`, with the time of its append if the topic wants that.

        `producer_id`: another one, which keeps its sequences apart from those of the producers of `target`.
        """
        settings, replicas = target.settings, self._replicas
        unavailable = target.unavailable()
        if unavailable is not ErrorCode.NONE:
            return Produced(unavailable)
        is_large = header.size > TIMELY_SIZE_MAX
        if not is_large or wire not in target.log.staging:  # Which has taken its space on the disk.
            full = replicas.space.refusal(header.size, self._steady_ms)
            if full is not None:
                return Produced(ErrorCode.KAFKA_STORAGE_ERROR, message=full)
            if is_large:
                raise UnstagedError(target, wire)
        if producer_id != NO_PRODUCER_ID:
            sequence = header.producer_epoch, header.base_sequence
            stamp_producer(wire, producer_id, *sequence, transactional=header.is_transactional)
            header = parse_header(wire)
        append_time = -1
        if settings.log_append_time:
            append_time = self._now_ms
            stamp_log_append_time(wire, 0, append_time)
            header = parse_header(wire)
        try:
            base_offset, _ = target.append(wire, header, self._steady_ms)
        except OSError as failure:
            return _storage_failed(target, failure)
        unsynced = (target,) if settings.fsync else ()
        # As `Produced(...)`, at half the cost.
        return tuple.__new__(Produced, (ErrorCode.NONE, base_offset, append_time, None, unsynced, ()))


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
