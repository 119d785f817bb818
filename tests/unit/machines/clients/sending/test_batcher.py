from __future__ import annotations

from collections.abc import Callable

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.clients.sending import (
    Batcher,
    BatcherSettings,
    Delivered,
    Encode,
    Encoded,
    Failed,
    InitProducer,
    Placement,
    ProduceResult,
    ProducerWork,
    Send,
)
from anabranch.machines.clients.sending.placing import LOOK_BACKOFF_MS, LOOKS_MAX

TOPIC = "t"
LEADERS = {0: 1, 1: 1, 2: 2}


class Rows(list[str]):
    @property
    def record_count(self) -> int:
        return len(self)


class Writer:
    """A batcher, fed by hand: a record `2:a` goes to partition 2, or to `2 % count` on a smaller topic."""

    def __init__(self, *, known: bool = True, count: int = 3, elastic: bool = True, **settings: int | bool) -> None:
        self.now = 0
        self.batcher = Batcher(BatcherSettings(**{"linger_ms": 0, **settings}), Rows)  # type: ignore[arg-type]
        self.outcomes: list[Delivered | Failed] = []
        self.refreshes: list[str] = []
        self.inits: list[InitProducer] = []
        self.placement = Placement(1, count, elastic)
        if settings.get("enable_idempotence", True):
            self.drain()
            self.batcher.producer_known(7, 0)
        if known:
            self.batcher.append_rows(TOPIC, Rows(), 0, 0)
            self.know()

    def know(self, count: int | None = None) -> None:
        if count is not None:
            self.placement = Placement(1, count, self.placement.elastic)
        leaders = {number: node for number, node in LEADERS.items() if number < self.placement.count}
        self.batcher.topic_known(TOPIC, self.placement, leaders, self.now)

    def drain(self) -> list[Send]:
        """Do what the batcher says, and return what it sends."""
        sends: list[Send] = []
        while True:
            work: ProducerWork = self.batcher.drain(self.now)
            self.outcomes += work.outcomes
            self.refreshes += work.refresh
            self.inits += [work.init_producer] if work.init_producer is not None else []
            sends += work.sends
            for encode in work.encodes:
                self.encode(encode)
            if not work.encodes:
                return sends

    def encode(self, encode: Encode) -> None:
        parts: dict[int, Rows] = {}
        for record in encode.rows:  # type: ignore[attr-defined]
            partition = int(record.partition(":")[0]) % encode.placement.count
            parts.setdefault(partition, Rows()).append(record)
        encoded = [Encoded(partition, rows, bytearray(10)) for partition, rows in parts.items()]
        self.batcher.encoded(encode.job, TOPIC, encoded)

    def send(self, *records: str) -> list[Send]:
        self.batcher.append_rows(TOPIC, Rows(records), len(records), self.now)
        return self.drain()

    def answer(self, send: Send, error: ErrorCode = ErrorCode.NONE, base_offset: int = 0) -> None:
        answers = {(TOPIC, batch.partition): ProduceResult(error, base_offset) for batch in send.batches}
        self.batcher.answered(send.request_id, answers, self.now)

    def established(self) -> Writer:
        """The broker knows the producer in partition 0."""
        (send,) = self.send("0:first")
        self.answer(send)
        self.drain()
        self.outcomes.clear()
        return self

    @property
    def failures(self) -> list[str]:
        return [str(outcome.error) for outcome in self.outcomes if isinstance(outcome, Failed)]


def seen(sends: list[Send]) -> list[tuple[int, int, list[str]]]:
    """(partition, sequence, records) of every batch."""
    return [(b.partition, b.sequence, list(b.rows)) for send in sends for b in send.batches]  # type: ignore[call-overload]


def test_one_request_takes_the_batches_of_all_partitions_that_a_broker_leads() -> None:
    writer = Writer()
    sends = writer.send("0:a", "1:b", "2:c")
    assert [(send.node, len(send.batches), send.counts) for send in sends] == [(1, 2, {TOPIC: 3}), (2, 1, {TOPIC: 3})]
    for send in sends:
        writer.answer(send, base_offset=40)
    writer.drain()
    assert {outcome.base_offset for outcome in writer.outcomes if isinstance(outcome, Delivered)} == {40}
    assert writer.batcher.idle and writer.batcher.buffered_size == 0


