"""The transaction coordinator, as conversations: what producers ask, what they are told, what the log says then."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.outcome import Outcome, SetTimer
from anabranch.machines.transactions.coordinator import (
    EXPIRED,
    SWEPT_MAX,
    SWEPT_PARTITIONS_MAX,
    TIMED_OUT,
    UNDELIVERED,
    Coordinator,
    Producer,
    WriteMarkers,
    described,
)
from anabranch.machines.transactions.records import TransactionRecord, decode_record, encode_record
from anabranch.machines.transactions.settings import TransactionSettings
from anabranch.machines.transactions.states import NEXT, REFUSED, TransactionEvent, TransactionState
from anabranch.machines.transactions.transaction import EPOCH_EXHAUSTED, EPOCH_MAX, Transaction, first
from anabranch.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from anabranch.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic
from anabranch.protocol.messages.end_txn import EndTxnRequest
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest

OK = ErrorCode.NONE
NEVER = Producer(-1, -1)
SETTINGS = TransactionSettings(timeout_max_ms=60_000, id_expiration_ms=1_000_000, timed_out_interval_ms=1_000)


class World:
    """A coordinator, its log, its clock, and a leader that writes every marker when it is told to."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.room = 1 << 40
        self.machine = Coordinator(SETTINGS, lambda size: self.machine.size + size <= self.room)
        self.journal: list[tuple[bytes, bytes | None]] = []
        self.timers: dict[Any, int] = {}
        self.markers: list[WriteMarkers] = []
        self.ids = itertools.count(7)
        self.ids_left = True
        self.perform(self.machine.loaded(self.now_ms))

    def perform(self, outcome: Outcome[Any, TransactionRecord]) -> Any:
        for record in outcome.records:
            self.journal.append(encode_record(record))
            self.machine.apply(record)
        for timer in outcome.timers:
            assert isinstance(timer, SetTimer)
            self.timers[timer.key] = timer.at_ms
        self.markers += outcome.effects
        return outcome.reply

    def crash(self) -> None:
        """The coordinator dies; another one reads the log."""
        before = self.machine
        self.machine, self.timers, self.markers = replayed(self.journal), {}, []
        assert self.machine == before
        self.perform(self.machine.loaded(self.now_ms))

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms
        while due := [key for key, at_ms in self.timers.items() if at_ms <= self.now_ms]:
            for key in due:
                del self.timers[key]
                self.perform(self.machine.on_timer(key, self.now_ms))

    def init(
        self, name: str | None = "t", asked: Producer = NEVER, timeout_ms: int = 10_000, version: int = 5
    ) -> tuple[ErrorCode, Producer]:
        request = InitProducerIdRequest(
            transactional_id=name,
            transaction_timeout_ms=timeout_ms,
            producer_id=asked.producer_id,
            producer_epoch=asked.producer_epoch,
        )
        outcome = self.machine.init_producer_id(
            request, version, self.now_ms, lambda: next(self.ids) if self.ids_left else None
        )
        reply = self.perform(outcome)
        return ErrorCode(reply.error_code), Producer(reply.producer_id, reply.producer_epoch)

    def add(self, producer: Producer, *partitions: int, name: str = "t", version: int = 3) -> ErrorCode:
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=producer.producer_id,
            v3_and_below_producer_epoch=producer.producer_epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name="topic", partitions=list(partitions))],
        )
        held = [TopicPartition("topic", partition) for partition in partitions]
        error = self.perform(self.machine.add_partitions(request, held, version, self.now_ms))
        assert isinstance(error, ErrorCode)
        return error

    def add_offsets(self, producer: Producer, partition: int) -> ErrorCode:
        request = AddOffsetsToTxnRequest(
            transactional_id="t",
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            group_id="g",
        )
        offsets = TopicPartition("__consumer_offsets", partition)
        return ErrorCode(self.perform(self.machine.add_offsets(request, offsets, 3, self.now_ms)).error_code)

    def end(self, producer: Producer, *, commit: bool = True, version: int = 3, name: str = "t") -> ErrorCode:
        request = EndTxnRequest(
            transactional_id=name,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            committed=commit,
        )
        return ErrorCode(self.perform(self.machine.end(request, version, self.now_ms)).error_code)

    def write_markers(self) -> list[WriteMarkers]:
        """The leaders have written what they were told to write."""
        written, self.markers = self.markers, []
        for effect in written:
            self.perform(self.machine.markers_written(effect, self.now_ms))
        return written

    def state(self, name: str = "t") -> str:
        return described(name, self.machine.transaction(name)).transaction_state


