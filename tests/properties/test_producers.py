"""Producer tables against plain models: a log that keeps everything, and readers of committed records."""

from __future__ import annotations

import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_TOPIC_ID
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.partition.appending import APPEND, Duplicate, Redirect, decide_append
from anabranch.machines.partition.producers import AbortedTransaction, Marker, ProducerTable, Remembered


class Batch(NamedTuple):
    base_offset: int
    last_offset_delta: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    max_timestamp: int = 0
    is_transactional: bool = False
    is_control: bool = False


OK = ErrorCode.NONE


def judge(table: ProducerTable, batch: Batch) -> Remembered | ErrorCode:
    """The batch that this one repeats, or whether it follows."""
    known = table.known(batch.producer_id)
    repeated = None if known is None else known.repetition(batch)
    return repeated or table.follows(batch, batch.producer_id)


def replayed(log: list[tuple[Batch, Marker | None]]) -> ProducerTable:
    table = ProducerTable()
    for batch, marker in log:
        table.apply(batch, 0, marker)
    return table


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_is_lost_and_repeated_every_record_is_appended_once_and_in_order(seed: int) -> None:
    """Producers with up to five requests in flight, over a network that loses and repeats requests and answers."""
    chance = random.Random(seed)
    table, log, end = ProducerTable(), list[tuple[Batch, Marker | None]](), 0
    pending: dict[int, list[Batch]] = {pid: [] for pid in range(3)}
    following = dict.fromkeys(pending, 2**31 - 20)
    answered: dict[tuple[int, int], int] = {}
    old: list[Batch] = []
    for _ in range(200):
        pid = chance.randrange(3)
        queue = pending[pid]
        while len(queue) < 5:
            size = chance.randint(1, 4)
            queue.append(Batch(-1, size - 1, pid, 0, following[pid]))
            following[pid] = (following[pid] + size) % 2**31
        batch = chance.choice(old) if old and chance.random() < 0.1 else chance.choice(queue)
        judged = judge(table, batch)
        if judged is OK and not any(entry[0].producer_id == batch.producer_id for entry in log):
            if batch is not pending[batch.producer_id][0]:
                table.refused(pending[batch.producer_id][0])
                continue
            if chance.random() < 0.3:
                table.refused(batch)
                continue
        if judged is OK:
            placed = batch._replace(base_offset=end)
            end += batch.last_offset_delta + 1
            log.append((placed, None))
            table.apply(placed, 0)
            answered[batch.producer_id, batch.base_sequence] = placed.base_offset
        elif isinstance(judged, Remembered):
            assert answered[batch.producer_id, batch.base_sequence] == judged.base_offset
        if (
            (judged is OK or isinstance(judged, Remembered))
            and chance.random() < 0.7
            and batch in pending[batch.producer_id]
        ):
            pending[batch.producer_id].remove(batch)
            old.append(batch)
        if chance.random() < 0.05:
            assert replayed(log) == table
            table = ProducerTable.restore(table.snapshot())
    for pid in pending:
        expected = 2**31 - 20
        for batch, _ in log:
            if batch.producer_id == pid:
                assert batch.base_sequence == expected
                expected = (expected + batch.last_offset_delta + 1) % 2**31


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_readers_of_committed_records_see_exactly_those_of_committed_transactions(seed: int) -> None:
    chance = random.Random(seed)
    table, log, end = ProducerTable(), list[tuple[Batch, Marker | None]](), 0
    aborted: list[AbortedTransaction] = []
    sequences = dict.fromkeys(range(4), 0)
    open_at: dict[int, int] = {}
    fate: dict[int, bool] = {}
    spans: list[tuple[int, int, int, bool]] = []
    for _ in range(chance.randint(1, 80)):
        pid = chance.randrange(4)
        if pid in open_at and chance.random() < 0.4:
            marker = Marker(commit=chance.random() < 0.5, coordinator_epoch=0)
            control = Batch(end, 0, pid, 0, -1, is_transactional=True, is_control=True)
            log.append((control, marker))
            line = table.apply(control, 0, marker)
            assert (line is None) == marker.commit
            if line is not None:
                aborted.append(line)
            spans.append((open_at.pop(pid), end, pid, marker.commit))
            end += 1
        else:
            transactional = pid != 3
            size = chance.randint(1, 3)
            batch = Batch(end, size - 1, pid, 0, sequences[pid], is_transactional=transactional)
            assert judge(table, batch) is OK
            log.append((batch, None))
            table.apply(batch, 0)
            sequences[pid] += size
            if transactional:
                open_at.setdefault(pid, end)
            end += size
    for start, marker_at, pid, commit in spans:
        for batch, _ in log:
            if batch.producer_id == pid and start <= batch.base_offset < marker_at:
                fate[batch.base_offset] = commit
    restored = ProducerTable.restore(table.snapshot())
    assert restored == table == replayed(log)
    high_watermark = 0
    while high_watermark <= end:
        stable = table.last_stable_offset(high_watermark)
        undecided = [start for start, at, _, _ in spans if at >= high_watermark] + list(open_at.values())
        assert stable == min([high_watermark, *undecided])
        assert restored.last_stable_offset(high_watermark) == stable
        high_watermark += chance.randint(1, 9)
    upper = chance.randint(0, table.last_stable_offset(end))
    fetch_from = chance.randint(0, upper)
    lines = wanted_lines(aborted, fetch_from, upper)
    for batch, _ in log:
        if batch.is_transactional and not batch.is_control and fetch_from <= batch.base_offset < upper:
            skipped = any(
                line.producer_id == batch.producer_id and line.first_offset <= batch.base_offset < line.last_offset
                for line in lines
            )
            assert skipped != fate[batch.base_offset]


