"""What a replayed micro-batch finds: decisions as metadata, and every history of deaths writes each row once."""

from __future__ import annotations

from base64 import b85encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TypeAlias
from zlib import compress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.base.ids import TopicPartition
from anabranch.client import OffsetAndMetadata, PreparedTransaction, TransactionDescription
from anabranch.spark.sink import decision as shipped
from anabranch.spark.sink.decision import (
    METADATA_MAX,
    Decision,
    DecisionError,
    Digest,
    MicroBatch,
    Names,
    Refusal,
    from_pieces,
    is_decided,
    is_marked,
    is_open,
    later_batch,
    mark_of,
    newest,
    next_decision,
    piece_of,
    to_metadata,
    undecided,
    why_refused,
)
from anabranch.spark.sink.task import SinkError, refuse_other

QUERY = Names("p", "4f00", "late")
PLANNED_MS = 1_795_761_854_373


def made(batch_id: int, tasks: range, epoch: int = 3, write: int = 0, planned_ms: int | None = PLANNED_MS) -> Decision:
    transactions = {
        task: PreparedTransaction(QUERY.task(task), 7_919 * task * task % 1_000_003, epoch) for task in tasks
    }
    digests = {task: Digest(10 + task, 123_456_789 * task) for task in tasks}
    return Decision(batch_id, transactions, MicroBatch(batch_id, digests).digest, digests, planned_ms, write)


def read(texts: Iterable[str], names: Names = QUERY) -> Decision | None:
    """Read a decision from all texts that its groups hold."""
    pieces = [piece_of(text) for text in texts]
    head = newest(piece for piece in pieces if not piece.number)
    return None if head is None else from_pieces(head, pieces, names)


@pytest.mark.parametrize("count", [1, 2, 300, 5_000])
@pytest.mark.parametrize("planned_ms", [None, PLANNED_MS])
def test_a_decision_is_read_as_it_was_written(count: int, planned_ms: int | None) -> None:
    decision = made(12, range(count), write=9_999, planned_ms=planned_ms)
    pieces = to_metadata(decision, QUERY)
    assert all(len(piece) <= METADATA_MAX for piece in pieces)
    assert {(piece.count, piece.write) for piece in map(piece_of, pieces)} == {(len(pieces), 9_999)}
    assert read(pieces) == read(reversed(pieces)) == decision
    assert read(pieces[1:]) is None


def test_a_decision_of_which_pieces_are_others_is_no_decision_that_can_be_read() -> None:
    """Neither those of another micro-batch nor those of another write for the same one make it whole."""
    decision = made(12, range(1_000))
    pieces = to_metadata(decision, QUERY)
    others = [made(11, range(1_000)), made(12, range(1_000), epoch=4), made(12, range(1_000), write=1)]
    assert len(pieces) > 2
    for other in others:
        mixed = [pieces[0], *to_metadata(other, QUERY)[1:]]
        head = piece_of(pieces[0])
        with pytest.raises(DecisionError, match=r"it has \d+ pieces, and 1 of them are there"):
            from_pieces(head, map(piece_of, mixed), QUERY)
        assert from_pieces(head, map(piece_of, [*mixed, *pieces]), QUERY) == decision


def test_a_decision_that_was_changed_is_not_read() -> None:
    piece = piece_of(to_metadata(made(12, range(3)), QUERY)[0])
    with pytest.raises(DecisionError, match="its checksum is wrong"):
        from_pieces(replace(piece, text=piece.text[:-1]), [], QUERY)


def test_the_decision_that_was_written_last_counts_wherever_it_is() -> None:
    """With the column `topic` the first piece may be in the committed offset of another topic each time."""
    first, second, third = made(12, range(3)), made(12, range(3), epoch=4, write=1), made(13, range(2), write=2)
    texts = {each: to_metadata(each_, QUERY)[0] for each, each_ in (("a", first), ("b", second), ("c", third))}
    assert read(texts["a"] for _ in range(1)) == first
    for order in permutations("ab"):
        assert read(texts[each] for each in order) == second
    for order in permutations("abc"):
        assert read(texts[each] for each in order) == third
    assert newest([]) is None


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 300), st.integers(0, 9)), min_size=1, max_size=8))
@settings(max_examples=50)
def test_a_write_that_stops_half_way_leaves_the_decision_before(writes: list[tuple[int, int, int]]) -> None:
    """Whatever was written, and how far, in groups that keep the last of each: the last whole one is read."""
    groups: dict[str, str] = {}
    batch_id, holds = 0, None

    def kept() -> Decision | None:
        if QUERY.decision() not in groups:
            return None
        head = piece_of(groups[QUERY.decision()])
        others = (groups[QUERY.decision(number, head.write)] for number in range(1, head.count))
        return from_pieces(head, map(piece_of, others), QUERY)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "METADATA_MAX", 300)
        for grows, tasks, steps in writes:
            batch_id += grows
            epoch = 1 if holds is None else 2 + holds.write
            again = made(batch_id, range(tasks), epoch=epoch)
            batch = MicroBatch(batch_id, again.digests or {})
            decision, _ = next_decision(kept(), batch, again.transactions)
            if decision.digests is None or decision.digests.keys() != decision.transactions.keys():
                continue
            pieces = list(enumerate(to_metadata(decision, QUERY)))
            for number, text in [*reversed(pieces)][:steps]:
                groups[QUERY.decision(number, decision.write)] = text
            holds = decision if steps >= len(pieces) else holds
            assert kept() == holds


