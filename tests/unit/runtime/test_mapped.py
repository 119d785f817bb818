"""Mapped files: what is mapped stays as it is when the file is cut, and what cannot be read is an error, not a signal.

What would end the process runs in one of its own.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from anabranch.runtime import mapped
from anabranch.runtime.disk import Disk, File

PAGE = mmap.PAGESIZE
SIZE = 40 * PAGE + 321


@pytest.fixture
def data() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> File:
    made = Disk().open(tmp_path / "f", create=True)
    made.write(data, 0)
    return made


def _alone(path: Path, code: str) -> int:
    """Run code with `file` and `data` in a process of its own; how it ended."""
    begin = (
        f"import os, pathlib; from anabranch.runtime.disk import Disk; path = pathlib.Path({str(path)!r});"
        "file, data = Disk().open(path), path.read_bytes();"
    )
    return subprocess.run([sys.executable, "-c", begin + code], check=False, timeout=60).returncode


@pytest.mark.parametrize("size", [0, 1, PAGE, 5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1, SIZE - 1, SIZE])
def test_what_is_mapped_outlives_a_cut(tmp_path: Path, file: File, data: bytes, size: int) -> None:
    code = f"""
views = [(at, end, file.map(end - at, at)) for at in (0, 77, 4096, 20_000) for end in (20_481, 100_000, {SIZE})]
file.truncate({size})
for at, end, view in views:
    assert view == data[at:end], (at, end)
assert path.read_bytes() == data[:{size}]
file.write(b"-" * 10_000, {size})
for at, end, view in views:
    assert view[max(0, {size} - at):] == data[at:end][max(0, {size} - at):], (at, end)
"""
    assert file.size() == SIZE
    assert _alone(tmp_path / "f", code) == 0


def test_a_cut_through_another_descriptor_counts_and_other_files_do_not(tmp_path: Path) -> None:
    code = """
import anabranch.runtime.mapped as mapped
view, other = file.map(len(data), 0), Disk().open(path)
path.with_name("g").write_bytes(data)
foreign = Disk().open(path.with_name("g"))
kept = foreign.map(len(data), 0)
kept_pages = []
mapped._keep, keep = lambda *which: (kept_pages.append(which[0]), keep(*which)), mapped._keep
other.truncate(100)
assert kept_pages == [view.obj]
assert view == data and kept == data
"""
    Disk().open(tmp_path / "f", create=True).write(os.urandom(SIZE), 0)
    assert _alone(tmp_path / "f", code) == 0


def test_threads_read_on_while_a_file_is_cut(tmp_path: Path, file: File) -> None:
    code = """
import threading, zlib
for _ in range(8):
    path.write_bytes(data)
    view, sums, ready = file.map(len(data), 0), [], threading.Barrier(3)
    def read():
        ready.wait()
        sums.extend(zlib.crc32(view) for _ in range(20))
    threads = [threading.Thread(target=read) for _ in range(2)]
    [each.start() for each in threads]
    ready.wait()
    for size in range(len(data), 0, -3_000):
        file.truncate(size)
    [each.join() for each in threads]
    assert set(sums) == {zlib.crc32(data)}
"""
    assert file.size() == SIZE
    assert _alone(tmp_path / "f", code) == 0


def test_what_is_not_in_a_file_any_more_cannot_be_mapped(file: File) -> None:
    file.truncate(PAGE)
    with pytest.raises(OSError, match="the file ends before"):
        file.map(SIZE - PAGE, PAGE)
    assert len(file.map(PAGE, 0)) == PAGE


def test_reading_in_tells_what_cannot_be_read(file: File, data: bytes) -> None:
    view = file.map(SIZE, 0)
    assert mapped.read_in(view[5:]) == data[5:]
    os.ftruncate(file.fd, PAGE)  # As no part of a broker does, and as pages of a bad disk are.
    with pytest.raises(OSError, match="cannot be read"):
        mapped.read_in(view)


def test_what_was_not_asked_for_need_not_be_readable(file: File, data: bytes) -> None:
    view = file.map(SIZE, 0)
    os.ftruncate(file.fd, 7 * PAGE)
    for start, end in [(0, 7 * PAGE), (PAGE - 1, PAGE + 1), (7 * PAGE - 1, 7 * PAGE), (9 * PAGE, 9 * PAGE)]:
        assert len(mapped.read_in(view[start:end])) == end - start
    with pytest.raises(OSError, match="cannot be read"):
        mapped.read_in(view[7 * PAGE - 1 : 7 * PAGE + 1])


def test_other_threads_go_on_while_a_file_is_read_in(tmp_path: Path) -> None:
    """As long as a slow disk takes: here there are many pages, which take long, too."""
    size = 256 << 20
    made = Disk().open(tmp_path / "large", create=True)
    os.ftruncate(made.fd, size)
    seen: list[float] = []
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            seen.append(time.perf_counter())
            time.sleep(0)

    other = threading.Thread(target=go_on)
    other.start()
    try:
        view = made.map(size, 0)
        began = time.perf_counter()
        mapped.read_in(view)
        ended = time.perf_counter()
    finally:
        over.set()
        other.join()
    quarter = (ended - began) / 4
    assert [at for at in seen if began + quarter < at < ended - quarter], ended - began


def test_what_is_not_mapped_need_not_be_read_in() -> None:
    assert mapped.read_in(memoryview(b"bytes")) == b"bytes"


def test_a_file_is_not_cut_while_a_copy_cannot_be_made(
    file: File, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = file.map(SIZE, 0)
    calls = mapped._calls()._replace(mremap=lambda *_: mapped._FAILED)
    monkeypatch.setattr(mapped, "_calls", lambda: calls)
    with pytest.raises(OSError):
        file.truncate(PAGE)
    assert file.size() == SIZE
    assert view == data


def test_what_is_dropped_is_forgotten(file: File) -> None:
    views = [file.map(100, at) for at in range(0, SIZE - 100, PAGE)]
    before = len(mapped._LIVING)
    del views[1:]
    assert len(mapped._LIVING) == before - len(range(0, SIZE - 100, PAGE)) + 1
    assert not mapped._CHANGING.locked()
