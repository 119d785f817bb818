"""The files that logs hold open: bounded, never closed with unsynced bytes, and not needed to read."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from anabranch.records.batch import headers
from anabranch.runtime.disk import Disk, File
from anabranch.storage.interface import FetchedSlice
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.group_commit import GroupCommit
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.open_files import OpenFiles
from tests.support.batches import make_batch

SYNCED = LogConfig(durability=Durability.FSYNC, segment_bytes=400, index_interval_bytes=100)
UNSYNCED = LogConfig(durability=Durability.OS, segment_bytes=400, index_interval_bytes=100)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


class Logs:
    """Logs that share room for some files."""

    def __init__(self, path: Path, most: int, config: LogConfig = SYNCED, disk: Disk | None = None) -> None:
        self.files = OpenFiles(most)
        self.commits = GroupCommit()
        self._made: list[LocalLog] = []
        self._path, self._config, self._disk = path, config, disk or Disk()

    def __getitem__(self, number: int) -> LocalLog:
        while len(self._made) <= number:
            name = f"t-{len(self._made)}"
            log = LocalLog.open(self._path / name, self._config, disk=self._disk, commits=self.commits)
            log.segments.share(self.files, log.commit_then)
            self._made.append(log)
        return self._made[number]

    def write(self, number: int, value: bytes = b"x" * 100) -> None:
        self[number].append(make_batch(1, value), 0, 0)

    async def drained(self) -> None:
        await self.commits.drain()
        await asyncio.sleep(0)

    async def close(self) -> None:
        await self.drained()
        for log in self._made:
            log.close()
        self.commits.close()


def descriptors(path: Path) -> int:
    """The descriptors of this process for files below a directory."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(str(path))
        except FileNotFoundError:
            continue
    return found


def values(log: LocalLog, offset: int) -> list[int]:
    part = log.read(offset, 1 << 20)
    return [] if part is None else [header.base_offset for _, header in headers(part.view())]


@in_loop
async def test_logs_that_are_written_and_read_in_turn_hold_few_files(tmp_path: Path) -> None:
    logs = Logs(tmp_path, 8)
    for turn in range(3):
        for number in range(20):
            logs.write(number)
            await logs[number].commit()
            assert descriptors(tmp_path) <= 8
        for number in range(20):
            assert [values(logs[number], offset)[0] for offset in range(turn + 1)] == [*range(turn + 1)]
            assert descriptors(tmp_path) <= 8
    assert len(logs.files) == descriptors(tmp_path)
    assert logs.files.closed and not logs.files.refused
    await logs.close()
    assert descriptors(tmp_path) == 0 == len(logs.files)


@in_loop
async def test_logs_that_nobody_syncs_are_synced_before_their_files_are_closed(tmp_path: Path) -> None:
    logs = Logs(tmp_path, 8, UNSYNCED)
    for number in range(100):
        logs.write(number)
        assert descriptors(tmp_path) <= 8
        if len(logs.files) > 6:  # The last quarter of the room: an opening has had some synced.
            await logs.drained()
    assert not logs.files.refused
    closed = [number for number in range(100) if not any(segment.is_open for segment in logs[number].segments)]
    assert len(closed) >= 92 and all(logs[number].flushed == 1 for number in closed)
    await logs.close()


@in_loop
async def test_an_append_without_room_is_refused_and_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    logs = Logs(tmp_path, 4, UNSYNCED)
    for number in range(4):
        logs.write(number)
    with pytest.raises(OSError, match=r"max\.open\.files is 4") as refused:
        logs.write(4)
    assert refused.value.errno == errno.EMFILE and (logs[4].end, logs[4].high_watermark) == (0, 0)
    assert descriptors(tmp_path) == 4 and logs.files.refused == 1
    await logs.drained()  # The refusal had the others synced.
    logs.write(4)
    assert values(logs[4], 0) == [0]
    await logs.close()


@in_loop
async def test_a_read_without_room_is_answered_all_the_same(tmp_path: Path) -> None:
    logs = Logs(tmp_path, 4)
    for number in range(8):
        logs.write(number)
        await logs[number].commit()
    held = [logs[number].read(0, 1 << 20) for number in range(4)]  # As a reader that does not take its answers.
    for number in range(4, 8):
        part = logs[number].read(0, 1 << 20)
        assert isinstance(part, FetchedSlice) and len(part) == logs[number].size
        assert next(headers(part.view()))[1].base_offset == 0
    assert descriptors(tmp_path) == 4 == len(logs.files)
    del held
    assert not isinstance(logs[7].read(0, 1 << 20), FetchedSlice)
    await logs.close()


class SyncedFile(File):
    """A file that has its disk know of every sync, and what was written before through the same descriptor."""

    __slots__ = ("disk", "written")

    def write(self, data: bytes | bytearray | memoryview, position: int) -> None:
        super().write(data, position)
        self.written = True

    def sync(self) -> None:
        if self.disk.broken:
            raise OSError(errno.EIO, "Input/output error")
        super().sync()
        self.written = False

    def close(self) -> None:
        if self.fd >= 0 and self.written and self.path.name.endswith(".log"):
            self.disk.closed_unsynced.append(self.path)
        super().close()


class WatchingDisk(Disk):
    """A disk that notes files that are closed between a write and its sync."""

    def __init__(self) -> None:
        self.closed_unsynced: list[Path] = []
        self.broken = False

    def open(self, path: Path, *, create: bool = False) -> File:
        plain = super().open(path, create=create)
        file = SyncedFile(path, plain.fd)
        plain.fd = -1
        file.disk, file.written = self, False
        return file


@pytest.mark.parametrize("config", [SYNCED, UNSYNCED], ids=["fsync", "os"])
@in_loop
async def test_no_file_is_closed_between_a_write_and_its_sync(tmp_path: Path, config: LogConfig) -> None:
    disk = WatchingDisk()
    logs = Logs(tmp_path, 8, config, disk)
    for turn in range(8):
        for number in range(20):
            try:
                logs.write(number)
            except OSError:  # No room until syncs have ended.
                await logs.drained()
                logs.write(number)
            if config is SYNCED:
                logs[number].commit()
            assert disk.closed_unsynced == []
        await logs.drained()
        assert all(values(logs[number], 0)[:1] == [0] for number in range(20)), turn
        assert disk.closed_unsynced == []
    assert any(len(logs[number].segments) > 2 for number in range(20))  # Segments were rolled, too.
    await logs.close()
    assert disk.closed_unsynced == []


@in_loop
async def test_the_error_of_a_sync_before_a_close_is_not_lost(tmp_path: Path) -> None:
    disk = WatchingDisk()
    logs = Logs(tmp_path, 4, UNSYNCED, disk)
    for number in range(4):
        logs.write(number)
    disk.broken = True
    with pytest.raises(OSError, match=r"max\.open\.files"):
        logs.write(4)
    await logs.drained()
    assert disk.closed_unsynced == [] and descriptors(tmp_path) == 4
    with pytest.raises(OSError, match="Input/output error"):
        logs[0].begin_flush()
    disk.broken = False
    logs[0].append(make_batch(1, b"again"), 0, 10_000)  # What was unsynced is written again first.
    assert values(logs[0], 0) == [0, 1]
    await logs.close()
