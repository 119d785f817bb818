"""Files on the real file system."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from anabranch.runtime import disk as disk_module
from anabranch.runtime.disk import Disk


def test_a_file_is_written_and_read_at_positions(tmp_path: Path) -> None:
    file = Disk().open(tmp_path / "f", create=True)
    file.write(b"0123456789", 0)
    file.write(memoryview(b"ab"), 4)
    assert (file.size(), file.read(4, 3), file.read(100, 8)) == (10, b"3ab6", b"89")
    file.sync()
    file.truncate(5)
    assert file.read(100, 0) == b"0123a"
    file.close()
    file.close()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr("os.pwrite", lambda fd, data, position: real(fd, memoryview(data)[:3], position))
    file = Disk().open(tmp_path / "f", create=True)
    file.write(b"0123456789", 2)
    assert (tmp_path / "f").read_bytes() == b"\0\x000123456789"


def test_a_map_begins_anywhere_and_outlives_file_and_name(tmp_path: Path) -> None:
    disk = Disk()
    data = os.urandom(20_000)
    file = disk.open(tmp_path / "f", create=True)
    file.write(data, 0)
    view = file.map(7_000, 9_001)
    file.close()
    disk.unlink(tmp_path / "f")
    disk.unlink(tmp_path / "f")
    assert view == data[9_001:16_001]


def test_replacing_leaves_nothing_behind(tmp_path: Path) -> None:
    disk = Disk()
    disk.replace(tmp_path / "f", b"one")
    disk.replace(tmp_path / "f", b"two")
    assert disk.read(tmp_path / "f") == b"two"
    assert disk.names(tmp_path) == ["f"]


def test_large_files_are_discarded_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "DISCARD_SIZE_MAX", 10)
    disk = Disk()
    for name, size in (("small", 5), ("large", 50)):
        (tmp_path / name).write_bytes(bytes(size))
    disk.discard([tmp_path / "small"])
    assert disk.names(tmp_path) == ["large"]
    disk.discard([tmp_path / "large", tmp_path / "none"])
    deadline = time.monotonic() + 10
    while disk.names(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert disk.names(tmp_path) == []


def test_a_file_that_another_thread_removes_meanwhile_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)
    Disk().discard([tmp_path / "gone"])


def test_what_cannot_be_renamed_is_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "DISCARD_SIZE_MAX", 10)

    class FullDisk(Disk):
        def rename(self, old: Path, new: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(50))
    FullDisk().discard([tmp_path / "a", tmp_path / "b"])
    assert not list(tmp_path.iterdir())


def test_one_thread_discards_all_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log may have thousands of them."""
    monkeypatch.setattr(disk_module, "DISCARD_SIZE_MAX", 10)
    go_on, threads = threading.Event(), set[int]()

    class SlowDisk(Disk):
        def unlink(self, path: Path) -> None:
            threads.add(threading.get_ident())
            assert go_on.wait(10)
            if path.name == "0.deleted":
                raise OSError(errno.EIO, "Input/output error")
            super().unlink(path)

    disk = SlowDisk()
    for number in range(50):
        (tmp_path / str(number)).write_bytes(bytes(50))
        disk.discard([tmp_path / str(number)])
        assert not disk.exists(tmp_path / str(number)), "the name is free for another file"
    go_on.set()
    deadline = time.monotonic() + 10
    while disk.names(tmp_path) != ["0.deleted"] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert disk.names(tmp_path) == ["0.deleted"], "an error ends the removal of no other file"
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_directories_come_and_go_with_what_is_in_them(tmp_path: Path) -> None:
    disk = Disk()
    disk.make_directory(tmp_path / "a" / "b")
    disk.make_directory(tmp_path / "a" / "b")
    disk.open(tmp_path / "a" / "b" / "f", create=True)
    disk.rename(tmp_path / "a" / "b" / "f", tmp_path / "a" / "b" / "g")
    disk.sync_directory(tmp_path / "a" / "b")
    assert disk.exists(tmp_path / "a" / "b" / "g")
    disk.remove_tree(tmp_path / "a")
    disk.remove_tree(tmp_path / "a")
    assert not disk.exists(tmp_path / "a")


def test_a_lock_is_held_by_one_process_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    program = "import sys,pathlib;from anabranch.runtime.disk import Disk;lock=Disk().lock(pathlib.Path(sys.argv[1]));"
    program += "print('held',flush=True);sys.stdin.read()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert path.read_text() == f"{holder.pid}\n"
        with pytest.raises(BlockingIOError):
            Disk().lock(path)
        holder.kill()
        holder.wait()
    lock = Disk().lock(path)
    with pytest.raises(BlockingIOError):
        Disk().lock(path)
    lock.release()
    Disk().lock(path).release()