def replayed(journal: list[tuple[bytes, bytes | None]]) -> Coordinator:
    def fold(machine: Coordinator, line: tuple[bytes, bytes | None]) -> Coordinator:
        record = decode_record(*line)
        assert record is not None
        machine.apply(record)
        return machine

    return reduce(fold, journal, Coordinator(SETTINGS))


@pytest.fixture
def world() -> World:
    return World()


def held(*partitions: int) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition("topic", partition) for partition in partitions)


def test_every_pair_of_state_and_event_is_decided() -> None:
    pairs = set(itertools.product(TransactionState, TransactionEvent))
    assert NEXT.keys() | REFUSED == pairs
    assert not NEXT.keys() & REFUSED


def test_a_transaction_from_its_first_partition_to_its_markers(world: World) -> None:
    assert world.init() == (OK, Producer(7, 0))
    assert world.state() == "Empty"
    producer = Producer(7, 0)
    assert world.add(producer, 0, 3) is OK
    assert world.add(producer, 1) is OK
    assert world.add_offsets(producer, 17) is OK
    assert world.state() == "Ongoing"
    assert world.end(producer) is OK
    assert world.state() == "PrepareCommit"
    assert world.markers == [
        WriteMarkers("t", 7, 0, 1_000, True, held(0, 1, 3) | {TopicPartition("__consumer_offsets", 17)})
    ]
    world.write_markers()
    assert world.state() == "CompleteCommit"
    assert world.add(producer, 2) is OK
    assert world.end(producer, commit=False) is OK
    assert world.write_markers() == [WriteMarkers("t", 7, 0, 1_001, False, held(2))]
    assert world.state() == "CompleteAbort"
    assert replayed(world.journal) == world.machine


def test_adding_what_is_there_writes_nothing(world: World) -> None:
    _, producer = world.init()
    world.add(producer, 0, 1)
    lines = len(world.journal)
    assert world.add(producer, 1) is OK
    assert len(world.journal) == lines


def test_while_a_transaction_completes_its_producer_is_told_to_wait(world: World) -> None:
    _, producer = world.init()
    world.add(producer, 0)
    world.end(producer)
    assert world.add(producer, 0) is ErrorCode.CONCURRENT_TRANSACTIONS
    assert world.init()[0] is ErrorCode.CONCURRENT_TRANSACTIONS
    assert world.end(producer) is ErrorCode.CONCURRENT_TRANSACTIONS
    assert world.end(producer, commit=False) is ErrorCode.INVALID_TXN_STATE
    world.write_markers()
    assert world.end(producer) is OK, "the answer to the first request was lost"
    assert world.end(producer, commit=False) is ErrorCode.INVALID_TXN_STATE
    assert world.add(producer, 0) is OK


def test_there_is_nothing_to_end_before_a_partition_was_added(world: World) -> None:
    _, producer = world.init()
    assert world.end(producer) is ErrorCode.INVALID_TXN_STATE
    assert world.end(producer, commit=False) is ErrorCode.INVALID_TXN_STATE


def test_a_second_producer_fences_the_first_and_aborts_what_it_left_open(world: World) -> None:
    _, old = world.init()
    world.add(old, 0)
    assert world.init()[0] is ErrorCode.CONCURRENT_TRANSACTIONS
    assert world.add(old, 1) is ErrorCode.PRODUCER_FENCED
    assert world.end(old) is ErrorCode.PRODUCER_FENCED
    assert world.init()[0] is ErrorCode.CONCURRENT_TRANSACTIONS
    assert world.write_markers() == [WriteMarkers("t", 7, 1, 1_000, False, held(0))]
    assert world.init() == (OK, Producer(7, 2))


