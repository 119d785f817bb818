"""The producer table: what is a repetition, what is a gap, who is fenced, who is forgotten; and transactions."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_TOPIC_ID
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.partition.appending import APPEND, Duplicate, Redirect, Refuse, decide_append
from anabranch.machines.partition.producers import (
    REFUSALS_REMEMBERED_MAX,
    SEQUENCE_MAX,
    AbortedTransaction,
    Marker,
    ProducerTable,
    origin,
    redirected,
)

OK, GAP, FENCED = ErrorCode.NONE, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.INVALID_PRODUCER_EPOCH
COMMIT, ABORT = Marker(commit=True, coordinator_epoch=0), Marker(commit=False, coordinator_epoch=0)


class Batch(NamedTuple):
    """What the table reads of a header."""

    base_sequence: int = 0
    records: int = 1
    producer_id: int = 7
    producer_epoch: int = 0
    base_offset: int = -1
    max_timestamp: int = 0
    is_transactional: bool = False
    is_control: bool = False

    @property
    def last_offset_delta(self) -> int:
        return self.records - 1


class Repetition(NamedTuple):
    """How a batch that was appended before is answered."""

    base_offset: int
    last_offset: int
    timestamp: int


def judge(table: ProducerTable, batch: Batch) -> Repetition | ErrorCode:
    """What a table says of a batch: it repeats one, or follows, or why it does not follow."""
    known = table.known(batch.producer_id)
    found = None if known is None else known.repetition(batch)
    return table.follows(batch, batch.producer_id) if found is None else Repetition(*found[2:])


class Partition:
    """A log that appends what its table lets follow."""

    def __init__(self, table: ProducerTable | None = None) -> None:
        self.table = ProducerTable() if table is None else table
        self.log: list[tuple[Batch, Marker | None]] = []
        self.end = 0

    def send(self, batch: Batch, now_ms: int = 0) -> Repetition | ErrorCode:
        judged = judge(self.table, batch)
        if judged is OK:
            self.append(batch, now_ms)
        return judged

    def append(self, batch: Batch, now_ms: int = 0, marker: Marker | None = None) -> AbortedTransaction | None:
        placed = batch._replace(base_offset=self.end)
        self.end += batch.records
        self.log.append((placed, marker))
        return self.table.apply(placed, now_ms, marker)

    def finish(self, producer_id: int, marker: Marker) -> AbortedTransaction | None:
        return self.append(Batch(-1, 1, producer_id, is_transactional=True, is_control=True), marker=marker)


def test_a_repetition_is_answered_as_it_was_the_first_time() -> None:
    partition = Partition()
    partition.send(Batch(0, 10, max_timestamp=111))
    partition.send(Batch(10, 5, max_timestamp=222))
    assert partition.send(Batch(0, 10)) == Repetition(0, 9, 111)
    assert partition.send(Batch(10, 5)) == Repetition(10, 14, 222)
    assert partition.end == 15


def test_five_batches_are_remembered_and_no_more() -> None:
    partition = Partition()
    for sequence in range(6):
        assert partition.send(Batch(sequence)) is OK
    assert partition.send(Batch(0)) is GAP
    assert [partition.send(Batch(sequence)) for sequence in range(1, 6)] == [
        Repetition(offset, offset, 0) for offset in range(1, 6)
    ]


def test_a_part_of_a_batch_is_not_a_repetition_of_it() -> None:
    partition = Partition()
    partition.send(Batch(0, 10))
    assert partition.send(Batch(0, 5)) is GAP
    assert partition.send(Batch(5, 5)) is GAP


def test_a_gap_is_refused_until_it_is_filled() -> None:
    partition = Partition()
    partition.send(Batch(0, 3))
    assert partition.send(Batch(4)) is GAP
    assert partition.send(Batch(3)) is OK
    assert partition.send(Batch(4)) is OK


def test_the_largest_sequence_is_followed_by_zero_also_within_a_batch() -> None:
    partition = Partition()
    partition.send(Batch(SEQUENCE_MAX - 3, 3))
    assert partition.send(Batch(SEQUENCE_MAX, 4)) is OK
    assert partition.send(Batch(SEQUENCE_MAX, 4)) == Repetition(3, 6, 0)
    assert partition.send(Batch(3)) is OK


def test_an_older_epoch_is_fenced_and_a_newer_one_begins_at_zero() -> None:
    partition = Partition()
    partition.send(Batch(0, producer_epoch=1))
    assert partition.send(Batch(1, producer_epoch=0)) is FENCED
    assert partition.send(Batch(0, producer_epoch=0)) is FENCED
    assert partition.send(Batch(1, producer_epoch=2)) is GAP
    assert partition.send(Batch(0, producer_epoch=2)) is OK
    assert partition.send(Batch(0, producer_epoch=1)) is FENCED, "what an older epoch appended is forgotten"


def test_a_producer_that_nobody_remembers_may_begin_anywhere() -> None:
    assert Partition().send(Batch(41)) is OK


def test_after_a_refused_first_batch_the_second_one_is_not_taken_for_the_first() -> None:
    """KAFKA-15591: else the repetition of the first one is out of order for ever."""
    partition = Partition()
    first, second = Batch(0), Batch(1)
    assert judge(partition.table, first) is OK
    partition.table.refused(first)
    assert partition.send(second) is GAP
    assert partition.send(first) is OK
    assert partition.send(second) is OK


def test_a_refused_batch_binds_only_its_own_epoch_and_only_until_something_is_appended() -> None:
    partition = Partition()
    partition.table.refused(Batch(5))
    assert judge(partition.table, Batch(6, producer_epoch=1)) is OK
    assert judge(partition.table, Batch(0)) is OK, "a producer that began anew"
    assert partition.send(Batch(5)) is OK
    partition.table.refused(Batch(6))
    assert partition.send(Batch(6)) is OK


def test_refusals_are_bounded_and_what_has_no_sequence_is_not_remembered() -> None:
    table = ProducerTable()
    for producer_id in range(REFUSALS_REMEMBERED_MAX + 1):
        table.refused(Batch(0, producer_id=producer_id))
    assert judge(table, Batch(1, producer_id=0)) is OK
    assert judge(table, Batch(1, producer_id=1)) is GAP
    table.refused(Batch(-1, producer_id=-1))
    assert judge(table, Batch(-1, producer_id=-1)) is OK


def test_batches_without_a_producer_id_leave_no_trace() -> None:
    partition = Partition()
    for _ in range(2):
        assert partition.send(Batch(-1, producer_id=-1, producer_epoch=-1)) is OK
    assert len(partition.table) == 0


def test_idle_producers_are_forgotten_but_not_in_the_middle_of_a_transaction() -> None:
    partition = Partition()
    partition.send(Batch(0, producer_id=1), now_ms=0)
    partition.send(Batch(0, producer_id=2), now_ms=60)
    partition.send(Batch(0, producer_id=3, is_transactional=True), now_ms=0)
    assert partition.table.expire(now_ms=100, idle_max_ms=100) == 0
    assert partition.table.expire(now_ms=101, idle_max_ms=100) == 1
    assert partition.send(Batch(0, producer_id=1)) is OK
    assert partition.send(Batch(9, producer_id=2)) is GAP
    assert partition.send(Batch(9, producer_id=3)) is GAP


def test_producers_of_a_clock_that_was_ahead_keep_no_others_from_being_forgotten() -> None:
    partition = Partition()
    partition.send(Batch(0, producer_id=1), now_ms=10**9)
    partition.send(Batch(0, producer_id=2), now_ms=50)
    partition.table.seen_by(100)
    assert partition.table.expire(now_ms=200, idle_max_ms=100) == 0
    assert partition.table.expire(now_ms=201, idle_max_ms=100) == 2


def test_of_too_many_producers_the_one_that_was_idle_longest_goes() -> None:
    partition = Partition(ProducerTable(producers_max=2))
    partition.send(Batch(0, producer_id=1, is_transactional=True))
    partition.send(Batch(0, producer_id=2))
    partition.send(Batch(0, producer_id=3))
    assert partition.table.evicted == 1
    assert judge(partition.table, Batch(7, producer_id=1)) is GAP
    assert judge(partition.table, Batch(7, producer_id=2)) is OK


def test_a_snapshot_is_the_table() -> None:
    partition = Partition()
    for sequence in range(7):
        partition.send(Batch(sequence, 1, producer_id=5, max_timestamp=sequence), now_ms=sequence)
    partition.send(Batch(0, 2, producer_id=6, is_transactional=True))
    restored = ProducerTable.restore(partition.table.snapshot())
    assert restored == partition.table
    assert restored != ProducerTable()
    assert restored.snapshot() == partition.table.snapshot()
    assert restored.last_stable_offset(9) == 7
    assert ProducerTable.restore(ProducerTable().snapshot()) == ProducerTable()


def test_a_damaged_snapshot_is_an_error_wherever_the_damage_is() -> None:
    partition = Partition()
    for sequence in range(3):
        partition.send(Batch(sequence))
    good = partition.table.snapshot()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 0x10
        with pytest.raises(DecodeError):
            ProducerTable.restore(bytes(bad))
        with pytest.raises(DecodeError):
            ProducerTable.restore(good[:position])
    with pytest.raises(DecodeError):
        ProducerTable.restore(good + b"\0")


def test_readers_of_committed_records_stop_at_the_first_open_transaction() -> None:
    partition = Partition()
    partition.send(Batch(0, 3, producer_id=1))
    assert partition.table.last_stable_offset(3) == 3
    partition.send(Batch(0, 2, producer_id=2, is_transactional=True))
    partition.send(Batch(0, 2, producer_id=3, is_transactional=True))
    partition.send(Batch(2, 2, producer_id=2, is_transactional=True))
    assert partition.table.open_transaction(2) == 3
    assert partition.table.last_stable_offset(9) == 3
    assert partition.finish(2, COMMIT) is None
    assert partition.table.open_transaction(2) is None
    assert partition.table.last_stable_offset(9) == 3, "its marker, at 9, is not below the high watermark yet"
    assert partition.table.last_stable_offset(10) == 5
    assert partition.finish(3, ABORT) == AbortedTransaction(3, 5, 10, 11)
    assert partition.table.last_stable_offset(10) == 5
    assert partition.table.last_stable_offset(11) == 11


def test_an_aborted_transaction_says_how_stable_the_log_was() -> None:
    partition = Partition()
    partition.send(Batch(0, producer_id=1, is_transactional=True))
    partition.send(Batch(0, producer_id=2, is_transactional=True))
    assert partition.finish(2, ABORT) == AbortedTransaction(2, 1, 2, 0)


def test_a_marker_without_a_transaction_ends_nothing() -> None:
    partition = Partition()
    partition.send(Batch(0, producer_id=1))
    assert partition.finish(1, ABORT) is None
    assert partition.finish(9, COMMIT) is None
    assert partition.table.last_stable_offset(3) == 3


def test_markers_of_older_epochs_and_coordinators_are_fenced() -> None:
    partition = Partition()
    partition.append(Batch(0, producer_id=1, producer_epoch=2, is_transactional=True))
    partition.append(
        Batch(-1, producer_id=1, producer_epoch=2, is_control=True), marker=Marker(commit=True, coordinator_epoch=5)
    )
    table = partition.table
    assert table.check_marker(1, 1, 5) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert table.check_marker(1, 2, 4) is ErrorCode.TRANSACTION_COORDINATOR_FENCED
    assert table.check_marker(1, 2, 5) is ErrorCode.NONE
    assert table.check_marker(8, 0, 0) is ErrorCode.NONE


def test_sequences_go_on_after_a_marker() -> None:
    partition = Partition()
    partition.send(Batch(0, 3, is_transactional=True))
    partition.finish(7, COMMIT)
    assert partition.send(Batch(3, is_transactional=True)) is OK
    assert partition.send(Batch(0, 3, is_transactional=True)) == Repetition(0, 2, 0)


def test_the_alias_of_a_redirected_producer_tells_both() -> None:
    for producer_id in (0, 1, (1 << 40) - 1):
        assert origin(producer_id) == (producer_id, None)
        for partition in (0, 1, 99_999):
            alias = redirected(producer_id, partition)
            assert origin(alias) == (producer_id, partition)
            assert 0 < alias < 1 << 63


LEADER = Leadership(NO_TOPIC_ID, 4, 1, 1, 2, 6, retiring=False)
SURVIVOR = Leadership(NO_TOPIC_ID, 0, 1, 1, 2, 3, retiring=False)


class Survivor(Partition):
    """Partition 0, which has the keys of partition 4 while that retires."""

    leadership = SURVIVOR


class Redirected:
    """Partition 4, whose stock producers' batches go to partition 0 while it retires."""

    def __init__(self) -> None:
        self.own, self.survivor = Partition(), Survivor()
        self.retiring = False

    def send(self, batch: Batch) -> Repetition | ErrorCode:
        role = SURVIVOR.of_removed(4) if self.retiring else LEADER
        decision = decide_append(role, self.own.table, [self.survivor], batch, COUNT_NOT_SAID)
        if isinstance(decision, Duplicate):
            return Repetition(*decision.of[2:])
        if isinstance(decision, Refuse):
            return decision.code
        if isinstance(decision, Redirect):
            decision.to.append(batch._replace(producer_id=decision.producer_id))
        else:
            assert decision is APPEND
            self.own.append(batch)
        return OK


