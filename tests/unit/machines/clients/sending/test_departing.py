"""Departing: what may leave now, and under which sequence numbers."""

from __future__ import annotations

import pytest

from anabranch.base.ids import NO_SEQUENCE
from anabranch.machines.clients.sending import departing
from anabranch.machines.clients.sending.departing import REQUEST_SIZE_MIN, SPAN_PER_PARTITION_MAX
from anabranch.machines.clients.sending.state import SEQUENCES, Partition, SendingState, Topic
from anabranch.machines.clients.sending.values import (
    Batch,
    BatcherSettings,
    BatchState,
    InitProducer,
    Placement,
    ProducerWork,
    Send,
)


class Rows(list[int]):
    @property
    def record_count(self) -> int:
        return len(self)


def world(count: int = 1, records: int = 1, size: int = 10, **settings: int | bool) -> tuple[SendingState, Partition]:
    """A topic whose partition 0 has `count` fresh batches; the broker knows the producer."""
    state = SendingState(BatcherSettings(**settings), producer_id=7, producer_epoch=1)  # type: ignore[arg-type]
    topic = state.topics["t"] = Topic("t", Placement(1, 1), {0: 3}, needs_metadata=False)
    partition = topic.partitions[0] = Partition(0, next_sequence=10, acked_sequence=9)
    for order in range(count):
        partition.fresh.append(Batch("t", 0, Rows(range(records)), bytearray(size), order, 1_000))
    return state, partition


def leave(state: SendingState, now_ms: int = 0) -> tuple[list[Send], ProducerWork]:
    work = ProducerWork()
    departing.send(state, now_ms, work)
    return work.sends, work


def test_a_batch_leaves_with_the_next_sequence_and_the_count_of_its_topic() -> None:
    state, partition = world(records=3)
    ((send,), _) = leave(state)
    assert (send.node, send.producer_id, send.producer_epoch, dict(send.counts)) == (3, 7, 1, {"t": 1})
    assert [batch.sequence for batch in send.batches] == [10]
    assert partition.next_sequence == 13 and partition.sent == [*send.batches]
    assert send.timeout_ms == 1_000, "no longer than the batch may take"


def test_sequences_wrap() -> None:
    state, partition = world(records=3)
    partition.next_sequence = SEQUENCES - 1
    leave(state)
    assert partition.next_sequence == 2


def test_a_broker_has_at_most_so_many_requests_and_a_partition_so_many_batches() -> None:
    state, partition = world(count=9, size=REQUEST_SIZE_MIN, max_in_flight_requests_per_connection=3)
    sends, _ = leave(state)
    assert len(sends) == 3 and state.load == {3: 3}
    state, partition = world(count=9, size=REQUEST_SIZE_MIN)
    sends, _ = leave(state)
    assert len(sends) == SPAN_PER_PARTITION_MAX == partition.span


def test_the_first_batch_in_a_partition_travels_alone() -> None:
    state, partition = world(count=2)
    partition.acked_sequence, partition.next_sequence = NO_SEQUENCE, 0
    sends, _ = leave(state)
    assert [len(send.batches) for send in sends] == [1]


def test_uncertain_batches_go_first_and_even_while_the_topic_is_moved() -> None:
    state, partition = world(count=1)
    state.topics["t"].moving = True
    lost = Batch("t", 0, Rows([0]), bytearray(1), 0, 1_000, BatchState.UNCERTAIN, sequence=4, index=0)
    partition.uncertain.append(lost)
    ((send,), _) = leave(state)
    assert send.batches == (lost,) and lost.sequence == 4 and lost.state is BatchState.SENT
    assert len(partition.fresh) == 1


def test_after_a_rejected_sequence_the_next_is_given_when_all_outcomes_are_known() -> None:
    state, partition = world(count=1)
    partition.rolling_back, partition.next_sequence = True, 50
    partition.sent.append(Batch("t", 0, Rows([0]), bytearray(1), 0, 1_000, BatchState.SENT, index=0))
    assert leave(state)[0] == []
    partition.sent.clear()
    ((send,), _) = leave(state)
    assert send.batches[0].sequence == partition.acked_sequence + 1 == 10


@pytest.mark.parametrize("settings", [{}, {"enable_idempotence": False, "acks": 1}])
def test_a_partition_that_backs_off_sends_nothing_until_its_time(settings: dict[str, int]) -> None:
    state, partition = world(**settings)
    partition.retry_at_ms = 9
    assert leave(state, 8)[0] == [] and state.wake_at_ms == 9
    assert len(leave(state, 9)[0]) == 1


def test_without_idempotence_one_batch_of_a_partition_is_on_its_way_and_has_no_sequence() -> None:
    state, partition = world(count=2, enable_idempotence=False)
    ((send,), _) = leave(state)
    assert [batch.sequence for batch in send.batches] == [NO_SEQUENCE] and len(partition.fresh) == 1


def test_a_transaction_asks_once_to_hold_a_partition_before_anything_is_sent_to_it() -> None:
    state, _ = world(transactional=True)
    sends, work = leave(state)
    assert (sends, work.add_partitions) == ([], [("t", 0)])
    sends, work = leave(state)
    assert (sends, work.add_partitions) == ([], [])
    state.held.add(("t", 0))
    assert len(leave(state)[0]) == 1


def test_a_partition_without_a_leader_asks_for_metadata() -> None:
    state, _ = world()
    state.topics["t"].leaders = {0: -1}
    assert leave(state)[0] == [] and state.topics["t"].needs_metadata and state.wake_at_ms == 100


def test_a_new_epoch_is_asked_for_once_and_only_when_every_outcome_is_known() -> None:
    state, partition = world(count=1)
    leave(state)
    state.new_epoch_needed = True
    assert departing.init_producer(state, 0) is None
    partition.sent.clear()
    state.ask_producer_at_ms = 5
    assert departing.init_producer(state, 4) is None and state.wake_at_ms == 5
    assert departing.init_producer(state, 5) == InitProducer(7, 1)
    assert departing.init_producer(state, 5) is None
