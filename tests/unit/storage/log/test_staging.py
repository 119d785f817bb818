"""Batches that are written beside the log: taken once, dropped by the thread, and in nobody's way when that fails."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path

import pytest

from anabranch.runtime.disk import Disk, File
from anabranch.storage.log.config import LogConfig
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_batch


class Telling(Disk):
    """A disk that tells by which thread files of its were closed, and fails to give names if it is to."""

    def __init__(self) -> None:
        super().__init__()
        self.closed_by: list[int] = []
        self.fails = False

    def open(self, path: Path, *, create: bool = False) -> File:
        file = super().open(path, create=create)
        fd, file.fd = file.fd, -1
        return TellingFile(path, fd, self)

    def rename(self, old: Path, new: Path) -> None:
        if self.fails:
            raise OSError(5, "no names today")
        super().rename(old, new)


class TellingFile(File):
    """One of its files."""

    __slots__ = ("disk",)

    def __init__(self, path: Path, fd: int, disk: Telling) -> None:
        super().__init__(path, fd)
        self.disk = disk

    def close(self) -> None:
        if self.fd >= 0 and self.path.name.endswith(".tmp"):
            self.disk.closed_by.append(threading.get_ident())
        super().close()


@pytest.fixture
def disk() -> Telling:
    return Telling()


@pytest.fixture
def log(tmp_path: Path, disk: Telling) -> LocalLog:
    return LocalLog.open(tmp_path / "t-0", LogConfig(), disk=disk)


def names(log: LocalLog) -> list[str]:
    return sorted(path.name for path in log.directory.glob("*") if path.suffix in (".log", ".tmp"))


def test_what_was_staged_is_the_next_segment_and_smaller_batches_follow_in_it(log: LocalLog) -> None:
    async def story() -> None:
        for number in range(2):
            data = memoryview(make_batch(3, b"large"))
            assert data not in log.staging
            async with log.staging.hold(data, log.epochs):
                assert data in log.staging and memoryview(data) not in log.staging, "it is this one, and no other"
                assert log.append(data, 0, 0).base_offset == 4 * number
                assert data not in log.staging
            log.append(make_batch(), 0, 0)

    asyncio.run(story())
    assert names(log) == ["00000000000000000000.log", "00000000000000000004.log"]
    assert log.end == 8
    log.close()


def test_what_is_not_appended_is_closed_and_removed_by_the_thread(log: LocalLog, disk: Telling) -> None:
    async def story() -> None:
        with pytest.raises(KeyError):
            async with log.staging.hold(memoryview(make_batch()), log.epochs):
                raise KeyError
        task = asyncio.create_task(hold())
        while not names(log):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def hold() -> None:
        async with log.staging.hold(memoryview(make_batch()), log.epochs):
            await asyncio.sleep(3600)

    asyncio.run(story())
    assert names(log) == []
    assert len(disk.closed_by) == 2 and threading.get_ident() not in disk.closed_by


def test_a_file_that_cannot_be_made_or_named_is_an_error_of_the_append_and_the_log_goes_on(
    log: LocalLog, disk: Telling
) -> None:
    log.append(make_batch(), 0, 0)

    async def story() -> None:
        data = memoryview(make_batch())
        async with log.staging.hold(data, log.epochs):
            disk.fails = True
            with pytest.raises(OSError, match="no names today"):
                log.append(data, 0, 0)
            disk.fails = False
        log.directory.rename(log.directory.with_name("elsewhere"))
        async with log.staging.hold(data, log.epochs):
            log.directory.with_name("elsewhere").rename(log.directory)
            with pytest.raises(FileNotFoundError):
                log.append(data, 0, 0)

    asyncio.run(story())
    assert log.append(make_batch(), 0, 0).base_offset == 1
    assert names(log) == ["00000000000000000000.log", "00000000000000000001.log"]
    log.close()


def test_the_files_of_a_log_are_closed_when_nobody_holds_it_any_more(tmp_path: Path, disk: Telling) -> None:
    """Not only when garbage is collected: until then the space of a deleted log is not given back."""
    log = LocalLog.open(tmp_path / "t-1", LogConfig(), disk=disk)
    log.append(make_batch(), 0, 0)
    gone = weakref.ref(log)
    gc.disable()
    try:
        del log
        assert gone() is None
    finally:
        gc.enable()
