"""Segments below the log start: when their files go, and what a kill in between leaves. When small segments end."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from math import isqrt
from pathlib import Path

import pytest

from anabranch.runtime.disk import Disk
from anabranch.storage.log import dropped
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.recovery import SWAP_SUFFIX, base_of
from anabranch.storage.log.segment import LOG_SUFFIX, Segment
from tests.support.batches import make_batch
from tests.support.dropped import remove_some

DEFAULT_THREADS_MAX = min(32, (os.cpu_count() or 1) + 4)
"""Threads of the default executor of a loop."""
CONFIG = LogConfig(durability=Durability.OS, segment_bytes=1, retention_ms=1_000)
"""A segment for each batch."""


class KilledError(BaseException):
    """The process is killed."""


class WatchedDisk(Disk):
    """A disk that notes what is removed or renamed, in which threads, and may be killed, or fail, meanwhile."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.left = 1 << 30
        self.refused: set[str] = set()

    def unlink(self, path: Path) -> None:
        self.threads.append(threading.get_ident())
        if not self.left:
            raise KilledError
        self.left -= 1
        if path.name in self.refused:
            raise OSError(errno.EIO, "Input/output error", str(path))
        super().unlink(path)

    def rename(self, old: Path, new: Path) -> None:
        self.threads.append(threading.get_ident())
        super().rename(old, new)


def open_log(path: Path, config: LogConfig = CONFIG) -> LocalLog:
    return LocalLog.open(path / "t-0", config, disk=WatchedDisk())


def filled(path: Path, count: int) -> LocalLog:
    log = open_log(path)
    for _ in range(count):
        log.append(make_batch(1, timestamp=1_000), 0, 1_000)
    log.flush()
    log.checkpoint()
    assert len(log.segments) == count
    disk_of(log).threads.clear()
    return log


def disk_of(log: LocalLog) -> WatchedDisk:
    assert isinstance(log.disk, WatchedDisk)
    return log.disk


def bases(log: LocalLog) -> list[int]:
    """Where the segments in the directory begin."""
    return sorted(base for each in log.directory.iterdir() if (base := base_of(each.name, LOG_SUFFIX)) is not None)


@pytest.mark.parametrize("by", ["DeleteRecords", "retention"])
def test_the_log_start_moves_at_once_and_files_go_in_a_thread_some_at_a_time(tmp_path: Path, by: str) -> None:
    log = filled(tmp_path, 300)
    if by == "DeleteRecords":
        log.delete_before(290)
    else:
        log.retain(10_000, before=290)
    assert (log.log_start, len(log.segments), len(bases(log))) == (290, 10, 300)
    assert disk_of(log).threads == [], "the loop removes no file"
    assert open_log(tmp_path).log_start == 290, "it is durable"
    log = filled(tmp_path / "again", 300)
    log.delete_before(290)

    async def story() -> int:
        turns, removing = 0, asyncio.ensure_future(log.remove_dropped())
        while not removing.done():
            await asyncio.sleep(0)
            turns += 1
            log.append(make_batch(1), 0, 1_000)
        return turns

    assert asyncio.run(story()) >= 290 // dropped.REMOVED_AT_A_TIME
    threads = disk_of(log).threads
    assert len(threads) == 290 * 3 and threading.get_ident() not in threads
    assert bases(log)[0] == 290
    assert [header.base_offset for header in log.headers_from(290)] == list(range(290, log.end))


def test_the_removal_of_files_goes_on_when_who_asked_for_it_is_cancelled(tmp_path: Path) -> None:
    log = filled(tmp_path, 3 * dropped.REMOVED_AT_A_TIME + 1)
    log.delete_before(log.end - 1)

    async def story() -> None:
        asked = asyncio.ensure_future(log.remove_dropped())
        while not log.dropped.removing:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(story())
    assert not len(log.dropped)
    assert bases(log) == [log.end - 1]


