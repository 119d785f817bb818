"""Damage to the indexes of a segment changes nothing that is found with them: retention, timestamps, offsets."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.records.batch import parse_header
from anabranch.runtime.disk import Disk, File
from anabranch.storage.directory import DataDirectory
from anabranch.storage.interface import Slice
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.errors import OfflineLogError
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_batch

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
CONFIG = LogConfig(durability=Durability.OS, segment_bytes=1_300, index_interval_bytes=300, retention_ms=HOUR_MS)


def opened(path: Path) -> LocalLog:
    return LocalLog.open(path, CONFIG, disk=Disk())


def found(log: LocalLog, now_ms: int) -> list[object]:
    """What is found by time, and by offset."""
    answers: list[object] = [log.retained_from(now_ms)]
    answers += [segment.max_timestamp for segment in log.segments]
    newest = log.batch_of_max_timestamp()
    assert isinstance(newest, Slice)
    answers.append(parse_header(newest.view(), 0).base_offset)
    for minute in range(-1, 16):
        batch = log.batch_for_timestamp(NOW_MS + minute * 60_000)
        assert batch is None or isinstance(batch, Slice)
        answers.append(None if batch is None else parse_header(batch.view(), 0).base_offset)
    for offset in range(0, 18, 2):
        part = log.read(offset, 0)
        assert part is not None
        answers.append(parse_header(part.view(), 0).base_offset)
    return answers


@pytest.fixture(params=["rising", "mixed"])
def closed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of 20 batches, one a minute, in three segments."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)
    chance = random.Random(7)
    log = opened(tmp_path / "t-0")
    for number in range(20):
        minute = number if request.param == "rising" else chance.randrange(20)
        timestamp = -1 if request.param == "mixed" and number < 3 else NOW_MS + minute * 60_000
        log.append(make_batch(2, b"v" * 100, timestamp=timestamp), 0, 0)
    assert len(log.segments) == 3
    log.close()
    return tmp_path / "t-0"


@pytest.mark.parametrize("suffix", [".timeindex", ".index"])
def test_every_flipped_bit_of_an_index_is_noticed_where_it_matters(closed: Path, suffix: str) -> None:
    """A higher timestamp ended the retention of the log for good, a lower one deleted early."""
    sound = {path: path.read_bytes() for path in closed.iterdir()}
    log = opened(closed)
    now_ms = log.segments[0].max_timestamp.timestamp + HOUR_MS + 1  # The first segment is just too old.
    expected = found(log, now_ms)
    assert expected[0] == log.segments[1].base_offset
    path = sorted(closed.glob(f"*{suffix}"))[0]
    assert len(sound[path]) >= 3 * 8
    wrong: list[object] = []
    for bit in range(8 * len(sound[path])):
        for other, data in sound.items():
            other.write_bytes(data)
        data = bytearray(sound[path])
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            if found(opened(closed), now_ms) != expected:
                wrong.append(bit)
        except OfflineLogError as error:
            wrong.append((bit, error))
    assert not wrong, wrong


# -- an index that changes under an open log: some of it is in memory, as it was -----------------------------------

WIDE = LogConfig(index_interval_bytes=1)
PAGE, FLIPPED = 512, 1
"""An index is read in pages of so many entries; the bit that makes 0 of the offset of the second page's first one."""


def wide(path: Path, count: int) -> LocalLog:
    log = LocalLog.open(path, WIDE, disk=Disk())
    for number in range(count):
        log.append(make_batch(1, b"v", timestamp=NOW_MS + number), 0, 0)
    return log


def flip(path: Path, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def first(part: object) -> int:
    assert isinstance(part, Slice)
    return parse_header(part.view(), 0).base_offset


@pytest.fixture
def two_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLog:
    """A log whose first segment has two pages of an index, of which the second is in memory."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)
    log = wide(tmp_path / "t-0", 2 * PAGE - 1)
    log.finish_segment(log.end)
    log.append(make_batch(1, timestamp=NOW_MS + 10 * PAGE), 0, 0)
    log.flush()
    log.close()
    log = LocalLog.open(tmp_path / "t-0", WIDE, disk=Disk())
    assert first(log.read(PAGE + 200, 0)) == PAGE + 200
    assert first(log.batch_for_timestamp(NOW_MS + PAGE + 200)) == PAGE + 200
    return log


def test_a_page_in_memory_that_differs_from_the_file_makes_no_read_pass_records_over(two_pages: LocalLog) -> None:
    places, _ = two_pages.segments[0].index.paths
    flip(places, 8 * PAGE + 2, FLIPPED)
    assert [first(two_pages.read(offset, 0)) for offset in (50, 300, 510)] == [50, 300, 510]


def test_nor_does_a_timestamp_find_a_later_one(two_pages: LocalLog) -> None:
    _, times = two_pages.segments[0].index.paths
    bit = next(bit for bit in range(2, 8) if (NOW_MS + PAGE - 1) >> 8 & 1 << bit)
    flip(times, 12 * PAGE + 6, bit)  # the largest timestamp before the entry goes down by a second or more
    found = [first(two_pages.batch_for_timestamp(NOW_MS + offset)) for offset in (50, 300)]
    assert found == [50, 300]


def test_a_cut_after_a_failed_sync_is_where_the_synced_batches_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next append went behind what was to be cut, under offsets that do not follow."""
    log = wide(tmp_path / "t-0", 300)
    log.flush()
    for number in range(2_300):
        log.append(make_batch(1, b"v", timestamp=NOW_MS + number), 0, 0)
    segment = log.segments[0]
    assert segment.locate(700) == segment.locate(700)  # its page is in memory
    flip(segment.index.paths[0], 8 * PAGE + 2, FLIPPED)
    with monkeypatch.context() as failing:
        failing.setattr(File, "sync", lambda file: (_ for _ in ()).throw(OSError(5, "sync")))
        with pytest.raises(OSError, match="sync"):
            log.flush()
    log.resume(10_000)
    assert (log.end, log.size) == (300, 300 * segment.header_at(0).size)
    assert log.append(make_batch(1, b"new"), 0, 20_000).base_offset == 300
    log.flush()
    assert LocalLog.open(tmp_path / "t-0", WIDE, disk=Disk()).end == 301


@pytest.mark.parametrize("bit", [32, 40, 62])
def test_an_offset_that_has_grown_out_of_its_segment_takes_the_log_offline_with_a_sentence(
    tmp_path: Path, bit: int
) -> None:
    """It fits no index: the log could not be opened, for an error of struct."""
    name = TopicPartition("t", 0)
    directory = DataDirectory(tmp_path, Disk())
    log = directory.open_log(name, CONFIG)
    for _ in range(20):
        log.append(make_batch(2, b"v" * 100), 0, 0)
    assert len(log.segments) == 3
    log.close()
    directory.stopped()
    directory.release()
    first = tmp_path / "t-0" / f"{0:020d}.log"
    data = bytearray(first.read_bytes())
    data[7 - bit // 8] ^= 1 << bit % 8
    first.write_bytes(data)
    directory = DataDirectory(tmp_path, Disk())
    with pytest.raises(OfflineLogError, match=r"the batch at position 0 begins at offset \d+.*restore the file"):
        directory.open_log(name, CONFIG)
    directory.release()
