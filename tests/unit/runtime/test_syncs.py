"""Files become durable beside the loop, by the kernel or by threads, and who asked is told, once and of every error."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop

from anabranch.runtime import syncs
from anabranch.runtime.disk import Disk, File
from anabranch.runtime.syncs import Syncs, Told

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


def has_native() -> bool:
    try:
        syncs._Kernel().close()
    except OSError:
        return False
    return True


@pytest.fixture(params=[True, False], ids=["kernel", "threads"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param and not has_native():
        pytest.skip("this system has no asynchronous I/O")
    return bool(request.param)


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


def files(directory: Path, count: int) -> list[File]:
    made = [Disk().open(directory / str(number), create=True) for number in range(count)]
    for file in made:
        file.write(b"x" * 100, 0)
    return made


async def synced(syncer: Syncs, some: Sequence[File]) -> OSError | None:
    told: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    syncer.sync(some, told.set_result)  # A second result is an error.
    return await asyncio.wait_for(told, 30)


def test_everyone_is_told_once(run: Callable[..., None], native: bool, tmp_path: Path) -> None:
    syncer = Syncs(native=native)

    async def scenario() -> None:
        several = files(tmp_path, 40)
        assert await synced(syncer, several) is None
        assert await synced(syncer, []) is None
        assert await asyncio.gather(*(synced(syncer, [file]) for file in several * 10)) == [None] * 400
        await asyncio.sleep(0.01)  # Time for a second word.
        syncer.close()

    run(scenario())


def test_a_file_that_cannot_be_synced_is_told_of_and_no_other(
    run: Callable[..., None], native: bool, tmp_path: Path
) -> None:
    syncer = Syncs(native=native)

    async def scenario() -> None:
        one, other = files(tmp_path, 2)
        reading, writing = os.pipe()
        pipe = File(tmp_path / "pipe", writing)
        found = await asyncio.gather(*(synced(syncer, each) for each in ([one], [pipe], [other, pipe, one], [other])))
        assert [error and error.errno for error in found] == [None, errno.EINVAL, errno.EINVAL, None]
        os.close(reading)
        syncer.close()

    run(scenario())


def test_more_than_the_kernel_takes_at_a_time_are_synced(
    run: Callable[..., None], native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syncs, "IN_FLIGHT_MAX", 3)
    syncer = Syncs(native=native)

    async def scenario() -> None:
        several = files(tmp_path, 20)
        assert await asyncio.gather(*(synced(syncer, [file]) for file in several * 3)) == [None] * 60
        syncer.close()

    run(scenario())


class _FailingKernel(syncs._Kernel):
    """Says that the disk refused."""

    def ended(self) -> list[tuple[int, int]]:
        return [(number, -errno.EIO) for number, _ in super().ended()]


@pytest.mark.skipif(not has_native(), reason="this system has no asynchronous I/O")
def test_an_error_of_the_disk_is_an_oserror_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncs, "_Kernel", _FailingKernel)

    async def scenario() -> None:
        syncer = Syncs()
        (file,) = files(tmp_path, 1)
        error = await synced(syncer, [file])
        assert error is not None and (error.errno, error.filename) == (errno.EIO, str(file.path))
        syncer.close()

    asyncio.run(scenario())


def test_where_the_kernel_has_nothing_threads_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "abacus")

    async def scenario() -> None:
        syncer = Syncs()
        assert await synced(syncer, files(tmp_path, 3)) is None
        assert syncer._native is None
        syncer.close()

    asyncio.run(scenario())


def test_the_kernel_syncs_without_threads(tmp_path: Path) -> None:
    if not has_native():
        pytest.skip("this system has no asynchronous I/O")

    async def scenario() -> None:
        syncer = Syncs()
        assert await synced(syncer, files(tmp_path, 16)) is None
        assert not syncer._threads._threads
        syncer.close()

    asyncio.run(scenario())


def test_work_is_done_in_threads_and_nothing_of_it_is_forgotten() -> None:
    async def scenario() -> None:
        syncer = Syncs()
        left = 5_000
        loop = asyncio.get_running_loop()
        all_told = loop.create_future()

        def again(error: OSError | None) -> None:
            nonlocal left
            assert error is None
            left -= 1
            if left == 0:
                all_told.set_result(None)
            elif left > 0:
                syncer.run(nothing, again)

        for _ in range(24):
            syncer.run(nothing, again)
        await asyncio.wait_for(all_told, 60)
        syncer.close()

    switched = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asyncio.run(scenario())
    finally:
        sys.setswitchinterval(switched)


def test_work_that_fails_in_an_unknown_way_is_an_oserror() -> None:
    async def scenario() -> None:
        told: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        done: Told = told.set_result
        syncer = Syncs()
        syncer.run(lambda: 1 // 0 and None, done)
        error = await asyncio.wait_for(told, 30)
        assert error is not None and error.errno == errno.EIO and "ZeroDivisionError" in str(error)
        syncer.close()

    asyncio.run(scenario())


def nothing() -> None:
    """Work that is done at once, so that threads are done together."""