@pytest.mark.parametrize("removed", range(10))
def test_a_kill_between_any_two_files_leaves_a_sound_log(tmp_path: Path, removed: int) -> None:
    log = filled(tmp_path, 6)
    log.delete_before(3)
    disk_of(log).left = removed
    if removed < 9:
        with pytest.raises(KilledError):
            remove_some(log, 10)
    else:
        remove_some(log, 10)
    assert bases(log) == list(range(-(-removed // 3), 6)), "no hole, should the log start be lost"
    found = open_log(tmp_path)
    assert (found.log_start, found.end) == (3, 6)
    assert [header.base_offset for header in found.headers_from(3)] == [3, 4, 5]
    names = {each.name for each in found.directory.iterdir() if not each.name.endswith("checkpoint")}
    kept = {path.name for segment in found.segments for path in segment.paths}
    assert names <= kept, "what was left is removed at the start"


def test_a_cut_to_the_log_start_leaves_no_file_below_it(tmp_path: Path) -> None:
    """The new end has no file yet: a start would take the newest one that is left for a log that was cut."""
    log = open_log(tmp_path)
    for _ in range(3):
        log.append(make_batch(2), 0, 1_000)
    log.flush()
    log.delete_before(5)
    log.truncate(5)
    assert (log.log_start, log.end, bases(log)) == (5, 5, [])
    assert (open_log(tmp_path).log_start, open_log(tmp_path).end) == (5, 5)


def test_a_file_that_cannot_be_removed_fails_no_deletion_and_goes_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = filled(tmp_path, 6)
    log.delete_before(4)
    disk_of(log).refused.add(log.directory.joinpath(f"{1:020d}.log").name)
    asyncio.run(log.remove_dropped())
    assert bases(log) == [1, 4, 5]
    assert "1.log: deleted records, but not their file" in caplog.text
    assert (open_log(tmp_path).log_start, bases(log)) == (4, [4, 5])


def test_a_log_that_is_about_to_be_removed_keeps_its_files_to_itself(tmp_path: Path) -> None:
    log = filled(tmp_path, 6)
    log.delete_before(4)
    log.abandon()
    asyncio.run(log.remove_dropped())
    assert bases(log) == list(range(6))


def test_whether_a_snapshot_covers_a_deletion_is_known_without_listing_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has three files for each segment."""
    log = filled(tmp_path, 6)
    log.write_snapshot(b"table")
    monkeypatch.setattr(WatchedDisk, "names", lambda *_: pytest.fail("the directory was listed"))
    assert log.has_snapshot_from(6) and not log.has_snapshot_from(7)
    log.append(make_batch(1), 0, 1_000)
    log.flush()
    log.write_snapshot(b"table", only=True)
    assert log.has_snapshot_from(7)
    assert log.newest_snapshot(bytes) == (7, b"table")


# -- small segments ----------------------------------------------------------------------------------------------------


def test_small_segments_end_by_time_the_later_the_more_of_them_there_are(tmp_path: Path) -> None:
    """A record a second, and a segment for each, would be a million files in four days."""
    log = open_log(tmp_path, LogConfig(durability=Durability.OS, segment_ms=1_000, small_segment_ms=10_000))
    seconds = 20_000
    for second in range(0, seconds, 5):
        log.append(make_batch(1), 0, second * 1_000)
    expected = isqrt(2 * seconds // 10)
    assert expected - 3 <= len(log.segments) <= expected + 3
    ages = [segment.first_append_ms or 0 for segment in log.segments]
    assert ages[1] - ages[0] == 10_000, "the first one is not held up for long"


@pytest.mark.parametrize(
    ("size", "age_ms", "count", "over"),
    [
        (99, 4_999, 1, False),
        (99, 5_000, 1, True),
        (99, 5_000, 5, True),
        (99, 5_000, 6, False),
        (99, 6_000, 6, True),
        (100, 5_000, 1_000, True),
        (100, 4_999, 1, False),
        (999, 1, 1_000, False),
        (1_000, 1, 1_000, True),
    ],
)
def test_a_segment_ends_by_size_or_by_time_if_it_is_large_or_old_enough_for_its_log(
    tmp_path: Path, size: int, age_ms: int, count: int, *, over: bool
) -> None:
    config = LogConfig(segment_bytes=1_000, segment_ms=5_000, small_segment_bytes=100, small_segment_ms=1_000)
    segment = Segment(Disk(), tmp_path, 0, 100)
    segment.size, segment.first_append_ms = size, 7
    assert segment.is_over(1, 5, 7 + age_ms, config, count) is over


class HeldDisk(Disk):
    """A disk on which so many files are removed as are said to be; counts those that were removed."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Semaphore(0)
        self.removed = 0

    def unlink(self, path: Path) -> None:
        self.begun.set()
        assert self.go_on.acquire(timeout=5)
        super().unlink(path)
        self.removed += 1


def held_log(path: Path, disk: HeldDisk) -> LocalLog:
    """A log that has three dropped segments, and one that is left."""
    log = LocalLog.open(path, CONFIG, disk=disk)
    for _ in range(4):
        log.append(make_batch(1), 0, 1_000)
    log.flush()
    log.delete_before(3)
    return log


def test_many_logs_that_remove_files_keep_no_other_work_waiting(tmp_path: Path) -> None:
    """Each file may take long, and the threads of the default executor are few."""
    disk = HeldDisk()
    logs = [held_log(tmp_path / f"t-{number}", disk) for number in range(2 * DEFAULT_THREADS_MAX)]

    async def story() -> None:
        removals = [asyncio.ensure_future(log.remove_dropped()) for log in logs]
        assert await asyncio.to_thread(disk.begun.wait, 20)
        await asyncio.wait_for(asyncio.to_thread(int), 3)
        disk.go_on.release(9 * len(logs))
        await asyncio.gather(*removals)

    asyncio.run(story())
    assert disk.removed == 9 * len(logs)
    assert all(bases(log) == [3] for log in logs)


def test_a_log_that_is_closed_removes_no_file_any_more_and_may_be_opened_again(tmp_path: Path) -> None:
    disk = HeldDisk()
    log = held_log(tmp_path / "t-0", disk)

    async def story() -> None:
        removal = asyncio.ensure_future(log.remove_dropped())
        assert await asyncio.to_thread(disk.begun.wait, 20)
        closing = asyncio.ensure_future(asyncio.to_thread(log.close))
        await asyncio.wait([closing], timeout=0.2)
        assert not closing.done(), "it waits for the file that is being removed"
        disk.go_on.release()
        await closing
        assert disk.removed == 1
        disk.go_on.release(9)
        await removal
        assert disk.removed == 1

    asyncio.run(story())
    again = LocalLog.open(tmp_path / "t-0", CONFIG, disk=Disk())
    assert (again.log_start, again.end, bases(again)) == (3, 4, [3])


def test_a_log_is_opened_while_another_thread_removes_its_dropped_files(tmp_path: Path) -> None:
    """As one does that an earlier broker of the process had take a large file."""

    class SharedDisk(Disk):
        def rename(self, old: Path, new: Path) -> None:
            if old.suffix == LOG_SUFFIX:
                old.unlink()
            super().rename(old, new)

    held_log(tmp_path / "t-0", HeldDisk()).close()
    log = LocalLog.open(tmp_path / "t-0", CONFIG, disk=SharedDisk())
    assert (log.log_start, log.end, bases(log)) == (3, 4, [3])


def test_a_compacted_segment_without_a_name_goes_with_those_that_it_was_made_of(tmp_path: Path) -> None:
    log = filled(tmp_path, 4)
    first, second = log.segments[:2]
    swap = Segment(log.disk, log.directory, 0, 4096, suffix=SWAP_SUFFIX)
    swap.path.write_bytes(first.path.read_bytes() + second.path.read_bytes())
    swap.load()
    swap.load_index(2)
    log.segments.put_in_place([0, 1], swap)
    assert not swap.is_named
    log.delete_before(2)
    asyncio.run(log.remove_dropped())
    assert bases(log) == [2, 3]
    assert list(log.directory.glob("*.swap")) == []


def test_a_file_that_cannot_be_removed_keeps_no_emptied_log_from_being_opened(tmp_path: Path) -> None:
    log = filled(tmp_path, 3)
    disk_of(log).refused.add(log.segments[0].path.name)
    log.delete_before(3)
    asyncio.run(log.remove_dropped())
    assert bases(log) == [0, 3], "the next one is there, or the oldest would be the newest"
    log = open_log(tmp_path)
    assert (log.log_start, log.end, bases(log)) == (3, 3, [3])


def test_a_finished_log_whose_oldest_file_cannot_be_removed_can_be_opened_when_all_is_deleted(tmp_path: Path) -> None:
    log = filled(tmp_path, 3)
    log.finish_segment(log.end)  # The segment of the next appends has no file.
    disk_of(log).refused.add(log.segments[0].path.name)
    log.delete_before(3)
    asyncio.run(log.remove_dropped())
    log = open_log(tmp_path)
    assert (log.log_start, log.end, bases(log)) == (3, 3, [3])
