"""The transactions of one partition of `__transaction_state`: a fold over its records, and their decisions.

    InitProducerId ──► AddPartitionsToTxn, AddOffsetsToTxn ──► EndTxn ──► markers ──► `markers_written`

The rules:
- the decision (PREPARE) is durable before the first marker is written: `WriteMarkers` is an effect, and effects are
  performed after the records. So either no partition has a marker, or all will get the same one, but for those that
  need none: a coordinator that is loaded anew asks again for the markers of every transaction that is prepared;
- markers are sent only while their transaction waits for them (`awaits`): an effect may be performed, and a delivery
  may end, when the next transaction of the same producer epoch has begun, and a marker would end that one;
- a producer that was replaced, or took too long, has an epoch below the one here, and is refused everywhere; the last
  epoch of all is given to no producer, it is for fencing;
- what transactions take in memory has a budget over all shards; what would pass it is refused, what is open can end;
- no decision looks at all ids, or at more partitions than one transaction may hold and some: what many ids need, after
  their timeouts or a load, is decided for some at a time, by timers that ring at once while there are more;
- a request during the completion of a transaction is answered CONCURRENT_TRANSACTIONS: its producer retries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, TopicPartition
from anabranch.base.limits import PARTITIONS_PER_TRANSACTION_MAX
from anabranch.base.memory import text_size
from anabranch.machines.outcome import Draft, Outcome
from anabranch.machines.transactions.records import TransactionLogKey, TransactionRecord
from anabranch.machines.transactions.schedule import Schedule
from anabranch.machines.transactions.settings import TransactionSettings
from anabranch.machines.transactions.states import TransactionEvent, TransactionState
from anabranch.machines.transactions.transaction import EPOCH_EXHAUSTED, NOT_STARTED, OWN_SIZE, Transaction, first
from anabranch.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from anabranch.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopicResult,
)
from anabranch.protocol.messages.describe_transactions import TopicData
from anabranch.protocol.messages.describe_transactions import TransactionState as DescribedTransaction
from anabranch.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse

Reply = TypeVar("Reply")

LATE_MAX_MS = 1_000
"""How long after its timeout a sweep may pass over a transaction."""

TIMED_OUT = ("timed out",)
EXPIRED = ("expired",)
UNDELIVERED = ("undelivered",)
SWEPT_MAX = 100
SWEPT_PARTITIONS_MAX = 2_000
"""The most ids of one sweep, and the partitions of their transactions from which on it takes no further one: its
records are one batch, made in some milliseconds. The next sweep follows at once."""
LOOKED_AT = 100
"""Ids that are looked at in the time in which a decision looks at a partition."""
NAME_COPIES = 4
"""A transactional id comes with each request: that of the first one, of the last, of the one that set what is
due, and of one that may be repeated."""
INIT_PRODUCER_FENCED_SINCE = 4
PRODUCER_FENCED_SINCE = 2
"""The versions of InitProducerId, and of the other requests, from which clients know PRODUCER_FENCED (KIP-588)."""


@dataclass(frozen=True, slots=True)
class WriteMarkers:
    """Write the end of a transaction into all its partitions, then submit `markers_written`; retry until it is done.

    Those of two transactions are never equal.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    started_ms: int
    commit: bool
    partitions: frozenset[TopicPartition]


class Producer(NamedTuple):
    """The producer named in a request."""

    producer_id: int
    producer_epoch: int