def test_after_a_lost_connection_without_acks_nothing_is_sent_before_metadata_is_refreshed() -> None:
    writer = Writer(acks=0, enable_idempotence=False)
    (send,) = writer.send("0:a")
    writer.answer(send)
    writer.drain()
    (stays,) = writer.send("2:z")
    writer.answer(stays)
    writer.refreshes.clear()
    writer.batcher.connection_lost(1)
    assert writer.send("0:b", "2:c") == []
    assert writer.refreshes == [TOPIC]
    writer.placement = Placement(1, 2)
    writer.know()
    assert [(send.counts, partition, rows) for send in writer.drain() for partition, _, rows in seen([send])] == [
        ({TOPIC: 2}, 0, ["0:b", "2:c"])
    ]


def test_a_lost_connection_without_a_change_of_the_topic_costs_some_looks() -> None:
    writer = Writer(acks=0, enable_idempotence=False)
    (send,) = writer.send("0:a")
    writer.batcher.not_sent(send.request_id, writer.now)
    writer.batcher.connection_lost(1)
    writer.refreshes.clear()
    looks, sends = 0, writer.drain()
    while not sends and writer.now < 10_000:
        if len(writer.refreshes) > looks:
            looks += 1
            writer.know()
        writer.now += 10
        sends = writer.drain()
    assert seen(sends) == [(0, -1, ["0:a"])]
    assert len(writer.refreshes) == LOOKS_MAX + 1
    assert writer.now < 1_000


def test_after_a_lost_connection_without_acks_a_resize_that_metadata_does_not_show_yet_is_waited_for() -> None:
    """Leaders refuse the old count before metadata shows the new one: each record sent meanwhile would be lost."""
    writer = Writer(acks=0, enable_idempotence=False)
    (send,) = writer.send("0:a")
    writer.answer(send)
    writer.batcher.connection_lost(1)
    writer.drain()
    writer.know()
    assert writer.send("0:b") == []
    writer.placement = Placement(1, 2)
    writer.now += LOOK_BACKOFF_MS
    writer.drain()
    assert writer.refreshes == [TOPIC]
    writer.know()
    assert [(send.counts, records) for send in writer.drain() for _, _, records in seen([send])] == [
        ({TOPIC: 2}, ["0:b"])
    ]


def test_records_linger_until_it_is_time_or_there_are_enough_or_a_flush() -> None:
    writer = Writer(linger_ms=5, batch_size=3)
    assert writer.batcher.append(TOPIC, ["0:a"], 1, writer.now)
    assert not writer.batcher.append(TOPIC, ["0:b"], 1, writer.now)
    assert writer.drain() == []
    assert writer.batcher.drain(writer.now).wake_at_ms == 5
    assert writer.batcher.append(TOPIC, ["0:c"], 1, writer.now)
    assert seen(writer.drain()) == [(0, 0, ["0:a", "0:b", "0:c"])]
    writer.batcher.append(TOPIC, ["1:d"], 1, writer.now)
    writer.now = 5
    assert seen(writer.drain()) == [(1, 0, ["1:d"])]
    writer.batcher.append(TOPIC, ["2:e"], 1, writer.now)
    writer.batcher.flush()
    assert seen(writer.drain()) == [(2, 0, ["2:e"])]


def test_the_first_batch_of_a_partition_travels_alone_and_then_at_most_five() -> None:
    writer = Writer()
    (first,) = writer.send("0:0")
    assert writer.send("0:1") == []
    writer.answer(first)
    sent = writer.drain()
    for number in range(2, 8):
        sent += writer.send(f"0:{number}")
    assert [sequence for _, sequence, _ in seen(sent)] == [1, 2, 3, 4, 5]