@pytest.mark.parametrize(("version", "code"), [(1, ErrorCode.INVALID_PRODUCER_EPOCH), (2, ErrorCode.PRODUCER_FENCED)])
def test_old_clients_are_fenced_with_the_code_that_they_know(world: World, version: int, code: ErrorCode) -> None:
    _, old = world.init()
    world.init()
    assert world.add(old, 0, version=version) is code
    assert world.end(old, version=version) is code
    assert world.init(asked=old, version=version + 2)[0] is code


def test_whoever_is_not_the_producer_changes_nothing(world: World) -> None:
    _, producer = world.init()
    world.add(producer, 0)
    before = list(world.journal)
    assert world.add(Producer(99, 0), 1) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert world.end(Producer(99, 0)) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert world.add(producer, 1, name="u") is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert world.end(Producer(7, 1)) is ErrorCode.PRODUCER_FENCED
    assert world.end(producer, name="") is ErrorCode.INVALID_REQUEST
    assert world.journal == before


@pytest.mark.parametrize("name", ["", None])
def test_a_producer_needs_a_transactional_id(world: World, name: str | None) -> None:
    assert world.init(name) == (ErrorCode.INVALID_REQUEST, NEVER)


@pytest.mark.parametrize("asked", [Producer(7, -1), Producer(-1, 0)])
def test_a_producer_says_all_or_nothing_of_itself(world: World, asked: Producer) -> None:
    assert world.init(asked=asked)[0] is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("timeout_ms", [0, -1, 60_001])
def test_a_timeout_that_is_too_long_is_refused(world: World, timeout_ms: int) -> None:
    assert world.init(timeout_ms=timeout_ms)[0] is ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert world.init(timeout_ms=60_000)[0] is OK


def test_a_producer_without_ids_left_tries_again_later(world: World) -> None:
    world.ids_left = False
    assert world.init()[0] is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert not world.journal


# KIP-360: the producer asks for the next epoch of itself.


def test_a_producer_bumps_its_own_epoch_and_may_ask_twice(world: World) -> None:
    _, producer = world.init()
    assert world.init(asked=producer) == (OK, Producer(7, 1))
    assert world.init(asked=producer) == (OK, Producer(7, 1)), "the first answer was lost"
    assert world.init(asked=Producer(7, 1)) == (OK, Producer(7, 2))
    assert world.init(asked=producer)[0] is ErrorCode.PRODUCER_FENCED


def test_a_producer_that_was_replaced_cannot_bump_itself_back(world: World) -> None:
    _, old = world.init()
    _, new = world.init()
    assert world.init(asked=old)[0] is ErrorCode.PRODUCER_FENCED
    assert world.add(new, 0) is OK
    assert world.init(asked=old)[0] is ErrorCode.PRODUCER_FENCED
    assert world.state() == "Ongoing"


def test_a_repeated_bump_does_not_abort_what_was_begun_since(world: World) -> None:
    _, producer = world.init()
    _, bumped = world.init(asked=producer)
    world.add(bumped, 0)
    assert world.init(asked=producer)[0] is ErrorCode.PRODUCER_FENCED
    assert world.end(bumped) is OK


def test_a_new_producer_id_when_the_epochs_are_used_up(world: World) -> None:
    world.init()
    exhaust(world, EPOCH_EXHAUSTED)
    last = Producer(7, EPOCH_EXHAUSTED)
    assert world.init(asked=last) == (OK, Producer(8, 0))
    assert world.init(asked=last) == (OK, Producer(8, 0)), "the first answer was lost"
    assert world.add(last, 0) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    exhaust(world, EPOCH_EXHAUSTED)
    assert world.init() == (OK, Producer(9, 0))