class Coordinator:
    """The transactional ids of one shard. Two are equal when their logs are equivalent."""

    def __init__(self, settings: TransactionSettings, has_room: Callable[[int], bool] = lambda size: True) -> None:
        """`has_room` tells whether so many more bytes of memory are left for the transactions of all shards."""
        self.settings = settings
        self.size = 0
        """Bytes of memory that its transactional ids take."""
        self._has_room = has_room
        self._transactions: dict[str, Transaction] = {}
        self._deadlines = Schedule(settings.timeout_max_ms, min(LATE_MAX_MS, settings.timed_out_interval_ms))
        """When each open transaction is aborted."""
        self._expirations = Schedule(settings.id_expiration_ms, settings.expired_interval_ms)
        """When each id without an open transaction is forgotten."""
        self._prepared: dict[str, None] = {}
        self._undelivered: dict[str, None] = {}
        """Those of them that were decided before the log was read, and have not been asked for since."""
        self._replaced: dict[str, tuple[Producer, Producer]] = {}
        """The producer epochs that InitProducerId replaced: a repeated request is recognized. Lost on fail-over."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coordinator) and self._transactions == other._transactions

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._transactions)

    # -- folding ---------------------------------------------------------------------------------------------------

    def apply(self, record: TransactionRecord, *, producer_id: int = NO_PRODUCER_ID) -> None:
        """Fold a record; the last one of an id counts."""
        name = record.key.transactional_id
        before = self._transactions.get(name)
        if before is not None:
            self.size -= _size(name, before)
        if record.value is None:
            self._transactions.pop(name, None)
            self._replaced.pop(name, None)
            self._file(name, before, None)
            return
        told = Transaction.of(record.value) if record.decided is None else record.decided
        self._transactions[name] = told
        self.size += _size(name, told)
        self._file(name, before, told)

    def _file(self, name: str, before: Transaction | None, after: Transaction | None) -> None:
        """Note what an id waits for now: its deadline, its markers, or to be forgotten."""
        if after is not None and before is not None and after.continues(before):
            return  # It keeps its deadline, which `loaded` may have set.
        self._deadlines.drop(name)
        self._expirations.drop(name)
        self._prepared.pop(name, None)
        if after is None:
            return
        if after.is_open:
            self._deadlines.set(name, after.deadline_ms)
        elif after.state.prepared:
            self._prepared[name] = None
        elif after.may(TransactionEvent.EXPIRED):
            self._expirations.set(name, after.updated_ms + self.settings.id_expiration_ms)

    def apply_marker(self, producer_id: int, producer_epoch: int, committed: bool) -> None:
        """Nothing in this log is transactional itself."""

    def loaded(self, now_ms: int) -> Outcome[None, TransactionRecord]:
        """Send the markers of decided transactions and start the sweeps.

        An open transaction from a clock that was ahead began now: its readers would wait for days.
        """
        for name in list(self._deadlines):
            known = self._transactions[name]
            if known.started_ms > now_ms:
                self._deadlines.set(name, now_ms + known.timeout_ms)
        self._undelivered = dict(self._prepared)
        draft: Draft[TransactionRecord] = Draft()
        self._deliver_some(draft, now_ms)
        draft.set_timer(TIMED_OUT, now_ms + self.settings.timed_out_interval_ms)
        draft.set_timer(EXPIRED, now_ms + self.settings.expired_interval_ms)
        return draft.outcome(None)

    def weight_of_loading(self) -> int:
        """How much `loaded` looks at, in partitions."""
        return (len(self._deadlines) + len(self._prepared)) // LOOKED_AT

    def on_timer(self, key: Hashable, now_ms: int) -> Outcome[None, TransactionRecord]:
        """Abort transactions after their timeout; forget unused ids; send what is left of the markers to be sent."""
        draft: Draft[TransactionRecord] = Draft()
        if key == TIMED_OUT:
            late, more = self._some(self._deadlines.due(now_ms))
            self._write(draft, ((name, self._transactions[name].fenced(now_ms)) for name in late))
            draft.set_timer(TIMED_OUT, now_ms if more else now_ms + self.settings.timed_out_interval_ms)
        elif key == EXPIRED:
            idle, more = self._some(self._expirations.due(now_ms))
            draft.write(*(TransactionRecord(TransactionLogKey(transactional_id=name), None) for name in idle))
            draft.set_timer(EXPIRED, now_ms if more else now_ms + self.settings.expired_interval_ms)
        else:
            assert key == UNDELIVERED, key
            self._deliver_some(draft, now_ms)
        return draft.outcome(None)

    def _deliver_some(self, draft: Draft[TransactionRecord], now_ms: int) -> None:
        """Send markers of transactions that were decided before the log was read."""
        some, more = self._some(self._undelivered)
        for name in some:
            del self._undelivered[name]
            if name in self._prepared:
                draft.perform(self._markers(name, self._transactions[name]))
        if more:
            draft.set_timer(UNDELIVERED, now_ms)

    def _some(self, names: Iterable[str]) -> tuple[list[str], bool]:
        """The first of these ids, as many as one sweep takes, and whether there are more."""
        some: list[str] = []
        partitions = 0
        for name in names:
            if len(some) == SWEPT_MAX or partitions >= SWEPT_PARTITIONS_MAX:
                return some, True
            some.append(name)
            known = self._transactions.get(name)
            partitions += 0 if known is None else len(known.partitions)
        return some, False

    # -- deciding --------------------------------------------------------------------------------------------------

    def init_producer_id(
        self, request: InitProducerIdRequest, version: int, now_ms: int, new_id: Callable[[], int | None]
    ) -> Outcome[InitProducerIdResponse, TransactionRecord]:
        """Give a producer its id and epoch and fence the former holder, after aborting its open transaction.

        `new_id` returns an unused producer id; None if none is available now.
        """
        name, asked = request.transactional_id, Producer(request.producer_id, request.producer_epoch)
        if not name or (asked.producer_id == NO_PRODUCER_ID) != (asked.producer_epoch == NO_PRODUCER_EPOCH):
            return _not_initialised(ErrorCode.INVALID_REQUEST)
        if not 0 < request.transaction_timeout_ms <= self.settings.timeout_max_ms:
            return _not_initialised(ErrorCode.INVALID_TRANSACTION_TIMEOUT)
        known = self._transactions.get(name)
        if known is None:
            return self._begin(name, request.transaction_timeout_ms, now_ms, new_id)
        if asked.producer_id != NO_PRODUCER_ID and not self._is_its_own(name, known, asked):
            return _not_initialised(_fenced(version, INIT_PRODUCER_FENCED_SINCE))
        if known.state.prepared:
            return _not_initialised(ErrorCode.CONCURRENT_TRANSACTIONS)
        if known.state is TransactionState.ONGOING:
            return self._outcome(_init_response(ErrorCode.CONCURRENT_TRANSACTIONS), [(name, known.fenced(now_ms))])
        current = Producer(known.producer_id, known.producer_epoch)
        given = current
        if not self._was_bumped(name, asked, current):
            if not known.exhausted:
                given = Producer(known.producer_id, known.producer_epoch + 1)
            else:
                fresh = new_id()
                if fresh is None:
                    return _not_initialised(ErrorCode.COORDINATOR_NOT_AVAILABLE)
                given = Producer(fresh, 0)
            self._replaced.pop(name, None)
            if asked.producer_id != NO_PRODUCER_ID:
                self._replaced[name] = (asked, given)
        after = known.initialised(*given, request.transaction_timeout_ms, now_ms)
        return self._outcome(_init_response(ErrorCode.NONE, given), [(name, after)])

    def add_partitions(
        self, request: AddPartitionsToTxnRequest, held: Collection[TopicPartition], version: int, now_ms: int
    ) -> Outcome[ErrorCode, TransactionRecord]:
        """Let a transaction hold partitions; the first ones begin it. They exist: the caller has seen to that.

        `held` are the partitions that the request names; the error is that of all of them (`partitions_response`).
        """
        name = request.v3_and_below_transactional_id
        sender = Producer(request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        error, changes = self._grow(name, sender, held, version, now_ms)
        return self._outcome(error, changes)

    def add_offsets(
        self, request: AddOffsetsToTxnRequest, partition: TopicPartition, version: int, now_ms: int
    ) -> Outcome[AddOffsetsToTxnResponse, TransactionRecord]:
        """Let a transaction hold the `partition` of `__consumer_offsets` that has the group's offsets."""
        sender = Producer(request.producer_id, request.producer_epoch)
        error, changes = self._grow(request.transactional_id, sender, [partition], version, now_ms)
        return self._outcome(AddOffsetsToTxnResponse(error_code=error), changes)

    def end(self, request: EndTxnRequest, version: int, now_ms: int) -> Outcome[EndTxnResponse, TransactionRecord]:
        """Decide a transaction; the answer is given when the decision is durable, and the markers follow."""
        sender = Producer(request.producer_id, request.producer_epoch)
        known = self._transactions.get(request.transactional_id)
        error = self._refuse(request.transactional_id, known, sender, version)
        if error is not ErrorCode.NONE or known is None:
            return Outcome(reply=EndTxnResponse(error_code=error))
        event = TransactionEvent.COMMITTED if request.committed else TransactionEvent.ABORTED
        if known.may(event):
            after = known.ended(now_ms, commit=request.committed)
            return self._outcome(EndTxnResponse(), [(request.transactional_id, after)])
        again = _END_AGAIN.get((known.state, event), ErrorCode.INVALID_TXN_STATE)
        return Outcome(reply=EndTxnResponse(error_code=again))

    def markers_written(self, written: WriteMarkers, now_ms: int) -> Outcome[None, TransactionRecord]:
        """Record that every partition has its marker. The report may be late or repeated."""
        if not self.awaits(written):
            return Outcome(reply=None)
        name = written.transactional_id
        return self._outcome(None, [(name, self._transactions[name].completed(now_ms))])

    # -- reading ---------------------------------------------------------------------------------------------------

    def awaits(self, markers: WriteMarkers) -> bool:
        """Whether a decided transaction waits for just these markers."""
        known = self._transactions.get(markers.transactional_id)
        return known is not None and known.state.prepared and self._markers(markers.transactional_id, known) == markers

    def verify(
        self, transactional_id: str, producer_id: int, producer_epoch: int, partition: TopicPartition
    ) -> ErrorCode:
        """Check that a partition belongs to the open transaction of a producer (KIP-890, part 1)."""
        known = self._transactions.get(transactional_id)
        error = self._refuse(transactional_id, known, Producer(producer_id, producer_epoch), PRODUCER_FENCED_SINCE)
        if error is not ErrorCode.NONE or known is None:
            return error
        if known.state.prepared:
            return ErrorCode.CONCURRENT_TRANSACTIONS
        held = known.state is TransactionState.ONGOING and partition in known.partitions
        return ErrorCode.NONE if held else ErrorCode.INVALID_TXN_STATE

    def transaction(self, transactional_id: str) -> Transaction | None:
        """What is known of a transactional id, a value; None if nothing is."""
        return self._transactions.get(transactional_id)

    def __iter__(self) -> Iterator[tuple[str, Transaction]]:
        """Every transactional id with its state, for ListTransactions."""
        return iter(self._transactions.items())

    def states(self) -> dict[TransactionState, int]:
        """How many transactional ids are in each state."""
        counts = dict.fromkeys(TransactionState, 0)
        for known in self._transactions.values():
            counts[known.state] += 1
        return counts

    # -- within ----------------------------------------------------------------------------------------------------

    def _begin(
        self, name: str, timeout_ms: int, now_ms: int, new_id: Callable[[], int | None]
    ) -> Outcome[InitProducerIdResponse, TransactionRecord]:
        if not self._has_room(NAME_COPIES * text_size(name) + OWN_SIZE):
            return _not_initialised(ErrorCode.POLICY_VIOLATION)
        fresh = new_id()
        if fresh is None:
            return _not_initialised(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        begun = first(fresh, timeout_ms, now_ms)
        return self._outcome(_init_response(ErrorCode.NONE, Producer(fresh, 0)), [(name, begun)])

    def _is_its_own(self, name: str, known: Transaction, asked: Producer) -> bool:
        """Whether a named producer holds the id, or held it until the request that it repeats."""
        if asked.producer_epoch > EPOCH_EXHAUSTED:
            return False
        current = Producer(known.producer_id, known.producer_epoch)
        return asked == current or (known.state is TransactionState.EMPTY and self._was_bumped(name, asked, current))

    def _was_bumped(self, name: str, asked: Producer, current: Producer) -> bool:
        return asked.producer_id != NO_PRODUCER_ID and self._replaced.get(name) == (asked, current)

    def _grow(
        self, name: str, sender: Producer, partitions: Collection[TopicPartition], version: int, now_ms: int
    ) -> tuple[ErrorCode, list[tuple[str, Transaction]]]:
        known = self._transactions.get(name)
        error = self._refuse(name, known, sender, version)
        if error is not ErrorCode.NONE or known is None:
            return error, []
        if not known.may(TransactionEvent.GREW):
            return ErrorCode.CONCURRENT_TRANSACTIONS, []
        if not partitions:
            return ErrorCode.INVALID_REQUEST, []
        if known.state is TransactionState.ONGOING and known.partitions.issuperset(partitions):
            return ErrorCode.NONE, []
        after = known.grown(partitions, now_ms)
        if len(after.partitions) > PARTITIONS_PER_TRANSACTION_MAX or not self._has_room(after.size - known.size):
            return ErrorCode.POLICY_VIOLATION, []
        return ErrorCode.NONE, [(name, after)]

    @staticmethod
    def _refuse(name: str, known: Transaction | None, sender: Producer, version: int) -> ErrorCode:
        """The error for a sender that does not hold the transactional id; NONE for its holder."""
        if not name:
            return ErrorCode.INVALID_REQUEST
        if known is None or sender.producer_id != known.producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        if sender.producer_epoch != known.producer_epoch or sender.producer_epoch > EPOCH_EXHAUSTED:
            return _fenced(version, PRODUCER_FENCED_SINCE)
        return ErrorCode.NONE

    def _outcome(self, reply: Reply, changes: Iterable[tuple[str, Transaction]]) -> Outcome[Reply, TransactionRecord]:
        draft: Draft[TransactionRecord] = Draft()
        self._write(draft, changes)
        return draft.outcome(reply)

    def _write(self, draft: Draft[TransactionRecord], changes: Iterable[tuple[str, Transaction]]) -> None:
        """Write what transactions become, and have the markers of decided ones sent."""
        for name, after in changes:
            draft.write(TransactionRecord(TransactionLogKey(transactional_id=name), after.value(), after))
            if after.state.prepared:
                draft.perform(self._markers(name, after))

    @staticmethod
    def _markers(name: str, prepared: Transaction) -> WriteMarkers:
        return WriteMarkers(
            transactional_id=name,
            producer_id=prepared.producer_id,
            producer_epoch=prepared.producer_epoch,
            started_ms=prepared.started_ms,
            commit=prepared.state is TransactionState.PREPARE_COMMIT,
            partitions=prepared.partitions,
        )


_END_AGAIN = {
    (TransactionState.COMPLETE_COMMIT, TransactionEvent.COMMITTED): ErrorCode.NONE,
    (TransactionState.COMPLETE_ABORT, TransactionEvent.ABORTED): ErrorCode.NONE,
    (TransactionState.PREPARE_COMMIT, TransactionEvent.COMMITTED): ErrorCode.CONCURRENT_TRANSACTIONS,
    (TransactionState.PREPARE_ABORT, TransactionEvent.ABORTED): ErrorCode.CONCURRENT_TRANSACTIONS,
}
"""The answer to a repeated EndTxn: the answer to the first one was lost."""


def described(transactional_id: str, known: Transaction | None) -> DescribedTransaction:
    """Describe a transaction, for DescribeTransactions."""
    if known is None:
        return DescribedTransaction(
            error_code=ErrorCode.TRANSACTIONAL_ID_NOT_FOUND if transactional_id else ErrorCode.INVALID_REQUEST,
            transactional_id=transactional_id,
        )
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(known.partitions):
        topics.setdefault(topic, []).append(partition)
    return DescribedTransaction(
        transactional_id=transactional_id,
        transaction_state=known.state.title,
        transaction_timeout_ms=known.timeout_ms,
        transaction_start_time_ms=known.started_ms if known.partitions else NOT_STARTED,
        producer_id=known.producer_id,
        producer_epoch=known.producer_epoch,
        topics=[TopicData(topic=topic, partitions=held) for topic, held in topics.items()],
    )


def partitions_response(
    request: AddPartitionsToTxnRequest, error: ErrorCode, missing: Collection[TopicPartition] = ()
) -> AddPartitionsToTxnResponse:
    """Answer for every partition alike, but for those that do not exist."""
    return AddPartitionsToTxnResponse(
        results_by_topic_v3_and_below=[
            AddPartitionsToTxnTopicResult(
                name=topic.name,
                results_by_partition=[
                    AddPartitionsToTxnPartitionResult(
                        partition_index=partition,
                        partition_error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                        if (topic.name, partition) in missing
                        else error,
                    )
                    for partition in topic.partitions
                ],
            )
            for topic in request.v3_and_below_topics
        ]
    )


def _size(name: str, known: Transaction) -> int:
    """The bytes of memory that a transactional id takes."""
    return NAME_COPIES * text_size(name) + known.size


def _fenced(version: int, since: int) -> ErrorCode:
    return ErrorCode.PRODUCER_FENCED if version >= since else ErrorCode.INVALID_PRODUCER_EPOCH


def _init_response(
    error: ErrorCode, given: Producer = Producer(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=error, producer_id=given.producer_id, producer_epoch=given.producer_epoch)


def _not_initialised(error: ErrorCode) -> Outcome[InitProducerIdResponse, TransactionRecord]:
    return Outcome(reply=_init_response(error))
