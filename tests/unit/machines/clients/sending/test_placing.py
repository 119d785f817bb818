"""Placing: one count for every unsent record of a topic, in the order of the records."""

from __future__ import annotations

from itertools import pairwise
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_SEQUENCE
from anabranch.machines.clients.sending.outcomes import take_back
from anabranch.machines.clients.sending.placing import (
    ENCODING_MAX,
    LOOK_BACKOFF_MS,
    LOOKS_MAX,
    advance,
    learn,
    take_encoded,
)
from anabranch.machines.clients.sending.state import Chunk, Partition, SendingState, Topic
from anabranch.machines.clients.sending.values import (
    Batch,
    BatcherSettings,
    BatchState,
    Encoded,
    Placement,
    ProducerWork,
    Refused,
)

TWO, THREE = Placement(1, 2), Placement(1, 3)
LEADERS = {0: 1, 1: 1, 2: 1}


class Rows(list[str]):
    @property
    def record_count(self) -> int:
        return len(self)


def topic_with(*chunks: str, placement: Placement | None = TWO) -> tuple[SendingState, Topic]:
    topic = Topic("t", placement, dict(LEADERS), needs_metadata=False)
    topic.backlog.extend(Chunk(Rows([name]), 1, 1_000, 0) for name in chunks)
    state = SendingState(BatcherSettings(), {"t": topic}, buffered_size=len(chunks))
    return state, topic


def encodes(state: SendingState, topic: Topic, now_ms: int = 0) -> list[tuple[int, object]]:
    work = ProducerWork()
    advance(state, topic, now_ms, work)
    return [(encode.job, encode.rows) for encode in work.encodes]


def fresh(topic: Topic, number: int, order: int, rows: Rows) -> Batch:
    batch = Batch("t", number, rows, bytearray(5), order, 1_000)
    topic.partitions.setdefault(number, Partition(number)).fresh.append(batch)
    return batch


def test_so_many_chunks_are_encoded_at_a_time() -> None:
    state, topic = topic_with("a", "b", "c")
    assert encodes(state, topic) == [(1, ["a"]), (2, ["b"])]
    assert len(topic.encoding) == ENCODING_MAX and encodes(state, topic) == []


def test_no_chunk_is_encoded_before_the_placement_is_known() -> None:
    state, topic = topic_with("a", placement=None)
    topic.needs_metadata = True
    work = ProducerWork()
    advance(state, topic, 0, work)
    assert (work.encodes, work.refresh) == ([], ["t"])
    learn(state, topic, TWO, LEADERS, 0)
    assert encodes(state, topic) == [(1, ["a"])]


def test_a_topic_that_was_created_again_takes_the_unacknowledged_batches_in_order_and_counts_from_0() -> None:
    first, second = Placement(1, 2, topic_id=UUID(int=1)), Placement(1, 2, topic_id=UUID(int=2))
    state, topic = topic_with(placement=first)
    batches = [fresh(topic, number, order, Rows([str(order)])) for order, number in enumerate((0, 1, 0, 1))]
    zero, one = topic.partitions[0], topic.partitions[1]
    for batch, partition in ((batches[0], zero), (batches[1], one)):
        partition.fresh.remove(batch)
        batch.sequence = 5
        partition.acked_sequence, partition.next_sequence = 4, 6
    batches[0].state, batches[0].maybe_appended = BatchState.UNCERTAIN, True
    zero.uncertain.append(batches[0])
    batches[1].state = BatchState.SENT
    one.sent.append(batches[1])
    learn(state, topic, second, LEADERS, 0)
    advance(state, topic, 0, ProducerWork())
    assert topic.moving and not zero.uncertain, "one of the earlier topic's answers has still to come"
    take_back(batches[1], one)
    work = ProducerWork()
    advance(state, topic, 0, work)
    assert not topic.moving and topic.placement == second
    assert [encode.rows for encode in work.encodes] == [["0"], ["1"]]
    assert [chunk.rows for chunk in topic.backlog] == [["2"], ["3"]]
    for partition in (zero, one):
        assert (partition.next_sequence, partition.acked_sequence, partition.rolling_back) == (0, NO_SEQUENCE, False)


def test_a_refused_count_is_looked_for_in_metadata_soon_and_often_and_then_sent_again() -> None:
    """A resize shows its count when it ends; one that is canceled never does."""
    state, topic = topic_with()
    batch = fresh(topic, 0, 0, Rows(["a"]))
    topic.moving = topic.needs_metadata = topic.refused = True
    now, asked = 0, []
    while topic.moving:
        work = ProducerWork()
        advance(state, topic, now, work)
        if work.refresh:
            asked.append(now)
            learn(state, topic, TWO, LEADERS, now)
        else:
            now += 1
    assert len(asked) == LOOKS_MAX + 1
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps[0] == LOOK_BACKOFF_MS and gaps == sorted(gaps) and gaps[-1] == state.settings.retry_backoff_ms
    assert list(topic.partitions[0].fresh) == [batch] and topic.partitions[0].retry_at_ms > now
    assert (topic.refused, topic.looks) == (False, 0)


