"""What a replayed micro-batch finds: decisions as metadata, and every history of deaths writes each row once."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.client import PreparedTransaction
from anabranch.spark.sink.decision import (
    METADATA_MAX,
    Decision,
    DecisionError,
    from_metadata,
    is_decided,
    is_marked,
    next_decision,
    piece_count,
    to_metadata,
)


def made(batch_id: int, tasks: range, epoch: int = 3) -> Decision:
    return Decision(
        batch_id, {task: PreparedTransaction(f"p-{task}", 7_919 * task * task % 1_000_003, epoch) for task in tasks}
    )


@pytest.mark.parametrize("count", [1, 2, 300, 5_000])
def test_a_decision_is_read_as_it_was_written(count: int) -> None:
    pieces = to_metadata(made(12, range(count)), "p")
    assert all(len(piece) <= METADATA_MAX for piece in pieces)
    assert piece_count(pieces[0]) == len(pieces)
    assert from_metadata(pieces, "p") == made(12, range(count))
    assert from_metadata(pieces[1:], "p") is None


def test_pieces_of_an_older_decision_do_not_count() -> None:
    old, new = to_metadata(made(11, range(5_000)), "p"), to_metadata(made(12, range(5_000)), "p")
    assert from_metadata([*old[:1], *new[1:]], "p") is None
    short = to_metadata(made(12, range(2)), "p")
    assert from_metadata([*short, *old[1:]], "p") == made(12, range(2))


@pytest.mark.parametrize("text", ["", "nothing", "9 1 0 1 x", "1 1 0 1 x", "1 x 0 1 x"])
def test_other_metadata_is_refused(text: str) -> None:
    with pytest.raises(DecisionError):
        from_metadata([text], "p")


def test_only_the_decision_of_the_same_micro_batch_counts() -> None:
    decision = made(12, range(3))
    assert is_decided(decision, 12) and not is_decided(decision, 13) and not is_decided(None, 12)


@dataclass
class Topic:
    """Transactions and what they hold, as brokers keep them."""

    open: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By task: the epoch and micro-batch of its open transaction."""
    epochs: dict[int, int] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)
    visible: list[tuple[int, int]] = field(default_factory=list)
    """Micro-batch and task."""
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
        self.visible.append((known[1], task))
        self.marks[task] = known[1] + 1
        return True

    def time_out(self, task: int) -> None:
        if task in self.open:
            self.begin(task)


class DiedError(Exception):
    pass


def attempt(topic: Topic, batch_id: int, tasks: int, steps: list[int]) -> None:
    """One attempt of a micro-batch, by the rules that ship; it dies when its steps are over."""

    def step() -> None:
        if not steps:
            raise DiedError
        late = steps.pop()
        if late:
            topic.time_out(late - 1)

    prepared: dict[int, PreparedTransaction] = {}
    for task in range(tasks):
        step()
        if is_decided(topic.decision, batch_id):
            mine = topic.decision.transactions.get(task)
            if mine is None or topic.commit(task, mine.producer_epoch):
                continue
        step()
        epoch = topic.begin(task)
        if is_marked(topic.marks.get(task), batch_id):
            continue
        step()
        topic.open[task] = epoch, batch_id
        prepared[task] = PreparedTransaction(f"p-{task}", task, epoch)
    step()
    decision, left = next_decision(topic.decision, batch_id, prepared)
    if prepared:
        topic.decision = decision
    for each in (*left, *prepared.values()):
        step()
        if not topic.commit(each.producer_id, each.producer_epoch) and each in prepared.values():
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
    assert sorted(topic.visible) == [(batch, task) for batch in range(batch_id + 1) for task in range(tasks)]


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
    assert sorted(topic.visible) == [(batch, task) for batch, tasks in divisions.items() for task in range(tasks)]
