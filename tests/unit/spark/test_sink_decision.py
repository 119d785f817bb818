"""What a replayed micro-batch finds: decisions as metadata, and every history of deaths writes each row once."""

from __future__ import annotations

from base64 import b85encode
from dataclasses import dataclass, field
from zlib import compress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.client import PreparedTransaction, TransactionDescription
from anabranch.spark.sink.decision import (
    METADATA_MAX,
    Decision,
    DecisionError,
    Digest,
    Names,
    from_metadata,
    has_fewer_rows,
    has_other_rows,
    is_decided,
    is_marked,
    is_open,
    later_batch,
    next_decision,
    piece_count,
    to_metadata,
    undecided,
)

QUERY = Names("p", "4f00", "late")
DIGEST = Digest(40, 12_345_678_901)


def made(batch_id: int, tasks: range, epoch: int = 3, names: Names = QUERY) -> Decision:
    transactions = {
        task: PreparedTransaction(names.task(task), 7_919 * task * task % 1_000_003, epoch) for task in tasks
    }
    return Decision(batch_id, transactions, DIGEST)


@pytest.mark.parametrize("count", [1, 2, 300, 5_000])
def test_a_decision_is_read_as_it_was_written(count: int) -> None:
    pieces = to_metadata(made(12, range(count)), QUERY)
    assert all(len(piece) <= METADATA_MAX for piece in pieces)
    assert piece_count(pieces[0]) == len(pieces)
    assert from_metadata(pieces, QUERY) == made(12, range(count))
    assert from_metadata(pieces[1:], QUERY) is None


def test_pieces_of_an_older_decision_do_not_count() -> None:
    old, new = to_metadata(made(11, range(5_000)), QUERY), to_metadata(made(12, range(5_000)), QUERY)
    assert from_metadata([*old[:1], *new[1:]], QUERY) is None
    short = to_metadata(made(12, range(2)), QUERY)
    assert from_metadata([*short, *old[1:]], QUERY) == made(12, range(2))


def test_a_decision_without_a_digest_is_read_and_has_no_other_rows() -> None:
    text = b85encode(compress(b"[[0,7,3],[2,9,4]]")).decode()
    names = Names("p", "4f00", None)
    found = from_metadata([f"1 12 0 1 {text}"], names)
    assert found == Decision(12, {0: PreparedTransaction("p-4f00-0", 7, 3), 2: PreparedTransaction("p-4f00-2", 9, 4)})
    assert not has_other_rows(found, 12, DIGEST)


@pytest.mark.parametrize("text", ["", "nothing", "9 1 0 1 x", "1 1 0 1 x", "2 1 0 1 x", "1 x 0 1 x"])
def test_other_metadata_is_refused(text: str) -> None:
    with pytest.raises(DecisionError):
        from_metadata([text], QUERY)


def test_no_two_names_of_a_query_and_its_copies_are_the_same() -> None:
    topics = (None, "t", "t-1", "t.1", "1", "1-t")
    queries = [Names("p", "4f00", topic) for topic in topics]
    names = [name for query in queries for at in range(3) for name in (query.decision(at), query.task(at))]
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


def test_other_rows_are_noticed_by_their_number_and_their_keys() -> None:
    decision = made(12, range(3))
    assert not has_other_rows(decision, 12, Digest(10, 12_345_678_000) + Digest(30, 901))
    assert has_other_rows(decision, 12, Digest(41, 12_345_678_901))
    assert has_other_rows(decision, 12, Digest(40, 1))
    assert not has_other_rows(decision, 13, Digest(1, 1)) and not has_other_rows(None, 12, Digest(1, 1))


def test_fewer_rows_are_a_replay_of_a_source_that_lost_some_if_the_decided_ones_are_written() -> None:
    decision, fewer = made(12, range(3)), Digest(39, 5)
    assert has_fewer_rows(decision, 12, fewer) and has_fewer_rows(decision, 12, Digest())
    assert not has_fewer_rows(decision, 12, DIGEST) and not has_fewer_rows(decision, 13, fewer)
    assert not has_other_rows(decision, 12, fewer) and not has_other_rows(decision, 12, Digest())
    assert has_other_rows(decision, 12, fewer, is_written=False)
    assert not has_other_rows(decision, 12, DIGEST, is_written=False)
    again = dict(made(12, range(1), epoch=4).transactions)
    decided, left = next_decision(decision, 12, again, fewer)
    assert decided.digest == DIGEST and left == (decision.transactions[1], decision.transactions[2])
    assert next_decision(decision, 13, again, fewer)[0].digest == fewer


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