def test_a_batch_whose_answer_is_lost_comes_again_to_the_same_partition_under_the_same_sequence() -> None:
    writer = Writer().established()
    (one,), (two,) = writer.send("0:a"), writer.send("0:b")
    writer.batcher.lost(one.request_id, writer.now)
    writer.batcher.lost(two.request_id, writer.now)
    assert writer.drain() == [] and writer.refreshes[-1] == TOPIC
    writer.know()
    writer.now += 1_000
    assert seen(writer.drain()) == [(0, 1, ["0:a"]), (0, 2, ["0:b"])]


def test_a_new_count_waits_for_every_outcome_and_then_places_all_that_is_left_in_order() -> None:
    writer = Writer().established()
    (one,), (two,), (three,) = writer.send("0:a"), writer.send("0:b"), writer.send("2:x")
    writer.send("2:c", "2:d")
    writer.answer(one, ErrorCode.INVALID_PARTITION_METADATA)
    writer.batcher.lost(three.request_id, writer.now)
    writer.know(count=2)
    writer.now += 1_000
    (again,) = writer.drain()
    assert seen([again]) == [(2, 0, ["2:x"])], "what is in doubt is asked for where it was sent"
    writer.answer(two, ErrorCode.INVALID_PARTITION_METADATA)
    assert writer.drain() == []
    writer.answer(again, ErrorCode.INVALID_PARTITION_METADATA)
    sends = writer.drain()
    assert {send.counts[TOPIC] for send in sends} == {2}
    assert seen(sends) == [(0, 1, ["0:a"]), (0, 2, ["0:b"]), (0, 3, ["2:x"]), (0, 4, ["2:c", "2:d"])]
    for send in sends:
        writer.answer(send)
    writer.drain()
    assert writer.failures == [] and writer.batcher.idle


def test_a_count_that_the_leader_does_not_rule_by_yet_is_tried_again_later() -> None:
    writer = Writer().established()
    (send,) = writer.send("0:a")
    writer.answer(send, ErrorCode.INVALID_PARTITION_METADATA)
    sent: list[Send] = []
    while not sent and writer.now < 2_000:
        writer.refreshes.clear()
        sent = writer.drain()
        if writer.refreshes:
            writer.know()
        else:
            writer.now += 1
    assert seen(sent) == [(0, 1, ["0:a"])]
    assert 400 < writer.now < 1_000