def wanted_lines(index: list[AbortedTransaction], fetch_from: int, upper: int) -> list[AbortedTransaction]:
    """The lines of the index that a fetch of `fetch_from` to `upper` needs, read no further than they say."""
    found = []
    for line in index:
        if line.last_offset >= fetch_from and line.first_offset < upper:
            found.append(line)
        if line.last_stable_offset >= upper:
            break
    return found


class Replica:
    """An ancestor of partition 5."""

    def __init__(self, partition: int) -> None:
        self.leadership = role(partition, 6)
        self.table = ProducerTable()


def role(partition: int, count: int) -> Leadership:
    return Leadership(NO_TOPIC_ID, partition, 0, 0, 1, count, retiring=partition >= count)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_a_stock_producer_is_appended_once_however_often_its_partition_retires(seed: int) -> None:
    """Partition 5 retires into 1 or 0 and comes back; its producer keeps one count and repeats what it likes."""
    chance = random.Random(seed)
    own, ancestors = ProducerTable(), [Replica(1), Replica(0)]
    count, sequence, log = 6, 0, list[int]()
    sent: list[int] = []
    for _ in range(150):
        if chance.random() < 0.1:
            count = chance.choice((6, 2, 1))
            for number, ancestor in zip((1, 0), ancestors, strict=True):
                ancestor.leadership = role(number, count)
        if sent and chance.random() < 0.3:
            number = chance.choice(sent[-5:])
        else:
            number, sequence = sequence, sequence + 1
            sent.append(number)
        batch = Batch(len(log), 0, 7, 0, number)
        decision = decide_append(role(5, count), own, ancestors, batch, COUNT_NOT_SAID)
        if isinstance(decision, Duplicate):
            assert log[decision.of.base_offset] == number
            continue
        if isinstance(decision, Redirect):
            decision.to.table.apply(batch._replace(producer_id=decision.producer_id), 0)
        else:
            assert decision is APPEND
            own.apply(batch, 0)
        log.append(number)
    assert log == list(range(sequence))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_snapshot_or_an_error(data: bytes) -> None:
    try:
        table = ProducerTable.restore(data)
    except DecodeError:
        return
    assert ProducerTable.restore(table.snapshot()) == table
