"""Which snapshots of producers a log has, while a thread writes one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from anabranch.runtime.disk import Disk
from anabranch.storage.log.snapshots import Snapshots

WAIT_MAX_S = 30.0


class PausedDisk(Disk):
    """A disk on which a file is replaced while the directory is listed."""

    def __init__(self) -> None:
        self.before_replace: Callable[[], object] = lambda: None
        self.after_names: Callable[[], object] = lambda: None

    def replace(self, path: Path, data: bytes) -> None:
        self.before_replace()
        super().replace(path, data)

    def names(self, directory: Path) -> list[str]:
        names = list(super().names(directory))
        self.after_names()
        return names


def test_a_list_from_before_a_write_is_not_kept_after_it(tmp_path: Path) -> None:
    disk = PausedDisk()
    snapshots = Snapshots(disk, tmp_path)
    snapshots.write(b"ten", 10, flushed=10, only=False)
    replacing, listed = threading.Event(), threading.Event()

    def pause() -> None:
        replacing.set()
        assert listed.wait(WAIT_MAX_S)

    disk.before_replace = pause
    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(snapshots.write, b"twenty", 20, flushed=10, only=False)
        assert replacing.wait(WAIT_MAX_S)

        def let_it_end() -> None:
            listed.set()
            written.result(WAIT_MAX_S)

        disk.after_names = let_it_end
        assert not snapshots.cover(20, flushed=20), "it was not there yet"
    disk.after_names = lambda: None
    assert snapshots.cover(20, flushed=20)
    snapshots.forget_above(15)
    assert [path.name for path in tmp_path.iterdir()] == [f"{10:020d}.snapshot"]
    assert list(Snapshots(Disk(), tmp_path).newest_first(30)) == [(10, b"ten")]
