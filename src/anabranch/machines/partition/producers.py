"""Idempotent and transactional producers of one partition, as a pure fold over its batches (ordering.md, section 5).

`appending` asks the table about a batch before it is appended; `apply` folds an appended batch, live and on recovery.

    same producer, epoch, sequences as one of the last 5 batches           a repetition: answered as it was then
    older epoch                                                            INVALID_PRODUCER_EPOCH
    newer epoch that does not start with sequence 0                        OUT_OF_ORDER_SEQUENCE_NUMBER
    sequence that does not follow the last one (2^31-1 is followed by 0)   OUT_OF_ORDER_SEQUENCE_NUMBER
    a producer that is not remembered                                      any sequence, as in Apache Kafka (KIP-360)

The last line has a trap (KAFKA-15591): the first batch of a pipeline is refused, the second one finds no producer and
is accepted, and the first one's repetition is out of order for ever. So a batch that is refused for a reason that may
pass is noted in the table (`refused`): the next batch of that producer must be that one (docs/adr/0012).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from struct import Struct
from typing import NamedTuple, Protocol

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.base.ids import NO_PRODUCER_ID, NO_SEQUENCE
from anabranch.base.limits import (
    PRODUCER_BATCHES_REMEMBERED,
    PRODUCER_ID_BITS,
    PRODUCER_IDLE_MIN_MS,
    PRODUCERS_PER_PARTITION_MAX,
)
from anabranch.machines.partition.aborted import AbortedTransaction, AbortedTransactions
from anabranch.records.checksum import crc32c

SEQUENCE_MAX = 2**31 - 1
_SEQUENCES = 2**31
NO_COORDINATOR_EPOCH = -1
REFUSALS_REMEMBERED_MAX = 1_000
PRODUCER_SIZE = 1_300
"""Bytes of memory that a producer takes in a partition, with all batches that are remembered of it."""
EXPIRED_MAX = 5_000
"""How many producers are dropped at a time, in about 2 ms."""
EVICTION_SCAN_MAX = 100
"""How many of the longest idle producers are looked at for one to forget; those in transactions are passed over."""


class Batch(Protocol):
    """The fields of a batch header used in decisions; `records.batch.BatchHeader` has them."""

    @property
    def base_offset(self) -> int: ...
    @property
    def last_offset_delta(self) -> int: ...
    @property
    def max_timestamp(self) -> int: ...
    @property
    def producer_id(self) -> int: ...
    @property
    def producer_epoch(self) -> int: ...
    @property
    def base_sequence(self) -> int: ...
    @property
    def is_transactional(self) -> bool: ...
    @property
    def is_control(self) -> bool: ...


class Marker(NamedTuple):
    """The end of a transaction: the content of a control batch of type COMMIT or ABORT."""

    commit: bool
    coordinator_epoch: int


class Remembered(NamedTuple):
    """A batch in the log, with the data to recognize and answer its repetitions."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp: int
    """The largest timestamp of the batch, which is the append time if the topic's timestamps are LogAppendTime."""


class Producer(NamedTuple):
    """The state of one producer in a partition; a value, so that a copy of a table is one of its references."""

    epoch: int
    coordinator_epoch: int = NO_COORDINATOR_EPOCH
    last_sequence: int = NO_SEQUENCE
    transaction_start: int | None = None
    batches: tuple[Remembered, ...] = ()
    """The last few batches of this epoch, oldest first."""
    seen_ms: int = 0

    def repetition(self, batch: Batch) -> Remembered | None:
        """Find the batch that `batch` repeats: same epoch, same sequences."""
        if batch.producer_epoch != self.epoch:
            return None
        first = batch.base_sequence
        for old in self.batches:
            if old.first_sequence == first and old.last_sequence == sequence_after(first, batch.last_offset_delta):
                return old
        return None