@pytest.mark.parametrize("error", [ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.TOPIC_AUTHORIZATION_FAILED])
def test_a_refused_batch_fails_and_gives_its_sequence_to_the_next(error: ErrorCode) -> None:
    writer = Writer().established()
    (one,), (two,) = writer.send("0:a"), writer.send("0:b")
    writer.answer(one, error)
    writer.answer(two, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert seen(writer.drain()) == [(0, 1, ["0:b"])]
    assert [error.name in failure for failure in writer.failures] == [True]


def test_records_that_the_broker_lost_are_told_of_and_a_new_epoch_begins() -> None:
    writer = Writer().established()
    (one,), (two,) = writer.send("0:a"), writer.send("0:b")
    writer.answer(one, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert writer.drain() == [] and writer.inits == [InitProducer(-1, -1)], "not before every outcome is known"
    writer.answer(two, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    writer.drain()
    assert writer.inits[1:] == [InitProducer(7, 0)]
    assert ["lacks records that it acknowledged" in failure for failure in writer.failures] == [True]
    writer.batcher.producer_known(7, 1)
    (send,) = writer.drain()
    assert (send.producer_epoch, seen([send])) == (1, [(0, 0, ["0:b"])])


def test_a_fenced_producer_sends_nothing_more() -> None:
    writer = Writer().established()
    (one,), _ = writer.send("0:a"), writer.send("0:b")
    writer.answer(one, ErrorCode.INVALID_PRODUCER_EPOCH)
    assert writer.drain() == []
    assert len(writer.failures) == 2 and "another producer has taken this producer's id" in writer.failures[0]
    assert writer.batcher.fatal is not None


def test_a_producer_id_that_is_forgotten_is_replaced_when_nothing_is_lost_by_it() -> None:
    writer = Writer().established()
    (one,) = writer.send("0:a")
    writer.answer(one, ErrorCode.UNKNOWN_PRODUCER_ID)
    writer.drain()
    writer.batcher.producer_known(8, 0)
    (send,) = writer.drain()
    assert (send.producer_id, seen([send]), writer.failures) == (8, [(0, 0, ["0:a"])], [])


def test_what_takes_too_long_fails_and_says_what_is_known_of_it() -> None:
    writer = Writer(delivery_timeout_ms=60_000).established()
    (one,) = writer.send("0:a")
    writer.batcher.lost(one.request_id, writer.now)
    writer.now = 60_000
    writer.drain()
    assert "They may or may not be in the log" in writer.failures[0]
    assert writer.inits[-1] == InitProducer(7, 0), "its sequence number is never given again"


def test_records_for_a_topic_that_nobody_knows_fail_after_max_block_ms() -> None:
    writer = Writer(known=False, max_block_ms=1_000)
    writer.send("0:a")
    unknown = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such topic")
    writer.batcher.topic_unknown(TOPIC, unknown, writer.now)
    assert writer.batcher.drain(writer.now).wake_at_ms == 100
    writer.now = 1_000
    writer.drain()
    (failure,) = writer.failures
    assert "within 1000 ms" in failure and "there is no such topic" in failure


def test_a_topic_that_cannot_be_had_fails_its_records_at_once() -> None:
    writer = Writer(known=False)
    writer.send("0:a")
    writer.batcher.topic_unknown(TOPIC, ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, "a bad name"), writer.now)
    writer.drain()
    assert len(writer.failures) == 1 and writer.batcher.idle


def test_a_request_that_never_left_leaves_no_doubt() -> None:
    writer = Writer().established()
    (one,) = writer.send("0:a")
    writer.batcher.not_sent(one.request_id, writer.now)
    writer.drain()
    writer.know(count=2)
    writer.now += 1_000
    assert seen(writer.drain()) == [(0, 1, ["0:a"])]


def test_a_batch_in_doubt_whose_partition_was_removed_is_told_of_at_once() -> None:
    writer = Writer()
    (one,) = writer.send("2:a")
    writer.batcher.lost(one.request_id, writer.now)
    writer.know(count=2)
    writer.now += 1_000
    (again,) = writer.drain()
    assert again.node == 2, "its last leader is asked"
    writer.answer(again, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    writer.drain()
    assert ["the partition was removed before it was known" in failure for failure in writer.failures] == [True]


def test_without_idempotence_a_partition_has_one_batch_on_its_way_so_that_order_holds() -> None:
    writer = Writer(enable_idempotence=False, acks=1)
    (one,) = writer.send("0:a")
    assert writer.send("0:b") == [] and one.batches[0].sequence == -1
    writer.batcher.lost(one.request_id, writer.now)
    writer.now += 1_000
    assert seen(writer.drain()) == [(0, -1, ["0:a"])]


def test_a_stock_topic_is_told_no_count() -> None:
    writer = Writer(elastic=False)
    (send,) = writer.send("0:a")
    assert send.counts == {TOPIC: -1}


def test_an_unknown_leader_is_asked_for_and_waited_for() -> None:
    writer = Writer()
    writer.batcher.topic_known(TOPIC, writer.placement, {0: -1, 1: 1, 2: 2}, writer.now)
    assert writer.send("0:a") == []
    writer.now += 1_000
    writer.drain()
    assert writer.refreshes[-1] == TOPIC
    writer.know()
    assert seen(writer.drain()) == [(0, 0, ["0:a"])]


def test_what_is_abandoned_is_counted() -> None:
    writer = Writer().established()
    writer.send("0:a", "0:b")
    writer.send("0:c")
    assert writer.batcher.abandon(ApiError(ErrorCode.REQUEST_TIMED_OUT, "closed")) == 3
    writer.drain()
    assert len(writer.failures) == 2 and writer.batcher.buffered_size == 0


def test_sequences_wrap_as_brokers_expect() -> None:
    writer = Writer().established()
    partition = writer.batcher._topics[TOPIC].partitions[0]
    partition.next_sequence, partition.acked_sequence = 2**31 - 1, 2**31 - 2
    sends = writer.send("0:a", "0:b")
    assert seen(sends) == [(0, 2**31 - 1, ["0:a", "0:b"])]
    writer.answer(sends[0])
    assert seen(writer.send("0:c")) == [(0, 1, ["0:c"])]


def test_a_result_of_encoding_for_an_old_placement_is_forgotten() -> None:
    writer = Writer().established()
    writer.batcher.append_rows(TOPIC, Rows(["2:a"]), 1, writer.now)
    work = writer.batcher.drain(writer.now)
    writer.know(count=2)
    late: Callable[[], None] = lambda: writer.encode(work.encodes[0])  # noqa: E731
    assert seen(writer.drain()) == [(0, 1, ["2:a"])]
    late()
    assert writer.drain() == []


# Transactions.


class TransactionalWriter(Writer):
    """A writer whose transaction is asked to hold partitions."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        super().__init__(transactional=True)

    def drain(self) -> list[Send]:
        sends: list[Send] = []
        while True:
            work = self.batcher.drain(self.now)
            self.outcomes += work.outcomes
            self.asked += work.add_partitions
            self.inits += [work.init_producer] if work.init_producer is not None else []
            sends += work.sends
            for encode in work.encodes:
                self.encode(encode)
            if not work.encodes:
                return sends


def test_nothing_is_sent_to_a_partition_before_the_transaction_holds_it() -> None:
    writer = TransactionalWriter()
    assert not writer.inits, "its epochs come from its transactions"
    assert writer.send("0:a", "1:b") == []
    assert writer.asked == [(TOPIC, 0), (TOPIC, 1)]
    assert writer.drain() == []
    assert writer.asked == [(TOPIC, 0), (TOPIC, 1)], "it is asked once"
    writer.batcher.partitions_added([(TOPIC, 1)])
    (send,) = writer.drain()
    assert seen([send]) == [(1, 0, ["1:b"])]
    writer.batcher.partitions_added([(TOPIC, 0)])
    (other,) = writer.drain()
    writer.answer(send)
    writer.answer(other)
    writer.drain()
    writer.batcher.transaction_ended()
    assert writer.send("1:c") == []
    assert writer.asked[-1] == (TOPIC, 1)
    writer.batcher.partitions_added([(TOPIC, 1)])
    assert seen(writer.drain()) == [(1, 1, ["1:c"])], "sequences go on"


def test_what_is_in_doubt_at_an_abort_needs_another_epoch() -> None:
    writer = TransactionalWriter()
    writer.send("0:a", "1:b")
    writer.batcher.partitions_added([(TOPIC, 0)])
    (sent,) = writer.drain()
    assert not writer.batcher.new_epoch_needed
    writer.batcher.abandon(ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED, "aborted"))
    writer.drain()
    assert len(writer.failures) == 2
    assert writer.batcher.new_epoch_needed
    writer.answer(sent)  # too late
    assert writer.send("0:c") == []
    writer.batcher.producer_known(7, 1)
    writer.batcher.transaction_ended()
    writer.drain()
    writer.batcher.partitions_added([(TOPIC, 0)])
    assert seen(writer.drain()) == [(0, 0, ["0:c"])]


def test_an_abort_without_anything_on_the_wire_keeps_the_epoch() -> None:
    writer = TransactionalWriter()
    writer.send("0:a")
    writer.batcher.abandon(ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED, "aborted"))
    writer.drain()
    assert not writer.batcher.new_epoch_needed


def test_a_partition_that_is_gone_is_looked_for_again() -> None:
    writer = TransactionalWriter()
    writer.send("2:a")
    writer.batcher.partitions_missing([(TOPIC, 2)], writer.now)
    assert writer.batcher.drain(writer.now).refresh == [TOPIC]
    writer.know(count=2)
    writer.now += 1_000
    writer.drain()
    assert writer.asked == [(TOPIC, 2), (TOPIC, 0)]