def test_a_stock_producer_counts_on_through_retirement_and_return() -> None:
    partition = Redirected()
    for round_ in range(4):
        partition.retiring = round_ % 2 == 1
        for sequence in range(10 * round_, 10 * round_ + 10):
            assert partition.send(Batch(sequence)) is OK
            assert isinstance(partition.send(Batch(sequence)), Repetition)
            assert partition.send(Batch(sequence + 2)) is GAP
    assert len(partition.own.log) == len(partition.survivor.log) == 20


def test_what_was_redirected_and_is_repeated_after_the_return_is_a_repetition() -> None:
    partition = Redirected()
    partition.send(Batch(0))
    partition.retiring = True
    for sequence in range(1, 9):
        partition.send(Batch(sequence))
    partition.retiring = False
    assert partition.send(Batch(8)) == Repetition(7, 7, 0)
    assert partition.send(Batch(1)) is GAP, "older than what is remembered: refused, not appended twice"


def test_a_redirected_producer_with_a_new_epoch_begins_at_zero() -> None:
    partition = Redirected()
    partition.send(Batch(0))
    partition.retiring = True
    assert partition.send(Batch(1)) is OK
    assert partition.send(Batch(3, producer_epoch=1)) is GAP
    assert partition.send(Batch(0, producer_epoch=1)) is OK
    assert partition.send(Batch(2)) is FENCED
    partition.retiring = False
    assert partition.send(Batch(1, producer_epoch=1)) is OK


def test_redirected_sequences_wrap_too() -> None:
    partition = Redirected()
    partition.send(Batch(SEQUENCE_MAX))
    partition.retiring = True
    assert partition.send(Batch(0)) is OK
    partition.retiring = False
    assert partition.send(Batch(1)) is OK


def test_two_origins_of_one_producer_do_not_disturb_each_other() -> None:
    partition = Redirected()
    partition.retiring = True
    partition.survivor.append(Batch(9))
    partition.survivor.append(Batch(0, producer_id=redirected(7, 4)))
    assert judge(partition.survivor.table, Batch(10)) is OK
    assert partition.send(Batch(1)) is OK
    assert partition.send(Batch(-1, producer_id=-1)) is OK