def in_version(version: int, body: str) -> Decision:
    found = read([f"{version} 12 0 1 {b85encode(compress(body.encode())).decode()}"])
    assert found is not None and found.digests is None and found.planned_ms is None and found.write == 0
    return found


def test_decisions_of_older_versions_are_read_and_count_for_what_they_say() -> None:
    """Without digests of tasks nobody knows what an aborted transaction held, and without one of all rows nothing."""
    transactions = {0: PreparedTransaction(QUERY.task(0), 7, 3), 2: PreparedTransaction(QUERY.task(2), 9, 4)}
    second, first = in_version(2, "[40,999,[[0,7,3],[2,9,4]]]"), in_version(1, "[[0,7,3],[2,9,4]]")
    assert second.transactions == first.transactions == transactions
    same = MicroBatch(12, {0: Digest(10, 900), 1: Digest(30, 99)}, PLANNED_MS)
    assert why_refused(second, same, {}, 0) is None
    assert why_refused(second, same, {}, 1) is why_refused(second, same, transactions, 0) is Refusal.ROWS_MISSING
    assert why_refused(second, MicroBatch(12, {0: Digest(39, 5)}), {}, 0) is Refusal.OTHER_ROWS
    assert why_refused(first, same, {}, 0) is Refusal.OTHER_ROWS
    assert next_decision(second, MicroBatch(13, {}), {})[0].write == 1


@pytest.mark.parametrize(
    "text", ["", "nothing", "9 1 0 1 x", "1 1 0 1 x", "2 1 0 1 x", "1 x 0 1 x", "3 1 0 1 x", "3 1 0 00000000 0 1 x"]
)
def test_other_metadata_is_refused(text: str) -> None:
    with pytest.raises(DecisionError):
        read([text])


def test_no_two_names_of_a_query_and_its_copies_are_the_same() -> None:
    topics = (None, "t", "t-1", "t.1", "1", "1-t")
    queries = [Names("p", "4f00", topic) for topic in topics]
    numbers = range(1, 4)
    names = [name for query in queries for at in numbers for name in (query.task(at), query.decision(at))]
    names += [name for query in queries for name in (query.decision(), *(query.decision(at, 1) for at in numbers))]
    assert QUERY.decision(0, 1) == QUERY.decision(0, 2) and QUERY.decision(1, 1) == QUERY.decision(1, 3)
    assert len(set(names)) == len(names)


def test_only_the_decision_of_the_same_micro_batch_counts() -> None:
    decision = made(12, range(3))
    assert is_decided(decision, 12) and not is_decided(decision, 13) and not is_decided(None, 12)
    assert is_marked(13, 12) and not is_marked(14, 12) and not is_marked(12, 12) and not is_marked(None, 12)


@pytest.mark.parametrize(
    ("decided", "mark", "later"),
    [(None, None, None), (11, 12, None), (12, 13, None), (13, None, 13), (None, 14, 13), (14, 14, 14), (11, 16, 15)],
)
def test_a_later_micro_batch_is_noticed_by_its_decision_and_its_marks(
    decided: int | None, mark: int | None, later: int | None
) -> None:
    assert later_batch(None if decided is None else made(decided, range(1)), mark, 12) == later


def test_a_mark_is_no_offset_that_a_resize_gave_a_group() -> None:
    """A partition that was made again has its log start committed, whatever the micro-batch."""
    names = (("out", 0), 4), (("out", 1), 117), (("other", 0), 3), (("other", 7), 900)
    offsets = {TopicPartition(*tp): OffsetAndMetadata(offset) for tp, offset in names}
    assert mark_of(offsets) == 4
    assert mark_of({tp: at for tp, at in offsets.items() if tp.partition}) is None


