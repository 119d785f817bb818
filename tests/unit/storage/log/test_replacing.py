"""Compacted segments whose putting in place an error of the disk, or the loss of power, interrupts."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.records.batch import headers
from anabranch.storage.checkpoints import RECOVERY_POINTS_FILE
from anabranch.storage.log import cleaner, replacing
from anabranch.storage.log.batch_files import records
from anabranch.storage.log.cleaner import Member
from anabranch.storage.log.config import LogConfig
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_keyed_batch
from tests.support.disks import FaultyDisk

HERE = Path("/data/t-0")
CONFIG = LogConfig(segment_bytes=1600, compact=True, min_cleanable_dirty_ratio=0.0)


def new_disk(seed: int = 1) -> FaultyDisk:
    disk = FaultyDisk(seed)
    disk.make_directory(HERE.parent)
    disk.safe_directories |= disk.directories
    return disk


def append(log: LocalLog, numbers: range, keys: int) -> None:
    for number in numbers:
        log.append(make_keyed_batch([(b"k%02d" % (number % keys), b"v%02d" % number)]), 0, number)


def filled(disk: FaultyDisk) -> LocalLog:
    """Six segments of ten records of eight keys, two of which fit into one, and one of another record."""
    log = LocalLog.open(HERE, CONFIG, disk=disk)
    for begin in range(0, 60, 10):
        append(log, range(begin, begin + 10), 8)
        log.finish_segment(log.end)
    log.append(make_keyed_batch([(b"last", b"v")]), 0, 100)
    log.flush()
    return log


def clean(log: LocalLog, now_ms: int) -> None:
    for work in replacing.resuming(log):
        work()
    for cleaned in cleaner.plan(Member(log), now_ms).run():
        replacing.finish(log, cleaned)


def offsets(log: LocalLog) -> set[int]:
    found, offset = set[int](), log.log_start
    while part := log.read(offset, 1 << 20, end=log.end):
        view = part.view()
        for position, header in headers(view):
            found |= {record.offset for record in records(header, view[position : position + header.size])}
            offset = header.next_offset
    return found


NEWEST = {*range(52, 60), 60}
"""Of each key the newest record."""


def refuse(disk: FaultyDisk, is_it: Callable[[Path, Path], bool], number: int = 1) -> None:
    """Refuse the renaming with this number of those."""
    whole = disk.rename

    def rename(old: Path, new: Path) -> None:
        nonlocal number
        number -= is_it(old, new)
        if not number:
            disk.rename = whole  # type: ignore[method-assign]
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(old, new)

    disk.rename = rename  # type: ignore[method-assign]


def test_new_segments_that_an_error_keeps_from_their_places_are_not_taken_for_finished_by_a_start() -> None:
    """Two have the name by which a start would finish them; then retention has other segments be taken together."""
    disk = new_disk()
    log = filled(disk)
    refuse(disk, lambda _, new: new.name.endswith(".log.swap"), number=3)
    with pytest.raises(OSError, match="No space"):
        clean(log, 10_000)
    log.delete_before(10)
    log.dropped.remove_at_once()
    clean(log, 20_000)
    log.close()
    assert offsets(LocalLog.open(HERE, CONFIG, disk=disk)) >= NEWEST


def test_new_segments_that_could_not_even_be_put_away_are_removed_by_the_next_cleaning() -> None:
    disk = new_disk()
    log = filled(disk)
    whole, swaps = disk.rename, 0

    def rename(old: Path, new: Path) -> None:
        nonlocal swaps
        swaps += new.name.endswith(".log.swap")
        if swaps == 3 or new.name.endswith(".log.cleaned"):
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(old, new)

    disk.rename = rename  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space"):
        clean(log, 10_000)
    disk.rename = whole  # type: ignore[method-assign]
    assert [name for name in disk.names(HERE) if name.endswith(".swap")]
    log.delete_before(10)
    log.dropped.remove_at_once()
    clean(log, 20_000)
    log.close()
    assert offsets(LocalLog.open(HERE, CONFIG, disk=disk)) >= NEWEST


def test_a_log_is_read_on_where_a_new_segment_cannot_be_given_its_name_and_is_cleaned_again() -> None:
    disk = new_disk()
    log = filled(disk)
    refuse(disk, lambda old, new: old.name.endswith(".log.swap") and new.name.endswith(".log"))
    with pytest.raises(OSError, match="No space"):
        clean(log, 10_000)
    assert offsets(log) >= NEWEST, "its file still has the other name"
    with pytest.raises(OSError, match="no names"):
        cleaner.plan(Member(log), 15_000)
    clean(log, 20_000)
    assert all(segment.is_named for segment in log.segments) and offsets(log) == NEWEST


def test_a_segment_that_has_its_name_has_its_index_also_where_the_next_one_gets_none() -> None:
    """The index would be written anew, by the next cleaning, under the name that it had."""
    disk = new_disk()
    log = filled(disk)
    refuse(disk, lambda old, new: old.name.endswith(".log.swap") and new.name.endswith(".log"), number=2)
    with pytest.raises(OSError, match="No space"):
        clean(log, 10_000)
    named = [segment for segment in log.segments if segment.is_named]
    assert 0 < len(named) < len(log.segments)
    assert not any(path.suffix == ".cleaned" for segment in named for path in segment.index.paths)


def test_after_a_loss_of_power_no_compacted_segment_is_the_newest() -> None:
    """It would seem never rewritten from the second start on."""
    for seed in range(60):
        disk = new_disk(seed)
        log = LocalLog.open(HERE, CONFIG, disk=disk)
        for now_ms in (5_000, 10_000):
            append(log, range(9), 3)
            log.flush()
            log.finish_segment(log.end)
            log.flush()
            log.checkpoint()
            if now_ms == 5_000:
                clean(log, now_ms)
        (cleaned,) = cleaner.plan(Member(log), 10_000).run()
        log.append(make_keyed_batch([(b"k9", b"v")]), 0, 100)  # The newest gets a file, whose name is not synced.
        next(replacing.finishing(log, cleaned))
        disk = disk.crash()
        log = LocalLog.open(HERE, CONFIG, disk=disk, power_lost=True)
        log.append(make_keyed_batch([(b"x", b"y")]), 0, 20_000)
        log.flush()
        log.close()
        log = LocalLog.open(HERE, CONFIG, disk=disk)
        gone = set(range(log.end)) - offsets(log)
        assert all(offset < log.rewritten.to for offset in gone), (seed, log.rewritten, gone)


def test_a_compacted_log_that_has_lost_its_recovery_point_opens_after_a_kill_too() -> None:
    """Its next one was noted before what is compacted, as no index was synced: behind it no offset may be missing."""
    disk = new_disk()
    log = filled(disk)
    clean(log, 10_000)
    log.finish_segment(log.end)
    append(log, range(70, 80), 8)
    log.flush()
    end = log.end
    log.close()
    (lost,) = (path for path in disk.nodes if path.name == RECOVERY_POINTS_FILE)
    disk.unlink(lost)
    for _ in range(2):
        log = LocalLog.open(HERE, CONFIG, disk=disk)
        assert log.end == end
        log.retain(20_000)
        assert log.recovery_point > log.segments[0].base_offset


def test_an_index_built_anew_after_such_an_opening_does_not_move_the_recovery_point_back() -> None:
    """Before the first note: the point was then noted before what is compacted, and the next start refused the log."""
    disk = new_disk()
    log = filled(disk)
    clean(log, 10_000)
    log.finish_segment(log.end)
    append(log, range(70, 80), 8)
    log.flush()
    end = log.end
    log.close()
    (lost,) = (path for path in disk.nodes if path.name == RECOVERY_POINTS_FILE)
    disk.unlink(lost)
    log = LocalLog.open(HERE, CONFIG, disk=disk)
    log.segments[0].rebuild_index()  # as a reader does that comes upon a wrong entry
    log.checkpoint()
    assert LocalLog.open(HERE, CONFIG, disk=disk).end == end
