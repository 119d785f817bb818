"""Outcomes: what each result of a broker means for a batch, over all error codes and states of a batch."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_SEQUENCE
from anabranch.machines.clients.sending import outcomes
from anabranch.machines.clients.sending.outcomes import DEFINITE, FENCED, STALE_LEADER
from anabranch.machines.clients.sending.state import Chunk, Partition, Request, SendingState, Topic
from anabranch.machines.clients.sending.values import (
    Batch,
    BatcherSettings,
    BatchState,
    Delivered,
    Failed,
    Placement,
    ProduceResult,
)


class Rows(list[int]):
    @property
    def record_count(self) -> int:
        return len(self)


def world(*, elastic: bool = True, **settings: int | bool) -> tuple[SendingState, Topic, Partition, Batch]:
    """A batch of two records under sequence 5 on the wire."""
    state = SendingState(BatcherSettings(**settings), buffered_size=10)  # type: ignore[arg-type]
    topic = state.topics["t"] = Topic("t", Placement(1, 1, elastic), {0: 3}, needs_metadata=False)
    partition = topic.partitions[0] = Partition(0, next_sequence=7, acked_sequence=4)
    batch = Batch("t", 0, Rows([1, 2]), bytearray(10), 1, 1_000, BatchState.SENT, sequence=5, index=0)
    partition.sent.append(batch)
    state.requests[1] = Request(3, (batch,))
    state.load[3] = 1
    return state, topic, partition, batch


def judged(code: ErrorCode, *, maybe_appended: bool = False, elastic: bool = True) -> tuple[SendingState, Topic, Batch]:
    state, topic, _, batch = world(elastic=elastic)
    batch.maybe_appended = maybe_appended
    outcomes.judge(state, batch, ProduceResult(code, 40), 0)
    return state, topic, batch


@pytest.mark.parametrize("maybe_appended", [False, True])
@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_leaves_a_batch_in_exactly_one_place(code: ErrorCode, maybe_appended: bool) -> None:
    state, topic, batch = judged(code, maybe_appended=maybe_appended)
    partition = topic.partitions[0]
    places = [batch in partition.fresh, batch in partition.uncertain, len(state.outcomes) == 1]
    assert places.count(True) == 1 and batch not in partition.sent
    if batch in partition.fresh:
        assert not maybe_appended or code is ErrorCode.INVALID_PARTITION_METADATA, "a repetition is found before"
        assert (batch.state, batch.sequence, partition.rolling_back) == (BatchState.FRESH, NO_SEQUENCE, True)
    if batch in partition.uncertain:
        assert (batch.state, batch.sequence, batch.maybe_appended) == (BatchState.UNCERTAIN, 5, True)
        assert partition.retry_at_ms > 0
    assert state.buffered_size == (0 if state.outcomes else 10)


@pytest.mark.parametrize("code", [ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER])
def test_appended_batches_are_delivered(code: ErrorCode) -> None:
    state, topic, batch = judged(code)
    assert state.outcomes == [Delivered(batch, 40, -1)]
    assert topic.partitions[0].acked_sequence == 6


def test_a_wrong_count_makes_the_batch_fresh_and_moves_the_topic() -> None:
    _, topic, batch = judged(ErrorCode.INVALID_PARTITION_METADATA)
    assert batch.state is BatchState.FRESH and topic.moving and topic.needs_metadata


def test_an_unknown_topic_id_moves_the_topic_and_a_batch_that_may_be_in_its_log_stays_uncertain() -> None:
    _, topic, batch = judged(ErrorCode.UNKNOWN_TOPIC_ID)
    assert batch.state is BatchState.FRESH and topic.moving and topic.needs_metadata
    _, topic, batch = judged(ErrorCode.UNKNOWN_TOPIC_ID, maybe_appended=True)
    assert batch.state is BatchState.UNCERTAIN and not topic.moving and topic.needs_metadata


@pytest.mark.parametrize("code", sorted(FENCED))
def test_a_fenced_producer_sends_nothing_any_more(code: ErrorCode) -> None:
    state, _, _ = judged(code)
    assert state.fatal is not None and "make a new producer" in str(state.fatal)


@pytest.mark.parametrize("code", sorted(DEFINITE))
def test_a_refusal_before_the_append_fails_the_batch_and_frees_its_sequence(code: ErrorCode) -> None:
    state, topic, _ = judged(code)
    (failed,) = state.outcomes
    assert isinstance(failed, Failed) and "2 records for t-0 were refused" in str(failed.error)
    assert topic.partitions[0].rolling_back and not state.new_epoch_needed
    doubted, _, _ = judged(code, maybe_appended=True)
    assert doubted.new_epoch_needed, "the sequence may be in the log all the same"


@pytest.mark.parametrize(
    "code", sorted(STALE_LEADER - {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})
)
def test_a_stale_leader_refreshes_metadata(code: ErrorCode) -> None:
    _, topic, batch = judged(code)
    assert batch.state is BatchState.UNCERTAIN and topic.needs_metadata


def test_a_partition_that_does_not_exist_gives_the_batch_back_on_elastic_topics_only() -> None:
    assert judged(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)[2].state is BatchState.FRESH
    assert judged(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, elastic=False)[2].state is BatchState.UNCERTAIN
    assert judged(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, maybe_appended=True)[2].state is BatchState.UNCERTAIN


def test_an_uncertain_batch_of_a_removed_partition_fails() -> None:
    state, topic, _, batch = world()
    batch.maybe_appended, topic.removed = True, frozenset({0})
    outcomes.judge(state, batch, ProduceResult(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), 0)
    (failed,) = state.outcomes
    assert isinstance(failed, Failed) and "the partition was removed before" in str(failed.error)


def test_a_gap_is_ours_while_an_earlier_batch_is_open_and_the_logs_otherwise() -> None:
    code = ProduceResult(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    state, _, partition, batch = world()
    partition.uncertain.append(Batch("t", 0, Rows([0]), bytearray(1), 0, 1_000, BatchState.UNCERTAIN))
    outcomes.judge(state, batch, code, 0)
    assert batch.state is BatchState.UNCERTAIN
    state, _, partition, batch = world()
    partition.rolling_back = True
    outcomes.judge(state, batch, code, 0)
    assert batch.state is BatchState.FRESH
    state, _, partition, batch = world()
    outcomes.judge(state, batch, code, 0)
    (failed,) = state.outcomes
    assert isinstance(failed, Failed) and state.new_epoch_needed and "lacks records" in str(failed.error)


def test_a_batch_taken_back_returns_to_its_place_among_the_fresh() -> None:
    _, _, partition, batch = world()
    for order in (0, 2):
        partition.fresh.append(Batch("t", 0, Rows([0]), bytearray(1), order, 1_000))
    outcomes.take_back(batch, partition)
    assert [other.order for other in partition.fresh] == [0, 1, 2]


def test_a_request_is_closed_once() -> None:
    state, _, _, batch = world()
    assert outcomes.take_request(state, 1) == (batch,) and state.load == {3: 0}
    assert outcomes.take_request(state, 1) == ()


def test_all_that_has_no_outcome_fails_and_a_new_epoch_is_needed_if_some_may_be_appended() -> None:
    state, topic, partition, _ = world()
    topic.backlog.append(Chunk(Rows([1, 2, 3]), 5, 1_000, 0))
    state.buffered_size += 5
    assert outcomes.fail_all(state, ApiError(ErrorCode.REQUEST_TIMED_OUT, "closed")) == 5
    assert len(state.outcomes) == 2 and state.buffered_size == 0 and state.new_epoch_needed
    assert topic.idle and not state.requests and not state.load and not partition.unresolved


def test_old_records_expire_but_not_those_on_the_wire() -> None:
    state, topic, partition, batch = world()
    partition.uncertain.append(Batch("t", 0, Rows([0]), bytearray(1), 0, 900, BatchState.UNCERTAIN))
    partition.fresh.append(Batch("t", 0, Rows([0]), bytearray(1), 2, 950))
    topic.backlog.append(Chunk(Rows([0]), 1, 960, 0))
    state.buffered_size += 3
    outcomes.expire(state, topic, 899)
    assert not state.outcomes and state.wake_at_ms == 900
    outcomes.expire(state, topic, 2_000)
    assert len(state.outcomes) == 3 and partition.sent == [batch] and state.buffered_size == 10
    texts = [str(outcome.error) for outcome in state.outcomes if isinstance(outcome, Failed)]
    assert sum("They may or may not be in the log" in text for text in texts) == 1