DIGESTS = {0: Digest(10, 100), 1: Digest(30, 12_345_678_901)}
TRANSACTIONS = {task: PreparedTransaction(QUERY.task(task), 5, 1) for task in DIGESTS}
DECIDED = next_decision(None, MicroBatch(12, DIGESTS), TRANSACTIONS)[0]
DECIDED_AT = replace(DECIDED, planned_ms=PLANNED_MS)
REPLACED = {1: TRANSACTIONS[1]}


@pytest.mark.parametrize(
    ("planned_ms", "digests", "why"),
    [
        (None, {0: Digest(40, 12_345_679_001)}, None),
        (None, {0: Digest(40, 12_345_679_002)}, Refusal.OTHER_ROWS),
        (None, {0: Digest(41, 12_345_679_001)}, Refusal.OTHER_ROWS),
        (None, {0: Digest(10, 100)}, Refusal.OTHER_ROWS),
        (None, {}, Refusal.OTHER_ROWS),
        (PLANNED_MS, {0: Digest(10, 100)}, None),
        (PLANNED_MS, {}, None),
        (PLANNED_MS, {0: Digest(41, 5)}, None),
        (PLANNED_MS + 1, DIGESTS, Refusal.PLANNED_ANEW),
        (PLANNED_MS + 1, {}, Refusal.PLANNED_ANEW),
    ],
)
def test_a_replay_is_known_by_when_it_was_planned_or_by_all_its_rows(
    planned_ms: int | None, digests: dict[int, Digest], why: Refusal | None
) -> None:
    assert why_refused(DECIDED_AT, MicroBatch(12, digests, planned_ms), {}, 0) is why
    if planned_ms is None:
        assert why_refused(DECIDED, MicroBatch(12, digests, PLANNED_MS), {}, 0) is why
    for other in (None, replace(DECIDED_AT, batch_id=11)):
        assert why_refused(other, MicroBatch(12, DIGESTS, planned_ms), TRANSACTIONS, 0) is None


@pytest.mark.parametrize("decision", [DECIDED, DECIDED_AT])
def test_what_was_aborted_is_written_again_by_a_replay_that_is_divided_as_before(decision: Decision) -> None:
    same, divided = MicroBatch(12, DIGESTS, PLANNED_MS), MicroBatch(12, {0: Digest(40, 12_345_679_001)}, PLANNED_MS)
    exchanged = MicroBatch(12, {0: DIGESTS[1], 1: DIGESTS[0]}, PLANNED_MS)
    assert why_refused(decision, same, REPLACED, 0) is None
    assert why_refused(decision, same, REPLACED, 1) is Refusal.ROWS_MISSING, "a task that had rows has none"
    assert why_refused(decision, divided, {}, 0) is None, "all of it is there"
    for other in (divided, exchanged):
        assert why_refused(decision, other, REPLACED, 0) is Refusal.ROWS_MISSING
        assert why_refused(decision, other, {}, 1) is Refusal.ROWS_MISSING
    made, left = next_decision(decision, same, {1: PreparedTransaction(QUERY.task(1), 5, 2)})
    assert made.transactions[1].producer_epoch == 2 and made.digests == DIGESTS and made.write == 1
    assert made.planned_ms == decision.planned_ms and left == (TRANSACTIONS[0],)


def test_the_advice_to_divide_rows_as_before_is_given_where_it_helps() -> None:
    """Without digests of tasks, as in decisions of older versions, no division of rows is known to be the same."""
    divided = MicroBatch(12, {0: Digest(40, 12_345_679_001)}, PLANNED_MS)
    with pytest.raises(SinkError, match=r"other tasks than then.*Start the query again.*Or set transactionalIdPrefix"):
        refuse_other(QUERY, DECIDED, divided, REPLACED, 0)
    second = in_version(2, "[40,12345679001,[[0,7,3],[1,9,4]]]")
    for batch in (divided, MicroBatch(12, DIGESTS, PLANNED_MS)):
        with pytest.raises(SinkError, match=r"1 of its 2 .*earlier version.*\. Set transactionalIdPrefix") as refused:
            refuse_other(QUERY, second, batch, REPLACED, 0)
        assert "Start the query again" not in str(refused.value)


def test_rows_that_are_in_the_topic_without_a_decision_are_unknown() -> None:
    for before in (None, replace(DECIDED, batch_id=11)):
        assert why_refused(before, MicroBatch(12, DIGESTS), REPLACED, 0) is Refusal.NOT_DECIDED
        assert why_refused(before, MicroBatch(12, {}), {}, 0) is None


