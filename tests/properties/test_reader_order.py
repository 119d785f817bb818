"""Histories of a reader beside a model broker that is resized, evicts fetch sessions and loses answers, one per seed.

Records of a key carry growing numbers, so the promise is read off what was handed out: every record once, the numbers
of a key ascending. The broker resizes and reaps step by step (ordering.md, section 4), other events between, keeps
incremental fetch sessions (KIP-227), and refuses stale counts and epochs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import (
    Fetch,
    Fetcher,
    FetcherSettings,
    FetchFrom,
    FetchResult,
    Lookup,
    TopicView,
)
from anabranch.machines.lineage import Lineage
from anabranch.machines.placement import place
from anabranch.records.batch import build

TOPIC = "t"
TOPIC_ID = UUID(int=9)
INITIAL = 2
NODES = 2
Record = tuple[int, int]


@dataclass
class Log:
    count: int
    epoch: int = 0
    start: int = 0
    open: bool = True
    records: dict[int, tuple[int, Record]] = field(default_factory=dict)
    """Offset to (leader epoch, record)."""
    end: int = 0

    def append(self, record: Record) -> None:
        self.records[self.end] = (self.epoch, record)
        self.end += 1

    def fetch(self, offset: int, batches: int, size: int) -> memoryview:
        data = bytearray()
        while batches and offset < self.end:
            epoch = self.records[offset][0]
            last = offset
            while last + 1 < self.end and last - offset < size and self.records[last + 1][0] == epoch:
                last += 1
            data += build(
                b"", record_count=0, last_offset_delta=last - offset, base_timestamp=0, max_timestamp=0,
                base_offset=offset, leader_epoch=epoch,
            )  # fmt: skip
            offset, batches = last + 1, batches - 1
        return memoryview(data)


@dataclass
class Session:
    session_id: int
    epoch: int
    partitions: dict[TopicPartition, FetchFrom]


class World:
    """The fetcher, the network and the brokers under one seed."""

    def __init__(self, seed: int, *, ordered: bool = True) -> None:
        self.chance = random.Random(seed)
        self.ordered = ordered
        self.fetcher = Fetcher(FetcherSettings(auto_offset_reset="earliest"))
        self.fetcher.assign([], [TOPIC])
        self.now = 0
        self.produced = 0
        self.logs = {partition: Log(INITIAL) for partition in range(INITIAL)}
        self.removed: dict[int, tuple[int, int]] = {}
        self.counts = [INITIAL]
        self.ends: list[dict[int, int]] = []
        self.resizing: Iterator[None] | None = None
        self.sessions: dict[int, Session] = {}
        self.session_ids = 0
        self.fetches: deque[Fetch] = deque()
        self.parked: deque[tuple[Fetch, int]] = deque()
        self.lookups: deque[Lookup] = deque()
        self.refreshes = 0
        self.views: deque[TopicView] = deque()
        self.read: list[Record] = []

    # -- the broker's side --------------------------------------------------------------------------------------------

    def resize(self, to: int) -> Iterator[None]:
        old, logs = self.counts[-1], self.logs
        ends: dict[int, int] = {}

        def cut(partition: int) -> None:
            ends[partition] = logs[partition].end
            logs[partition].epoch += 1
            logs[partition].count = to

        if to > old:
            for partition in self.chance.sample(sorted(logs), len(logs)):
                cut(partition)
                yield
            for partition in range(old, to):
                if partition in logs:
                    logs[partition].open = True
                else:
                    offset, epoch = self.removed.get(partition, (0, -1))
                    logs[partition] = Log(to, epoch + 1, start=offset, end=offset)
        else:
            retiring = [partition for partition in logs if partition >= to]
            for partition in self.chance.sample(retiring, len(retiring)):
                cut(partition)
                logs[partition].open = False
                yield
            for partition in self.chance.sample(range(to), to):
                cut(partition)
                yield
        yield
        self.counts.append(to)
        self.ends.append(ends)

    def view(self) -> TopicView:
        """Layouts as they were published last, leader epochs as they are."""
        ends = tuple({p: end for p, end in layout.items() if p in self.logs} for layout in self.ends)
        lineage = Lineage.of_ends(INITIAL, tuple(self.counts), ends)
        published = {p: log for p, log in self.logs.items() if p < max(self.counts)}
        leaders = {partition: partition // 2 % NODES for partition in published}
        epochs = {partition: log.epoch for partition, log in published.items()}
        return TopicView(TOPIC, TOPIC_ID, lineage, leaders, epochs, elastic=True, ordered=self.ordered)

    def produce(self) -> None:
        key = self.chance.randint(0, 9)
        partition = place(key * 2_654_435_761 & 0x7FFFFFFF, INITIAL, self.counts[-1])
        log = self.logs[partition]
        if log.open and log.count == self.counts[-1]:
            self.produced += 1
            log.append((key, self.produced))

    def reap(self) -> None:
        """Delete what was read of retiring partitions, and remove the highest one if nothing is left."""
        for partition, log in sorted(self.logs.items(), reverse=True):
            if log.open or self.resizing is not None:
                return
            tp = TopicPartition(TOPIC, partition)
            position = self.fetcher.position(tp) if tp in self.fetcher.assignment else None
            log.start = max(log.start, position or 0)
            if log.start < log.end:
                return
            self.removed[partition] = (log.end, log.epoch)
            del self.logs[partition]

    def fetch(self, fetch: Fetch) -> tuple[ErrorCode, int, dict[TopicPartition, FetchResult]]:
        session = self.sessions.get(fetch.node)
        if fetch.session_id == 0:
            self.session_ids += 1
            session = self.sessions[fetch.node] = Session(self.session_ids, 0, {})
        elif session is None or session.session_id != fetch.session_id:
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND, 0, {}
        elif session.epoch + 1 != fetch.session_epoch:
            return ErrorCode.INVALID_FETCH_SESSION_EPOCH, 0, {}
        session.epoch = fetch.session_epoch
        session.partitions.update(fetch.partitions)
        for tp in fetch.forgotten:
            session.partitions.pop(tp, None)
        answers = {}
        for tp, wanted in session.partitions.items():
            answer = self.fetch_partition(tp.partition, wanted)
            if answer.error is not ErrorCode.NONE or answer.data or tp in fetch.partitions:
                answers[tp] = answer
        return ErrorCode.NONE, session.session_id, answers

    def fetch_partition(self, partition: int, wanted: FetchFrom) -> FetchResult:
        log = self.logs.get(partition)
        if log is None:
            return FetchResult(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if wanted.count != log.count:
            return FetchResult(ErrorCode.INVALID_PARTITION_METADATA)
        if wanted.leader_epoch < log.epoch:
            return FetchResult(ErrorCode.FENCED_LEADER_EPOCH)
        if wanted.leader_epoch > log.epoch:
            return FetchResult(ErrorCode.UNKNOWN_LEADER_EPOCH)
        if not log.start <= wanted.offset <= log.end:
            return FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE)
        data = log.fetch(wanted.offset, self.chance.randint(1, 3), self.chance.randint(0, 4))
        return FetchResult(ErrorCode.NONE, data, high_watermark=log.end, log_start_offset=log.start)

    # -- the reader's side --------------------------------------------------------------------------------------------

    def drain(self) -> None:
        work = self.fetcher.drain(self.now)
        self.fetches.extend(work.fetches)
        self.lookups.extend(work.lookups)
        self.refreshes += len(work.refresh)
        if work.wake_at_ms is not None and self.chance.random() < 0.5:
            self.now = max(self.now, work.wake_at_ms)
        assert self.fetcher.errors() == []

    def poll(self) -> None:
        """Take some of what is ready, in any order of partitions."""
        ready = self.fetcher.deliverable()
        seen: set[int] = set()
        for part in ready:
            if part.partition in seen or self.chance.random() < 0.3:
                seen.add(part.partition)
                continue
            end = part.end if self.chance.random() < 0.7 else self.chance.randint(part.start, part.end)
            if end < part.end:
                seen.add(part.partition)
            log = self.logs.get(part.partition)
            assert log is not None
            self.read.extend(log.records[offset][1] for offset in range(part.start, end))
            self.fetcher.handed_out(part, end)

    def answer(self, fetch: Fetch) -> None:
        if self.chance.random() < 0.03:
            self.sessions.pop(fetch.node, None)
        error, session_id, answers = self.fetch(fetch)
        idle = error is ErrorCode.NONE and all(not answer.data and not answer.error for answer in answers.values())
        if idle and self.chance.random() < 0.5:
            self.parked.append((fetch, session_id))
            return
        if self.chance.random() < 0.05:
            self.fetcher.lost(fetch.request_id, self.now)
        else:
            self.fetcher.answered(fetch.request_id, error, session_id, answers, self.now)

    def answer_parked(self, fetch: Fetch, session_id: int) -> None:
        """A fetch that waited for records is answered with what came, a resize or not: it was checked on arrival."""
        answers = {}
        session = self.sessions.get(fetch.node)
        if session is not None and session.session_id == session_id:
            for tp, wanted in session.partitions.items():
                log = self.logs.get(tp.partition)
                if log is not None and wanted.offset < log.end:
                    answers[tp] = FetchResult(ErrorCode.NONE, log.fetch(wanted.offset, 2, 3), high_watermark=log.end)
        self.fetcher.answered(fetch.request_id, ErrorCode.NONE, session_id, answers, self.now)

    def look_up(self, lookup: Lookup) -> None:
        answers = {}
        for tp, (timestamp, epoch) in lookup.partitions.items():
            log = self.logs.get(tp.partition)
            if log is None:
                answers[tp] = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1)
            elif epoch < log.epoch:
                answers[tp] = (ErrorCode.FENCED_LEADER_EPOCH, -1)
            else:
                answers[tp] = (ErrorCode.NONE, log.start if timestamp == -2 else log.end)
        self.fetcher.found(lookup.request_id, answers, self.now)

    def step(self) -> None:
        chance = self.chance
        self.now += chance.choice([0, 1, 30])
        event = chance.random()
        if event < 0.35:
            for _ in range(chance.randint(1, 6)):
                self.produce()
        elif event < 0.39 and self.resizing is None:
            self.resizing = self.resize(chance.choice([n for n in range(INITIAL, 9) if n != self.counts[-1]]))
        elif event < 0.43:
            self.reap()
        elif event < 0.6:
            self.poll()
        else:
            self.progress()
        self.drain()

    def progress(self) -> None:
        """One thing that was on its way arrives."""
        ways = ["fetch"] * bool(self.fetches) + ["lookup"] * bool(self.lookups) + ["look"] * bool(self.refreshes)
        ways += (
            ["parked"] * (bool(self.parked) and (not ways or self.chance.random() < 0.1))
            + ["view"] * bool(self.views)
            + ["resize"] * (self.resizing is not None)
        )
        if not ways:
            return
        way = self.chance.choice(ways)
        if way == "fetch":
            self.answer(self.fetches.popleft())
        elif way == "lookup":
            self.look_up(self.lookups.popleft())
        elif way == "parked":
            self.answer_parked(*self.parked.popleft())
        elif way == "look":
            self.refreshes -= 1
            self.views.append(self.view())
        elif way == "view":
            self.fetcher.topic_known(replace(self.views.popleft()), self.now)
        elif self.resizing is not None and next(self.resizing, "done") == "done":
            self.resizing = None

    def finish(self) -> None:
        for _ in range(20_000):
            self.now += 10
            self.progress()
            self.poll()
            self.drain()
            if self.resizing is None and len(self.read) == self.produced:
                return
        raise AssertionError(f"the reader is stuck: {len(self.read)} of {self.produced} were handed out")

    def check(self) -> None:
        assert len(set(self.read)) == len(self.read) == self.produced, "lost or doubled"
        last: dict[int, int] = {}
        for key, number in self.read:
            assert number > last.get(key, 0), f"key {key}: {number} was handed out after {last[key]}"
            last[key] = number


def run(seed: int, *, ordered: bool = True) -> World:
    world = World(seed, ordered=ordered)
    for _ in range(200):
        world.step()
    world.finish()
    world.check()
    return world


@pytest.mark.parametrize("block", range(4))
def test_every_record_is_handed_out_once_and_in_order_of_its_key(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        try:
            run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_without_gates_keys_come_out_of_order() -> None:
    wrong = 0
    for seed in range(50):
        try:
            run(seed, ordered=False)
        except AssertionError:
            wrong += 1
    assert wrong > 10
