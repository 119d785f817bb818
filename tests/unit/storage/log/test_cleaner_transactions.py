"""Compaction of transactional logs: what is committed stays, what is aborted goes, what is ended looks ended."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from anabranch.machines.partition.producers import Marker, ProducerTable
from anabranch.records.batch import TRANSACTIONAL, end_transaction_marker, headers, parse_end_transaction_marker
from anabranch.records.key_values import decode_pairs
from anabranch.runtime.disk import Disk
from anabranch.storage.log import cleaner, replacing
from anabranch.storage.log.cleaner import Member
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.log import LocalLog
from tests.support.thorough import thorough
from tests.support.wire import batch

DAY_MS = 24 * 3600 * 1000
CONFIG = LogConfig(
    durability=Durability.OS,
    segment_bytes=400,
    index_interval_bytes=1,
    compact=True,
    delete=False,
    delete_retention_ms=1_000,
    min_cleanable_dirty_ratio=0.0,
)


class Transactional:
    """A compacted log, its table, and what should be in it."""

    def __init__(self, path: Path) -> None:
        self.log = LocalLog.open(path / "t-0", CONFIG, disk=Disk())
        self.table = ProducerTable()
        self.now_ms = 10 * DAY_MS
        self.sequences: dict[int, int] = {}
        self.pending: dict[int, dict[bytes, tuple[int, bytes]]] = {}
        self.committed: dict[bytes, tuple[int, bytes]] = {}

    def put(self, producer: int, key: bytes, value: bytes) -> None:
        sequence = self.sequences.get(producer, 0)
        self.sequences[producer] = sequence + 1
        data = batch(
            [value], key=key, producer=(producer, 0, sequence), attributes=TRANSACTIONAL, timestamp=self.now_ms
        )
        offset = self._append(data)
        self.pending.setdefault(producer, {})[key] = (offset, value)

    def end(self, producer: int, *, commit: bool) -> None:
        marker = end_transaction_marker(producer, 0, commit=commit, coordinator_epoch=0, timestamp_ms=self.now_ms)
        self._append(marker, Marker(commit, 0))
        for key, written in self.pending.pop(producer, {}).items():
            if commit and self.committed.get(key, (-1, b""))[0] < written[0]:
                self.committed[key] = written

    def _append(self, data: bytearray, marker: Marker | None = None) -> int:
        offset = self.log.append(data, 0, self.now_ms).base_offset
        ((_, header),) = headers(data)
        self.table.apply(header, self.now_ms, marker)
        return offset

    def clean(self) -> None:
        self.log.flush()
        stable = self.table.last_stable_offset(self.log.high_watermark)
        member = Member(self.log, stable=stable, aborted=self.table.aborted)
        if cleaner.is_due(member, self.now_ms):
            for cleaned in cleaner.plan(member, self.now_ms).run():
                self.table.aborted = self.table.aborted.without(cleaned.forgotten)
                replacing.finish(self.log, cleaned)

    def check(self) -> None:
        folded, markers = ProducerTable(), 0
        found: dict[bytes, tuple[int, bytes]] = {}
        lines = sorted(self.table.aborted, key=lambda line: line.first_offset)
        void: set[int] = set()
        stable = self.table.last_stable_offset(self.log.high_watermark)
        for piece in self.log.slices():
            view = piece.view()
            for position, header in headers(view):
                data = view[position : position + header.size]
                marker = parse_end_transaction_marker(data) if header.is_control else None
                folded.apply(header, self.now_ms, None if marker is None else Marker(marker.commit, 0))
                while lines and lines[0].first_offset <= header.last_offset:
                    void.add(lines.pop(0).producer_id)
                if marker is not None:
                    markers += 1
                    if not marker.commit:
                        void.discard(header.producer_id)
                elif header.producer_id not in void and header.base_offset < stable:
                    for delta, (key, value) in enumerate(decode_pairs(data, header)):
                        if key is not None and value is not None:
                            found[key] = (header.base_offset + delta, value)
        assert not void, "a reader would leave out what comes after"
        assert folded.transactions == self.table.transactions
        assert folded.last_stable_offset(self.log.end) == self.table.last_stable_offset(self.log.end)
        below = {key: written for key, written in self.committed.items() if written[0] < stable}
        assert {key: found.get(key) for key in below} == below
        self.markers = markers


@pytest.mark.parametrize("seed", range(thorough(40, 10)))
def test_random_transactions_survive_cleaning(tmp_path: Path, seed: int) -> None:
    chance, world = random.Random(seed), Transactional(tmp_path)
    for _ in range(150):
        world.now_ms += chance.choice((1, 1, 300, DAY_MS // 4))
        producer = chance.randrange(3)
        what = chance.random()
        if what < 0.6:
            world.put(producer, b"k%d" % chance.randrange(5), chance.randbytes(20))
        elif what < 0.9 and producer in world.pending:
            world.end(producer, commit=chance.random() < 0.6)
        elif what >= 0.9:
            world.clean()
            world.check()


def test_aborted_records_go_and_in_the_end_their_markers_too(tmp_path: Path) -> None:
    world = Transactional(tmp_path)
    for number in range(30):
        world.put(1, b"aborted", b"%d" % number)
        world.end(1, commit=False)
    world.put(1, b"kept", b"x")
    world.end(1, commit=True)
    for number in range(40):
        world.put(2, b"filler%d" % (number % 3), bytes(100))
        world.end(2, commit=True)
    before = world.log.size
    world.clean()
    world.check()
    assert world.log.size < before
    assert b"aborted" not in b"".join(bytes(piece.view()) for piece in world.log.slices())
    many = world.markers
    world.now_ms += 2 * DAY_MS
    for _ in range(3):
        world.put(2, b"filler", bytes(300))
        world.end(2, commit=True)
        world.clean()
        world.now_ms += 2_000
    world.check()
    assert world.markers < many / 4
    assert len(world.table.aborted) < 5


def test_an_open_transaction_is_not_touched(tmp_path: Path) -> None:
    world = Transactional(tmp_path)
    world.put(1, b"key", b"open")
    for _ in range(20):
        world.put(2, b"key", bytes(100))
        world.end(2, commit=True)
    before = world.log.size
    world.clean()
    assert world.log.size == before
    world.end(1, commit=True)
    world.put(2, b"other", bytes(300))
    world.end(2, commit=True)
    world.clean()
    world.check()
    assert world.log.size < before