def test_the_last_epoch_can_still_be_fenced(world: World) -> None:
    world.init()
    exhaust(world, EPOCH_EXHAUSTED)
    world.add(Producer(7, EPOCH_EXHAUSTED), 0)
    assert world.init()[0] is ErrorCode.CONCURRENT_TRANSACTIONS
    assert world.write_markers()[0].producer_epoch == EPOCH_MAX
    assert world.init() == (OK, Producer(8, 0))


def test_nobody_is_taken_for_a_producer_of_the_epoch_that_is_for_fencing(world: World) -> None:
    world.init()
    exhaust(world, EPOCH_EXHAUSTED)
    world.add(Producer(7, EPOCH_EXHAUSTED), 0)
    world.init()
    world.write_markers()
    nobody = Producer(7, EPOCH_MAX)
    assert world.add(nobody, 0) is ErrorCode.PRODUCER_FENCED
    assert world.end(nobody, commit=False) is ErrorCode.PRODUCER_FENCED
    assert world.init(asked=nobody)[0] is ErrorCode.PRODUCER_FENCED
    assert world.machine.verify("t", *nobody, TopicPartition("topic", 0)) is ErrorCode.PRODUCER_FENCED
    assert world.state() == "CompleteAbort"
    assert world.init() == (OK, Producer(8, 0))


def test_a_transaction_in_a_log_under_the_epoch_that_is_for_fencing_ends(world: World) -> None:
    _, producer = world.init()
    world.add(producer, 0)
    exhaust(world, EPOCH_MAX)
    world.crash()
    world.advance(20_000)
    assert world.state() == "PrepareAbort"
    assert world.write_markers() == [WriteMarkers("t", 7, EPOCH_MAX, 1_000, False, held(0))]
    assert world.init() == (OK, Producer(8, 0))


def exhaust(world: World, epoch: int) -> None:
    record = decode_record(*world.journal[-1])
    assert record is not None and record.value is not None
    told = replace(Transaction.of(record.value), producer_epoch=epoch)
    world.perform(Outcome(reply=None, records=(TransactionRecord(record.key, told.value()),)))


# Time.


def test_a_transaction_that_takes_too_long_is_aborted_and_its_producer_fenced(world: World) -> None:
    _, producer = world.init(timeout_ms=5_000)
    world.add(producer, 0)
    world.advance(4_000)
    assert world.add(producer, 1) is OK, "which does not prolong it"
    assert world.state() == "Ongoing"
    world.advance(1_000)
    assert world.state() == "PrepareAbort"
    assert world.write_markers() == [WriteMarkers("t", 7, 1, 1_000, False, held(0, 1))]
    assert world.end(producer) is ErrorCode.PRODUCER_FENCED
    assert world.init() == (OK, Producer(7, 2))


def test_a_transaction_that_began_by_a_clock_that_was_ahead_has_its_timeout_from_the_load_on(world: World) -> None:
    world.now_ms += 10**9
    _, producer = world.init(timeout_ms=5_000)
    world.add(producer, 0)
    world.now_ms -= 10**9
    world.crash()
    world.advance(4_000)
    assert world.add(producer, 1) is OK, "which does not prolong it"
    world.advance(999)
    assert world.state() == "Ongoing"
    world.advance(1_000)
    assert world.state() == "PrepareAbort", "its readers would wait for days"


def test_many_late_transactions_are_aborted_batch_by_batch(world: World) -> None:
    for number in range(1_200):
        _, producer = world.init(f"t{number}")
        world.add(producer, 0, name=f"t{number}")
    batches = []
    world.now_ms += 20_000
    while world.machine.states()[TransactionState.ONGOING]:
        outcome = world.machine.on_timer(TIMED_OUT, world.now_ms)
        batches.append(len(outcome.records))
        world.perform(outcome)
    assert batches == [SWEPT_MAX] * 12
    assert world.timers[TIMED_OUT] == world.now_ms + SETTINGS.timed_out_interval_ms