@dataclass
class Topic:
    """Transactions and what they hold, as brokers keep them."""

    open: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By task: the epoch, micro-batch and plan of its open transaction."""
    epochs: dict[int, int] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)
    visible: list[tuple[int, int, int]] = field(default_factory=list)
    """Micro-batch, task and plan."""
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
        self.visible.append((known[1], task, known[2]))
        self.marks[task] = known[1] + 1
        return True

    def time_out(self, task: int) -> None:
        if task in self.open:
            self.begin(task)


class DiedError(Exception):
    pass


class RefusedError(Exception):
    pass


def attempt(topic: Topic, batch_id: int, tasks: int, steps: list[int], plan: int = 0, rows: int = 100) -> None:
    """One attempt of a micro-batch, by the rules that ship; it dies when its steps are over.

    A micro-batch that is planned anew has another `plan`, and other rows.
    """

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
    digest = Digest(rows, plan)
    for task in range(tasks):
        step()
        refuse_older()
        if is_decided(topic.decision, batch_id):
            mine = topic.decision.transactions.get(task)
            if mine is None or topic.commit(task, mine.producer_epoch):
                continue
        step()
        epoch = topic.begin(task)
        refuse_older(topic.marks.get(task))
        if is_marked(topic.marks.get(task), batch_id):
            continue
        step()
        topic.open[task] = epoch, batch_id, plan
        prepared[task] = PreparedTransaction(f"p-{task}", task, epoch)
    step()
    refuse_older()
    decision, left = next_decision(topic.decision, batch_id, prepared, digest)
    are_there = True
    for each in left:
        step()
        if not topic.commit(each.producer_id, each.producer_epoch):
            are_there = are_there and is_marked(topic.marks.get(each.producer_id), batch_id)
    if has_other_rows(topic.decision, batch_id, digest, is_written=are_there):
        raise RefusedError
    if prepared:
        topic.decision = decision
    for each in prepared.values():
        step()
        if not topic.commit(each.producer_id, each.producer_epoch):
            raise DiedError


@given(st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 4), max_size=20)), max_size=12))
def test_whoever_dies_every_row_is_written_once(deaths: list[tuple[int, list[int]]]) -> None:
    """Attempts that end after some steps, transactions that time out between them, and divisions that differ."""
    topic, batch_id, tasks = Topic(), 0, 3
    for _, steps in deaths:
        try:
            attempt(topic, batch_id, tasks, list(steps))
            batch_id += 1
        except DiedError:
            pass
    attempt(topic, batch_id, tasks, [0] * 100)
    assert sorted(topic.visible) == [(batch, task, 0) for batch in range(batch_id + 1) for task in range(tasks)]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.just([0] * 100) | st.lists(st.integers(0, 4), max_size=20)), max_size=12)
)
def test_a_checkpoint_that_goes_back_loses_no_row_unnoticed(runs: list[tuple[int, list[int]]]) -> None:
    """Before each run the checkpoint goes back by so many micro-batches, and plans the next one anew."""
    topic, batch_id, tasks, plan = Topic(), 0, 3, 0
    for back, steps in [*runs, (0, [0] * 100)]:
        if back and batch_id:
            batch_id, plan = max(0, batch_id - back), plan + 1
        try:
            attempt(topic, batch_id, tasks, list(steps), plan)
        except DiedError:
            continue
        except RefusedError:
            assert plan, "a replay of what was planned once was refused"
            return
        for task in range(tasks):
            plans = [plan_ for *it, plan_ in topic.visible if it == [batch_id, task]]
            assert plans == [plan], "a micro-batch ended without its rows, or beside others"
        batch_id, plan = batch_id + 1, plan + 1 if plan else 0


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20)), max_size=12))
def test_what_was_decided_becomes_visible_though_the_replay_is_divided_in_another_way(
    deaths: list[tuple[int, int]],
) -> None:
    """Without timeouts nothing depends on how a replay divides its rows: all of one attempt is visible, or of none."""
    topic, batch_id = Topic(), 0
    divisions: dict[int, int] = {}
    for tasks, steps in deaths:
        before = topic.decision
        try:
            attempt(topic, batch_id, tasks, [0] * steps)
            divisions.setdefault(batch_id, tasks)
            batch_id += 1
        except DiedError:
            if topic.decision is not before:
                divisions.setdefault(batch_id, tasks)
    attempt(topic, batch_id, 2, [0] * 100)
    divisions.setdefault(batch_id, 2)
    assert sorted(topic.visible) == [(batch, task, 0) for batch, tasks in divisions.items() for task in range(tasks)]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20), st.integers(0, 3)), max_size=12), st.booleans())
def test_a_decided_micro_batch_becomes_visible_whole_though_its_source_loses_rows(
    deaths: list[tuple[int, int, int]], is_other: bool
) -> None:
    """Replays have fewer rows each time; where the last one is of other rows, it is refused, and nothing is half."""
    topic, rows = Topic(), 100
    for tasks, steps, lost in deaths:
        rows -= lost
        try:
            attempt(topic, 0, tasks, [0] * steps, rows=rows)
        except DiedError:
            continue
    decided = topic.decision
    try:
        attempt(topic, 0, 2, [0] * 100, plan=int(is_other), rows=100 if is_other else rows)
        assert not is_other or decided is None
    except RefusedError:
        assert is_other and decided is not None
    decided = decided or topic.decision
    assert decided is not None
    assert sorted(task for _, task, _ in topic.visible) == sorted(decided.transactions)