class ProducerTable:
    """The producers of a partition. Two tables are equal if they decide alike."""

    def __init__(self, producers_max: int = PRODUCERS_PER_PARTITION_MAX) -> None:
        self._producers: dict[int, Producer] = {}
        """By id; the longest idle one comes first."""
        self._producers_max = producers_max
        self._awaited: dict[int, tuple[int, int]] = {}
        """Producer to the epoch and sequence of the refused batch that must come next. Not durable."""
        self._undecided: dict[int, int] = {}
        """First offset to producer of each open transaction, ascending."""
        self._ended: dict[int, int] = {}
        """First offset to marker offset of transactions with a marker that may be at or above the high watermark."""
        self.aborted = AbortedTransactions()
        """The index of aborted transactions, for readers of committed records."""
        self.evicted = 0
        """The number of producers dropped to make room."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProducerTable) and self._comparable() == other._comparable()

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._producers)

    # Deciding.

    def known(self, producer_id: int) -> Producer | None:
        """Return the producer of this id; None if unknown."""
        return self._producers.get(producer_id)

    def has_room(self, now_ms: int) -> bool:
        """Whether one more producer can be remembered, and none is forgotten that may still repeat a batch."""
        if len(self._producers) < self._producers_max:
            return True
        eldest = (known for known in islice(self._producers.values(), EVICTION_SCAN_MAX))
        return any(it.transaction_start is None and now_ms - it.seen_ms >= PRODUCER_IDLE_MIN_MS for it in eldest)

    def follows(self, batch: Batch, producer_id: int) -> ErrorCode:
        """Check that a batch that repeats none is the next one of its producer, which is known here by `producer_id`.

        INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER, or NONE.
        """
        if producer_id == NO_PRODUCER_ID:
            return ErrorCode.NONE
        known = self._producers.get(producer_id)
        epoch, sequence = batch.producer_epoch, batch.base_sequence
        if known is not None:
            if epoch < known.epoch:
                return ErrorCode.INVALID_PRODUCER_EPOCH
            if epoch > known.epoch:
                return ErrorCode.NONE if sequence == 0 else ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
            if known.last_sequence != NO_SEQUENCE:
                in_order = sequence == (known.last_sequence + 1) % _SEQUENCES
                return ErrorCode.NONE if in_order else ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        awaited = self._awaited.get(producer_id)
        if awaited is not None and awaited[0] == epoch and awaited[1] != sequence and sequence != 0:
            return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        return ErrorCode.NONE

    def refused(self, batch: Batch) -> None:
        """Record the refusal of a new, in-order batch for a reason that may pass.

        Only producers without a sequence here yet need the record: their next batch must be this one.
        """
        known = self._producers.get(batch.producer_id)
        if batch.producer_id == NO_PRODUCER_ID or batch.base_sequence == NO_SEQUENCE:
            return
        if known is not None and known.epoch == batch.producer_epoch and known.last_sequence != NO_SEQUENCE:
            return
        self._awaited.pop(batch.producer_id, None)
        self._awaited[batch.producer_id] = (batch.producer_epoch, batch.base_sequence)
        if len(self._awaited) > REFUSALS_REMEMBERED_MAX:
            del self._awaited[next(iter(self._awaited))]

    def forget_refusal(self, producer_id: int) -> None:
        """Drop the record of a refused batch of this producer: the batch was appended elsewhere."""
        self._awaited.pop(producer_id, None)

    def check_marker(self, producer_id: int, producer_epoch: int, coordinator_epoch: int) -> ErrorCode:
        """Decide about a transaction marker of the coordinator, before it is appended."""
        known = self._producers.get(producer_id)
        if known is None:
            return ErrorCode.NONE
        if producer_epoch < known.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if coordinator_epoch < known.coordinator_epoch:
            return ErrorCode.TRANSACTION_COORDINATOR_FENCED
        return ErrorCode.NONE

    # Folding.

    def apply(
        self, batch: Batch, now_ms: int, marker: Marker | None = None, base_offset: int | None = None
    ) -> AbortedTransaction | None:
        """Fold a batch that is in the log, with its offsets; for a control batch, with the marker that it holds.

        Returns the new line of the aborted-transaction index, if any. `now_ms`: the time of the producer's activity.
        `base_offset`: its offset in the log, where `batch` has another one.
        """
        producer_id = batch.producer_id
        if producer_id == NO_PRODUCER_ID:
            return None
        if base_offset is None:
            base_offset = batch.base_offset
        known = self._producers.pop(producer_id, None)
        if known is None:
            self._make_room()
            known = Producer(batch.producer_epoch)
        epoch, coordinator_epoch, last, transaction_start, batches, _ = known
        if epoch != batch.producer_epoch:
            epoch, last, batches = batch.producer_epoch, NO_SEQUENCE, ()
        line: AbortedTransaction | None = None
        if batch.is_control:
            if marker is not None:
                coordinator_epoch = max(coordinator_epoch, marker.coordinator_epoch)
                line = self._end(producer_id, base_offset, transaction_start, marker)
                transaction_start = None
        else:
            if batch.base_sequence != NO_SEQUENCE:
                first, delta = batch.base_sequence, batch.last_offset_delta
                last = sequence_after(first, delta)
                # These, and `Producer(...)`, at half the cost; every produced batch has one of each.
                newest = tuple.__new__(Remembered, (first, last, base_offset, base_offset + delta, batch.max_timestamp))
                batches = (*batches[1 - PRODUCER_BATCHES_REMEMBERED :], newest)
            if transaction_start is None and batch.is_transactional:
                transaction_start = base_offset
                self._undecided[transaction_start] = producer_id
        if self._awaited:
            self._awaited.pop(producer_id, None)
        fields = (epoch, coordinator_epoch, last, transaction_start, batches, now_ms)
        self._producers[producer_id] = tuple.__new__(Producer, fields)
        return line

    def seen_by(self, now_ms: int) -> None:
        """Have no producer be seen later than now: the clock may have been ahead when the table was saved."""
        for producer_id, known in self._producers.items():
            if known.seen_ms > now_ms:
                self._producers[producer_id] = known._replace(seen_ms=now_ms)

    def expire(self, now_ms: int, idle_max_ms: int) -> int:
        """Drop the longest idle producers, except those in an open transaction; return their number.

        At most EXPIRED_MAX of them: so many may be followed by others.
        """
        idle: list[int] = []
        for producer_id, known in self._producers.items():
            if now_ms - known.seen_ms <= idle_max_ms or len(idle) == EXPIRED_MAX:
                break
            if known.transaction_start is None:
                idle.append(producer_id)
        for producer_id in idle:
            del self._producers[producer_id]
        return len(idle)

    # Transactions.

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the offset below which no record belongs to an open transaction: the last stable offset.

        A transaction with its marker not below the high watermark is still open: a crash may undo the marker. The high
        watermark never falls from call to call, so ended transactions are dropped.
        """
        for start in [start for start, marker in self._ended.items() if marker < high_watermark]:
            del self._ended[start]
        first = next(iter(self._undecided), high_watermark)
        return min(first, min(self._ended, default=first), high_watermark)

    def open_transaction(self, producer_id: int) -> int | None:
        """Return the first offset of the producer's open transaction."""
        known = self._producers.get(producer_id)
        return None if known is None else known.transaction_start

    @property
    def transactions(self) -> int:
        """The number of open transactions."""
        return len(self._undecided)

    def needs_marker(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether a marker would change anything; a repeated marker would not."""
        known = self._producers.get(producer_id)
        return known is None or known.transaction_start is not None or producer_epoch > known.epoch

    def __iter__(self) -> Iterator[tuple[int, Producer]]:
        """The producers by id."""
        return iter(self._producers.items())

    # Snapshots.

    def copy(self) -> ProducerTable:
        """Return a table of its own, to be saved while this one goes on: what may last is left to its `snapshot`."""
        made = ProducerTable(self._producers_max)
        made._producers = dict(self._producers)
        made._undecided = dict(self._undecided)
        made._ended = dict(self._ended)
        made.aborted = self.aborted.copy()
        return made

    def snapshot(self) -> bytes:
        """Return the table as bytes for `restore`, with a checksum."""
        parts = [b""]
        for producer_id, known in self._producers.items():
            start = -1 if known.transaction_start is None else known.transaction_start
            parts.append(
                _ENTRY.pack(
                    producer_id,
                    known.epoch,
                    known.coordinator_epoch,
                    known.last_sequence,
                    start,
                    known.seen_ms,
                    len(known.batches),
                )
            )
            parts += [_BATCH.pack(*batch) for batch in known.batches]
        ended = [_SPAN.pack(start, marker) for start, marker in self._ended.items()]
        parts[0] = _COUNTS.pack(len(self._producers), len(ended), len(self.aborted))
        body = b"".join([*parts, *ended, self.aborted.to_bytes()])
        return _HEAD.pack(_MAGIC, _VERSION, crc32c(body)) + body

    @classmethod
    def restore(cls, data: bytes, producers_max: int = PRODUCERS_PER_PARTITION_MAX) -> ProducerTable:
        """Load a snapshot. Raises `DecodeError` for malformed or damaged bytes."""
        table = cls(producers_max)
        try:
            magic, version, checksum = _HEAD.unpack_from(data)
            body = memoryview(data)[_HEAD.size :]
            if magic != _MAGIC or version != _VERSION:
                raise DecodeError(f"a producer snapshot of an unknown kind: magic {magic!r}, version {version}")
            if crc32c(body) != checksum:
                raise DecodeError("a producer snapshot whose checksum does not fit its content")
            table._read(body)
        except struct.error as error:
            raise DecodeError(f"a producer snapshot that is cut off: {error}") from error
        return table

    def _read(self, body: memoryview) -> None:
        count, ended, aborted = _COUNTS.unpack_from(body)
        position = _COUNTS.size
        for _ in range(count):
            producer_id, epoch, coordinator_epoch, last, start, seen_ms, batches = _ENTRY.unpack_from(body, position)
            position += _ENTRY.size
            remembered: list[Remembered] = []
            for _ in range(batches):
                remembered.append(Remembered(*_BATCH.unpack_from(body, position)))
                position += _BATCH.size
            begun = None if start < 0 else start
            self._producers[producer_id] = Producer(epoch, coordinator_epoch, last, begun, tuple(remembered), seen_ms)
        for _ in range(ended):
            first, marker = _SPAN.unpack_from(body, position)
            position += _SPAN.size
            self._ended[first] = marker
        self.aborted = AbortedTransactions.from_bytes(body[position:])
        if len(self.aborted) != aborted:
            raise DecodeError(f"a producer snapshot with {len(self.aborted)} aborted transactions, not {aborted}")
        starts = {p.transaction_start: i for i, p in self._producers.items() if p.transaction_start is not None}
        self._undecided = dict(sorted(starts.items()))

    # Within.

    def _end(self, producer_id: int, offset: int, first: int | None, marker: Marker) -> AbortedTransaction | None:
        if first is None:
            return None
        self._undecided.pop(first, None)
        self._ended[first] = offset
        if marker.commit:
            return None
        stable = next(iter(self._undecided), offset + 1)
        line = AbortedTransaction(producer_id, first, offset, stable)
        self.aborted.add(line)
        return line

    def _make_room(self) -> None:
        while len(self._producers) >= self._producers_max:
            idle = (i for i, known in self._producers.items() if known.transaction_start is None)
            oldest = next(idle, None)
            if oldest is None:
                return
            del self._producers[oldest]
            self.evicted += 1

    def _comparable(self) -> tuple[object, ...]:
        return list(self._producers.items()), list(self._undecided.items()), self.aborted


_MAGIC = b"ANPS"
_VERSION = 2
_HEAD = Struct(">4sHI")
_COUNTS = Struct(">III")
_ENTRY = Struct(">qhiiqqB")
_BATCH = Struct(">iiqqq")
_SPAN = Struct(">qq")


def sequence_after(sequence: int, count: int) -> int:
    """Return the sequence number `count` records after `sequence`; 2^31-1 is followed by 0."""
    return (sequence + count) % _SEQUENCES


def redirected(producer_id: int, partition: int) -> int:
    """Return the id under which a producer's batches for a retiring `partition` are appended to its survivor.

    Sequences are counted per producer and partition by the client, so batches of two origins must not share an id.
    """
    assert 0 <= producer_id < 1 << PRODUCER_ID_BITS
    return producer_id | (partition + 1) << PRODUCER_ID_BITS


def origin(producer_id: int) -> tuple[int, int | None]:
    """Return the producer behind an id, and the partition that it addressed if its batch was redirected."""
    if producer_id < 1 << PRODUCER_ID_BITS:
        return producer_id, None
    return producer_id & ((1 << PRODUCER_ID_BITS) - 1), (producer_id >> PRODUCER_ID_BITS) - 1


def ahead(one: Producer, other: Producer) -> bool:
    """Whether `one` is the later state of a producer; sequences wrap, so the shorter way round counts."""
    if one.epoch != other.epoch or NO_SEQUENCE in (one.last_sequence, other.last_sequence):
        return (one.epoch, one.last_sequence) > (other.epoch, other.last_sequence)
    return 0 < (one.last_sequence - other.last_sequence) % _SEQUENCES < _SEQUENCES // 2
