"""One transactional id: its producer, and the transaction that this producer has open, as a value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from anabranch.base.errors import DecodeError
from anabranch.base.ids import NO_PRODUCER_ID, TopicPartition
from anabranch.machines.transactions.records import PartitionsSchema, TransactionLogValue
from anabranch.machines.transactions.states import NEXT, TransactionEvent, TransactionState

EPOCH_MAX = 32_767
EPOCH_EXHAUSTED = EPOCH_MAX - 1
"""The last epoch that a producer may have: the one above is left for fencing it."""
NOT_STARTED = -1
AHEAD_MAX_MS = 1_000
"""How far the beginning of a transaction may be ahead of the clock, where many begin in a millisecond."""
OWN_SIZE = 900
PARTITION_SIZE = 160
"""Bytes of memory of a transactional id beside its name, and of each partition that its transaction holds."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transactional id as of its last record."""

    producer_id: int
    producer_epoch: int
    previous_producer_id: int
    timeout_ms: int
    state: TransactionState
    partitions: frozenset[TopicPartition]
    updated_ms: int
    started_ms: int

    @property
    def is_open(self) -> bool:
        """Whether its producer may add to it."""
        return self.state is TransactionState.ONGOING

    def continues(self, before: Transaction) -> bool:
        """Whether this is the open transaction that was open before, with more partitions."""
        return self.is_open and before.is_open and self.started_ms == before.started_ms

    @property
    def exhausted(self) -> bool:
        """Whether the producer id has no epoch left to be given."""
        return self.producer_epoch >= EPOCH_EXHAUSTED

    @property
    def deadline_ms(self) -> int:
        """When it is aborted if it is still ongoing."""
        return self.started_ms + self.timeout_ms

    @property
    def size(self) -> int:
        """The bytes of memory that it takes, beside its name."""
        return OWN_SIZE + PARTITION_SIZE * len(self.partitions)

    def may(self, event: TransactionEvent) -> bool:
        """Whether the event leads anywhere from here."""
        return (self.state, event) in NEXT

    def initialised(self, producer_id: int, producer_epoch: int, timeout_ms: int, now_ms: int) -> Transaction:
        """Give it to a producer under this id and epoch."""
        previous = self.previous_producer_id if producer_id == self.producer_id else self.producer_id
        return replace(
            self._after(TransactionEvent.INITIALISED, now_ms),
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            previous_producer_id=previous,
            timeout_ms=timeout_ms,
            partitions=frozenset(),
            started_ms=NOT_STARTED,
        )

    def grown(self, partitions: Iterable[TopicPartition], now_ms: int) -> Transaction:
        """Let it hold these partitions too; the first ones begin it."""
        begun = self.state is not TransactionState.ONGOING
        held = frozenset(partitions) if begun else self.partitions | frozenset(partitions)
        started_ms = self._next_start(now_ms) if begun else self.started_ms
        return replace(self._after(TransactionEvent.GREW, now_ms), partitions=held, started_ms=started_ms)

    def _next_start(self, now_ms: int) -> int:
        """When a transaction that begins now began: later than the one before, from which it is told by this."""
        # A beginning far ahead is by a clock that was wrong, before this broker started.
        return self.started_ms + 1 if 0 <= self.started_ms - now_ms < AHEAD_MAX_MS else now_ms

    def ended(self, now_ms: int, *, commit: bool) -> Transaction:
        """Decide it."""
        return self._after(TransactionEvent.COMMITTED if commit else TransactionEvent.ABORTED, now_ms)

    def fenced(self, now_ms: int) -> Transaction:
        """Abort it under an epoch that its producer does not have; the last one of all no producer has."""
        epoch = min(self.producer_epoch + 1, EPOCH_MAX)
        return replace(self._after(TransactionEvent.ABORTED, now_ms), producer_epoch=epoch)

    def completed(self, now_ms: int) -> Transaction:
        """Every partition has its marker."""
        return replace(self._after(TransactionEvent.MARKED, now_ms), partitions=frozenset())

    def _after(self, event: TransactionEvent, now_ms: int) -> Transaction:
        return replace(self, state=NEXT[self.state, event], updated_ms=now_ms)

    def value(self) -> TransactionLogValue:
        """Write it as the value of a log record."""
        topics: dict[str, list[int]] = {}
        for topic, partition in self.partitions:
            topics.setdefault(topic, []).append(partition)
        partitions = [PartitionsSchema(topic=topic, partition_ids=sorted(ids)) for topic, ids in sorted(topics.items())]
        return TransactionLogValue(
            producer_id=self.producer_id,
            previous_producer_id=self.previous_producer_id,
            producer_epoch=self.producer_epoch,
            transaction_timeout_ms=self.timeout_ms,
            transaction_status=self.state,
            # Kafka writes null without a transaction.
            transaction_partitions=None if self.state is TransactionState.EMPTY else partitions,
            transaction_last_update_timestamp_ms=self.updated_ms,
            transaction_start_timestamp_ms=self.started_ms,
        )

    @classmethod
    def of(cls, value: TransactionLogValue) -> Transaction:
        """Read the value of a log record. DecodeError for an unknown status."""
        try:
            state = TransactionState(value.transaction_status)
        except ValueError:
            raise DecodeError(f"a transaction of status {value.transaction_status}") from None
        return cls(
            producer_id=value.producer_id,
            producer_epoch=value.producer_epoch,
            previous_producer_id=value.previous_producer_id,
            timeout_ms=value.transaction_timeout_ms,
            state=state,
            partitions=frozenset(
                TopicPartition(held.topic, partition)
                for held in value.transaction_partitions or ()
                for partition in held.partition_ids
            ),
            updated_ms=value.transaction_last_update_timestamp_ms,
            started_ms=value.transaction_start_timestamp_ms,
        )


def first(producer_id: int, timeout_ms: int, now_ms: int) -> Transaction:
    """A transactional id that was never used before, given to its first producer."""
    return Transaction(
        producer_id=producer_id,
        producer_epoch=0,
        previous_producer_id=NO_PRODUCER_ID,
        timeout_ms=timeout_ms,
        state=TransactionState.EMPTY,
        partitions=frozenset(),
        updated_ms=now_ms,
        started_ms=NOT_STARTED,
    )