def test_what_an_attempt_prepared_is_aborted_unless_the_decision_holds_it() -> None:
    prepared = dict(made(12, range(2)).transactions)
    assert undecided(made(12, range(3)), 12, prepared) == ()
    assert undecided(made(12, range(1)), 12, prepared) == (prepared[1],)
    assert undecided(made(12, range(2), epoch=2), 12, prepared) == (prepared[0], prepared[1])
    assert undecided(made(11, range(2)), 12, prepared) == undecided(None, 12, prepared) == (prepared[0], prepared[1])


@pytest.mark.parametrize(
    ("state", "epoch", "now_ms", "is_it"),
    [
        ("Ongoing", 3, 1_000_000, True),
        ("Ongoing", 3, 1_589_000, True),
        ("Ongoing", 3, 1_591_000, False),
        ("Ongoing", 3, 1_609_000, False),
        ("Ongoing", 3, 5_000_000, True),
        ("Ongoing", 4, 1_000_000, False),
        ("PrepareAbort", 3, 1_000_000, False),
        ("CompleteAbort", 3, 1_000_000, False),
    ],
)
def test_a_transaction_is_open_until_shortly_before_its_timeout(
    state: str, epoch: int, now_ms: int, is_it: bool
) -> None:
    prepared = PreparedTransaction("p-1", 7, 3)
    assert is_open(prepared, TransactionDescription("p-1", state, 7, epoch, 600_000, 1_000_000), now_ms) == is_it
    assert not is_open(prepared, None, now_ms)


Row: TypeAlias = tuple[int, int, int]
"""Micro-batch, plan and number."""


def rows_of(batch_id: int, plan: int = 0, numbers: Iterable[int] = range(12)) -> list[Row]:
    return [(batch_id, plan, number) for number in numbers]


def divided(rows: Sequence[Row], tasks: int) -> list[Sequence[Row]]:
    """The rows of each task."""
    size = -(-len(rows) // tasks)
    return [rows[task * size : (task + 1) * size] for task in range(tasks)]


def digest_of(rows: Sequence[Row]) -> Digest:
    return Digest(len(rows), sum(1 + number * number + 1_000 * plan for _, plan, number in rows))


@dataclass
class Topic:
    """Transactions and what they hold, as brokers keep them."""

    open: dict[int, tuple[int, int, Sequence[Row]]] = field(default_factory=dict)
    """By task: the epoch, micro-batch and rows of its open transaction."""
    epochs: dict[int, int] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)
    visible: list[Row] = field(default_factory=list)
    decision: Decision | None = None

    def begin(self, task: int) -> int:
        self.open.pop(task, None)
        self.epochs[task] = self.epochs.get(task, 0) + 1
        return self.epochs[task]

    def commit(self, task: int, epoch: int) -> bool:
        known = self.open.get(task)
        if known is None or known[0] != epoch:
            return self.epochs.get(task) == epoch and self.marks.get(task) is not None
        del self.open[task]
        self.visible += known[2]
        assert len(set(self.visible)) == len(self.visible), "a row came twice"
        self.marks[task] = known[1] + 1
        return True

    def time_out(self, task: int) -> None:
        if task in self.open:
            self.begin(task)

    def of(self, batch_id: int) -> list[Row]:
        return sorted(row for row in self.visible if row[0] == batch_id)


class DiedError(Exception):
    pass


class RefusedError(Exception):
    pass


def attempt(
    topic: Topic, batch_id: int, tasks: Sequence[Sequence[Row]], steps: list[int], planned_ms: int | None = None
) -> None:
    """One attempt of a micro-batch, by the rules that ship; it dies when its steps are over."""

    def step() -> None:
        if not steps:
            raise DiedError
        late = steps.pop()
        if late:
            topic.time_out(late - 1)

    def refuse_older(mark: int | None = None) -> None:
        if later_batch(topic.decision, mark, batch_id) is not None:
            raise RefusedError

    prepared: dict[int, PreparedTransaction] = {}
    for task, rows in enumerate(tasks):
        step()
        refuse_older()
        if is_decided(topic.decision, batch_id):
            mine = topic.decision.transactions.get(task)
            if mine is None or topic.commit(task, mine.producer_epoch):
                continue
        step()
        epoch = topic.begin(task)
        refuse_older(topic.marks.get(task))
        if is_marked(topic.marks.get(task), batch_id) or not rows:
            continue
        step()
        topic.open[task] = epoch, batch_id, rows
        prepared[task] = PreparedTransaction(QUERY.task(task), task, epoch)
    step()
    refuse_older()
    batch = MicroBatch(batch_id, {task: digest_of(rows) for task, rows in enumerate(tasks) if rows}, planned_ms)
    decision, left = next_decision(topic.decision, batch, prepared)
    missing = 0
    for each in left:
        step()
        if not topic.commit(each.producer_id, each.producer_epoch):
            missing += not is_marked(topic.marks.get(each.producer_id), batch_id)
    if why_refused(topic.decision, batch, prepared, missing) is not None:
        for task, each in prepared.items():
            if topic.open.get(task, (None,))[0] == each.producer_epoch:
                topic.time_out(task)
        raise RefusedError
    if prepared:
        topic.decision = decision
    for each in prepared.values():
        step()
        if not topic.commit(each.producer_id, each.producer_epoch):
            raise DiedError