def test_only_ids_tell_that_a_topic_was_created_again() -> None:
    first, second, unknown = (Placement(1, 2, topic_id=UUID(int=number)) for number in (1, 2, 0))
    assert second.replaces(first) and not first.replaces(first)
    assert not unknown.replaces(first) and not first.replaces(unknown)


def test_chunks_that_are_encoded_out_of_order_are_queued_in_order() -> None:
    state, topic = topic_with("a", "b")
    encodes(state, topic)
    take_encoded(state, topic, 2, [Encoded(0, Rows(["b"]), bytearray(7))], [])
    assert not topic.partitions
    take_encoded(state, topic, 1, [Encoded(0, Rows(["a"]), bytearray(5))], [])
    assert [batch.rows for batch in topic.partitions[0].fresh] == [["a"], ["b"]]
    assert [batch.order for batch in topic.partitions[0].fresh] == [0, 1]
    assert state.buffered_size == 12, "bytes of batches are counted now, not the sizes of rows"


def test_rows_that_cannot_be_encoded_fail_and_the_others_go_on() -> None:
    state, topic = topic_with("a")
    encodes(state, topic)
    error = ApiError(ErrorCode.MESSAGE_TOO_LARGE, "too large")
    take_encoded(state, topic, 1, [Encoded(1, Rows(["x"]), bytearray(3))], [Refused(Rows(["y"]), error)])
    assert len(topic.partitions[1].fresh) == 1 and len(state.outcomes) == 1


def test_a_partition_without_a_known_leader_needs_metadata() -> None:
    state, topic = topic_with("a")
    encodes(state, topic)
    take_encoded(state, topic, 1, [Encoded(9, Rows(["a"]), bytearray(1))], [])
    assert topic.needs_metadata


def test_a_new_count_waits_until_no_batch_is_on_the_wire_or_uncertain() -> None:
    for unresolved in (BatchState.SENT, BatchState.UNCERTAIN):
        state, topic = topic_with("later")
        batch = fresh(topic, 0, 0, Rows(["first"]))
        part = topic.partitions[0]
        (part.sent if unresolved is BatchState.SENT else part.uncertain).append(part.fresh.popleft())
        batch.state = unresolved
        learn(state, topic, THREE, LEADERS, 0)
        assert topic.moving and encodes(state, topic) == [] and topic.placement == TWO
        part.sent.clear()
        part.uncertain.clear()
        assert encodes(state, topic) == [(1, ["later"])] and topic.placement == THREE


def test_when_the_count_changes_all_fresh_batches_and_encodings_are_placed_anew_in_order() -> None:
    state, topic = topic_with("c", "d")
    fresh(topic, 1, 1, Rows(["b"]))
    fresh(topic, 0, 0, Rows(["a"]))
    encodes(state, topic)
    learn(state, topic, THREE, LEADERS, 0)
    assert [rows for _, rows in encodes(state, topic)] == [["a"], ["b"]]
    assert [chunk.rows for chunk in topic.backlog] == [["c"], ["d"]]
    take_encoded(state, topic, 1, [Encoded(0, Rows(["c"]), bytearray(1))], [])
    assert not topic.partitions[0].fresh, "an encoding under the old count is dropped"


def test_a_count_that_did_not_change_after_all_keeps_the_batches() -> None:
    state, topic = topic_with()
    fresh(topic, 0, 0, Rows(["a"]))
    topic.moving = True
    learn(state, topic, TWO, LEADERS, 0)
    encodes(state, topic, now_ms=10)
    assert not topic.moving and len(topic.partitions[0].fresh) == 1
    assert topic.partitions[0].retry_at_ms == 110, "the broker has not applied the count yet"


def test_a_removed_partition_with_uncertain_batches_keeps_its_last_leader() -> None:
    state, topic = topic_with()
    batch = fresh(topic, 2, 0, Rows(["a"]))
    topic.partitions[2].fresh.clear()
    topic.partitions[2].uncertain.append(batch)
    learn(state, topic, TWO, {0: 7, 1: 7}, 0)
    assert topic.removed == {2} and topic.leaders == {0: 7, 1: 7, 2: 1}
    learn(state, topic, Placement(1, 2, elastic=False), {0: 7, 1: 7}, 0)
    assert topic.removed == frozenset(), "a stock broker removes no partitions"


def test_an_open_chunk_lingers_until_its_time() -> None:
    state, topic = topic_with("a")
    topic.open = topic.backlog[0]
    topic.open.ready_at_ms = 5
    assert encodes(state, topic, now_ms=4) == [] and state.wake_at_ms == 5
    assert encodes(state, topic, now_ms=5) == [(1, ["a"])] and topic.open is None
