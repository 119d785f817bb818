"""The aborted-transaction index: what readers of committed records are told."""

from __future__ import annotations

import random

import pytest

from anabranch.base.errors import DecodeError
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
    index.forget([30])
    assert [line.producer_id for line in index] == [2]
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
        aborted: list[tuple[int, int, int]] = []
        for _ in range(60):
            producer = chance.randrange(5)
            ends = producer in began and chance.random() < 0.4
            commit = chance.random() < 0.5
            header = _marker(producer, commit=commit) if ends else _records(producer, offset)
            table.apply(header._replace(base_offset=offset), 0, Marker(commit, 0) if ends else None)
            if ends:
                first = began.pop(producer)
                if not commit:
                    aborted.append((producer, first, offset))
            else:
                began.setdefault(producer, offset)
            offset += 1
        for _ in range(20):
            stable = table.last_stable_offset(offset)
            start = chance.randint(0, stable)
            end = chance.randint(start, stable)
            found = {(line.producer_id, line.first_offset) for line in table.aborted.between(start, end)}
            needed = {(who, first) for who, first, last in aborted if first < end and last >= start}
            assert found == needed
        assert ProducerTable.restore(table.snapshot()) == table


def _records(producer: int, sequence: int) -> BatchHeader:
    return parse_header(batch([b"x"], producer=(producer, 0, sequence), attributes=TRANSACTIONAL))


def _marker(producer: int, *, commit: bool) -> BatchHeader:
    return parse_header(end_transaction_marker(producer, 0, commit=commit, coordinator_epoch=0, timestamp_ms=0))
