"""The aborted-transaction index: what readers of committed records are told."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from anabranch.base.errors import DecodeError
from anabranch.machines.partition import aborted
from anabranch.machines.partition.aborted import AbortedTransaction, AbortedTransactions
from anabranch.machines.partition.producers import Marker, ProducerTable
from anabranch.records.batch import BatchHeader, end_transaction_marker, parse_header
from tests.support.wire import batch

TRANSACTIONAL = 0x10


def index_of(*lines: tuple[int, int, int, int]) -> AbortedTransactions:
    index = AbortedTransactions()
    for line in lines:
        index.add(AbortedTransaction(*line))
    return index


def test_a_reader_is_told_of_the_transactions_that_have_records_where_it_reads() -> None:
    index = index_of((1, 0, 5, 2), (2, 2, 9, 10), (3, 20, 30, 31))
    assert [line.producer_id for line in index.between(0, 100)] == [1, 2, 3]
    assert [line.producer_id for line in index.between(0, 2)] == [1]
    assert [line.producer_id for line in index.between(6, 20)] == [2]
    assert [line.producer_id for line in index.between(10, 20)] == []
    assert [line.producer_id for line in index.between(30, 31)] == [3]
    assert index.between(31, 100) == []


def test_lines_are_forgotten_with_what_they_speak_of() -> None:
    index = index_of((1, 0, 5, 2), (2, 2, 9, 10), (3, 20, 30, 31))
    index.forget_before(6)
    assert [line.producer_id for line in index] == [2, 3]
    assert [line.producer_id for line in index.without([30])] == [2]
    index.forget_before(100)
    assert len(index) == 0


def test_the_index_is_written_and_read() -> None:
    index = index_of((1 << 45, 0, 5, 2), (2, 2, 9, 10))
    assert AbortedTransactions.from_bytes(index.to_bytes()) == index
    with pytest.raises(DecodeError):
        AbortedTransactions.from_bytes(index.to_bytes()[:-1])


def test_it_says_the_same_as_looking_at_every_transaction() -> None:
    """Random histories of open and ended transactions: the shortcut by last stable offset leaves nothing out."""
    for seed in range(100):
        chance, table, offset = random.Random(seed), ProducerTable(), 0
        began: dict[int, int] = {}
        ended: list[tuple[int, int, int]] = []
        for _ in range(60):
            producer = chance.randrange(5)
            ends = producer in began and chance.random() < 0.4
            commit = chance.random() < 0.5
            header = _marker(producer, commit=commit) if ends else _records(producer, offset)
            table.apply(header._replace(base_offset=offset), 0, Marker(commit, 0) if ends else None)
            if ends:
                first = began.pop(producer)
                if not commit:
                    ended.append((producer, first, offset))
            else:
                began.setdefault(producer, offset)
            offset += 1
        for _ in range(20):
            stable = table.last_stable_offset(offset)
            start = chance.randint(0, stable)
            end = chance.randint(start, stable)
            found = {(line.producer_id, line.first_offset) for line in table.aborted.between(start, end)}
            needed = {(who, first) for who, first, last in ended if first < end and last >= start}
            assert found == needed
        assert ProducerTable.restore(table.snapshot()) == table


class History:
    """Transactions that overlap, stay open, and end; the index of the aborted ones, and a list of them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.index = AbortedTransactions()
        self.lines: list[AbortedTransaction] = []
        self.open: dict[int, int] = {}
        self.offset = 0
        self.copies: list[tuple[AbortedTransactions, list[AbortedTransaction]]] = []

    def step(self) -> None:
        """Do one of the things that happen to a partition."""
        chance = self.chance
        what = chance.choices((self.append, self.delete, self.compact, self.truncate, self.load, self.copy), WEIGHTS)[0]
        what()
        assert list(self.index) == self.lines
        assert len(self.index) == len(self.lines)

    def append(self) -> None:
        """Begin transactions, and end some: producer 0 leaves its own open for long."""
        for _ in range(self.chance.randrange(12)):
            producer = self.chance.randrange(6)
            if producer in self.open and self.chance.random() < (0.02 if producer == 0 else 0.6):
                first = self.open.pop(producer)
                if self.chance.random() < 0.7:
                    stable = min(self.open.values(), default=self.offset + 1)
                    line = AbortedTransaction(producer, first, self.offset, stable)
                    self.index.add(line)
                    self.lines.append(line)
            else:
                self.open.setdefault(producer, self.offset)
            self.offset += 1

    def delete(self) -> None:
        """Move the log start."""
        start = self.chance.randint(0, self.offset) if self.chance.random() < 0.3 else self.offset // 3
        self.index.forget_before(start)
        self.lines = [line for line in self.lines if line.last_offset >= start]

    def compact(self) -> None:
        """Forget lines in a thread, while others are added and dropped."""
        gone = {line.last_offset for line in self.lines if self.chance.random() < 0.3}
        newest, work = self.index.newest_marker, self.index.copy()
        self.append()
        if self.chance.random() < 0.5:
            self.delete()
        kept = work.without(gone)
        kept.follow(self.index, newest)
        self.index = kept
        self.lines = [line for line in self.lines if line.last_offset not in gone]

    def truncate(self) -> None:
        """Cut the log: its table is folded anew, and so is the index."""
        end = self.chance.randint(self.offset // 2, self.offset)
        self.lines = [line for line in self.lines if line.last_offset < end]
        self.index = AbortedTransactions(self.lines)
        self.open = {producer: first for producer, first in self.open.items() if first < end}
        self.offset = end

    def load(self) -> None:
        """Read the index from its file."""
        self.index = AbortedTransactions.from_bytes(self.index.to_bytes())

    def copy(self) -> None:
        """Keep a copy, as a snapshot that is written in a thread; or go on with one."""
        self.copies.append((self.index.copy(), list(self.lines)))
        if self.chance.random() < 0.5:
            self.index, self.copies[-1] = self.copies[-1][0], (self.index, self.copies[-1][1])

    def check(self) -> None:
        """Compare look-ups with looking at every line."""
        chance, lines = self.chance, self.lines
        for _ in range(8):
            start = chance.randint(0, self.offset)
            end = chance.randint(start, min(self.offset, start + chance.choice((3, 30, 10_000))))
            found = self.index.between(start, end)
            assert found == [line for line in lines if line.first_offset < end and line.last_offset >= start]
            producer = chance.randrange(7)
            is_void = any(it.producer_id == producer and it.first_offset <= start <= it.last_offset for it in lines)
            assert self.index.is_void(producer, start) == is_void
            most = chance.randrange(8)
            ended = [line.last_offset for line in lines if start <= line.last_offset < end]
            reach = self.index.reach(start, end, most)
            assert reach == ((ended[most], most) if most < len(ended) else (end, len(ended)))
        for copy, before in self.copies:
            assert list(copy) == before, "a copy does not change"


WEIGHTS = 60, 4, 4, 2, 3, 3


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(("block", "chunk"), [(2, 4), (3, 9), (aborted.BLOCK, aborted.CHUNK)])
def test_look_ups_find_what_looking_at_every_line_finds(
    seed: int, block: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aborted, "BLOCK", block)
    monkeypatch.setattr(aborted, "CHUNK", chunk)
    history = History(seed)
    for _ in range(40):
        history.step()
        history.check()


def work_of(call: Callable[[], object]) -> int:
    """How many lines of the index's code a call runs: its work, whatever else the machine does."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., object] | None:
        nonlocal count
        if frame.f_code.co_filename != aborted.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


LINES = 20_000


def test_a_look_up_costs_what_it_finds_whatever_comes_behind() -> None:
    index = AbortedTransactions(AbortedTransaction(7, 2 * n, 2 * n + 1, 2 * n + 2) for n in range(LINES))
    end, count = index.reach(0, 2 * LINES, 100)
    assert (end, count) == (201, 100)
    assert index.reach(50, 40, 0) == (40, 0), "a reader that is behind the end already"
    assert len(index.between(0, end)) == 101
    assert work_of(lambda: index.between(0, end)) < 2_000
    assert work_of(lambda: index.reach(0, 2 * LINES, 100)) < 100


@pytest.mark.parametrize("ends", [True, False])
def test_a_transaction_that_stays_open_costs_those_beside_it_little(*, ends: bool) -> None:
    """All lines have its first offset as their last stable offset; at last it is aborted, too, or still open."""
    index = AbortedTransactions(AbortedTransaction(n + 2, 2 * n + 1, 2 * n + 2, 0) for n in range(LINES))
    if ends:
        index.add(AbortedTransaction(1, 0, 2 * LINES + 1, 0))
    assert len(index.between(1, 100)) == 50 + ends
    assert work_of(lambda: index.between(1, 100)) < 2_500
    assert index.is_void(1, 133) == ends
    assert not index.is_void(2, 133)
    assert work_of(lambda: index.is_void(2, 133)) < 1_500


def test_a_copy_and_a_drop_do_not_touch_every_line() -> None:
    index = AbortedTransactions(AbortedTransaction(7, 2 * n, 2 * n + 1, 2 * n + 2) for n in range(LINES))
    copy = index.copy()
    shared = sum(chunk is other for chunk, other in zip(index._chunks, copy._chunks, strict=True))
    assert shared == LINES // aborted.CHUNK
    assert work_of(lambda: index.forget_before(LINES)) < 200
    assert (len(index), len(copy)) == (LINES // 2, LINES)


def _records(producer: int, sequence: int) -> BatchHeader:
    return parse_header(batch([b"x"], producer=(producer, 0, sequence), attributes=TRANSACTIONAL))


def _marker(producer: int, *, commit: bool) -> BatchHeader:
    return parse_header(end_transaction_marker(producer, 0, commit=commit, coordinator_epoch=0, timestamp_ms=0))
