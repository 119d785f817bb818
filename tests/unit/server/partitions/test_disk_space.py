"""The space that records leave free: looked at now and then, appended bytes counted at once."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import cast

import pytest

from anabranch.runtime.clock import Clock
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions.disk_space import LOOK_INTERVAL_MS, DeletionRoom, DiskSpace
from anabranch.storage.directory import DataDirectory


class SteadyClock(Clock):
    at_ms = 0

    def monotonic_ms(self) -> int:
        return self.at_ms


class FileSystem:
    free = 1_000
    looks = 0
    broken = False

    def __call__(self) -> int:
        self.looks += 1
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        return self.free


def test_records_are_refused_before_the_disk_is_full_and_taken_when_there_is_space(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "anabranch")
    clock, disk = SteadyClock(), FileSystem()
    space = DiskSpace(disk, clock, Metrics(), free_min=600)
    assert space.refusal(300, clock.at_ms) is None
    disk.free = 700
    assert space.refusal(100, clock.at_ms) is None
    assert disk.looks == 1
    disk.free = 600
    refusal = space.refusal(1, clock.at_ms)
    assert refusal is not None and "log.dirs.free.bytes.min" in refusal, "what was appended counts at once"
    assert disk.looks == 2
    for _ in range(10):
        assert space.refusal(1, clock.at_ms) is not None
    assert disk.looks == 2, "a refused client does not have the file system asked"
    disk.free = 10_000
    clock.at_ms += LOOK_INTERVAL_MS
    assert space.refusal(1, clock.at_ms) is None
    disk.free = 0
    clock.at_ms += LOOK_INTERVAL_MS
    assert space.refusal(1, clock.at_ms) is not None, "another program has filled the disk"
    for free in (10_000, 0) * 10:
        disk.free = free
        clock.at_ms += LOOK_INTERVAL_MS
        space.refusal(1, clock.at_ms)
    assert [record.message for record in caplog.records] == [
        "records refused: the disk is nearly full",
        "records taken again: the disk has space",
        "records refused: the disk is nearly full",
        "records taken again: the disk has space",
    ]


def test_a_file_system_that_does_not_tell_refuses_nothing() -> None:
    disk = FileSystem()
    disk.broken = True
    assert DiskSpace(disk, SteadyClock(), Metrics(), free_min=600).refusal(300, 0) is None


class Reserve:
    """A directory whose reserve is given up and made again."""

    def __init__(self) -> None:
        self.is_full = True
        self.done: list[str] = []
        self.fails = False

    def make_room(self) -> None:
        self._do("given up")

    def keep_reserve(self) -> None:
        self._do("reserved")

    def _do(self, what: str) -> None:
        if self.fails:
            raise OSError(what)
        self.done.append(what)


def test_the_reserve_is_made_again_when_no_deletion_uses_it(caplog: pytest.LogCaptureFixture) -> None:
    reserve = Reserve()

    async def in_thread(work: Callable[[], None]) -> None:
        work()

    async def story() -> None:
        room = DeletionRoom(cast(DataDirectory, reserve), in_thread)
        async with room.taken():
            async with room.taken():
                await room.keep_reserve()  # By the upkeep.
            assert reserve.done == ["given up"] * 2
        assert reserve.done == ["given up", "given up", "reserved"]
        async with room.taken(needed=False):
            pass
        reserve.is_full = False
        async with room.taken():
            pass
        assert len(reserve.done) == 3, "a disk with space needs no reserve"
        reserve.is_full = reserve.fails = True
        async with room.taken():
            reserve.done.append("deleted")
        assert reserve.done[-1] == "deleted", "its own error tells what is wrong"
        assert len(caplog.records) == 2
        for _ in range(2):
            await room.keep_reserve()
        assert len(caplog.records) == 2, "a failure that lasts is told once"
        reserve.fails = False
        await room.keep_reserve()
        reserve.fails = True
        await room.keep_reserve()

    asyncio.run(story())
    assert len(caplog.records) == 3
