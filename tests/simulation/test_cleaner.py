"""Compaction on a disk that fails, against a model: whoever reads the log from its start ends with the last values."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from anabranch.records.batch import headers
from anabranch.records.compression import Compression
from anabranch.storage.log import cleaner, replacing, scrub
from anabranch.storage.log.batch_files import records
from anabranch.storage.log.cleaner import Cleaned, Cleaning, Member
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_keyed_batch
from tests.support.disks import FaultyDisk
from tests.support.dropped import remove_some
from tests.support.thorough import thorough

HERE = Path("/data/t-0")
HISTORIES = thorough(200, 60)
DELETE_RETENTION_MS = 300


class PowerLossError(Exception):
    """The power goes."""


class History:
    """One random life of a compacted log; the model is every record that was ever appended."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = FaultyDisk(seed)
        self.disk.make_directory(HERE.parent)
        self.disk.safe_directories |= self.disk.directories
        self.config = LogConfig(
            durability=self.chance.choice((Durability.FSYNC, Durability.OS)),
            segment_bytes=self.chance.choice((300, 1_500)),
            index_interval_bytes=self.chance.choice((1, 300)),
            compact=True,
            delete=False,
            delete_retention_ms=DELETE_RETENTION_MS,
            min_cleanable_dirty_ratio=self.chance.choice((0.0, 0.3)),
        )
        self.records: dict[int, tuple[bytes | None, bytes | None]] = {}
        self.appended_at: dict[int, int] = {}
        self.now_ms = 1
        self.cleaning: Cleaning | None = None
        self.cleaned: Cleaned | None = None
        self.steps: Generator[replacing.Work, None, int] | None = None
        """What is left of putting new segments in place, while other things happen."""
        self.work: replacing.Work | None = None
        self.saved = 0
        self.dropped: set[int] = set()
        self.stamp = 0
        self.open()

    def open(self, *, power_lost: bool = False) -> None:
        self.log = LocalLog.open(HERE, self.config, disk=self.disk, power_lost=power_lost)
        self.cleaning = self.cleaned = self.steps = self.work = None
        self.compared: list[scrub.Settled] = []
        """What a scrub has listed, and comes to later."""

    def step(self) -> None:
        self.now_ms += self.chance.randint(0, 40)
        steps = {
            self.append: 50,
            self.log.flush: 15,
            self.finish_segment: 2,
            self.plan: 10,
            self.run: 10,
            self.finish: 4,
            self.begin_to_finish: 6,
            self.go_on: 30,
            self.delete_all: 0.5,
            self.delete_before: 1,
            self.restart: 3,
            self.crash: 3,
            self.crash_while_cleaning: 3,
            self.fail_while_cleaning: 3,
            self.scrub: 5,
        }
        self.chance.choices(list(steps), list(steps.values()))[0]()

    def append(self) -> None:
        rows: list[tuple[bytes | None, bytes | None]] = []
        for _ in range(self.chance.randint(1, 4)):
            key = None if self.chance.random() < 0.05 else b"k%d" % self.chance.randrange(8)
            value = None if self.chance.random() < 0.3 else self.chance.randbytes(self.chance.randint(0, 60))
            rows.append((key, value))
        codec = self.chance.choice((Compression.NONE, Compression.LZ4, Compression.ZSTD))
        batch = make_keyed_batch(rows, timestamp=self.now_ms, compression=codec)
        base = self.log.append(batch, 0, self.now_ms).base_offset
        for offset, row in enumerate(rows, base):
            self.records[offset] = row
            self.appended_at[offset] = self.now_ms

    def finish_segment(self) -> None:
        """A resize has cut: the records before it may be cleaned."""
        self.log.finish_segment(self.log.end)

    def plan(self) -> None:
        if self.steps is not None:
            return
        for work in replacing.resuming(self.log):
            work()
        member = Member(self.log)
        due = cleaner.is_due(member, self.now_ms)
        self.cleaning, self.cleaned = cleaner.plan(member, self.now_ms) if due else None, None

    def run(self) -> None:
        if self.cleaning is not None:
            self.cleaned, self.cleaning = next(iter(self.cleaning.run()), None), None

    def begin_to_finish(self) -> None:
        if self.cleaned is not None and self.steps is None:
            self.steps, self.cleaned = replacing.finishing(self.log, self.cleaned), None
            self.go_on()

    def go_on(self) -> None:
        """Do what a thread does, and then a step in the loop."""
        if self.steps is None:
            return
        try:
            if self.work is not None:
                self.work()
            self.work = next(self.steps)
        except StopIteration as done:
            self.saved += done.value
            self.steps = self.work = None

    def delete_all(self) -> None:
        self.log.delete_before(self.log.high_watermark)

    def finish(self) -> None:
        if self.cleaned is not None and self.steps is None:
            size = self.log.size
            saved = replacing.finish(self.log, self.cleaned)
            assert self.log.size == size - saved
            self.saved += saved
            self.cleaned = None

    def delete_before(self) -> None:
        self.log.delete_before(self.chance.randint(self.log.log_start, self.log.high_watermark))
        remove_some(self.log, len(self.log.dropped) // 2)

    def restart(self) -> None:
        if self.chance.random() < 0.5:
            self.log.close()
        end = self.log.end
        self.open()
        assert self.log.end == end

    def crash(self) -> None:
        flushed = self.log.flushed
        self.disk = self.disk.crash()
        self.open(power_lost=True)
        assert self.log.end >= flushed
        for offset in [offset for offset in self.records if offset >= self.log.end]:
            del self.records[offset]

    def is_to_finish(self) -> bool:
        """Clean the log, as far as that is due; whether new segments are to take their places now."""
        self.plan()
        self.run()
        return self.cleaned is not None and self.steps is None

    def crash_while_cleaning(self) -> None:
        """The power goes at some sync of a directory, or before one, while the new segments take their places."""
        if not self.is_to_finish():
            return
        left = self.chance.randint(0, 8)

        def sync_directory(path: Path) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise PowerLossError
            FaultyDisk.sync_directory(self.disk, path)

        self.disk.sync_directory = sync_directory  # type: ignore[method-assign]
        assert self.cleaned is not None
        try:
            replacing.finish(self.log, self.cleaned)
        except PowerLossError:
            self.crash()
        else:
            del self.disk.sync_directory
        self.cleaned = None

    def fail_while_cleaning(self) -> None:
        """The disk refuses something once, while the new segments take their places; what follows may finish it."""
        if not self.is_to_finish():
            return
        left = self.chance.randint(0, 12)

        def refusing(name: str) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left == -1:
                    raise OSError(errno.ENOSPC, "no space left")
                return getattr(FaultyDisk, name)(self.disk, *args, **named)

            return call

        names = ("rename", "discard", "sync_directory", "open", "names")
        for name in names:
            setattr(self.disk, name, refusing(name))
        try:
            with contextlib.suppress(OSError):
                assert self.cleaned is not None
                self.saved += replacing.finish(self.log, self.cleaned)
        finally:
            for name in names:
                delattr(self.disk, name)
        self.cleaned = None

    def scrub(self) -> None:
        """What is missing in segments is no damage, at no time."""
        for compared in self.compared if self.chance.random() < 0.5 else scrub.settled(self.log):
            with contextlib.suppress(FileNotFoundError):
                found = scrub.scrub(self.disk, HERE, compared.source, lambda size: None)
                assert found is None or not scrub.is_as_it_was(self.log, compared), found
        self.compared = scrub.settled(self.log)

    def check(self) -> None:
        log = self.log
        offset, found = log.log_start, dict[int, tuple[bytes | None, bytes | None]]()
        only_empty = False
        while part := log.read(offset, self.chance.randint(1, 800), end=log.end):
            view = part.view()
            only_empty |= next(headers(view))[1].record_count == 0
            for position, header in headers(view):
                assert header.next_offset > offset
                assert not (only_empty and header.record_count), "an answer without records, though there are some"
                for record in records(header, view[position : position + header.size]):
                    value = None if record.tombstone else self.records[record.offset][1]
                    found[record.offset] = (record.key, value)
                    if record.offset >= log.log_start:
                        assert self.appended_at[record.offset] <= record.timestamp <= header.max_timestamp
                offset = header.next_offset
        assert offset == log.end
        for at, row in found.items():
            assert self.records[at] == row
        now: dict[bytes, bytes] = {}
        expected: dict[bytes, bytes] = {}
        for rows, end in ((found, now), (self.records, expected)):
            for at in sorted(rows):
                key, value = rows[at]
                if key is None or at < log.log_start:
                    continue
                if value is None:
                    end.pop(key, None)
                else:
                    end[key] = value
        assert now == expected
        last: dict[bytes, int] = {key: at for at, (key, _) in sorted(self.records.items()) if key is not None}
        for at in last.values():
            young = self.now_ms - self.appended_at[at] < DELETE_RETENTION_MS
            if at >= log.log_start and (self.records[at][1] is not None or young):
                assert at in found, "the newest record of a key, or its tombstone, is gone too early"
        dropped = {at for at in self.records if at >= log.log_start} - found.keys()
        assert all(at < log.rewritten.to for at in dropped), (log.rewritten, dropped)
        assert dropped <= self.dropped or log.rewritten.stamp > self.stamp, "records are gone, and nothing tells of it"
        self.dropped, self.stamp = dropped, log.rewritten.stamp


def test_compaction_keeps_the_newest_of_each_key_whatever_happens() -> None:
    saved = 0
    for seed in range(HISTORIES):
        try:
            history = History(seed)
            for _ in range(history.chance.randint(10, 120)):
                history.step()
                history.check()
        except BaseException:
            print(f"replay with: History({seed})")
            raise
        saved += history.saved
    assert saved > 10 * HISTORIES


@pytest.mark.parametrize("codec", list(Compression))
def test_only_the_newest_are_left_in_the_end(codec: Compression) -> None:
    disk = FaultyDisk(1)
    config = LogConfig(durability=Durability.OS, segment_bytes=2_000, compact=True, delete_retention_ms=0)
    log = LocalLog.open(HERE, config, disk=disk)
    for number in range(300):
        rows: list[tuple[bytes | None, bytes | None]] = [(b"k%d" % (number % 5), b"%d" % number), (b"gone", None)]
        log.append(make_keyed_batch(rows, compression=codec, producer_id=7, base_sequence=2 * number), 0, number)
    log.flush()
    for now_ms in (2_000, 3_000):
        if cleaner.is_due(Member(log), now_ms):
            for cleaned in cleaner.plan(Member(log), now_ms).run():
                replacing.finish(log, cleaned)
        for number in range(40):
            log.append(make_keyed_batch([(b"k%d" % (number % 5), b"%d" % number)], compression=codec), 0, now_ms)
        log.flush()
    found: dict[bytes | None, int] = {}
    bases = []
    offset = 0
    while part := log.read(offset, 1 << 20):
        view = part.view()
        for position, header in headers(view):
            bases.append(header.base_offset)
            for record in records(header, view[position : position + header.size]):
                if record.offset < cleaner.finished_segments(log)[-1].end - 100:
                    assert record.key != b"gone"
                found[record.key] = record.offset
            offset = header.next_offset
    assert len(found) >= 5
    assert len(bases) < 150
    reopened = LocalLog.open(HERE, config, disk=disk)
    assert (reopened.end, reopened.size) == (log.end, log.size)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("power_lost", [False, True])
def test_records_that_are_deleted_while_segments_are_replaced_stay_deleted(steps: int, power_lost: bool) -> None:
    disk = FaultyDisk(steps)
    disk.make_directory(HERE.parent)
    disk.safe_directories |= disk.directories
    config = LogConfig(segment_bytes=300, compact=True, min_cleanable_dirty_ratio=0.0)
    log = LocalLog.open(HERE, config, disk=disk)
    for number in range(30):
        log.append(make_keyed_batch([(b"k%d" % (number % 3), b"%d" % number)]), 0, number)
    log.flush()
    (cleaned,) = cleaner.plan(Member(log), 10_000).run()
    left = replacing.finishing(log, cleaned)
    work = next(left)
    for _ in range(steps - 1):
        work()
        work = next(left)
    log.delete_before(log.end)
    log.append(make_keyed_batch([(b"k", b"new")]), 0, 0)
    log.append(make_keyed_batch([(b"k", b"new")]), 0, 0)
    log.flush()
    after = disk
    if power_lost:
        after = disk.crash()
    else:
        work()
        for each in left:
            each()
    reopened = LocalLog.open(HERE, config, disk=after, power_lost=power_lost)
    assert (reopened.log_start, reopened.end) == (30, 32)
    assert not [name for name in after.names(HERE) if name.startswith("0000000000000000000")]