STEPS = st.lists(st.integers(0, 4), max_size=20)
"""At each step the task, from 1 on, whose transaction times out."""
ENOUGH = [0] * 100


@given(st.lists(STEPS, max_size=12))
def test_whoever_dies_every_row_is_written_once(deaths: list[list[int]]) -> None:
    """Attempts that end after some steps, and transactions that time out between them."""
    topic, batch_id = Topic(), 0
    for steps in [*deaths, ENOUGH]:
        try:
            attempt(topic, batch_id, divided(rows_of(batch_id), 3), list(steps))
            batch_id += 1
        except DiedError:
            pass
    assert sorted(topic.visible) == [row for batch in range(batch_id) for row in rows_of(batch)]


@given(st.lists(st.tuples(st.integers(0, 3), st.just(ENOUGH) | STEPS), max_size=12), st.booleans())
def test_a_checkpoint_that_goes_back_loses_no_row_unnoticed(runs: list[tuple[int, list[int]]], is_known: bool) -> None:
    """Before each run the checkpoint goes back by so many micro-batches, and plans the next anew, with fewer rows."""
    topic, batch_id, plan = Topic(), 0, 0
    for back, steps in [*runs, (0, ENOUGH)]:
        if back and batch_id:
            batch_id, plan = max(0, batch_id - back), plan + 1
        rows = rows_of(batch_id, plan, range(max(1, 12 - plan)))
        try:
            attempt(topic, batch_id, divided(rows, 3), list(steps), PLANNED_MS + plan if is_known else None)
        except DiedError:
            continue
        except RefusedError:
            assert plan, "a replay of what was planned once was refused"
            return
        assert topic.of(batch_id) == rows, "a micro-batch ended without its rows, or beside others"
        batch_id, plan = batch_id + 1, plan + 1 if plan else 0


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20), st.integers(0, 3)), max_size=12),
    st.booleans(),
)
def test_what_was_decided_becomes_visible_however_a_replay_is_divided_and_whatever_its_source_lost(
    deaths: list[tuple[int, int, int]], is_known: bool
) -> None:
    """Without timeouts all of one attempt is visible, or of none, also where a replay is refused."""
    topic, lost = Topic(), 0
    decided: list[Row] = []
    for tasks, steps, loses in [*deaths, (2, 100, 0)]:
        lost = min(11, lost + loses)
        rows = rows_of(0, 0, range(lost, 12))
        before = topic.decision
        try:
            attempt(topic, 0, divided(rows, tasks), [0] * steps, PLANNED_MS if is_known else None)
        except DiedError:
            pass
        except RefusedError:
            assert not is_known and rows != decided
            assert topic.of(0) == decided
        if topic.decision is not before:
            decided = rows
    assert topic.of(0) == decided


@given(
    st.lists(st.tuples(st.integers(1, 4), st.just(ENOUGH) | STEPS, st.integers(0, 1)), max_size=12),
    st.booleans(),
)
def test_a_micro_batch_that_ends_without_an_error_is_whole(
    attempts: list[tuple[int, list[int], int]], is_known: bool
) -> None:
    """Divisions differ, transactions time out, and sources lose rows: no row comes twice, or is missing unnoticed."""
    topic, lost = Topic(), 0
    decided: list[Row] = []
    for tasks, steps, loses in attempts:
        lost += loses
        rows = rows_of(0, 0, range(min(lost, 11), 12))
        before, has_ended = topic.decision, True
        try:
            attempt(topic, 0, divided(rows, tasks), list(steps), PLANNED_MS if is_known else None)
        except (DiedError, RefusedError):
            has_ended = False
        if before is None and topic.decision is not None:
            decided = rows
        assert set(topic.of(0)) <= set(decided)
        assert not has_ended or topic.of(0) == decided