def test_a_sweep_is_bounded_by_the_partitions_of_its_transactions(world: World) -> None:
    for number in range(4):
        _, producer = world.init(f"t{number}")
        world.add(producer, *range(SWEPT_PARTITIONS_MAX // 2), name=f"t{number}")
    world.now_ms += 20_000
    swept = []
    for _ in range(2):
        outcome = world.machine.on_timer(TIMED_OUT, world.now_ms)
        swept.append(sum(len(effect.partitions) for effect in outcome.effects))
        world.perform(outcome)
    assert swept == [SWEPT_PARTITIONS_MAX] * 2
    assert world.machine.states()[TransactionState.ONGOING] == 0


def test_a_look_for_what_is_late_does_not_look_at_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        _, producer = world.init(f"t{number}", timeout_ms=60_000)
        world.add(producer, 0, name=f"t{number}")
        world.init(f"idle{number}")
    _, producer = world.init("late", timeout_ms=5_000)
    world.add(producer, 0, name="late")
    looked_at = []

    class Watched(dict[str, Transaction]):
        def __getitem__(self, name: str) -> Transaction:
            looked_at.append(name)
            return super().__getitem__(name)

        def get(self, name: str, default: Any = None) -> Any:
            looked_at.append(name)
            return super().get(name, default)

        def _all(self) -> Any:
            raise AssertionError("all ids are looked at")

        items = values = __iter__ = _all

    monkeypatch.setattr(world.machine, "_transactions", Watched(world.machine._transactions))
    assert not world.machine.on_timer(EXPIRED, world.now_ms).records
    outcome = world.machine.on_timer(TIMED_OUT, world.now_ms + 6_000)
    assert len(outcome.records) == 1
    assert set(looked_at) == {"late"}


def test_an_id_that_nobody_uses_is_forgotten_but_not_an_open_transaction(world: World) -> None:
    world.init("idle")
    _, producer = world.init("done")
    world.add(producer, 0, name="done")
    world.end(producer, name="done")
    world.write_markers()
    _, other = world.init("stuck")
    world.add(other, 0, name="stuck")
    world.end(other, name="stuck")
    world.advance(999_999)
    world.perform(world.machine.on_timer(EXPIRED, world.now_ms))
    assert len(world.machine) == 3
    world.now_ms += 1
    world.perform(world.machine.on_timer(EXPIRED, world.now_ms))
    assert [name for name, _ in world.machine] == ["stuck"]
    assert described("idle", world.machine.transaction("idle")).error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    assert replayed(world.journal) == world.machine
    assert world.init("idle") == (OK, Producer(10, 0))


# Crashes.


@pytest.mark.parametrize("commit", [True, False])
def test_a_coordinator_that_dies_before_the_markers_finishes_after_it_is_loaded(world: World, commit: bool) -> None:
    _, producer = world.init()
    world.add(producer, 0, 1)
    world.end(producer, commit=commit)
    told = list(world.markers)
    world.crash()
    assert world.markers == told
    assert world.add(producer, 0) is ErrorCode.CONCURRENT_TRANSACTIONS
    world.write_markers()
    assert world.state() == ("CompleteCommit" if commit else "CompleteAbort")
    world.crash()
    assert not world.markers


def test_a_coordinator_that_dies_with_many_decisions_sends_the_markers_of_some_at_a_time(world: World) -> None:
    for number in range(250):
        _, producer = world.init(f"t{number}")
        world.add(producer, 0, name=f"t{number}")
        world.end(producer, name=f"t{number}")
    world.crash()
    sent = [len(world.write_markers())]
    while UNDELIVERED in world.timers:
        del world.timers[UNDELIVERED]
        world.perform(world.machine.on_timer(UNDELIVERED, world.now_ms))
        sent.append(len(world.write_markers()))
    assert sent == [SWEPT_MAX, SWEPT_MAX, 50]
    assert world.machine.states()[TransactionState.COMPLETE_COMMIT] == 250


def test_an_open_transaction_survives_the_coordinator_and_still_has_its_timeout(world: World) -> None:
    _, producer = world.init(timeout_ms=5_000)
    world.add(producer, 0)
    world.advance(3_000)
    world.crash()
    assert world.add(producer, 1) is OK
    world.advance(2_000)
    assert world.state() == "PrepareAbort"


def test_markers_that_were_written_for_an_earlier_transaction_complete_no_other(world: World) -> None:
    _, producer = world.init()
    world.add(producer, 0)
    world.end(producer)
    late = world.markers[0]
    world.write_markers()
    world.perform(world.machine.markers_written(late, world.now_ms))
    assert world.state() == "CompleteCommit"
    world.add(producer, 0)
    world.end(producer, commit=False)
    world.perform(world.machine.markers_written(late, world.now_ms))
    assert world.state() == "PrepareAbort"


def test_of_two_transactions_that_are_alike_the_markers_are_not_equal(world: World) -> None:
    _, producer = world.init()
    ended = []
    for _ in range(4):  # Within a millisecond.
        world.add(producer, 0)
        assert not any(map(world.machine.awaits, ended))
        world.end(producer)
        (markers,) = world.markers
        assert world.machine.awaits(markers)
        for earlier in ended:
            assert not world.machine.awaits(earlier)
            world.perform(world.machine.markers_written(earlier, world.now_ms))
        assert world.state() == "PrepareCommit"
        ended += world.write_markers()
    assert not any(map(world.machine.awaits, ended))


def test_a_transaction_after_one_by_a_clock_that_was_ahead_begins_now(world: World) -> None:
    world.now_ms += 10**9
    _, producer = world.init(timeout_ms=5_000)
    world.add(producer, 0)
    world.end(producer)
    world.write_markers()
    world.now_ms -= 10**9
    world.crash()
    world.add(producer, 0)
    world.advance(6_000)
    assert world.state() == "PrepareAbort", "its readers would wait for days"


# Reading.


def test_only_the_open_transaction_of_its_producer_is_verified(world: World) -> None:
    _, producer = world.init()
    machine, zero = world.machine, TopicPartition("topic", 0)
    assert machine.verify("t", *producer, zero) is ErrorCode.INVALID_TXN_STATE
    world.add(producer, 0)
    assert machine.verify("t", *producer, zero) is OK
    assert machine.verify("t", *producer, TopicPartition("topic", 1)) is ErrorCode.INVALID_TXN_STATE
    assert machine.verify("t", 7, 1, zero) is ErrorCode.PRODUCER_FENCED
    assert machine.verify("u", *producer, zero) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    world.end(producer)
    assert machine.verify("t", *producer, zero) is ErrorCode.CONCURRENT_TRANSACTIONS
    world.write_markers()
    assert machine.verify("t", *producer, zero) is ErrorCode.INVALID_TXN_STATE


def test_a_transaction_is_described(world: World) -> None:
    _, producer = world.init(timeout_ms=1_234)
    world.add(producer, 1, 0)
    told = described("t", world.machine.transaction("t"))
    assert (told.transaction_state, told.transaction_timeout_ms, told.transaction_start_time_ms) == (
        "Ongoing",
        1_234,
        1_000,
    )
    assert [(topic.topic, topic.partitions) for topic in told.topics] == [("topic", [0, 1])]
    assert (told.producer_id, told.producer_epoch) == producer


# Records.


def test_a_record_is_laid_out_as_kafka_lays_it_out() -> None:
    told = replace(
        first(producer_id=5, timeout_ms=60_000, now_ms=9),
        state=TransactionState.ONGOING,
        partitions=held(1),
        started_ms=8,
    )
    world = World()
    world.init("tx")
    key, value = world.journal[0]
    assert key == b"\0\0" + b"\0\2tx"
    assert value is not None and value[:2] == b"\0\1"
    written = encode_record(TransactionRecord(decode_key(b"tx"), told.value()))[1]
    assert written is not None
    assert written.hex(" ") == (
        "00 01 "  # version
        "00 00 00 00 00 00 00 05 "  # producer id
        "00 00 "  # epoch
        "00 00 ea 60 "  # timeout
        "01 "  # Ongoing
        "02 06 74 6f 70 69 63 02 00 00 00 01 00 "  # one topic, one partition, no tags
        "00 00 00 00 00 00 00 09 "
        "00 00 00 00 00 00 00 08 "
        "00"  # no tags
    )


def decode_key(name: bytes) -> Any:
    record = decode_record(b"\0\0" + len(name).to_bytes(2, "big") + name, None)
    assert record is not None
    return record.key


def test_the_first_version_of_records_is_read() -> None:
    value = (
        b"\0\0" + (5).to_bytes(8, "big") + b"\0\3" + (60_000).to_bytes(4, "big") + b"\4" + b"\xff\xff\xff\xff"
        + (9).to_bytes(8, "big") + (8).to_bytes(8, "big")
    )  # fmt: skip
    record = decode_record(b"\0\0\0\2tx", value)
    assert record is not None and record.value is not None
    told = Transaction.of(record.value)
    assert (told.producer_id, told.producer_epoch, told.state) == (5, 3, TransactionState.COMPLETE_COMMIT)
    assert decode_record(b"\0\1other", b"") is None


def test_a_decision_that_is_not_written_leaves_nothing_behind() -> None:
    world, count = World(), 100
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            request = InitProducerIdRequest(transactional_id=f"{number}" + "t" * 10_000, transaction_timeout_ms=1)
            assert world.machine.init_producer_id(request, 4, 0, lambda: 7).records
        del request
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < count * 1_000
    assert (len(world.machine), world.machine.size) == (0, 0)


def test_the_memory_of_a_transactional_id_counts_as_often_as_it_may_be_kept() -> None:
    world, name = World(), "t" * 1_000 + "\U0001f600"
    world.init("t")
    short = world.machine.size
    world.room = short + 3 * 4 * len(name)
    assert world.init(name)[0] is ErrorCode.POLICY_VIOLATION
    world.room = 1 << 40
    _, producer = world.init(name)
    assert world.machine.size > short + 3 * 4 * len(name)
    tracemalloc.start()
    try:
        _, producer = world.init(str(bytes(name, "utf-8"), "utf-8"), producer)
        world.add(producer, 0, name=str(bytes(name, "utf-8"), "utf-8"))
        world.journal.clear()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < world.machine.size - short


def test_what_transactions_take_is_bounded_and_given_back() -> None:
    world = World()
    code, producer = world.init("t")
    empty = world.machine.size
    assert (code, world.add(producer, *range(10))) == (OK, OK)
    full = world.machine.size
    assert full > empty > len("t")
    world.room = full
    assert world.init("another")[0] is ErrorCode.POLICY_VIOLATION
    assert world.add(producer, 10) is ErrorCode.POLICY_VIOLATION
    assert world.add(producer, 9) is OK, "it holds this one"
    assert replayed(world.journal).size == full
    assert world.end(producer) is OK
    world.write_markers()
    assert world.machine.size == empty
    assert world.add(producer, 0) is OK
    world.end(producer, commit=False)
    world.write_markers()
    world.advance(SETTINGS.id_expiration_ms + SETTINGS.expired_interval_ms)
    assert (len(world.machine), world.machine.size) == (0, 0)


def test_a_sweep_finds_what_is_a_second_late_also_where_timeouts_may_be_days() -> None:
    days_ms = 7 * 24 * 3_600_000
    world = World()
    world.machine = Coordinator(TransactionSettings(timeout_max_ms=days_ms))
    _, producer = world.init(timeout_ms=60_000)
    world.add(producer, 0)
    world.perform(world.machine.on_timer(TIMED_OUT, world.now_ms + 59_999))
    assert world.state() == "Ongoing"
    world.perform(world.machine.on_timer(TIMED_OUT, world.now_ms + 61_000))
    assert world.state() == "PrepareAbort"
